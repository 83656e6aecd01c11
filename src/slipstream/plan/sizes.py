"""Which sizes a draft may have where every size is captured when it first comes: few, and old ones rather than new."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_CAPTURED = (1, 2, 3, 5, 7, 11, 15, 23, 31, 47, 63)
"""Nodes of a draft that are thought of: with the last token they make 2, 3, 4, 6, 8, … rows, which is what passes are
filled up to for one request."""
MARGIN = 1.02
"""What a draft must promise beyond another: the estimates are no better than this."""


class CapturedSizes:
    """The sizes of one engine's drafts so far."""

    def __init__(self) -> None:
        self._largest: dict[str, int] = {}  # by drafter: drafts that were ever allowed
        self._used: dict[str, set[int]] = {}  # sizes that drafts had so far

    def best(self, drafter: str, rate: NDArray[np.float64]) -> int:
        """The size, 0 to K, with the best of these rates [K + 1]; no new one that is hardly better than an old."""
        sizes = self._choices(drafter, len(rate) - 1)
        old = [size for size in sizes if not size or size in self._used.get(drafter, ())]
        new, best = max(sizes, key=rate.__getitem__), max(old, key=rate.__getitem__)
        return new if rate[new] > rate[best] * MARGIN else best

    def use(self, drafter: str, size: int) -> None:
        self._used.setdefault(drafter, set()).add(size)

    def _choices(self, drafter: str, most: int) -> list[int]:
        """Few, and the largest that the drafter ever may have."""
        largest = self._largest[drafter] = max(most, self._largest.get(drafter, 0))
        return [0, *(size for size in _CAPTURED if size <= most and size < largest), *([most] * (most == largest))]
