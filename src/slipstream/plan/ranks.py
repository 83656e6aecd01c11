"""Which nodes of a tree turn out right: where they stand in their drafter's order of sureness, by depth.

The first nodes of a tree are a tree too, the best of that size. So every draft tells what any smaller one of its levels
would have brought: as much of the accepted path as lies among its nodes. What a larger one would have brought is not
seen, so each size is compared only with drafts that were at least as large.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np

from slipstream.core.draft import MAX_NODES
from slipstream.plan.measured import Floats

DEPTHS = 12
"""Depths that are told apart; what lies deeper fares as the last of these."""
_EDGES = (1, 2, 3, 5, 7, 11, 15, 23, 31, 47, MAX_NODES)
"""Sizes of trees that are told apart."""
_BUCKET = [bisect_right(_EDGES, rank) for rank in range(MAX_NODES)]
"""By rank of a node: the first of these sizes that has it."""
_SPREAD = 0.6
"""How soon a growing tree has the right nodes, before anything was seen: a chain of 6 brings 0.7 of a whole tree."""
_WEIGHT = 3.0
"""Accepted nodes at a depth that this is worth."""
_DECAY = 0.999
_HEAVY = 1e9
"""A weight at which numbers are brought down again."""


def _usual() -> Floats:  # [D, S]
    """The part of the right nodes of a whole tree that trees of each size have, before anything was seen."""
    depths, sizes = np.arange(1, DEPTHS + 1)[:, None], np.array(_EDGES, dtype=np.float64)
    kept = (1 - np.exp(-_SPREAD * sizes / depths)) / (1 - np.exp(-_SPREAD * MAX_NODES / depths))
    return np.where(sizes >= depths, kept, 1e-9)


def _lost(kept: Floats) -> Floats:  # [D, S]
    """Of the right nodes that trees of each size have, the part that those of the size before have not."""
    return np.concatenate((np.ones((DEPTHS, 1)), 1 - kept[:, :-1] / kept[:, 1:]), axis=1)


def _between() -> Floats:  # [S + 1, MAX_NODES + 1]
    """What sizes 0, 1, 2, … take of the sizes that are told apart, 0 first: straight lines along the logarithm."""
    known = np.log1p(np.array((0, *_EDGES), dtype=np.float64))
    every = np.log1p(np.arange(MAX_NODES + 1, dtype=np.float64))
    return np.stack([np.interp(every, known, line) for line in np.eye(len(known))])


_USUALLY_LOST = _lost(_usual())
_BETWEEN = _between()
_POSSIBLE = np.arange(MAX_NODES + 1) >= np.arange(1, DEPTHS + 1)[:, None]
"""[D, MAX_NODES + 1]: a tree is at most as deep as it has nodes."""


class NodeRanks:
    """Of one drafter's trees. What was seen before fades by what is new weighing more."""

    def __init__(self) -> None:
        self._whole = MAX_NODES
        self._last = [[0.0] * (len(_EDGES) + 1) for _ in range(DEPTHS)]
        self._had = [[0.0] * (len(_EDGES) + 1) for _ in range(DEPTHS)]
        """[D, S + 1]: right nodes that a size has and the one before has not; and how many more it has than the one
        before, of drafts that were no smaller. Lists: a round of many requests changes a few numbers for each."""
        self._weight = 1.0
        self._is_new = True  # something was seen since the table was made
        self._table = self.kept(MAX_NODES)

    def observe(self, path: Sequence[int], nodes: int) -> None:
        """In a tree of so many nodes these were right."""
        self._weight /= _DECAY
        if self._weight > _HEAVY:
            self._last, self._had = (
                [[count / self._weight for count in line] for line in table] for table in (self._last, self._had)
            )
            self._weight = 1.0
        whole = bisect_right(_EDGES, nodes)  # sizes that the draft has all nodes of
        for depth, rank in enumerate(path[:DEPTHS]):
            size = _BUCKET[rank]
            if size < whole:
                self._last[depth][size] += self._weight
                self._had[depth][size] += self._weight
                self._had[depth][whole] -= self._weight
        self._is_new = True

    def kept(self, whole: int) -> Floats:  # [D, MAX_NODES + 1]
        """By depth and nodes: which part of what a whole tree has right at that depth is among so many nodes.

        whole: nodes of the largest tree that the drafter makes.
        """
        if self._is_new or whole != self._whole:
            self._is_new, self._whole = False, whole
            prior = _WEIGHT * self._weight
            last, had = np.array((self._last, self._had))[:, :, :-1]  # [D, S]
            lost = (last + prior * _USUALLY_LOST) / (had.cumsum(1) + prior)  # [D, S]
            down = np.cumprod((1 - lost)[:, :0:-1], axis=1)[:, ::-1]  # [D, S - 1]
            sizes = np.concatenate((np.zeros((DEPTHS, 1)), down, np.ones((DEPTHS, 1))), axis=1)
            every = np.where(_POSSIBLE, sizes @ _BETWEEN, 0.0)
            self._table = np.minimum(every / np.maximum(every[:, whole, None], 1e-9), 1.0)
        return self._table

    def missed(self, chance: float, nodes: int, accepted: int) -> float:
        """The chance that a whole tree had the next token, where one of so many nodes was right so far and no further.

        chance: that a whole tree has the right token of the next level. By the table of the last plan: one is enough
        for all requests of a round.
        """
        depth = min(accepted, DEPTHS - 1)
        above = float(self._table[depth - 1, nodes]) if depth else 1.0
        part = min(1.0, float(self._table[depth, nodes]) / above) if above > 0 else 0.0
        return chance * (1 - part) / max(1 - chance * part, 1e-6)
