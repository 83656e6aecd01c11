"""The rule of rejection sampling on the target's own probabilities: what comes out must have their distribution.

Here drafts are drawn by a made-up drafter that is like the target, but not it, and tells its true q. Only the eight
likeliest tokens are possible, so that thousands of rounds at once are quick, and the test is sharp.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.audit.chance import Fit
from slipstream.audit.results import Check, Finding, Outcome
from slipstream.audit.stage import UNLIKELY, Bench, Stage
from slipstream.core.draft import ROOT, Draft
from slipstream.sampling.noise import gumbel, position_keys, stream_keys
from slipstream.verify.rejection import rejection_keys, verify_rejection

_POSSIBLE = 8
_BATCH = 2000
_BATCHES = 10


@dataclass(frozen=True, slots=True)
class _Node:
    """Under which node it hangs, and which of its parent's draws it is."""

    parent: int
    draw: int


SHAPES = {
    "chain": (_Node(ROOT, 0), _Node(0, 0)),
    "tree": (_Node(ROOT, 0), _Node(ROOT, 1), _Node(0, 0), _Node(0, 1), _Node(ROOT, 2), _Node(1, 0)),
}


@dataclass(frozen=True, slots=True)
class _Scene:
    """Two tokens of an answer: probabilities of the first, and of the second by the first."""

    first: Tensor  # [V]
    second: Tensor  # [V, V]

    def drafter(self) -> _Scene:
        """Like it, but flatter, and with some of its mass at the wrong tokens."""

        def flatter(p: Tensor) -> Tensor:
            q = p.sqrt() + 0.3 * p.roll(1, -1)
            return q / q.sum(-1, keepdim=True)

        return _Scene(flatter(self.first), flatter(self.second))


class Rule(Stage):
    """Many rounds of one shape of draft."""

    def __init__(self, bench: Bench, shape: str, temperature: float) -> None:
        self.title = f"rejection sampling, the rule on a {shape}"
        self.size = _BATCHES
        self._bench, self._nodes, self._temperature = bench, SHAPES[shape], temperature
        self._scene: _Scene | None = None
        self._first = self._second = torch.zeros(0)  # [V] and [V, V]: how often each token came out
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
        why = f"What comes out does not have the target's distribution: chance alone does this with {chance:.1e}."
        prompt = self._bench.prompts[0].id
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
        """The target's probabilities behind the first prompt, over the tokens that are possible there."""
        context = list(self._bench.prompts[0].token_ids)
        fresh = self._bench.fresh

        def possible(tokens: list[int]) -> Tensor:
            logits = fresh.logits(tokens, [len(tokens) - 1])[0].double() / self._temperature  # [V]
            p = torch.zeros_like(logits)
            likeliest = logits.topk(min(_POSSIBLE, len(logits))).indices
            p[likeliest] = logits[likeliest].softmax(0)
            return p

        first = possible(context)
        rows = {int(token): possible([*context, int(token)]) for token in first.nonzero()[:, 0]}
        known = torch.stack((first, *rows.values())).sum(0).nonzero()[:, 0]  # [V'], all that can come
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
            rows.append(p.second[tokens[:, i]])  # below the second level nobody looks
        parents = torch.tensor([node.parent for node in nodes]).expand(_BATCH, -1)
        is_chain = all(node.parent == i - 1 for i, node in enumerate(nodes))
        draft = Draft(tokens, parents, torch.full((_BATCH,), len(nodes)), is_chain)
        keys = rejection_keys(streams, torch.zeros_like(streams), len(nodes) + 1)
        verdicts = verify_rejection(draft, torch.stack(rows, 1), keys, drawn_from)
        self._drafted += _BATCH * len(nodes)
        self._accepted += int(verdicts.accepted.sum())
        self._first += verdicts.tokens[:, 0].bincount(minlength=count)
        both = verdicts.tokens[verdicts.accepted > 0, :2]  # [A, 2]: where a node stood, the token behind it came too
        self._second += (both[:, 0] * count + both[:, 1]).bincount(minlength=count * count).view(count, count)
