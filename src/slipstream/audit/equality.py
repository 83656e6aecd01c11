"""Token equality with speculation on and off, and the cache that speculation leaves behind.

`Equality` compares answers with plain decoding of one request at a time, greedy and for the same seeds. `Cache` takes
log probabilities from passes over the continued cache and compares them with a fresh pass over the same tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from slipstream.audit.report import Check, Finding, Outcome
from slipstream.audit.rounding import Row
from slipstream.audit.stage import (
    MAX_FINDINGS,
    Asked,
    AuditPrompt,
    AuditState,
    Mode,
    Setting,
    Source,
    Stage,
    Tally,
    ask,
    with_seeds,
)
from slipstream.core.errors import RequestError
from slipstream.core.outputs import CompletionOutput, RequestOutput, parting
from slipstream.core.params import MAX_LOGPROBS


class Reference(Stage):
    """The plain answers, one request at a time. The probe learns these answers."""

    def __init__(self, state: AuditState, setting: Setting) -> None:
        self.title = f"{setting.name} · plain, alone (what the others are compared with)"
        self.size = len(state.prompts)
        self._state, self._setting = state, setting

    def steps(self) -> Iterator[int]:
        state, plain = self._state, Mode()
        params = replace(self._setting.params, speculation=plain.speculation)
        found: list[CompletionOutput] = []
        state.probe.forget()
        for asked in ask(state.llm, state.prompts, with_seeds(params, self.size), 1):
            for one in asked:
                prompt = state.prompts[one.index]
                if one.answer.error is not None:
                    raise RequestError(f"prompt {prompt.id}: plain decoding failed: {one.answer.error}")
                state.probe.tell(prompt.token_ids, one.params.seed, one.answer.token_ids)
                found.append(one.answer)
            yield len(asked)
        state.plain[self._setting.name] = found

    def check(self, *, complete: bool, seconds: float) -> Check | None:
        return None


class Equality(Stage):
    """Compares one mode's answers with the plain ones."""

    def __init__(self, state: AuditState, setting: Setting, mode: Mode, at_once: int) -> None:
        self.title = f"{setting.name} · {mode.name}, {state.company(at_once)}"
        self.size = len(state.prompts)
        self._state, self._setting, self._mode, self._at_once = state, setting, mode, at_once
        self._tally = Tally()
        self._findings: list[Finding] = []

    def steps(self) -> Iterator[int]:
        state = self._state
        params = replace(self._setting.params, speculation=self._mode.speculation)
        plain = state.plain[self._setting.name]
        for asked in ask(state.llm, state.prompts, with_seeds(params, self.size), self._at_once):
            for one in asked:
                self._tally.add(one.answer)
                state.drafted.setdefault(self._mode.name, Counter())[one.index] += one.answer.speculation.drafted
                finding = self._compare(one, plain[one.index])
                self._tally.same += finding is None
                if finding is not None:
                    self._findings.append(finding)
            yield len(asked)

    def check(self, *, complete: bool, seconds: float) -> Check:
        tally = self._tally
        more = {"complete": complete, "seconds": seconds, "findings": tuple(self._findings)}
        return tally.check("equality", self, self._mode.drafter, tally.compared, tally.same, **more)

    def _compare(self, one: Asked, plain: CompletionOutput) -> Finding | None:
        answer, prompt = one.answer, self._state.prompts[one.index]
        if answer.error is not None:
            return Finding(Outcome.BUG, prompt.id, f"The request failed: {answer.error}")
        at = parting(plain.token_ids, answer.token_ids)
        if at is None:
            if (answer.finish_reason, answer.text) == (plain.finish_reason, plain.text):
                return None
            return Finding(
                Outcome.BUG, prompt.id, "The tokens are the same, but the text or the reason to stop is not."
            )
        if at >= min(len(plain.token_ids), len(answer.token_ids)):
            which = "sooner" if len(answer.token_ids) < len(plain.token_ids) else "later"
            return Finding(Outcome.BUG, prompt.id, f"The same tokens, but the answer ends {which} than plain.", at)
        if sum(finding.outcome is Outcome.BUG for finding in self._findings) >= MAX_FINDINGS:
            why = f"Differs, as {MAX_FINDINGS} answers before it did by a bug; not looked into."
            return Finding(Outcome.BUG, prompt.id, why, at)
        return self._judge(one, plain, at)

    def _judge(self, one: Asked, plain: CompletionOutput, at: int) -> Finding:
        """Classify the first difference: a near-tie that rounding explains, or a bug."""
        state, prompt = self._state, self._state.prompts[one.index]
        before = [*prompt.token_ids, *plain.token_ids[:at]]
        logits = state.fresh.logits(before, [len(before) - 1])[0]
        expected, got = plain.token_ids[at], one.answer.token_ids[at]
        (asked,) = state.llm._intake.job(prompt.token_ids, replace(one.params, n=1), _ignore, streaming=False).answers
        said = plain.token_ids[:at]
        row = Row.of(logits, one.params, prompt.token_ids, said, sorted(asked.end_ids), asked.bad_words)
        margin = row.margin(expected, got)
        allowed = 2 * state.rounding.of_row(logits)
        explained = margin <= allowed
        return Finding(
            Outcome.NEAR_TIE if explained else Outcome.BUG,
            prompt.id,
            f"The two tokens lie within rounding of each other in {state.rounding.dtype}: either may come first."
            if explained
            else f"Rounding in {state.rounding.dtype} cannot turn one token into the other here.",
            at,
            state.token(expected),
            state.token(got),
            margin,
            allowed,
        )


_MAY_STRAY = {"float32": 0.0}
"""Share of tokens that may differ by more than rounding, by dtype. In 16 bits a mixture of experts may route a token to
another expert, which changes all of its numbers."""
_STRAY_IN_16_BITS = 0.02


class Cache(Stage):
    """Compares one mode's log probabilities with a source that has no history."""

    def __init__(
        self, state: AuditState, setting: Setting, mode: Mode, source: Source, *, most: int | None = None
    ) -> None:
        self.title = f"cache against {source.name} · {mode.name}, {state.company(state.at_once)}"
        self._prompts: Sequence[AuditPrompt] = state.prompts[:most]
        self.size = len(self._prompts)
        self._state, self._setting, self._mode, self._source = state, setting, mode, source
        self._tally = Tally()
        self._failed: list[Finding] = []
        self._strays: list[Finding] = []
        self._same = 0
        self._worst = self._worst_part = 0.0

    def steps(self) -> Iterator[int]:
        state = self._state
        asking = replace(self._setting.params, speculation=self._mode.speculation, logprobs=MAX_LOGPROBS)
        for asked in ask(state.llm, self._prompts, with_seeds(asking, self.size), state.at_once):
            for one in asked:
                self._tally.add(one.answer)
                self._compare(one)
                yield 1

    def check(self, *, complete: bool, seconds: float) -> Check:
        tally, limit = self._tally, _MAY_STRAY.get(self._state.rounding.dtype, _STRAY_IN_16_BITS)
        strayed = tally.tokens - self._same
        return tally.check(
            "cache",
            self,
            self._mode.drafter,
            tally.tokens,
            self._same,
            unit="tokens",
            complete=complete,
            seconds=seconds,
            figures={"largest_error": self._worst, "largest_error_of_allowed": self._worst_part},
            findings=(*self._failed, *(self._strays if strayed > limit * tally.tokens else ())),
        )

    def _compare(self, one: Asked) -> None:
        state, answer, prompt = self._state, one.answer, self._prompts[one.index]
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
        for at, reported in enumerate(answer.logprobs):
            bound = max(state.rounding.of_row(logits[at]), self._source.stray(logits[at]))
            allowed = 2 * bound  # for the logit and for the normalizing sum
            error = max(abs(entry.logprob - float(right[at, token])) for token, entry in reported.items())
            self._worst, self._worst_part = max(self._worst, error), max(self._worst_part, error / allowed)
            state.errors[self._mode.name] = max(self._worst, state.errors.get(self._mode.name, 0.0))
            self._same += error <= allowed
            if not error <= allowed and len(self._strays) < MAX_FINDINGS:
                why = "The log probabilities over the continued cache are not those of a fresh pass."
                token = state.token(answer.token_ids[at])
                self._strays.append(Finding(Outcome.BUG, prompt.id, why, at, token, None, error, allowed))


def _ignore(output: RequestOutput) -> None:
    """The sink of a job that never runs."""
