"""When those who listen hear of rounds: at once as a rule; several rounds together where telling would take too long.

Telling everybody of a round takes the engine's thread or its interpreter some microseconds for each of a crowd: nothing
beside the round of a large model, but as long as the round of a small one. There the crowd hears of several rounds
together: its outputs are not even made until then.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

CROWD = 8
"""Fewer streams hear of every round."""
LONGEST_S = 0.025
"""Nobody waits longer to hear what is there, but for the round that runs by then."""
NEWEST = 0.2
"""Weight of the last figure in a running one."""


class Reporter(Protocol):
    """A request whose output can wait."""

    def report(self) -> None:
        """Put down all that was not told yet."""


class Pacing:
    """On the engine's thread, but for `note_cost`.

    part: of a round, that telling everybody may take before it is too long for every round.
    share: of all time, that telling takes then.
    clock: seconds of the wall.
    """

    def __init__(self, part: float, share: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self._part, self._share = part, share
        self._clock = clock
        self._each_s = 0.0  # what telling one stream costs, as far as that was seen
        self._holding: dict[Reporter, None] = {}  # those with something to tell
        self._asked = self._crowd = 0  # who wanted to tell something in this round, and in the last one
        self._telling = False  # now it is time
        self._round_s = 0.0
        self._last = self._next = 0.0  # the last round's end; when a crowd may hear again

    def holds(self, request: Reporter, urgent: bool) -> bool:
        """Is what this request has to tell to wait? Then it is asked again when it is time.

        urgent: it tells now, whatever is said here.
        """
        if self._telling:
            return False
        self._asked += not urgent
        if urgent or not self._pace_s:
            self._holding.pop(request, None)  # all that it has to tell is told now
            return False
        self._holding[request] = None
        return True

    def end_turn(self) -> None:
        """A turn of the engine is over: those who had to wait report, if it is time."""
        now = self._clock()
        if self._asked:
            self._round_s += NEWEST * (min(now - self._last, LONGEST_S) - self._round_s)
            self._last = now
            self._crowd, self._asked = self._asked, 0
        if self._holding and now >= self._next:
            self._next = now + self._pace_s
            self._telling = True
            for request in self._holding:
                request.report()
            self._telling, self._holding = False, {}

    def note_cost(self, seconds: float, streams: int) -> None:
        """Telling so many took so long. One thread alone says so."""
        self._each_s += NEWEST * (seconds / streams - self._each_s)

    @property
    def _pace_s(self) -> float:
        """How far apart a crowd's news are; 0: they come with every round."""
        telling = self._crowd * self._each_s
        if self._crowd < CROWD or telling <= self._part * self._round_s:
            return 0.0
        return min(telling / self._share, LONGEST_S)
