"""Rejection sampling through the engine: many answers to one prompt, against the model's own probabilities.

Its tokens are not those of plain decoding, so equality tells nothing. But behind each beginning that many answers
share, the next tokens must have the distribution that a fresh pass over that beginning gives.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import torch

from slipstream.audit.answers import Mode
from slipstream.audit.chance import Fit
from slipstream.audit.results import Check, Finding, Outcome
from slipstream.audit.stage import UNLIKELY, Bench, Setting, Stage, Tally
from slipstream.core.params import MAX_N, SamplingParams

_PLACES = 4  # tokens of an answer; the first comes from the prompt's pass, undrafted
_FEWEST = 40  # answers that must share a beginning
_MOST = 32  # beginnings, each of which costs a pass


class Drawn(Stage):
    """One drafter's answers by rejection sampling."""

    def __init__(self, bench: Bench, greedy: Setting, mode: Mode, temperature: float, seed: int, samples: int) -> None:
        self.title = f"rejection sampling · {mode.name}"
        self._bench, self._greedy, self._mode = bench, greedy, mode
        speculation = replace(mode.speculation, verifier="rejection")
        self._params = SamplingParams(
            temperature=temperature, seed=seed, max_tokens=_PLACES, ignore_eos=True, speculation=speculation
        )
        # no more answers to a request than run at once: those that wait would have to read the prompt again
        self._together = min(bench.llm.engine.config.max_num_seqs, MAX_N)
        self.size = -(-samples // self._together)
        self._samples = samples
        self._tally, self._failed = Tally(), False
        self._fit = Fit()
        self._prompt = ""

    def steps(self) -> Iterator[int]:
        bench = self._bench
        index = bench.lively(self._mode)
        prompt, answer = bench.prompts[index], bench.plain[self._greedy.name][index].token_ids
        self._prompt = prompt.id
        context = [*prompt.token_ids, *answer[: len(answer) // 2]]
        answers: list[tuple[int, ...]] = []
        for number in range(self.size):
            count = min(self._together, self._samples - number * self._together)
            params = replace(self._params, seed=(self._params.seed or 0) + number, n=count)
            bench.probe.tell(context, params.seed, answer[len(answer) // 2 :])
            for given in bench.llm.generate([{"prompt_token_ids": context}], [params])[0].outputs:
                self._tally.add(given)
                self._failed |= given.error is not None
                answers.append(tuple(given.token_ids))
            yield 1
        self._fit.slack = bench.errors.get(self._mode.name, 0.0) / self._params.temperature
        self._test(context, answers)

    def check(self, *, complete: bool, seconds: float) -> Check:
        tally, chance = self._tally, self._fit.p_value
        why = ""
        if self._failed:
            why = "A request failed."
        elif chance < UNLIKELY:
            why = f"The tokens do not have the model's distribution: chance alone does this with {chance:.1e}."
        return Check(
            kind="distribution",
            title=self.title,
            drafter=self._mode.drafter,
            compared=self._fit.draws,
            same=self._fit.draws,
            unit="draws",
            tokens=tally.tokens,
            drafted=tally.drafted,
            accepted=tally.accepted,
            failures=tally.failures,
            complete=complete,
            seconds=seconds,
            figures={"p_value": chance},
            findings=(Finding(Outcome.BUG, self._prompt, why),) if why else (),
            missing=f"no beginning is shared by {_FEWEST} answers; draw more (--samples)" if complete else "",
        )

    def _test(self, context: list[int], answers: list[tuple[int, ...]]) -> None:
        begun = Counter(answer[:length] for answer in answers for length in range(_PLACES) if length < len(answer))
        for beginning, count in begun.most_common(_MOST):
            if count < _FEWEST:
                break
            tokens = [*context, *beginning]
            logits = self._bench.fresh.logits(tokens, [len(tokens) - 1])[0].double()  # [V]
            next_tokens = [a[len(beginning)] for a in answers if a[: len(beginning)] == beginning]
            observed = torch.tensor(next_tokens).bincount(minlength=logits.shape[0])
            self._fit.add(observed, (logits / self._params.temperature).softmax(0))
