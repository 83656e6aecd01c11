"""The findings of an audit, its verdict, and the report: Markdown for people, and the same content as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any


class Outcome(StrEnum):
    """Ordered from good to bad."""

    PASS = "pass"
    NEAR_TIE = "near-tie"  # a difference that rounding explains
    NOT_TESTED = "not tested"  # not run, or nothing was drafted
    STOPPED = "stopped"  # interrupted before its end
    BUG = "bug"  # a difference that rounding does not explain


@dataclass(frozen=True, slots=True)
class Token:
    """A token and its text."""

    id: int
    text: str


@dataclass(frozen=True, slots=True)
class Finding:
    """A difference."""

    outcome: Outcome  # NEAR_TIE or BUG
    prompt: str
    why: str  # a sentence
    position: int | None = None  # of the token in the answer, from 0
    expected: Token | None = None
    got: Token | None = None
    margin: float | None = None  # in logits
    allowed: float | None = None  # the largest margin that rounding explains

    @property
    def excess(self) -> float:
        """The margin relative to what is allowed."""
        return self.margin / self.allowed if self.margin is not None and self.allowed else float("inf")


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check: done, interrupted, or left out."""

    kind: str  # "equality", "cache", "distribution" or "left out"
    title: str
    drafter: str | None  # None: plain decoding
    compared: int  # answers, or what `unit` says
    same: int
    unit: str = "answers"
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    failures: int = 0  # drafter calls that raised, were late or returned nonsense
    complete: bool = True
    seconds: float = 0.0
    figures: Mapping[str, float] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()
    missing: str = ""  # why nothing could be compared
    declined: bool = False  # left out by an option

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
        """Why this check shows nothing; "" if it does."""
        if not self.compared:
            return self.missing or ("nothing was compared" if self.complete else "stopped before it began")
        about_drafts = self.kind in ("equality", "distribution") and self.drafter is not None
        return "nothing was guessed" if about_drafts and not self.drafted else ""


_NAMED = 6  # checks listed in a verdict


@dataclass(frozen=True, slots=True)
class Audit:
    """All checks and their verdict."""

    checks: tuple[Check, ...]
    drafters: tuple[str, ...]
    rounding: str  # the bound in words
    notes: tuple[str, ...] = ()  # what ended it early
    interrupted: bool = False  # by the user
    broken: bool = False  # by an error

    @property
    def idle(self) -> tuple[str, ...]:
        """Drafters that drafted nothing in any check."""
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
        """Checks that were asked for but compared nothing."""
        return tuple(check for check in self.not_tested if not check.compared and not check.declined)

    def passed(self, strict: bool = False) -> bool:
        """True if every requested check ran without a bug; with `strict`, without a near-tie as well."""
        tried = len(self.checks) > len(self.not_tested)
        ended = self.interrupted or self.broken
        return tried and not (ended or self.bugs or self.idle or self.missing or (strict and self.near_ties))

    @property
    def lossless(self) -> bool:
        """True if it passed with nothing left out."""
        return self.passed() and not self.not_tested

    @property
    def verdict(self) -> str:
        """One sentence, with another on what was not tested."""
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


SHOWN = 12  # findings in the Markdown; the JSON has all

MARKS = {
    Outcome.PASS: "pass",
    Outcome.NEAR_TIE: "near-tie",
    Outcome.NOT_TESTED: "not tested",
    Outcome.STOPPED: "stopped",
    Outcome.BUG: "**BUG**",
}

MEANING = """\
Speculative decoding guesses tokens ahead and lets the model check them. Lossless means that the guesses change the
speed and nothing else. This audit decoded the same prompts without guesses, one request at a time, then with each
drafter, alone and in a batch, and compared every token.

* **greedy** and **T=…** rows: the same tokens as plain decoding, for the same seeds.
* **probe** is the audit's own drafter. It knows the answer and is wrong on purpose, in chains and trees: acceptance and
  rejection are tried often, however good the drafters above are.
* **cache against …** rows: the log probabilities that speculation saw over its cache, against those of a fresh pass
  over the same tokens.
* **rejection sampling** is the other verifier, for requests that ask for it. Its tokens need not be those of plain
  decoding, but must have the model's distribution: a p-value below 0.00001 means that they do not.
* A **near-tie** is a place where two tokens were so close that rounding decides between them. A **BUG** is a
  difference that rounding cannot explain."""


def to_json(audit: Audit, about: Mapping[str, Any], *, strict: bool = False) -> dict[str, Any]:
    """about: date, command, model, versions, hardware and settings."""
    return {
        **about,
        "verdict": audit.verdict,
        "lossless": audit.lossless,
        "passed": audit.passed(strict),
        "not_tested": {check.title: check.untested for check in audit.not_tested},
        "interrupted": audit.interrupted,
        "broken": audit.broken,
        "bugs": len(audit.bugs),
        "near_ties": len(audit.near_ties),
        "rounding": audit.rounding,
        "notes": list(audit.notes),
        "checks": [_check_json(check) for check in audit.checks],
    }


def _check_json(check: Check) -> dict[str, Any]:
    values = asdict(check)
    values["findings"] = [asdict(finding) for finding in check.findings]
    return {"outcome": check.outcome, **values, "seconds": round(check.seconds, 3)}


def to_markdown(audit: Audit, about: Mapping[str, Any]) -> str:
    parts = [
        f"# Losslessness audit of {about['model']}",
        f"**{audit.verdict}**",
        _checks(audit),
        _differences(audit),
        "\n".join(f"* {note}" for note in audit.notes),
        "## What was done",
        MEANING,
        "## What rounding explains",
        audit.rounding,
        "## Where and how",
        _about(about),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _checks(audit: Audit) -> str:
    rows = ["| check | result | the same | tokens | guessed | accepted |", "|---|---|---|---|---|---|"]
    for check in audit.checks:
        cells = (
            check.title,
            MARKS[check.outcome] + (f": {check.untested}" if check.outcome is Outcome.NOT_TESTED else ""),
            f"{compared(check)}{figures(check)}" if check.compared else "",
            f"{check.tokens}",
            f"{check.drafted}" if check.drafter else "",
            f"{check.accepted}" if check.drafter else "",
        )
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows)


def compared(check: Check) -> str:
    """What was compared, and how much of it was the same. Draws are only judged together."""
    if check.kind == "distribution":
        return f"{check.compared} {check.unit}"
    return f"{check.same} of {check.compared} {check.unit}"


def figures(check: Check) -> str:
    """Further figures of a check, in brackets."""
    found = [f"{name.replace('_', ' ')} {value:.2g}" for name, value in check.figures.items()]
    if check.failures:
        found.append(f"{check.failures} drafter failures")
    return f" ({', '.join(found)})" if found else ""


def _differences(audit: Audit) -> str:
    found = [(check, finding) for check in audit.checks for finding in check.findings]
    if not found:
        return ""
    found.sort(key=lambda one: (one[1].outcome is not Outcome.BUG, -one[1].excess))
    lines = ["## Differences", ""]
    lines += [f"* {MARKS[finding.outcome]}: {check.title}, {describe(finding)}" for check, finding in found[:SHOWN]]
    if len(found) > SHOWN:
        lines.append(f"* and {len(found) - SHOWN} more, in the JSON")
    return "\n".join(lines)


def describe(finding: Finding) -> str:
    """A finding in one or two sentences."""
    text = f"prompt {finding.prompt}"
    if finding.position is not None:
        text += f", token {finding.position}"
    if finding.expected is not None and finding.got is not None:
        text += (
            f": plain decoding says {finding.expected.text!r} ({finding.expected.id}), here it is "
            f"{finding.got.text!r} ({finding.got.id})"
        )
    if finding.margin is not None:
        text += f"; margin {finding.margin:.2g}, rounding explains {finding.allowed:.2g}"
    return f"{text}. {finding.why}"


def _about(about: Mapping[str, Any]) -> str:
    rows = ["| | |", "|---|---|"]
    for name, value in about.items():
        if isinstance(value, Mapping):
            value = ", ".join(f"{key} {part}" for key, part in value.items() if part is not None)
        elif isinstance(value, list):
            value = " ".join(str(part) for part in value)
        rows.append(f"| {name} | {str(value).replace('|', '/')} |")
    return "\n".join(rows)
