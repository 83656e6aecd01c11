"""The plan for a drafter whose guesses cost time, beside others that draft for the same requests."""

from __future__ import annotations

import pytest

from slipstream.plan.adaptive import AdaptivePlanner
from slipstream.plan.cost import PassCost
from slipstream.plan.planner import Beside, Levels


def taught(*, beside: float) -> AdaptivePlanner:
    """A pass takes 1 s and 0.01 s a row more, a guess of "slow" 0.2 s; it is right half of the time."""
    planner = AdaptivePlanner(PassCost(0.01))
    for _ in range(60):
        planner.observe("slow", "r", 4, 1)
        planner.observe("free", "r", 10, round(10 * beside))
    for rows in (1, 2, 4, 8, 16, 32):
        planner.observe_pass(rows, 1 + 0.01 * rows)
    for depth in (1, 2, 4):
        planner.observe_draft("slow", depth, 0.2 * depth)
    return planner


def test_a_slow_drafter_rests_where_a_free_one_is_sure() -> None:
    planner = taught(beside=1.0)
    assert planner.budget("slow", ["r"], [4], 1)[0] > 0
    assert planner.budget("slow", ["r"], [4], 1, [(Beside("free", 10),)]) == [0]


def test_it_drafts_where_the_other_is_never_right_or_says_nothing() -> None:
    planner = taught(beside=0.0)
    alone = planner.budget("slow", ["r"], [4], 1)
    assert planner.budget("slow", ["r"], [4], 1, [()]) == alone
    assert planner.budget("slow", ["r"], [4], 1, [(Beside("free", 10),)])[0] > 0


@pytest.mark.parametrize(("right", "wanted"), [(1.0, False), (0.0, True)])
def test_trees_as_well(right: float, wanted: bool) -> None:
    planner = taught(beside=right)
    size = planner.budget_trees("slow", ["r"], [16], 1, [(Beside("free", 10),)], levels=[Levels(3, 16)]).nodes[0]
    assert bool(size) == wanted
