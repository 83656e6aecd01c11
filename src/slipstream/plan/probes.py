"""Probes: where nothing pays by the estimates, a little is drafted now and then all the same. Texts change."""

from __future__ import annotations

from collections.abc import Callable

from slipstream.plan.cost import PassCost
from slipstream.plan.hopes import Hopes

_FIRST = 16
_LAST = 256
"""Rounds between two probes of a drafter that does not pay: first, and at the most."""
_WASTE = 0.01
_RAREST = 4096
"""What probes of all drafters may cost of the time, and the most rounds between two of one that cost much."""
_EARLY = 64
"""The first probe of a drafter that stopped comes after so many rounds at the latest, whatever it costs, unless those
before it failed: it may have stopped when it was least lucky."""
_FOLLOW = 6
"""Probes in a row that may follow one that was right: the estimates must hear of it."""
_CHEAP, _DEAR = 1.1, 1.5
"""A probe has a few nodes where a pass with them costs no more than so many without; and is for all requests up to so
many."""


class Probes:
    """When each drafter is tried again.

    Not so often that it costs much of the time. Free guesses are tried as often as that; where guesses take time, it is
    ever more rarely while they fail, for what has not read along must first read what it missed; and hardly ever where
    not even good guesses could pay (`hopes.py`).
    """

    def __init__(self, cost: PassCost) -> None:
        self._cost = cost
        self._idle: dict[str, int] = {}  # rounds since the drafter last drafted
        self._patience: dict[str, int] = {}  # idle rounds before the next probe
        self._said: dict[str, tuple[int, bool]] = {}  # the round of the last answer, and what it was
        self._follow: dict[str, int] = {}  # probes that still follow one that was right
        self._free: set[str] = set()  # drafters whose guesses take no time
        self._slow: set[str] = set()  # … and the others, as far as there is hope for them
        self._early: set[str] = set()  # drafters that have not been probed since they drafted

    def drafts(self, drafter: str) -> None:
        """It has a part in this round anyway."""
        self._idle[drafter] = 0
        self._early.add(drafter)
        self._slow.add(drafter)

    def probed(self, drafter: str) -> None:
        """It is probed in this round, or tried."""
        self._idle[drafter] = 0
        self._early.discard(drafter)

    def due(self, drafter: str, lost: float, could_pay: Callable[[], bool], passed: int = 1, *, now: int) -> bool:
        """Is a drafter probed now whose guesses take time, and that does not draft anyway?

        lost: what a probe costs, in plain rounds, all that must be read before it included. passed: rounds since the
        last plan. now: this round; where it is planned again, the answer stands.
        """
        before, answer = self._said.get(drafter, (-1, False))
        if before != now:
            answer = self._is_due(drafter, lost, could_pay, passed)
            self._said[drafter] = now, answer
        return answer

    def _is_due(self, drafter: str, lost: float, could_pay: Callable[[], bool], passed: int) -> bool:
        if drafter not in self._idle:
            self._slow.add(drafter)
        idle = self._idle[drafter] = self._idle.get(drafter, 0) + passed
        patience = self._patience.get(drafter, _FIRST)
        seldom = _seldom(lost * max(1, len(self._slow)))
        if idle < max(patience, min(seldom, _EARLY) if drafter in self._early else seldom):
            return False
        if idle < Hopes.RARELY and not could_pay():
            self._slow.discard(drafter)  # it has no part in what may be lost
            return False
        self._slow.add(drafter)
        self.probed(drafter)
        self._patience[drafter] = min(2 * patience, _LAST)
        return True

    def free(self, drafter: str, chosen: int, rows: int, most: int) -> int:
        """How many guesses are checked of one whose guesses are there already: what was chosen, or if that is nothing,
        now and then a few of `most`. Called once a round."""
        self._free.add(drafter)
        if chosen:
            self._idle[drafter], self._follow[drafter] = 0, _FOLLOW
            return chosen
        small = self.small(rows, most)
        idle = self._idle[drafter] = self._idle.get(drafter, 0) + 1
        seldom = _seldom(self._cost.seconds(rows + small) / self._cost.seconds(rows) - 1)
        patience = self._patience.get(drafter, _FIRST)
        if idle < min(patience, seldom):
            return 0
        left = self._follow.get(drafter, _FOLLOW)
        self._idle[drafter] = 0 if left else -int(_FOLLOW * seldom)  # right, and yet it does not pay: long pause
        self._follow[drafter] = left or _FOLLOW
        self._patience[drafter] = min(2 * patience, _LAST)
        return small

    def requests(self, rows: int, small: int, requests: int) -> int:
        """For how many of these requests a probe is, that has `small` nodes for each: for all of them unless that
        makes the pass much dearer, else for those that the next size of a pass has room for."""
        if not self._cost.padded or self._cost.seconds(rows + small * requests) < _DEAR * self._cost.seconds(rows):
            return requests
        return min(requests, max(1, (self._cost.filled(rows + 1) - rows) // small))

    def small(self, rows: int, most: int) -> int:
        """Nodes of a probe: a few where rows are cheap, and one where they are not."""
        few = min(4, most)
        return few if self._cost.seconds(rows + few) < _CHEAP * self._cost.seconds(rows) else 1

    def succeeded(self, drafter: str) -> None:
        """Something of its guesses was right."""
        self._patience.pop(drafter, None)
        left = self._follow.get(drafter, 0)
        if drafter in self._free and self._idle.get(drafter) == 0 and left:
            self._idle[drafter], self._follow[drafter] = _RAREST, left - 1


def _seldom(lost: float) -> float:
    """Rounds from one probe to the next of those that lose so many plain rounds each."""
    return min(max(lost / _WASTE, _FIRST), _RAREST)
