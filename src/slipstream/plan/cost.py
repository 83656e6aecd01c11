"""What a pass of the target costs by its number of rows, learned from the passes themselves."""

from __future__ import annotations

from collections import deque
from statistics import median

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_EDGES = np.array([1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512], dtype=np.float64)
_EDGE_OF = [int(np.abs(np.log(_EDGES) - np.log(rows)).argmin()) for rows in range(1, int(_EDGES[-1]))]
"""The nearest edge of each size. Looked up every round: logarithms would take as long as the whole plan."""
_REMEMBER = 9
"""Recent passes kept for each size: their median forgets a hiccup and follows a growing context."""
_STALE = 512
"""Passes after which a size that did not come again is forgotten: what made it dear may be long over."""


class PassCost:
    """Seconds of a pass over n rows. Sizes not seen lately follow their neighbours along a prior's slope.

    slope: how much one more row adds, as a part of the first one, before anything was seen.
    """

    def __init__(self, slope: float) -> None:
        self._slope = slope
        self._seen: dict[int, deque[float]] = {}  # edge -> seconds by those of the prior
        self._last: dict[int, int] = {}  # edge -> the pass that was last seen there
        self._passes = 0

    @property
    def observed(self) -> bool:
        return bool(self._seen)

    def observe(self, rows: int, seconds: float) -> None:
        edge = self._edge(rows)
        self._passes += 1
        self._last[edge] = self._passes
        self._seen.setdefault(edge, deque(maxlen=_REMEMBER)).append(seconds / float(self._prior(rows)))
        for old in [e for e, last in self._last.items() if self._passes - last > _STALE]:
            del self._last[old], self._seen[old]

    def seconds(self, rows: int) -> float:
        return float(self.curve(rows, rows)[0])

    def curve(self, low: int, high: int) -> Floats:
        """Seconds for low, low + 1, … high rows; in an arbitrary unit before the first observation."""
        rows = np.arange(low, high + 1, dtype=np.float64)
        if not self._seen:
            return self._prior(rows)
        edges = sorted(self._seen)
        scale = np.interp(np.log(rows), np.log(_EDGES[edges]), [median(self._seen[e]) for e in edges])
        return np.maximum.accumulate(self._prior(rows) * scale)  # more rows never cost less: what says so is noise

    def _prior(self, rows: Floats | float) -> Floats:
        return np.asarray(1 + self._slope * (np.asarray(rows) - 1))

    @staticmethod
    def _edge(rows: int) -> int:
        return _EDGE_OF[max(rows, 1) - 1] if rows < _EDGES[-1] else len(_EDGES) - 1
