"""The reason, by drafter, why an answer was drafted for or not: recorded in each step, put into words at its end.

The words come from `NodeCaps.why_none` (limits), `DraftRoom` (the cache), `Decision.text` (the planner), the guard of a
host drafter (failures), and this file (the rest).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from slipstream.core.draft import Tree
from slipstream.core.outputs import DrafterStats, Undrafted
from slipstream.drafters.guard import Proposals
from slipstream.engine.caps import SHORT, DraftRoom
from slipstream.engine.state import Answer, Copied
from slipstream.plan.planner import Planner
from slipstream.plan.types import Decision

_AGREES = 3
"""Tokens by which the place of a copied text is found: the last ones of the text and the first ones of the draft."""
_READ = 2048
"""Most tokens that are decoded to name the turn of a place, or to see whether it is code: other requests wait."""
_ROLES = re.compile(r"<\|im_start\|>user|<\|start_header_id\|>user|<start_of_turn>user|<\|user\|>|\[INST\]", re.I)
"""The beginning of a user's turn in common chat templates."""

RESTING = "off: its drafts made steps slower; tried again later"
SWITCHED_OFF = "off: switched off for all requests (LLM.speculates)"

UNASKED = "off: not asked, since of late its guesses won nothing, or less than another's"
COMPARED = "off: its steps were plain, to compare drafted ones with"
SILENT = "off: it had no guess"
LATE = "off: it was late"
UNWEIGHED = ""
"""Its guesses are taken without a decision: nothing to report."""
PASSING = frozenset((UNASKED, COMPARED, SILENT, LATE, UNWEIGHED))
"""The reasons that say nothing about the answer itself, so the planner's own reason comes before them."""

Decode = Callable[[list[int]], str]


class Outcomes:
    """Records the outcome of each drafter in each step, in `Answer.decided` and in the engine's counters."""

    def __init__(self, undrafted: dict[Undrafted, int], totals: Mapping[str, DrafterStats]) -> None:
        self._undrafted, self._totals = undrafted, totals

    def weigh(
        self,
        name: str,
        decision: Decision | None,
        answers: Sequence[Answer],
        offered: Sequence[int | Tree],
        taken: Sequence[int | Tree],
    ) -> None:
        """Record what was taken of each answer's offer: the most nodes, or a tree. Empty offers do not count."""
        own, others = (UNWEIGHED, UNWEIGHED) if decision is None else (decision, decision.for_others())
        for answer, before, after in zip(answers, offered, taken, strict=True):
            if before:
                answer.decided[name] = own if after else others
                if not after:
                    self._decline(name, answer)

    def skip(self, name: str, answer: Answer) -> None:
        """The drafter was not asked."""
        answer.decided.setdefault(name, UNASKED)
        self._decline(name, answer)

    def fall_silent(self, name: str, answers: Sequence[Answer], caps: Sequence[int], proposals: Proposals) -> None:
        """The drafter was asked: record the answers for which it had no guess, or was late."""
        silent = [a for a, most, tree in zip(answers, caps, proposals.trees, strict=True) if most and not tree]
        self._undrafted["late" if proposals.late else "no_guess"] += len(silent)
        for answer in silent:
            if answer.decided.get(name, UNASKED) in (UNASKED, COMPARED):
                answer.decided[name] = LATE if proposals.late else SILENT

    def _decline(self, name: str, answer: Answer) -> None:
        self._undrafted["declined"] += 1
        self._totals[name].declined += 1
        answer.output.speculation.of(name).declined += 1


def note_plan(answer: Answer, planner: Planner, room: DraftRoom, decode: Decode, *, enabled: bool = True) -> None:
    """Write the last decisions and the measured gain into the output of an answer that ends or is preempted.

    enabled: as in `Drafting`.
    """
    stats, gain = answer.output.speculation, planner.gain(answer.id)
    if gain.drafts:  # otherwise nothing was measured
        stats.expected_gain, stats.measured_gain = gain.expected, gain.measured
    off = dict.fromkeys(answer.drafters, SWITCHED_OFF)
    stats.plan = plan_of(answer, planner, room, decode) if enabled else off


def plan_of(answer: Answer, planner: Planner, room: DraftRoom, decode: Decode) -> dict[str, str]:
    """By drafter: the last decision for this answer and its reason, or why there was none, if that is known."""
    found = {name: why for name in answer.drafters if (why := _why(answer, name, planner, room))}
    found |= {name: f"off: {why}" for name, why in answer.refused.items()}
    last = answer.copied
    if last is not None and found.get(last.drafter, "").startswith(last.drafter):
        expected = found[last.drafter].rpartition(": ")[2]
        with suppress(Exception):  # a tokenizer that cannot decode its own tokens: the answer goes without this text
            found[last.drafter] = f"{last.drafter} {len(last.tokens)}: {_words(answer, last, decode)}; {expected}"
    return found


def _why(answer: Answer, drafter: str, planner: Planner, room: DraftRoom) -> str | None:
    decided = answer.decided.get(drafter)
    if isinstance(decided, str) and decided not in PASSING:  # limits of the request come before the drafter's state
        return decided
    if off := planner.why_off(drafter):
        return RESTING if answer.tenant else off  # a tenant sees no figures of others
    if room.is_short(answer):
        return SHORT
    return planner.words(drafter, decided, shared=not answer.tenant) if isinstance(decided, Decision) else decided


def _words(answer: Answer, last: Copied, decode: Decode) -> str:
    """Where a drafter copied its last draft from."""
    if last.source != "text":
        return last.source
    place = copied_from(answer.tokens[: last.length], last.tokens)
    if place is None:
        return "matches an earlier text"
    if place >= answer.prompt_length:
        own = answer.tokens[answer.prompt_length : place]
        return f"matches {_code(decode(own)) if len(own) <= _READ else ''}its own answer"
    if place > _READ:
        return f"matches the prompt at token {place}"
    before = decode(answer.tokens[:place])
    turns = len(_ROLES.findall(before))
    return f"matches {_code(before)}turn {turns}" if turns else f"matches {_code(before)}the prompt"


def _code(before: str) -> str:
    """The words for a place after this text if it is inside a code fence."""
    return "code of " if before.count("```") % 2 else ""


def copied_from(tokens: Sequence[int], guess: Sequence[int]) -> int | None:
    """The latest place in the text where the guess occurred before; None if there is none."""
    for before, behind in ((_AGREES - 1, 1), (1, _AGREES - 1), (1, 1)):  # a guess may combine two places
        wanted = [*tokens[max(0, len(tokens) - before) :], *guess[:behind]]
        first = wanted[0]
        for at in range(len(tokens) - 1 - before, -1, -1):
            if tokens[at] == first and list(tokens[at : at + len(wanted)]) == wanted:
                return at + before
    return None
