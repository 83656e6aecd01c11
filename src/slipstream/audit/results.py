"""What an audit found: plain data, for reports to tell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum


class Outcome(StrEnum):
    """From good to bad."""

    PASS = "pass"
    NEAR_TIE = "near-tie"  # something differs, and rounding explains it
    NOT_TESTED = "not tested"  # it was not run, or nothing was guessed, so nothing could go wrong
    STOPPED = "stopped"  # interrupted before its end
    BUG = "bug"  # something differs, and rounding does not explain it


@dataclass(frozen=True, slots=True)
class Token:
    """One token, for people too."""

    id: int
    text: str


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is not as it should be."""

    outcome: Outcome  # NEAR_TIE or BUG
    prompt: str
    why: str  # a sentence
    position: int | None = None  # which token of the answer, from 0
    expected: Token | None = None
    got: Token | None = None
    margin: float | None = None  # in logits
    allowed: float | None = None  # the largest margin that rounding explains

    @property
    def excess(self) -> float:
        """The margin as a part of what is allowed."""
        return self.margin / self.allowed if self.margin is not None and self.allowed else float("inf")


@dataclass(frozen=True, slots=True)
class Check:
    """One check: done, stopped on the way, or left out."""

    kind: str  # "equality", "cache", "distribution" or "left out"
    title: str
    drafter: str | None  # None: plain decoding
    compared: int  # answers, or what `unit` says
    same: int
    unit: str = "answers"
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    failures: int = 0  # times that the drafter raised, was late or talked nonsense
    complete: bool = True
    seconds: float = 0.0
    figures: Mapping[str, float] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()
    missing: str = ""  # why nothing could be compared
    declined: bool = False  # … since an option leaves it out

    @property
    def outcome(self) -> Outcome:
        if any(finding.outcome is Outcome.BUG for finding in self.findings):
            return Outcome.BUG
        if self.compared and not self.complete:
            return Outcome.STOPPED
        if self.untested:
            return Outcome.NOT_TESTED
        return Outcome.NEAR_TIE if self.findings else Outcome.PASS

    @property
    def untested(self) -> str:
        """Why this check shows nothing; empty where it does."""
        if not self.compared:
            return self.missing or ("nothing was compared" if self.complete else "stopped before it began")
        about_drafts = self.kind in ("equality", "distribution") and self.drafter is not None
        return "nothing was guessed" if about_drafts and not self.drafted else ""


_NAMED = 6
"""Checks that a verdict names; the table has all."""


@dataclass(frozen=True, slots=True)
class Audit:
    """All checks, and what they say together."""

    checks: tuple[Check, ...]
    drafters: tuple[str, ...]
    rounding: str  # the bound in words
    notes: tuple[str, ...] = ()  # what ended it early
    interrupted: bool = False  # by the user
    broken: bool = False  # by an error

    @property
    def idle(self) -> tuple[str, ...]:
        """Drafters that guessed nothing in any check."""
        busy = {check.drafter for check in self.checks if check.drafted}
        return tuple(drafter for drafter in self.drafters if drafter not in busy)

    @property
    def bugs(self) -> tuple[Finding, ...]:
        return self._found(Outcome.BUG)

    @property
    def near_ties(self) -> tuple[Finding, ...]:
        return self._found(Outcome.NEAR_TIE)

    def _found(self, outcome: Outcome) -> tuple[Finding, ...]:
        return tuple(finding for check in self.checks for finding in check.findings if finding.outcome is outcome)

    @property
    def not_tested(self) -> tuple[Check, ...]:
        return tuple(check for check in self.checks if check.outcome is Outcome.NOT_TESTED)

    @property
    def missing(self) -> tuple[Check, ...]:
        """Checks that were asked for and compared nothing."""
        return tuple(check for check in self.not_tested if not check.compared and not check.declined)

    def passed(self, strict: bool = False) -> bool:
        """Did all that was asked for run, without a bug? `strict`: without a near-tie as well."""
        tried = len(self.checks) > len(self.not_tested)
        ended = self.interrupted or self.broken
        return tried and not (ended or self.bugs or self.idle or self.missing or (strict and self.near_ties))

    @property
    def lossless(self) -> bool:
        """Was it shown, with nothing left out?"""
        return self.passed() and not self.not_tested

    @property
    def verdict(self) -> str:
        """One sentence, and one on what was not tested."""
        if self.bugs:
            return f"NOT lossless: {_count(self.bugs, 'difference')} that rounding does not explain."
        if self.interrupted or self.broken:
            return "Not finished: no bug was found in the part that was done."
        if self.idle:
            return (
                f"Not shown: {', '.join(self.idle)} guessed nothing, so nothing of it was tested. "
                "Give it longer answers (--max-tokens) or other prompts (--prompts)."
            )
        ties = f"{_count(self.near_ties, 'near-tie')}, no bug"
        if self.lossless:
            return f"Lossless but for rounding: {ties}." if self.near_ties else "Lossless: every check passed."
        left = [f"{check.title} ({check.untested})" for check in self.missing or self.not_tested]
        more = f", and {len(left) - _NAMED} more" if len(left) > _NAMED else ""
        untested = f"Not tested: {'; '.join(left[:_NAMED])}{more}."
        if not self.passed():
            return f"Not shown: no bug was found, but not all that was asked for could be tested. {untested}"
        return f"No difference in what was tested{' but for rounding: ' + ties if self.near_ties else ''}. {untested}"


def _count(things: Sequence[object], name: str) -> str:
    return f"{len(things)} {name}{'s' if len(things) != 1 else ''}"
