"""The cache after drafts were accepted, rejected and moved, against a cache that was never used.

Answers are asked for with log probabilities: these come from passes over the cache as speculation left it. The same
tokens then go through the model once more as one fresh prompt. Both must agree but for rounding, at every token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from slipstream.audit.answers import Asked, AuditPrompt, Mode, ask, with_seeds
from slipstream.audit.fresh import Source
from slipstream.audit.results import Check, Finding, Outcome
from slipstream.audit.stage import MAX_FINDINGS, Bench, Setting, Stage, Tally
from slipstream.core.params import MAX_LOGPROBS

_MAY_STRAY = {"float32": 0.0}
"""Which part of the tokens may be off by more than rounding: none in fp32. In 16 bits a mixture of experts may send a
token to another expert, and then all of its numbers are others."""
_STRAY_IN_16_BITS = 0.02


class Cache(Stage):
    """One mode's log probabilities against those of a source that has no history."""

    def __init__(self, bench: Bench, setting: Setting, mode: Mode, source: Source, *, most: int | None = None) -> None:
        self.title = f"cache against {source.name} · {mode.name}, {bench.company(bench.at_once)}"
        self._prompts: Sequence[AuditPrompt] = bench.prompts[:most]
        self.size = len(self._prompts)
        self._bench, self._setting, self._mode, self._source = bench, setting, mode, source
        self._tally = Tally()
        self._failed: list[Finding] = []
        self._strays: list[Finding] = []
        self._same = 0
        self._worst = self._worst_part = 0.0

    def steps(self) -> Iterator[int]:
        bench = self._bench
        asking = replace(self._setting.params, speculation=self._mode.speculation, logprobs=MAX_LOGPROBS)
        for asked in ask(bench.llm, self._prompts, with_seeds(asking, self.size), bench.at_once):
            for one in asked:
                self._tally.add(one.answer)
                self._compare(one)
                yield 1

    def check(self, *, complete: bool, seconds: float) -> Check:
        tally, limit = self._tally, _MAY_STRAY.get(self._bench.rounding.dtype, _STRAY_IN_16_BITS)
        strayed = tally.tokens - self._same
        return Check(
            kind="cache",
            title=self.title,
            drafter=self._mode.drafter,
            compared=tally.tokens,
            same=self._same,
            unit="tokens",
            tokens=tally.tokens,
            drafted=tally.drafted,
            accepted=tally.accepted,
            failures=tally.failures,
            complete=complete,
            seconds=seconds,
            figures={"largest_error": self._worst, "largest_error_of_allowed": self._worst_part},
            findings=(*self._failed, *(self._strays if strayed > limit * tally.tokens else ())),
        )

    def _compare(self, one: Asked) -> None:
        bench, answer, prompt = self._bench, one.answer, self._prompts[one.index]
        if answer.error is not None or answer.logprobs is None:
            self._failed.append(Finding(Outcome.BUG, prompt.id, f"The request failed: {answer.error}"))
            return
        if len(answer.logprobs) != len(answer.token_ids):
            why = f"{len(answer.token_ids)} tokens with {len(answer.logprobs)} log probabilities."
            self._failed.append(Finding(Outcome.BUG, prompt.id, why))
            return
        tokens = [*prompt.token_ids, *answer.token_ids]
        first = len(prompt.token_ids) - 1
        logits = self._source.logits(tokens[:-1], range(first, len(tokens) - 1))  # [N, V]
        right = logits.log_softmax(1)
        for at, told in enumerate(answer.logprobs):
            bound = max(bench.rounding.of_row(logits[at]), self._source.stray(logits[at]))
            allowed = 2 * bound  # the logit's, and that of the sum over all
            error = max(abs(entry.logprob - float(right[at, token])) for token, entry in told.items())
            self._worst, self._worst_part = max(self._worst, error), max(self._worst_part, error / allowed)
            bench.errors[self._mode.name] = max(self._worst, bench.errors.get(self._mode.name, 0.0))
            self._same += error <= allowed
            if not error <= allowed and len(self._strays) < MAX_FINDINGS:
                why = "The log probabilities over the continued cache are not those of a fresh pass."
                token = bench.token(answer.token_ids[at])
                self._strays.append(Finding(Outcome.BUG, prompt.id, why, at, token, None, error, allowed))
