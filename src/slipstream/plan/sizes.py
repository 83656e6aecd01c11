"""Which sizes a draft may have where every size is captured by itself: few, and old ones rather than new."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from slipstream.plan.cost import PassCost
from slipstream.plan.draft_cost import filled_crowd

_CAPTURED = (1, 2, 3, 5, 7, 11, 15, 23, 31, 47, 63)
"""Nodes of a draft that are thought of: with the last token they make 2, 3, 4, 6, 8, … rows, which is what passes are
filled up to for one request."""
_LITTLE, _LONG = 1.03, 6
"""A size that is only so many times as good as the last one is taken after so many rounds."""
MARGIN = 1.02
"""What a draft must promise beyond another: the estimates are no better than this."""


class CapturedSizes:
    """The sizes of one engine's drafts so far."""

    def __init__(self) -> None:
        self._largest: dict[str, int] = {}  # by drafter: drafts that were ever allowed
        self._used: dict[str, set[int]] = {}  # sizes that drafts had so far
        self._levels: dict[str, set[int]] = {}  # … and levels, of trees
        self._rounds: set[tuple[int, int, int]] = set()  # shapes of rounds with trees so far
        self._last: dict[str, tuple[int, int]] = {}  # by drafter: its last draft's nodes and levels
        self._stays: dict[str, int] = {}  # … and how often it stayed at them though another size was a little better

    def best(self, drafter: str, rate: NDArray[np.float64]) -> int:
        """The size, 0 to K, with the best of these rates [K + 1]; no new one that is hardly better than an old."""
        sizes, old = self.choices(drafter, len(rate) - 1), self.known(drafter, len(rate) - 1)
        last, _ = self._last.get(drafter, (0, 0))
        return self._kept(drafter, rate, _better(rate, sizes, old), last if last in sizes else 0)

    def best_tree(self, drafter: str, rate: NDArray[np.float64], nodes: Sequence[int], levels: Sequence[int]) -> int:
        """The same of pairs of nodes and levels [C]: which of them. Each of the two is captured by itself."""
        every, old = range(len(rate)), self.known_trees(drafter, nodes, levels)
        last = self._last.get(drafter)
        same = [i for i in old if i and (nodes[i], levels[i]) == last]
        return self._kept(drafter, rate, _better(rate, every, old), same[0] if same else 0)

    def known(self, drafter: str, most: int) -> list[int]:
        """Of these sizes, 0 and those that are captured."""
        return [size for size in self.choices(drafter, most) if not size or size in self._used.get(drafter, ())]

    def known_trees(self, drafter: str, nodes: Sequence[int], levels: Sequence[int]) -> list[int]:
        """The same of pairs: which of them."""
        sizes, depths = self._used.get(drafter, set()), self._levels.get(drafter, set())
        return [i for i in range(len(nodes)) if not i or (nodes[i] in sizes and levels[i] in depths)]

    def _kept(self, drafter: str, rate: NDArray[np.float64], best: int, last: int) -> int:
        """The last choice, where the best is hardly better, for a while: what changes from round to round is not worth
        it."""
        stays = self._stays.get(drafter, 0)
        if best and best == last:
            self._stays[drafter] = max(0, stays - 1)
        elif best and last and rate[0] * MARGIN < rate[last] >= rate[best] / _LITTLE and stays < _LONG:
            self._stays[drafter] = stays + 1
            return last
        else:
            self._stays[drafter] = 0
        return best

    def use(self, drafter: str, size: int, levels: int = 0) -> None:
        self._last[drafter] = (size, levels)
        self._used.setdefault(drafter, set()).add(size)
        if levels:
            self._levels.setdefault(drafter, set()).add(levels)

    def plan(self, requests: int, nodes: int, levels: int) -> None:
        """A round of so many requests has trees of so many nodes in all."""
        self._rounds.add(_shape(requests, nodes, levels))

    def planned(self, requests: int, nodes: int, levels: int) -> bool:
        """Was there such a round before? Then it is captured."""
        return _shape(requests, nodes, levels) in self._rounds

    def choices(self, drafter: str, most: int) -> list[int]:
        """Few, and the largest that the drafter ever may have."""
        largest = self._largest[drafter] = max(most, self._largest.get(drafter, 0))
        return [0, *(size for size in _CAPTURED if size <= most and size < largest), *([most] * (most == largest))]


def _shape(requests: int, nodes: int, levels: int) -> tuple[int, int, int]:
    """What the captures of a round of trees depend on, as far as it is planned."""
    return filled_crowd(requests), PassCost.filled(requests + nodes), levels


def _better(rate: NDArray[np.float64], every: Sequence[int], old: Sequence[int]) -> int:
    new, best = max(every, key=rate.__getitem__), max(old, key=rate.__getitem__)
    return new if rate[new] > rate[best] * MARGIN else best
