"""How many levels the trees of device drafters may have."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.drafters.base import DeviceDrafter, Drafter
from slipstream.plan.planner import Levels
from slipstream.plan.trees import level_choices


def levels_of(drafter: Drafter) -> tuple[Levels, ...]:
    """The levels that a drafter's trees may have, the most last; () where it makes none on the device."""
    if not (isinstance(drafter, DeviceDrafter) and drafter.makes_trees):
        return ()
    counts = level_choices(drafter.depth) if drafter.grows else (drafter.depth,)
    return tuple(Levels(count, drafter.most_at(count)) for count in counts)


def no_deeper(choices: Sequence[Levels], levels: int, nodes: int) -> int:
    """As many levels, but no more than trees of so many nodes can have: the first of the choices that is enough."""
    return next(one.deep for one in choices if one.deep >= min(levels, nodes))
