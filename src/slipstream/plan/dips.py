"""How many requests run, but for dips: when some end, fewer decode for a few rounds, until the next ones are read.

Who guesses for few need not be who guesses for many, and a change costs what the other one has to read first. It is not
worth it for a dip.
"""

from __future__ import annotations

from collections import deque

from slipstream.plan.extras import crowd_of

LONG = 8
"""Rounds, at the most, that a dip lasts."""
_DEEP = 4
"""… and to which part, at the least, those fall that run: where fewer are left, the load has changed. However few of
them decode: requests that began together end together."""


class Dips:
    """Of one planner, which tells it how many requests each round has."""

    def __init__(self) -> None:
        self._lately: deque[int] = deque(maxlen=LONG)
        self._running = 0  # requests that run, those included that are still read or wait for that
        self.usual = 1  # requests, but for a dip: those of the round, if it is none

    def next_round(self, requests: int, running: int = 0) -> None:
        """So many decode, of so many that run; 0: that is not said."""
        self._lately.append(requests)
        self._running = running
        most = max(self._lately)
        self.usual = most if self._is_same_load(most, requests) else requests

    def is_dip(self, requests: int) -> bool:
        """Are so many fewer than usual that they would be planned for as another crowd?"""
        return crowd_of(requests) < crowd_of(self.usual) and self._is_same_load(self.usual, requests)

    def _is_same_load(self, usual: int, requests: int) -> bool:
        return usual <= _DEEP * max(requests, self._running)
