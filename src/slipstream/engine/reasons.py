"""Decisions as one person wants to read them: for one answer, and with where its guesses came from.

Put together when the answer ends or somebody asks, and not while rounds run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress

from slipstream.engine.fates import PASSING
from slipstream.engine.room import SHORT, DraftRoom
from slipstream.engine.state import Answer, Copied
from slipstream.plan.decisions import Decision
from slipstream.plan.planner import Planner

_AGREES = 3
"""Tokens by which the place of a copied text is found: the last ones, and the first that is guessed."""
_READ = 2048
"""Tokens that are read as text to say which turn a place belongs to, or whether it is code: others wait meanwhile."""
_ROLES = re.compile(r"<\|im_start\|>user|<\|start_header_id\|>user|<start_of_turn>user|<\|user\|>|\[INST\]", re.I)
"""How the chat templates that are around begin what a user says."""

RESTING = "off: drafts made requests of its kind slower; tried again later"
SWITCHED_OFF = "off: switched off for everybody (LLM.speculates)"

Decode = Callable[[list[int]], str]


def note_plan(answer: Answer, planner: Planner, room: DraftRoom, decode: Decode, *, enabled: bool = True) -> None:
    """The answer leaves: what was measured for it, and what was decided last. enabled: as in `Drafting`."""
    stats, gain = answer.output.speculation, planner.gain(answer.id)
    if gain.drafts:  # else nothing was measured
        stats.expected_gain, stats.measured_gain = gain.expected, gain.measured
    off = dict.fromkeys(answer.drafters, SWITCHED_OFF)
    stats.plan = plan_of(answer, planner, room, decode) if enabled else off


def plan_of(answer: Answer, planner: Planner, room: DraftRoom, decode: Decode) -> dict[str, str]:
    """By drafter: what was decided last for this answer, and why. Where nothing ever was, why not, if that is known."""
    found = {name: why for name in answer.drafters if (why := _why(answer, name, planner, room))}
    found |= {name: f"off: {why}" for name, why in answer.refused.items()}
    last = answer.copied
    if last is not None and found.get(last.drafter, "").startswith(last.drafter):
        expected = found[last.drafter].rpartition(": ")[2]
        with suppress(Exception):  # a tokenizer that cannot decode its own tokens: nobody goes without an answer for it
            found[last.drafter] = f"{last.drafter} {len(last.tokens)}: {_words(answer, last, decode)}; {expected}"
    return found


def _why(answer: Answer, drafter: str, planner: Planner, room: DraftRoom) -> str | None:
    decided = answer.decided.get(drafter)
    if isinstance(decided, str) and decided not in PASSING:  # its own limits come before what is known of others
        return decided
    off = planner.why(answer.id, drafter) or (SHORT if room.is_short(answer) else None)
    if answer.tenant:  # which sees nothing of others
        off = RESTING if off and off != SHORT else off
        return off or (planner.words(drafter, decided, shared=False) if isinstance(decided, Decision) else decided)
    return off or (planner.words(drafter, decided) if isinstance(decided, Decision) else decided)


def _words(answer: Answer, last: Copied, decode: Decode) -> str:
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
    """Does a text end inside a fence of code?"""
    return "code of " if before.count("```") % 2 else ""


def copied_from(tokens: Sequence[int], guess: Sequence[int]) -> int | None:
    """Where in the text the guess stood before, the latest place first; None: nowhere."""
    for before, behind in ((_AGREES - 1, 1), (1, _AGREES - 1), (1, 1)):  # a guess may be put together from two places
        wanted = [*tokens[max(0, len(tokens) - before) :], *guess[:behind]]
        first = wanted[0]
        for at in range(len(tokens) - 1 - before, -1, -1):
            if tokens[at] == first and list(tokens[at : at + len(wanted)]) == wanted:
                return at + before
    return None
