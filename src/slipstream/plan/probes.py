"""Probes: where nothing pays by the estimates, a little is drafted now and then all the same. Texts change."""

from __future__ import annotations

from slipstream.plan.cost import PassCost

_FIRST = 16
_LAST = 256
"""Rounds between two probes of a drafter that does not pay: first, and at the most."""
_WASTE = 0.01
_RAREST = 1024
"""What probes may cost of the time, and the most rounds between two that cost much."""
_FOLLOW = 6
"""Probes in a row that may follow one that was right: the estimates must hear of it."""
_CHEAP = 1.1
"""A probe has a few nodes where a pass with them costs no more than so many without."""


class Probes:
    """When each drafter is tried again.

    Not so often that it costs much of the time. Free guesses are tried as often as that; where guesses take time, it is
    ever more rarely while they fail, for what has not read along must first read what it missed.
    """

    def __init__(self, cost: PassCost) -> None:
        self._cost = cost
        self._idle: dict[str, int] = {}  # rounds since the drafter last drafted
        self._patience: dict[str, int] = {}  # idle rounds before the next probe
        self._follow: dict[str, int] = {}  # probes that still follow one that was right
        self._free: set[str] = set()  # drafters whose guesses take no time

    def size(self, drafter: str, chosen: int, small: int, rows: int, guess_s: float | None = None) -> int:
        """What is drafted: what was chosen, or if that is nothing, now and then `small`. Called once a round.

        guess_s: what guesses take; None: they are there already.
        """
        if guess_s is None:
            self._free.add(drafter)
        if chosen:
            self._idle[drafter], self._follow[drafter] = 0, _FOLLOW
            return chosen
        idle = self._idle[drafter] = self._idle.get(drafter, 0) + 1
        dearer = (self._cost.seconds(rows + small) + (guess_s or 0.0)) / self._cost.seconds(rows) - 1
        seldom = min(max(dearer / _WASTE, _FIRST), _RAREST)
        patience = self._patience.get(drafter, _FIRST)
        if idle < (min if guess_s is None else max)(patience, seldom):
            return 0
        left = self._follow.get(drafter, _FOLLOW)
        self._idle[drafter] = 0 if left else -int(_FOLLOW * seldom)  # right, and yet it does not pay: long pause
        self._follow[drafter] = left or _FOLLOW
        self._patience[drafter] = min(2 * patience, _LAST)
        return small

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
