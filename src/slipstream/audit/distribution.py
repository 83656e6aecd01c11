"""Rejection sampling keeps the distribution: chi-square tests of the rule alone, and of whole answers by the engine.

`Rule` tests the verifier on the target's own probabilities, with drafts from a made-up drafter that resembles the
target and reports its true q. Only eight tokens are possible, which makes thousands of steps quick and the test sharp.
`Drawn` tests the engine: its tokens need not be those of plain decoding, but after each beginning that many answers
share, the next tokens must have the distribution of a fresh pass.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from slipstream.audit.report import Check, Finding, Outcome
from slipstream.audit.stage import UNLIKELY, AuditState, Mode, Setting, Stage, Tally
from slipstream.core.draft import ROOT, Draft
from slipstream.core.params import MAX_N, SamplingParams
from slipstream.sampling.noise import gumbel, position_keys, stream_keys
from slipstream.verify.rejection import rejection_keys, verify_rejection

_LEAST = 5.0  # expected draws of a cell of the test; rarer tokens share a cell


@dataclass(slots=True)
class Fit:
    """Pearson's chi-square test over several positions, each with its own distribution.

    slack: the probabilities are known only up to a factor e^slack; deviations within it count as 0.
    """

    slack: float = 0.0
    statistic: float = 0.0
    freedom: int = 0
    draws: int = 0
    impossible: int = 0  # draws of tokens with probability 0

    def add(self, observed: Tensor, p: Tensor) -> None:
        """Add a position. observed [V]: draws of each token; p [V]: their probabilities."""
        observed, p = observed.double(), p.double()
        draws = float(observed.sum())
        self.draws += int(draws)
        self.impossible += int(observed[p == 0].sum())
        wanted = p / p.sum() * draws
        common = wanted >= _LEAST
        observed = torch.cat((observed[common], observed[~common].sum()[None]))
        wanted = torch.cat((wanted[common], wanted[~common].sum()[None]))
        if wanted[-1] < _LEAST and len(wanted) > 1:  # merge a too small rest into the rarest cell
            rarest = int(wanted[:-1].argmin())
            observed[rarest] += observed[-1]
            wanted[rarest] += wanted[-1]
            observed, wanted = observed[:-1], wanted[:-1]
        off = ((observed - wanted).abs() - wanted * math.expm1(self.slack)).clamp(min=0)
        self.statistic += float((off**2 / wanted).sum())
        self.freedom += len(wanted) - 1

    @property
    def p_value(self) -> float:
        """Probability of a deviation at least this large by chance; 1 if there is nothing to test."""
        if self.impossible:
            return 0.0
        if not self.freedom:
            return 1.0
        half = torch.tensor([self.freedom / 2, self.statistic / 2], dtype=torch.float64)
        return float(torch.special.gammaincc(half[0], half[1]))


_POSSIBLE = 8  # tokens
_BATCH = 2000
_BATCHES = 10


@dataclass(frozen=True, slots=True)
class _Node:
    """A node's parent, and the index of its draw among the parent's."""

    parent: int
    draw: int


SHAPES = {
    "chain": (_Node(ROOT, 0), _Node(0, 0)),
    "tree": (_Node(ROOT, 0), _Node(ROOT, 1), _Node(0, 0), _Node(0, 1), _Node(ROOT, 2), _Node(1, 0)),
}


@dataclass(frozen=True, slots=True)
class _Scene:
    """Probabilities of two tokens of an answer."""

    first: Tensor  # [V]
    second: Tensor  # [V, V], by the first token

    def drafter(self) -> _Scene:
        """Similar probabilities, but flatter and with some mass on wrong tokens."""

        def flatter(p: Tensor) -> Tensor:
            q = p.sqrt() + 0.3 * p.roll(1, -1)
            return q / q.sum(-1, keepdim=True)

        return _Scene(flatter(self.first), flatter(self.second))


class Rule(Stage):
    """Many steps with drafts of one shape."""

    def __init__(self, state: AuditState, shape: str, temperature: float) -> None:
        self.title = f"rejection sampling, the rule on a {shape}"
        self.size = _BATCHES
        self._state, self._nodes, self._temperature = state, SHAPES[shape], temperature
        self._scene: _Scene | None = None
        self._first = self._second = torch.zeros(0)  # [V] and [V, V]: counts of emitted tokens
        self._drafted = self._accepted = 0

    def steps(self) -> Iterator[int]:
        scene = self._scene = self._possible()
        self._first, self._second = torch.zeros_like(scene.first), torch.zeros_like(scene.second)
        for batch in range(_BATCHES):
            self._round(scene, scene.drafter(), batch * _BATCH)
            yield 1

    def check(self, *, complete: bool, seconds: float) -> Check:
        fit = self._fit()
        chance = fit.p_value
        why = f"The emitted tokens do not have the target's distribution: p-value {chance:.1e}."
        prompt = self._state.prompts[0].id
        return Check(
            kind="distribution",
            title=self.title,
            drafter=None,
            compared=fit.draws,
            same=fit.draws,
            unit="draws",
            tokens=fit.draws,
            drafted=self._drafted,
            accepted=self._accepted,
            complete=complete,
            seconds=seconds,
            figures={"p_value": chance},
            findings=(Finding(Outcome.BUG, prompt, why),) if chance < UNLIKELY else (),
        )

    def _fit(self) -> Fit:
        fit = Fit()
        if self._scene is not None and self._first.any():
            fit.add(self._first, self._scene.first)
            for token in self._second.sum(1).nonzero()[:, 0]:
                fit.add(self._second[token], self._scene.second[token])
        return fit

    def _possible(self) -> _Scene:
        """The target's probabilities after the first prompt, limited to the likeliest tokens."""
        context = list(self._state.prompts[0].token_ids)
        fresh = self._state.fresh

        def possible(tokens: list[int]) -> Tensor:
            logits = fresh.logits(tokens, [len(tokens) - 1])[0].double() / self._temperature  # [V]
            p = torch.zeros_like(logits)
            likeliest = logits.topk(min(_POSSIBLE, len(logits))).indices
            p[likeliest] = logits[likeliest].softmax(0)
            return p

        first = possible(context)
        rows = {int(token): possible([*context, int(token)]) for token in first.nonzero()[:, 0]}
        known = torch.stack((first, *rows.values())).sum(0).nonzero()[:, 0]  # [V']: all possible tokens
        second = torch.stack([rows.get(int(token), first)[known] for token in known])
        return _Scene(first[known].float(), second.float())

    def _round(self, p: _Scene, q: _Scene, start: int) -> None:
        nodes, count = self._nodes, p.first.shape[0]
        streams = stream_keys(torch.arange(start, start + _BATCH), torch.zeros(_BATCH, dtype=torch.int64))  # [B]
        tokens = torch.zeros(_BATCH, len(nodes), dtype=torch.int64)
        drawn_from, rows = torch.zeros(_BATCH, len(nodes), count), [p.first.expand(_BATCH, count)]
        for i, node in enumerate(nodes):
            deep = node.parent != ROOT
            drawn_from[:, i] = q.second[tokens[:, node.parent]] if deep else q.first
            keys = position_keys(streams, torch.full_like(streams, int(deep)))
            scores = drawn_from[:, i].log() + gumbel(keys, torch.arange(count, dtype=torch.int32))
            tokens[:, i] = scores.topk(node.draw + 1).indices[:, node.draw]  # without replacement
            rows.append(p.second[tokens[:, i]])  # never read below the second level
        parents = torch.tensor([node.parent for node in nodes]).expand(_BATCH, -1)
        is_chain = all(node.parent == i - 1 for i, node in enumerate(nodes))
        draft = Draft(tokens, parents, torch.full((_BATCH,), len(nodes)), is_chain)
        keys = rejection_keys(streams, torch.zeros_like(streams), len(nodes) + 1)
        verdicts = verify_rejection(draft, torch.stack(rows, 1), keys, drawn_from)
        self._drafted += _BATCH * len(nodes)
        self._accepted += int(verdicts.accepted.sum())
        self._first += verdicts.tokens[:, 0].bincount(minlength=count)
        both = verdicts.tokens[verdicts.accepted > 0, :2]  # [A, 2]: after an accepted node a second token follows
        self._second += (both[:, 0] * count + both[:, 1]).bincount(minlength=count * count).view(count, count)


_POSITIONS = 4  # tokens of an answer; the first is undrafted, from the prompt's pass
_FEWEST = 40  # answers that must share a beginning to test it
_MOST = 32  # beginnings tested; each costs a pass


class Drawn(Stage):
    """One drafter's answers by rejection sampling."""

    def __init__(
        self, state: AuditState, greedy: Setting, mode: Mode, temperature: float, seed: int, samples: int
    ) -> None:
        self.title = f"rejection sampling · {mode.name}"
        self._state, self._greedy, self._mode = state, greedy, mode
        speculation = replace(mode.speculation, verifier="rejection")
        self._params = SamplingParams(
            temperature=temperature, seed=seed, max_tokens=_POSITIONS, ignore_eos=True, speculation=speculation
        )
        # a request for more answers than run at once would have the waiting ones read the prompt again
        self._together = min(state.llm.engine.config.max_num_seqs, MAX_N)
        self.size = -(-samples // self._together)
        self._samples = samples
        self._tally, self._failed = Tally(), False
        self._fit = Fit()
        self._prompt = ""

    def steps(self) -> Iterator[int]:
        state = self._state
        index = state.most_drafted(self._mode)
        prompt, answer = state.prompts[index], state.plain[self._greedy.name][index].token_ids
        self._prompt = prompt.id
        context = [*prompt.token_ids, *answer[: len(answer) // 2]]
        answers: list[tuple[int, ...]] = []
        for number in range(self.size):
            count = min(self._together, self._samples - number * self._together)
            params = replace(self._params, seed=(self._params.seed or 0) + number, n=count)
            state.probe.tell(context, params.seed, answer[len(answer) // 2 :])
            for given in state.llm.generate([{"prompt_token_ids": context}], [params])[0].outputs:
                self._tally.add(given)
                self._failed |= given.error is not None
                answers.append(tuple(given.token_ids))
            yield 1
        self._fit.slack = state.errors.get(self._mode.name, 0.0) / self._params.temperature
        self._test(context, answers)

    def check(self, *, complete: bool, seconds: float) -> Check:
        tally, chance = self._tally, self._fit.p_value
        why = ""
        if self._failed:
            why = "A request failed."
        elif chance < UNLIKELY:
            why = f"The tokens do not have the model's distribution: p-value {chance:.1e}."
        return tally.check(
            "distribution",
            self,
            self._mode.drafter,
            self._fit.draws,
            self._fit.draws,
            unit="draws",
            complete=complete,
            seconds=seconds,
            figures={"p_value": chance},
            findings=(Finding(Outcome.BUG, self._prompt, why),) if why else (),
            missing=f"no {_FEWEST} answers share a beginning; draw more (--samples)" if complete else "",
        )

    def _test(self, context: list[int], answers: list[tuple[int, ...]]) -> None:
        begun = Counter(answer[:length] for answer in answers for length in range(_POSITIONS) if length < len(answer))
        for beginning, count in begun.most_common(_MOST):
            if count < _FEWEST:
                break
            tokens = [*context, *beginning]
            logits = self._state.fresh.logits(tokens, [len(tokens) - 1])[0].double()  # [V]
            next_tokens = [a[len(beginning)] for a in answers if a[: len(beginning)] == beginning]
            observed = torch.tensor(next_tokens).bincount(minlength=logits.shape[0])
            self._fit.add(observed, (logits / self._params.temperature).softmax(0))
