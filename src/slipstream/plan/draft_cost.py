"""What guesses of one drafter cost, by their size and by how many requests they are for.

A chain's size is its nodes; a tree's is its levels, each of which is one step, whatever is taken of it. A draft
model's step over 64 requests costs more than over one. Sizes for a number of requests that was not seen lately follow
the nearest that was, along what was measured at the start, or else along a prior's slope.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from slipstream.plan.cost import PassCost
from slipstream.plan.measured import Curve, DraftSeen, Floats

_CROWDS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Numbers of requests that are told apart; a GPU's rounds come in these."""
_SLOPE = 1.0
"""What one more node of a chain or level of a tree adds, as a part of the first one, before anything was seen."""


class DraftCost:
    """Seconds of a draft.

    crowding: how much one more request adds, as a part of the first one, before anything was seen.
    """

    def __init__(self, crowding: float, seen: Sequence[DraftSeen] = (), *, late: bool = False) -> None:
        self._crowding = crowding
        self._late = late  # as in `PassCost`
        self._measured = {one.requests: one.curve for one in seen}
        self._costs: dict[int, PassCost] = {}  # by crowd
        self._last = 0  # the crowd that was seen last

    @property
    def observed(self) -> bool:
        return bool(self._measured or self._costs)

    def observe(self, size: int, requests: int, seconds: float) -> None:
        crowd = self._last = filled_crowd(requests)
        if crowd not in self._costs:
            prior = self._prior(crowd)
            self._costs[crowd] = PassCost(_SLOPE, prior)
            self._costs[crowd].late = self._late
        self._costs[crowd].observe(size, seconds)

    def curve(self, most: int, requests: int) -> Floats:  # [most]
        """For sizes 1, 2, …; in an arbitrary unit before anything was seen."""
        crowd = filled_crowd(requests)
        if crowd in self._costs:
            return self._costs[crowd].curve(1, most)
        if not self._costs:
            return self._usual(crowd, most)
        near = min(self._costs, key=lambda seen: (abs(np.log(seen / crowd)), seen != self._last))
        return np.asarray(self._costs[near].curve(1, most) * self._usual(crowd, most) / self._usual(near, most))

    def _usual(self, crowd: int, most: int) -> Floats:  # [most]
        """Before any round of so many was seen."""
        sizes = np.arange(1, most + 1, dtype=np.float64)
        prior = self._prior(crowd)
        if prior is not None:
            return prior.at(sizes)
        return np.asarray((1 + _SLOPE * (sizes - 1)) * (1 + self._crowding * (crowd - 1)))

    def _prior(self, crowd: int) -> Curve | None:
        """What was measured, between and beyond the numbers of requests that were."""
        if not self._measured:
            return None
        known = sorted(self._measured)
        if crowd in self._measured:
            return self._measured[crowd]
        sizes = self._measured[known[0]].sizes
        at = np.array(sizes, dtype=np.float64)
        rows = [Curve(tuple(known), tuple(float(self._measured[n].at(at)[i]) for n in known)) for i in range(len(at))]
        crowds = np.array([crowd], dtype=np.float64)
        return Curve(sizes, tuple(float(row.at(crowds)[0]) for row in rows))


def filled_crowd(requests: int) -> int:
    """The next of `_CROWDS`: rounds are filled up to that."""
    return next((crowd for crowd in _CROWDS if crowd >= requests), _CROWDS[-1])
