"""What trees may be drafted in a round: pairs of nodes and levels, what each is expected to bring, and what it takes.

A level is a pass of the drafter, and a node a row of the target's: where text is easy, levels pay, and where it is
not, few of either do. All requests of a round have as many levels, for they are grown together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from slipstream.core.draft import MAX_NODES
from slipstream.plan.measured import Floats
from slipstream.plan.planner import Levels
from slipstream.plan.ranks import DEPTHS

_LEVELS = (1, 2, 4, 6, 8, 10, 16, 24, 32, 48)
"""Levels that trees are grown to, besides as many as the drafter may: few, since each is recorded by itself."""
_PROBED = Levels(4, 15)
"""A probe: enough to tell what trees are worth."""
_FIRST, _EVERY = 8, 64
"""Plans after which a larger tree is tried than pays best: what it brings, smaller ones do not tell."""
_WORTH = 0.8
"""… if it is expected to be so fast by the best."""


def level_choices(depth: int) -> tuple[int, ...]:
    """Levels that trees of a drafter may have that goes so deep."""
    return (*[levels for levels in _LEVELS if levels < depth], depth)


def probe_of(levels: Sequence[Levels], most: int) -> Levels:
    """What is drafted now and then where nothing pays."""
    deep = next((one for one in levels if one.deep >= _PROBED.deep), levels[-1])
    return Levels(deep.deep, min(most, deep.nodes, _PROBED.nodes))


class TreeChoices(NamedTuple):
    """Choices of a round for B requests: nothing, and then pairs, the largest and deepest last."""

    nodes: list[int]  # [C] most of a request
    levels: list[int]  # [C]
    gained: Floats  # [C, B] tokens
    drafted: NDArray[np.int64]  # [C, B]: rows

    def larger(self, best: int, rate: Floats, old: Sequence[bool] | None = None) -> int:
        """The largest and deepest that is not much slower than the best; rate [C]: tokens a second, as expected.

        old [C]: which of them were drafted before, where new ones are captured while everybody waits. Then it is the
        largest of those; where none is larger than the best, the next one that is, so that one step is taken at a time.
        """
        worth = [i for i in range(1, len(rate)) if rate[i] >= _WORTH * rate[best]]
        if old is not None:
            few, flat = self.nodes[best], self.levels[best]
            worth = [i for i in worth if i != best and self.nodes[i] >= few and self.levels[i] >= flat] or [best]
            if not any(old[i] for i in worth):
                return min(worth, key=lambda i: (self.nodes[i] == few, self.nodes[i], self.levels[i]))
            worth = [i for i in worth if old[i]]
        return max(worth, key=lambda i: self.nodes[i] * self.levels[i])


def explores(plans: int) -> bool:
    """Is a larger tree tried in the so-manieth plan?"""
    return plans % _EVERY == _FIRST


def tree_choices(
    sizes: Sequence[int],
    levels: Sequence[Levels],
    caps: Sequence[int],
    chances: Floats,  # [L, B]: that a whole tree is right to each depth
    kept: Floats,  # [D, MAX_NODES + 1]: as in `NodeRanks`
) -> TreeChoices:
    """All pairs of these sizes and levels that make sense. No request has more nodes than its cap."""
    pairs = [(0, 0)]
    above = 0
    for count, most in levels:
        # what fits into fewer levels is no reason for more
        pairs += [(nodes, count) for nodes in dict.fromkeys(min(size, most) for size in sizes) if nodes > above]
        above = count
    nodes, deep = np.array(pairs).T  # [C]
    drafted = np.minimum(nodes[:, None], np.array(caps))  # [C, B]
    depths = np.arange(len(chances))  # [L]
    parts = kept[np.minimum(depths, DEPTHS - 1)][:, np.minimum(drafted, MAX_NODES)]  # [L, C, B]
    right = np.where((depths[:, None] < deep)[:, :, None], chances[:, None, :] * parts, 0.0)
    return TreeChoices(nodes.tolist(), deep.tolist(), right.sum(0), drafted)
