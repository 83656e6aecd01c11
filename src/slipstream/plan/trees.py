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
_PROBED = 4
"""Levels of a probe: enough to tell what trees are worth."""


def level_choices(depth: int) -> tuple[int, ...]:
    """Levels that trees of a drafter may have that goes so deep."""
    return (*[levels for levels in _LEVELS if levels < depth], depth)


def probed(levels: Sequence[Levels]) -> int:
    return next((one.deep for one in levels if one.deep >= _PROBED), levels[-1].deep)


class TreeChoices(NamedTuple):
    """Choices of a round for B requests: nothing, and then pairs, the largest and deepest last."""

    nodes: list[int]  # [C] most of a request
    levels: list[int]  # [C]
    gained: Floats  # [C, B] tokens
    drafted: NDArray[np.int64]  # [C, B]: rows


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
