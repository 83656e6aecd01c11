"""Why an answer was drafted for or not, by drafter: noted step by step, and put into words when the answer ends."""

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
"""Tokens by which the place of a copied text is found: the last ones, and the first that is guessed."""
_READ = 2048
"""Tokens that are read as text to say which turn a place belongs to, or whether it is code: others wait meanwhile."""
_ROLES = re.compile(r"<\|im_start\|>user|<\|start_header_id\|>user|<start_of_turn>user|<\|user\|>|\[INST\]", re.I)
"""How the chat templates that are around begin what a user says."""

RESTING = "off: its drafts made steps slower; tried again later"
SWITCHED_OFF = "off: switched off for everybody (LLM.speculates)"

UNASKED = "off: not asked, since of late its guesses won nothing, or less than another's"
COMPARED = "off: its rounds were plain, to compare drafted ones with"
SILENT = "off: it had no guess"
LATE = "off: it was late"
UNWEIGHED = ""
"""Its guesses are taken as they come: there is nothing to say of that."""
PASSING = frozenset((UNASKED, COMPARED, SILENT, LATE, UNWEIGHED))
"""What is said where nothing was ever weighed for an answer, and where no limit of its own kept it from guesses."""


class Outcomes:
    """What became of each drafter's part in a step. Of one engine; words are put together when an answer ends."""

    def __init__(self, undrafted: dict[Undrafted, int], totals: Mapping[str, DrafterStats]) -> None:
        self._undrafted, self._totals = undrafted, totals

    def weigh(
        self,
        name: str,
        decision: Decision | None,
        answers: Sequence[Answer],
        had: Sequence[int | Tree],
        taken: Sequence[int | Tree],
    ) -> None:
        """It was decided what is taken of what there was, or could have been. Who had nothing has no part in it."""
        kept, passed = (UNWEIGHED, UNWEIGHED) if decision is None else (decision, decision.for_others())
        for answer, before, after in zip(answers, had, taken, strict=True):
            if before:
                answer.decided[name] = kept if after else passed
                if not after:
                    self.decline(name, answer)

    def decline(self, name: str, answer: Answer) -> None:
        self._undrafted["declined"] += 1
        self._totals[name].declined += 1
        answer.output.speculation.of(name).declined += 1

    def skip(self, name: str, answer: Answer) -> None:
        """It was not even asked."""
        answer.decided.setdefault(name, UNASKED)
        self.decline(name, answer)

    def fall_silent(self, name: str, answers: Sequence[Answer], caps: Sequence[int], proposals: Proposals) -> None:
        """It was asked, and had nothing to say for some of them, or was late."""
        silent = [a for a, most, tree in zip(answers, caps, proposals.trees, strict=True) if most and not tree]
        self._undrafted["late" if proposals.late else "no_guess"] += len(silent)
        why = LATE if proposals.late else SILENT
        for answer in silent:
            if answer.decided.get(name, UNASKED) in (UNASKED, COMPARED):
                answer.decided[name] = why


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
    off = planner.why_off(drafter)
    if answer.tenant and off:  # which sees nothing of others
        off = RESTING
    off = off or (SHORT if room.is_short(answer) else None)
    return off or (
        planner.words(drafter, decided, shared=not answer.tenant) if isinstance(decided, Decision) else decided
    )


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
