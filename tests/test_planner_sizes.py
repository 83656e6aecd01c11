"""How many sizes of draft a planner uses: where rounds are captured, each new one costs a recording."""

from __future__ import annotations

import random

from slipstream.plan.adaptive import AdaptivePlanner
from slipstream.plan.cost import PassCost
from slipstream.plan.planner import Levels

CAP = 12


def play(planner: AdaptivePlanner, rounds: int, *, seed: int = 0) -> list[int]:
    """The depths of one request's drafts, whose guesses are right more and less often by turns, and whose end comes
    nearer every hundred rounds."""
    dice, depths = random.Random(seed), []
    for number in range(rounds):
        alpha = (0.5, 0.7, 0.85, 0.93)[number // 25 % 4]
        cap = min(CAP, 100 - number % 100)
        planner.next_round()
        depth = planner.budget("model", ["a"], [cap], 1)[0]
        depths.append(depth)
        accepted = 0
        while accepted < depth and dice.random() < alpha:
            accepted += 1
        planner.observe("model", "a", depth, accepted)
        planner.observe_pass(1 + depth, 1.0 + 0.02 * depth)
        if depth:
            planner.observe_draft("model", depth, 0.05 * depth)
    return depths


def test_where_rounds_are_captured_drafts_have_few_sizes() -> None:
    padded, free = AdaptivePlanner(PassCost(0.001)), AdaptivePlanner(PassCost(0.001))
    padded.pad_passes()
    few, many = set(play(padded, 600)), set(play(free, 600))
    assert few <= {0, 1, 2, 3, 5, 7, 11, CAP}, "its largest is the drafter's own, and between are few"
    assert len(few) < len(many), "without captures every size may come"
    assert not many <= {0, 1, 2, 3, 5, 7, 11, CAP}


def test_a_size_that_is_hardly_better_is_not_recorded() -> None:
    planner = AdaptivePlanner(PassCost(0.001))
    planner.pad_passes()
    for _ in range(200):  # alpha settles; depth is nearly free
        depth = planner.budget("model", ["a"], [7], 1)[0]
        planner.observe("model", "a", 10, 9)
        planner.observe_pass(1 + depth, 1.0)
        planner.observe_draft("model", max(depth, 1), 1e-4 * max(depth, 1))
    assert planner.budget("model", ["a"], [7], 1) == [7], "the drafter's own, which pays best"
    # a little less is right now, so that one size below would be better by less than the estimates are worth
    planner.observe_draft("model", 7, 1e-4 * 7)
    assert planner.budget("model", ["a"], [7], 1) == [7]
    assert planner.budget("model", ["a"], [6], 1) == [5], "6 would be a size of its own"


def test_sizes_follow_what_pays_all_the_same() -> None:
    planner = AdaptivePlanner(PassCost(0.001))
    planner.pad_passes()
    for _ in range(60):
        depth = planner.budget("model", ["a"], [15], 1)[0]
        planner.observe("model", "a", 10, 9)
        planner.observe_pass(1 + depth, 1.0)
        planner.observe_draft("model", max(depth, 1), 0.01 * max(depth, 1))
    deep = planner.budget("model", ["a"], [15], 1)[0]
    for _ in range(60):  # and now most of it is wrong, and guesses are dear
        depth = planner.budget("model", ["a"], [15], 1)[0]
        planner.observe("model", "a", 10, 0 if _ % 3 else 1)
        planner.observe_pass(1 + depth, 1.0)
        planner.observe_draft("model", max(depth, 1), 0.2 * max(depth, 1))
    assert deep >= 11
    assert planner.budget("model", ["a"], [15], 1)[0] <= 1


def test_trees_have_few_sizes_too() -> None:
    planner = AdaptivePlanner(PassCost(0.001))
    planner.pad_passes()
    sizes, dice = set(), random.Random(1)
    for number in range(300):
        size = planner.budget_trees("eagle", ["a"], [40], 1, levels=[Levels(6, 63)]).nodes[0]
        sizes.add(size)
        right = dice.randint(0, 6) if number // 50 % 2 else dice.randint(0, 1)
        planner.observe("eagle", "a", 6 if size else 0, min(right, size))
        planner.observe_pass(1 + size, 1.0 + (0.004 if number % 100 < 50 else 0.02) * size)
        planner.observe_draft("eagle", 6, 0.1, is_tree=True)
    assert sizes <= {0, 1, 2, 3, 5, 7, 11, 15, 23, 31, 40}
