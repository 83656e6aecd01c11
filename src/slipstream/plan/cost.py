"""What a pass of the target costs by its number of rows, learned from the passes themselves."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_EDGES = np.array([1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512], dtype=np.float64)
_LOG_EDGES = np.log(_EDGES)
_EDGE_OF = [int(np.abs(_LOG_EDGES - np.log(rows)).argmin()) for rows in range(1, int(_EDGES[-1]))]
"""The nearest edge of each size. Looked up every round: logarithms would take as long as the whole plan."""
SIZES = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512)
_NEXT = np.array([SIZES[np.searchsorted(SIZES, rows)] for rows in range(1, SIZES[-1] + 1)], dtype=np.int64)
"""The rows of queued rounds, and what 1, 2, … rows are filled up to."""
_REMEMBER = 9
"""Recent passes kept for each size: their median forgets a hiccup and follows a growing context."""
_STALE = 512
"""Passes after which a size that did not come again is forgotten: what made it dear may be long over."""
_FLAT = 1.05
"""Where the largest pass costs no more than so many of the smallest, what those between cost is of no interest."""


@dataclass(frozen=True, slots=True)
class Steps:
    """What passes cost, without the sizes that nobody would choose: between two steps, rows cost as at the larger."""

    rows: list[int]  # the first is what was asked for, whatever it is filled up to
    seconds: list[float]


class PassCost:
    """Seconds of a pass over n rows. Sizes not seen lately follow their neighbours along a prior's slope.

    slope: how much one more row adds, as a part of the first one, before anything was seen.
    """

    def __init__(self, slope: float) -> None:
        self._slope = slope
        self.padded = False  # passes are filled up to one of `SIZES`: rows up to there cost nothing more
        self._seen: dict[int, deque[float]] = {}  # edge -> seconds by those of the prior
        self._typical: dict[int, float] = {}  # edge -> the median of them
        self._table: Floats = np.empty(0)  # seconds for 1, 2, … rows, as many as were asked for
        self._last: dict[int, int] = {}  # edge -> the pass that was last seen there
        self._passes = 0
        self._steps: dict[int, Steps] = {}  # by their first rows, as far as the table goes

    @property
    def slope(self) -> float:
        return self._slope

    @property
    def observed(self) -> bool:
        return bool(self._seen)

    def observe(self, rows: int, seconds: float) -> None:
        edge = self._edge(rows)
        self._passes += 1
        self._last[edge] = self._passes
        seen = self._seen.setdefault(edge, deque(maxlen=_REMEMBER))
        seen.append(seconds / (1 + self._slope * (rows - 1)))
        typical = _median(seen)
        changed = typical != self._typical.get(edge)
        self._typical[edge] = typical
        for old in [e for e, last in self._last.items() if self._passes - last > _STALE]:
            del self._last[old], self._seen[old], self._typical[old]
            changed = True
        if changed:  # now, and not when a round waits for its plan
            self._table = self._interpolated(len(self._table))
            known, self._steps = list(self._steps)[-1:], {}
            for low in known:
                self.steps(low, len(self._table))

    def seen(self, rows: int) -> bool:
        """Was a pass of about this size seen lately?"""
        return self._edge(self._next(rows) if self.padded else rows) in self._seen

    def unseen(self, low: int, high: int) -> int | None:
        """The largest size for `low` rows or more, but below that of `high`, of which it would be good to know more."""
        if self._edge(self._next(low)) in self._seen and self.seconds(high) <= _FLAT * self.seconds(low):
            return None  # nothing to be won
        between = [size for size in SIZES if self._next(low) <= size < self._next(high)]
        return next((size for size in reversed(between) if self._edge(size) not in self._seen), None)

    def seconds(self, rows: int) -> float:
        return float(self._grown(rows)[rows - 1])

    def steps(self, low: int, high: int) -> Steps:
        """Sizes from `low` on, up to `high` rows and perhaps further: `curve` without what is not worth comparing."""
        found = self._steps.get(low)
        if found is None or found.rows[-1] < high:
            top = max(self._next(high), len(self._table))
            costs = self.curve(low, top)
            rows = list(range(low, top + 1))
            if self.padded:
                rows = [low, *(n for n in SIZES if low < n <= top), *range(max(low, SIZES[-1]) + 1, top + 1)]
            found = self._steps[low] = Steps(rows, [float(costs[n - low]) for n in rows])
        return found

    def curve(self, low: int, high: int) -> Floats:
        """Seconds for low, low + 1, … high rows; in an arbitrary unit before the first observation."""
        part = self._grown(high)[low - 1 : high]
        # more rows never cost less: what says so is noise
        return np.maximum.accumulate(part) if self._seen else part.copy()

    def _grown(self, high: int) -> Floats:
        if high > len(self._table):
            self._table = self._interpolated(high)
        return self._table

    def _interpolated(self, high: int) -> Floats:  # [high]
        rows = np.arange(1, high + 1, dtype=np.float64)
        prior = 1 + self._slope * (rows - 1)
        if not self._typical:
            return prior
        edges = sorted(self._typical)
        if self.padded:
            filled = rows.copy()
            filled[: len(_NEXT)] = _NEXT[:high]
            rows, prior = filled, 1 + self._slope * (filled - 1)
        return prior * np.interp(np.log(rows), _LOG_EDGES[edges], [self._typical[e] for e in edges])

    @staticmethod
    def _next(rows: int) -> int:
        return int(_NEXT[rows - 1]) if rows <= len(_NEXT) else rows

    @staticmethod
    def _edge(rows: int) -> int:
        return _EDGE_OF[max(rows, 1) - 1] if rows < _EDGES[-1] else len(_EDGES) - 1


def _median(values: deque[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
