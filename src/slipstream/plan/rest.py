"""Rounds without a plan: where nothing was drafted in the last one, many requests are not planned for in every round.

A plan for 64 requests and two drafters takes the host as long as all else that it does in a round. Where both together
take longer than the device does for a plain round, it waits for a plan that says "nothing", again.
"""

from __future__ import annotations

from slipstream.plan.extras import crowd_of

_MANY = 12
"""Requests from which on a plan takes long."""
_EVERY = 4
"""Rounds from one plan to the next, each of which is about one drafter: its turn comes after as many plans as there are
drafters."""
_LATELY = 16
"""Rounds after which a drafter that was not asked about is nobody's any more."""
_FEW = 4
_AWAY = 64
"""Of more than so many requests newcomers are not read for a drafter that has not guessed for so many rounds."""
_LONGEST = 16
"""Rounds that count, at the most, from one plan to the next of a drafter: nobody may have been there for it."""


class PlanRest:
    """Of one planner. `next_round` is told first in every round, and then `idles` may be asked."""

    def __init__(self) -> None:
        self._now = 0
        self._crowd = 0  # of the last plan
        self._idle = 0  # rounds since then that went without
        self._planned = False  # the last round had a plan, …
        self._empty = False  # … and nothing was drafted in the last one that had
        self._last: dict[str, int] = {}  # by drafter whose guesses take time: when it was planned last
        self._asked: dict[str, int] = {}  # … and asked about
        self._now_of: dict[int, int] = {}  # by crowd: its rounds
        self._guessed: dict[tuple[str, int], int] = {}  # by drafter and crowd: in which of these it guessed last
        self._running = 0  # the crowd of this round

    def next_round(self, requests: int, *, drafts: bool) -> None:
        """drafts: was something drafted in the round before?"""
        self._running = crowd_of(requests)
        self._now_of[self._running] = self._now_of.get(self._running, 0) + 1
        if self._planned:
            self._empty, self._idle = not drafts, 0
        self._planned = True
        self._now += 1

    def guess(self, drafter: str) -> None:
        """It has a part in this round."""
        self._guessed[drafter, self._running] = self._now_of.get(self._running, 0)

    def leaves(self, drafter: str) -> bool:
        """Has it not guessed for long where as many run as now?"""
        if self._running <= _FEW:
            return False
        return self._now_of.get(self._running, 0) - self._guessed.get((drafter, self._running), 0) > _AWAY

    def idles(self, requests: int) -> bool:
        """Is there no plan in this round?"""
        crowd = crowd_of(requests)
        if requests >= _MANY and self._empty and crowd == self._crowd and self._idle < _EVERY - 1:
            self._idle += 1
            self._planned = False
            return True
        self._empty = self._empty and crowd == self._crowd
        self._crowd = crowd
        return False

    def asks(self, drafter: str, requests: int) -> bool:
        """Is this drafter planned now? Where nothing was drafted, one is at a time: who was not for longest."""
        self._asked[drafter] = self._now
        if requests < _MANY or not self._empty or drafter not in self._last:
            return True
        others = [last for name, last in self._last.items() if self._now - self._asked.get(name, -_LATELY) < _LATELY]
        return self._now not in others and self._last[drafter] == min(others)

    def plan(self, drafter: str) -> int:
        """It is planned now; how many rounds ago was it before?"""
        passed = min(self._now - self._last.get(drafter, self._now - 1), _LONGEST)
        self._last[drafter] = self._now
        return max(passed, 1)
