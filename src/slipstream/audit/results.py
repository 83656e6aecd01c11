"""What an audit found: plain data, for reports to tell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum


class Outcome(StrEnum):
    """From good to bad."""

    PASS = "pass"
    NEAR_TIE = "near-tie"  # something differs, and rounding explains it
    UNTESTED = "untested"  # nothing was guessed, so nothing could go wrong
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
    """One check, done or stopped on the way."""

    kind: str  # "equality", "cache" or "distribution"
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

    @property
    def outcome(self) -> Outcome:
        if any(finding.outcome is Outcome.BUG for finding in self.findings):
            return Outcome.BUG
        if not self.complete:
            return Outcome.STOPPED
        about_drafts = self.kind in ("equality", "distribution") and self.drafter is not None
        if not self.compared or (about_drafts and not self.drafted):
            return Outcome.UNTESTED
        return Outcome.NEAR_TIE if self.findings else Outcome.PASS


@dataclass(frozen=True, slots=True)
class Audit:
    """All checks, and what they say together."""

    checks: tuple[Check, ...]
    drafters: tuple[str, ...]
    rounding: str  # the bound in words
    notes: tuple[str, ...] = ()  # what was left out, and why
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

    def lossless(self, strict: bool = False) -> bool:
        """Was it shown? `strict`: near-ties count as well."""
        return not (self.interrupted or self.broken or self.bugs or self.idle or (strict and self.near_ties))

    @property
    def verdict(self) -> str:
        """One sentence."""
        if self.bugs:
            return f"NOT lossless: {_count(self.bugs, 'difference')} that rounding does not explain."
        if self.interrupted or self.broken:
            return "Not finished: no bug was found in the part that was done."
        if self.idle:
            return (
                f"Not shown: {', '.join(self.idle)} guessed nothing, so nothing of it was tested. "
                "Give it longer answers (--max-tokens) or other prompts (--prompts)."
            )
        if self.near_ties:
            return f"Lossless but for rounding: {_count(self.near_ties, 'near-tie')}, no bug."
        if not self.drafters:
            return "Every check passed, but no drafter was audited: name one with --drafter."
        return "Lossless: every check passed."


def _count(things: Sequence[object], name: str) -> str:
    return f"{len(things)} {name}{'s' if len(things) != 1 else ''}"
