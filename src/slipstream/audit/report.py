"""The report: Markdown for people, JSON for programs. Both say the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from slipstream.audit.results import Audit, Check, Finding, Outcome

SHOWN = 12
"""Findings in the Markdown; the JSON has all."""

MARKS = {
    Outcome.PASS: "pass",
    Outcome.NEAR_TIE: "near-tie",
    Outcome.NOT_TESTED: "not tested",
    Outcome.STOPPED: "stopped",
    Outcome.BUG: "**BUG**",
}

MEANING = """\
Speculative decoding guesses tokens ahead and lets the model check them. Lossless means that the guesses change the
speed and nothing else. This audit decoded the same prompts without guesses, one request at a time, and then with each
drafter, alone and in a batch, and compared every token.

* **greedy** and **T=…** rows: the same tokens as plain decoding, for the same seeds.
* **probe** is a drafter of the audit itself. It knows the answer and is wrong on purpose, in chains and trees, so that
  acceptance and rejection are tried often, however good the drafters above are.
* **cache against …** rows: the log probabilities that speculation saw over its cache, against those of a fresh pass
  over the same tokens.
* **rejection sampling** is the other verifier, for requests that ask for it. Its tokens need not be those of plain
  decoding, but must have the model's distribution: a p-value below 0.00001 means that they have not.
* A **near-tie** is a place where two tokens were so close that rounding decides between them. A **BUG** is a
  difference that rounding cannot explain."""


def to_json(audit: Audit, about: Mapping[str, Any], *, strict: bool = False) -> dict[str, Any]:
    """`about`: date, command, model, versions, hardware and settings, as the caller knows them."""
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
    """How much was compared, and how much of it was the same. Of draws only all together can be right or wrong."""
    if check.kind == "distribution":
        return f"{check.compared} {check.unit}"
    return f"{check.same} of {check.compared} {check.unit}"


def figures(check: Check) -> str:
    """What else a check measured, in brackets."""
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
    lines += [f"* {MARKS[finding.outcome]}: {check.title}, {told(finding)}" for check, finding in found[:SHOWN]]
    if len(found) > SHOWN:
        lines.append(f"* and {len(found) - SHOWN} more, in the JSON")
    return "\n".join(lines)


def told(finding: Finding) -> str:
    """One finding as a sentence or two."""
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
