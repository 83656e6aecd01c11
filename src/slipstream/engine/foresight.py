"""Plans of device drafters that are made while the device is at work, before the host knows what it gave.

Where a round waits for drafters on the host, all that the host does between hearing of one round and queueing the next
keeps the device waiting, and most of that is to plan. What device drafters are to do depends little on the last tokens,
but on what those on the host guess beside them; and that is most likely much the same as the last time. So it is
planned as if it were. Where it turns out that others have guesses than was thought, or far more or fewer of them, it is
planned anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from slipstream.engine.draft_loops import Drafts
from slipstream.engine.plans import Gathered, HostGuess
from slipstream.engine.state import Answer
from slipstream.plan.planner import Planner, TreeBudget

_ALIKE = 2
"""Guesses of which there are no more than so many times as many as was thought are what was thought."""


class Budgeted(NamedTuple):
    """How far a device drafter is to go for some requests of a round."""

    requests: list[int]
    budget: TreeBudget  # levels: 0 where it makes no trees


class Foreseen(NamedTuple):
    """What device drafters are to do in a round, if those on the host guess so."""

    answers: list[Answer]
    supposed: list[HostGuess]  # [B]
    budgets: Mapping[str, Budgeted]  # of those that were asked
    drafts: Drafts

    def budget(self, drafter: str, requests: Sequence[int]) -> TreeBudget | None:
        """None: it was not for just these."""
        found = self.budgets.get(drafter)
        return found.budget if found is not None and found.requests == list(requests) else None

    def stands(self, gathered: Gathered, planner: Planner) -> bool:
        """Did the host guess like that? Tells the planner."""
        stands = all(map(_alike, self.supposed, gathered.guesses()))
        (planner.go_on if stands else planner.plan_again)()
        return stands


class Foresight:
    """Of one engine: at most one round that is planned and not begun."""

    def __init__(self) -> None:
        self._last: dict[str, HostGuess] = {}  # by request: what was guessed on the host in the last round
        self._foreseen: Foreseen | None = None

    def supposed(self, answers: Sequence[Answer]) -> list[HostGuess]:
        """What the host will most likely guess for these."""
        return [self._last.get(answer.id, HostGuess()) for answer in answers]

    def put(self, foreseen: Foreseen) -> None:
        self._foreseen = foreseen

    def take(self, answers: Sequence[Answer], planner: Planner) -> Foreseen | None:
        """What was foreseen of a round of just these, which begins now; whatever was, is forgotten."""
        found, self._foreseen = self._foreseen, None
        if found is None or found.answers == list(answers):
            return found
        planner.skip_round()
        return None

    def note(self, answers: Sequence[Answer], gathered: Gathered) -> None:
        """That is what the host guessed."""
        if not (gathered.hosts or self._last):
            return
        self._last = {a.id: guess for a, guess in zip(answers, gathered.guesses(), strict=True) if guess.company}


def _alike(one: HostGuess, other: HostGuess) -> bool:
    if one.company != other.company:
        return False
    few, many = sorted((len(one.tree), len(other.tree)))
    return many <= _ALIKE * few
