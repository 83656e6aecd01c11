"""Is a drafter on the host worth the wait where another guesses on the device, for which nobody waits?

One request of a 7B model on an H200: a pass takes 4 ms, and a round that asks the host's drafter waits for it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from slipstream.core.draft import Tree
from slipstream.plan.adaptive import AdaptivePlanner
from slipstream.plan.cost import SIZES, PassCost
from slipstream.plan.gains import Turn
from slipstream.plan.planner import Beside
from slipstream.plan.traits import Traits
from slipstream.plan.waits import Waits

DEEP = 5
PASS_S, ROW_S, LEVEL_S = 4e-3, 1e-5, 0.1e-3


def right_for(chance: float, nodes: int, dice: random.Random) -> int:
    return next((depth for depth in range(nodes) if dice.random() >= chance), nodes)


def asked_share(
    host: float, device: float | None, wait_s: float, rounds: int = 3000, nodes: int = 3, each: int = 1 << 30
) -> float:
    """How often the host's drafter is asked, whose guesses are right with this chance, in the second half.

    each: rounds of a request; then the next one comes.
    """
    planner, dice = AdaptivePlanner(PassCost(0.001)), random.Random(1)
    planner.pad_passes()
    promise: Sequence[float] = [host**depth for depth in range(1, nodes + 1)]
    asked: list[bool] = []
    for number in range(rounds):
        if number % each == 0:
            planner.forget("a")
            planner.start("a", Traits())
        planner.next_round(1, 300)
        asked.append(not planner.rests("ngram", 1))
        guessed = depth = 0
        if asked[-1]:
            guessed = len(planner.trim("ngram", ["a"], [Tree.chain(range(nodes))], [promise], 1)[0])
            planner.observe_wait("ngram", wait_s)
        if device is not None:
            beside = [[Beside("ngram", guessed)]] if guessed else [[]]
            depth = planner.budget("eagle", ["a"], [DEEP], 1, beside)[0]
        rows = next(size for size in SIZES if size > guessed + depth)
        planner.observe_pass(rows, PASS_S + ROW_S * rows)
        right = [0]
        if depth:
            assert device is not None
            right.append(right_for(device, depth, dice))
            planner.observe_draft("eagle", depth, LEVEL_S * depth)
            planner.observe("eagle", "a", depth, right[-1])
        if guessed:
            right.append(right_for(host, guessed, dice))
            planner.observe("ngram", "a", guessed, right[-1])
        if asked[-1]:
            lasted_s = PASS_S + ROW_S * rows + LEVEL_S * depth + wait_s
            planner.observe_waited(["ngram"], 1, 1 + max(right), lasted_s)
    return sum(asked[rounds // 2 :]) / (rounds - rounds // 2)


def test_alone_it_is_worth_a_wait() -> None:
    assert asked_share(0.5, None, 0.8e-3) == 1.0


@pytest.mark.parametrize("wait_s", [0.4e-3, 0.8e-3])
def test_beside_a_better_one_it_is_not(wait_s: float) -> None:
    """Half of its guesses are right, and the other's four of five: what it adds is less than the wait costs."""
    assert asked_share(0.5, 0.8, wait_s) < 0.35


def test_one_that_is_right_far_ahead_is_worth_it_all_the_same() -> None:
    assert asked_share(0.97, 0.6, 0.4e-3, nodes=12) > 0.9


def test_nobody_minds_a_wait_that_is_short() -> None:
    assert asked_share(0.5, 0.8, 0.1e-3) == 1.0


def test_where_it_has_nothing_to_say_the_device_need_not_wait_for_that() -> None:
    assert asked_share(0.0, 0.8, 0.8e-3) < 0.35


def test_newcomers_are_no_reason_to_wait_again_and_again() -> None:
    """Answers of 30 rounds, shorter than a trial: it was in vain for those before them."""
    assert asked_share(0.0, 0.8, 0.8e-3, each=30) < 0.35
    assert asked_share(0.97, 0.6, 0.4e-3, nodes=12, each=30) > 0.9


def test_with_many_requests_a_few_rounds_tell() -> None:
    """A wait of a third of a pass costs much in 16 rounds, and many requests show in six what they have to show."""
    for rows, rounds in ((64, 6), (16, 6), (4, 6), (1, 24)):
        waits = Waits()
        waits.observe(1.3e-3)
        while not waits.rests(waits.asked, rows):
            waits.weigh(1.6, 2.0, 4e-3, waits.asked, rows)
            if not waits.asked:
                break
            rounds -= 1
        assert rounds == 1, rows


@pytest.mark.parametrize(("won", "rounds"), [(1.6, 6), (1.9, 6), (2.05, 25)])
def test_one_that_was_listened_to_again_has_to_show_at_once_what_it_promised(won: float, rounds: int) -> None:
    """A little worse than without it: in a trial that comes round by itself that may be chance, here it is enough."""
    waits, rows = Waits(), 4
    waits.observe(1.3e-3)
    waits.until = 100
    waits.wake(50)
    for now in range(50, 50 + rounds):
        assert not waits.rests(now, rows)
        waits.weigh(won, 2.0, 4e-3, now, rows)
    assert waits.asked == 0  # the trial is over
    assert waits.rests(50 + rounds, rows)
    for now in range(1000, 1006):  # the next trial comes round by itself
        waits.weigh(1.9, 2.0, 4e-3, now, rows)
    assert waits.asked == 6


def test_a_wait_is_weighed_against_what_rounds_brought_without_one() -> None:
    """What a drafter on the host brought itself, in rounds in which it was not waited for, is none of that."""
    planner = AdaptivePlanner(PassCost(0.001))
    planner.pad_passes()
    planner.rests("ngram", 2)  # the planner hears of it
    for _ in range(40):
        planner.observe_pass(2, 1.0)
        planner.next_round(2, 100)
        planner.observe_round([Turn("a", 3, 3, ("ngram",)), Turn("b", 3, 3, ("ngram",))], 1.0)
    assert planner._spare(2) == 1.0
    for _ in range(40):
        planner.next_round(2, 100)
        planner.observe_round([Turn("a", 3, 3, ("model",)), Turn("b", 3, 1, ("model",))], 1.0)
    assert planner._spare(2) == pytest.approx(2.0, rel=0.05)
    for _ in range(100):
        planner.next_round(2, 100)
    assert planner._spare(2) == 1.0, "that was long ago"
    planner.observe_round([Turn("a", 3, 3, ("model",)), Turn("b", 3, 1, ("model",))], 1.0)
    assert planner._spare(2) == pytest.approx(2.0, rel=0.05)


def test_who_silences_nobody_lets_everybody_guess() -> None:
    planner = AdaptivePlanner(PassCost(0.001))
    for i in range(4):
        planner.start(f"r{i}", Traits())
    for number in range(60):
        planner.observe_pass(4, 1.0)
        planner.next_round(4, 400)
        may = [planner.speculates(f"r{i}", ("d",)) for i in range(4)]
        assert all(may) or planner.silences
        drafts = number > 3 and all(may)
        turns = [Turn(f"r{i}", 3 * drafts, 1, ("d",) if drafts else ()) for i in range(4)]
        planner.observe_round(turns, 2.0 if drafts else 1.0)
    assert planner.silences
