"""The same tokens with speculation on and off, alone and in company: at temperature 0, and for the same seeds.

Plain decoding of one request at a time is what everything is measured by.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from slipstream.audit.answers import Asked, Mode, ask, with_seeds
from slipstream.audit.results import Check, Finding, Outcome
from slipstream.audit.rounding import Row
from slipstream.audit.stage import MAX_FINDINGS, Bench, Setting, Stage, Tally
from slipstream.core.errors import RequestError
from slipstream.core.outputs import CompletionOutput, parting


class Reference(Stage):
    """The plain answers, one request at a time. The probe is told them."""

    def __init__(self, bench: Bench, setting: Setting) -> None:
        self.title = f"{setting.name} · plain, alone (what the others are compared with)"
        self.size = len(bench.prompts)
        self._bench, self._setting = bench, setting

    def steps(self) -> Iterator[int]:
        bench, plain = self._bench, Mode()
        params = replace(self._setting.params, speculation=plain.speculation)
        found: list[CompletionOutput] = []
        bench.probe.forget()
        for asked in ask(bench.llm, bench.prompts, with_seeds(params, self.size), 1):
            for one in asked:
                prompt = bench.prompts[one.index]
                if one.answer.error is not None:
                    raise RequestError(f"prompt {prompt.id}: plain decoding failed: {one.answer.error}")
                bench.probe.tell(prompt.token_ids, one.params.seed, one.answer.token_ids)
                found.append(one.answer)
            yield len(asked)
        bench.plain[self._setting.name] = found

    def check(self, *, complete: bool, seconds: float) -> Check | None:
        return None


class Equality(Stage):
    """One mode's answers against the plain ones."""

    def __init__(self, bench: Bench, setting: Setting, mode: Mode, at_once: int) -> None:
        self.title = f"{setting.name} · {mode.name}, {bench.company(at_once)}"
        self.size = len(bench.prompts)
        self._bench, self._setting, self._mode, self._at_once = bench, setting, mode, at_once
        self._tally = Tally()
        self._findings: list[Finding] = []

    def steps(self) -> Iterator[int]:
        bench = self._bench
        params = replace(self._setting.params, speculation=self._mode.speculation)
        plain = bench.plain[self._setting.name]
        for asked in ask(bench.llm, bench.prompts, with_seeds(params, self.size), self._at_once):
            for one in asked:
                self._tally.add(one.answer)
                bench.drafted.setdefault(self._mode.name, Counter())[one.index] += one.answer.speculation.drafted
                finding = self._compare(one, plain[one.index])
                self._tally.same += finding is None
                if finding is not None:
                    self._findings.append(finding)
            yield len(asked)

    def check(self, *, complete: bool, seconds: float) -> Check:
        tally = self._tally
        return Check(
            kind="equality",
            title=self.title,
            drafter=self._mode.drafter,
            compared=tally.compared,
            same=tally.same,
            tokens=tally.tokens,
            drafted=tally.drafted,
            accepted=tally.accepted,
            failures=tally.failures,
            complete=complete,
            seconds=seconds,
            findings=tuple(self._findings),
        )

    def _compare(self, one: Asked, plain: CompletionOutput) -> Finding | None:
        answer, prompt = one.answer, self._bench.prompts[one.index]
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
        """Where two answers part: could rounding have done it?"""
        bench, prompt = self._bench, self._bench.prompts[one.index]
        before = [*prompt.token_ids, *plain.token_ids[:at]]
        logits = bench.fresh.logits(before, [len(before) - 1])[0]
        expected, got = plain.token_ids[at], one.answer.token_ids[at]
        margin = Row.of(logits, one.params, len(before)).margin(expected, got)
        allowed = 2 * bench.rounding.of_row(logits)
        explained = margin <= allowed
        return Finding(
            Outcome.NEAR_TIE if explained else Outcome.BUG,
            prompt.id,
            f"The two tokens lie within rounding of each other in {bench.rounding.dtype}: either may come first."
            if explained
            else f"Rounding in {bench.rounding.dtype} cannot turn one token into the other here.",
            at,
            bench.token(expected),
            bench.token(got),
            margin,
            allowed,
        )
