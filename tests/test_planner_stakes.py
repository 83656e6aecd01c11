"""What the planner holds against whom, how much it risks, and when it asks again: on a scripted clock."""

from __future__ import annotations

import pytest

from slipstream.core.draft import Tree
from slipstream.plan.adaptive import AdaptivePlanner
from slipstream.plan.asking import Asking
from slipstream.plan.cost import PassCost
from slipstream.plan.decisions import Decision
from slipstream.plan.gains import Gains, Turn
from slipstream.plan.traits import Traits
from test_planner_pays import LONG, Game, roomy, steep


def test_a_drafter_that_loses_silences_nobody_else() -> None:
    """The same kind of request: slow with one drafter, quick with another, and slow again with both together."""
    gains = Gains(0.0)
    gains.start("r", Traits())
    gains.next_round()
    gains.observe([Turn("r", 0, 1)], 1.0)
    for _ in range(20):
        gains.next_round()
        gains.observe([Turn("r", 4, 1, ("ngram",))], 1.5, expected=1.3)
        gains.observe([Turn("r", 4, 4, ("eagle",))], 1.5, expected=2.6)
        gains.observe([Turn("r", 8, 2, ("suffix", "eagle"))], 3.0, expected=1.3)
    assert not gains.drafts("r", ("ngram",))
    assert gains.drafts("r", ("eagle",))
    assert gains.drafts("r", ("suffix",)), "nothing was seen of it alone"
    assert not gains.drafts("r", ("suffix", "eagle"))
    assert gains.doubt(["ngram"]) > 1.1
    assert gains.doubt(["eagle"]) == 1
    assert "1 at once; ngram" in (gains.off("r", "ngram") or "")
    assert "suffix + eagle" in (gains.off("r", "eagle") or ""), "beside the other it is off"
    assert gains.off("r", "suffix") is None
    assert {kind.drafters for kind in gains.kinds()} == {("ngram",), ("eagle",), ("suffix", "eagle")}
    for _ in range(400):
        gains.observe([Turn("r", 4, 4, ("eagle",))], 1.5, expected=2.6)
    assert gains.doubt(["ngram"]) < 1.05, "it is forgotten while another drafts"


def test_one_drafter_drafts_on_where_another_is_off() -> None:
    """By whole rounds: one promises 0.9 and is slow for reasons that nobody is told, the other keeps its word."""
    game = Game(roomy, lambda n: 1, promise=None, hidden_s=1.6, padded=True).play(300)
    planner = game.planner
    assert not planner.speculates("r0", ("d",)) or game.drafted[-20:].count(0) >= 18
    for _ in range(8):
        planner.next_round(1)
        assert planner.speculates("r0", ("other",))
        (tree,) = planner.trim("other", ["r0"], [Tree.chain(range(4))], [[0.9, 0.8, 0.7, 0.6]], 1)
        assert tree.tokens
        planner.observe("other", "r0", 4, 4)
        planner.observe_round([Turn("r0", 4, 5, ("other",))], 1.0)


def test_no_more_is_lost_than_was_won_and_a_little_beside() -> None:
    gains = Gains(0.0)
    gains.start("r", Traits())
    gains.next_round()
    gains.observe([Turn("r", 0, 1)], 1.0)
    first = gains.stake(["d"], ["r"], 1)
    assert 2 < first < 4, "a few rounds, to begin with"
    for _ in range(2):
        gains.observe([Turn("r", 6, 1, ("d",))], 2.5, expected=1.5)  # wrong: one and a half rounds are lost
    assert gains.stake(["d"], ["r"], 1) == pytest.approx(first - 3)
    assert gains.stake(["other"], ["r"], 1) == first
    for _ in range(100):
        gains.next_round()
    rested = gains.stake(["d"], ["r"], 1)
    assert first - 3 + 0.5 < rested < first - 3 + 3, "it comes again slowly"
    gains.hear("d", "r", True)
    heard = gains.stake(["d"], ["r"], 1)
    assert heard > rested, "and by guesses that would have been right"
    gains.hear("d", "r", False)
    assert gains.stake(["d"], ["r"], 1) == pytest.approx(rested)
    for _ in range(50):
        gains.hear("d", "r", False)
    assert gains.stake(["d"], ["r"], 1) == pytest.approx(0)
    for _ in range(4):
        gains.observe([Turn("r", 6, 7, ("d",))], 2.0, expected=1.5)
    gains.start("newcomer", Traits())
    gains.start("another", Traits(warm=True))
    assert gains.stake(["d"], ["another"], 1) == first, "another kind"
    won, other = gains.stake(["d"], ["r"], 1), gains.stake(["d"], ["newcomer"], 1)
    assert won > 15, "five rounds are won each time, and may be lost again"
    assert other < 6, "but not by others"


def test_a_kind_that_is_new_to_a_poor_drafter_begins_with_less() -> None:
    """Requests of many kinds must not each pay for the same lesson; nobody is silenced for it."""
    gains = Gains(0.0)
    gains.start("r", Traits())
    gains.start("sampled", Traits(warm=True))
    gains.next_round()
    gains.observe([Turn("r", 0, 1)], 1.0)
    first = gains.stake(["d"], ["sampled"], 1)
    for _ in range(2):
        gains.observe([Turn("r", 6, 1, ("d",))], 2.5, expected=1.5)
    assert gains.stake(["d"], ["sampled"], 1) == 1
    assert gains.stake(["other"], ["sampled"], 1) == first
    for _ in range(250):
        gains.next_round()
    assert 1 < gains.stake(["d"], ["sampled"], 1) < first, "it is forgotten slowly"
    gains.observe([Turn("sampled", 6, 5, ("d",))], 2.0, expected=1.5)
    assert gains.stake(["d"], ["sampled"], 1) > first, "from then on it has a purse of its own"


def test_surely_wrong_once_in_every_answer() -> None:
    """Mostly it has nothing to say, and then is sure and wrong: by its record elsewhere that pays, and here never."""
    planner = AdaptivePlanner(PassCost(0.15))
    spent = rounds = 0.0
    for answer in range(40):
        planner.start(f"a{answer}", Traits())
        for number in range(60):
            planner.next_round(1)
            guess = [Tree.chain(range(20))] if number == 30 else [Tree()]
            (tree,) = planner.trim("d", [f"a{answer}"], guess, [[0.99**i for i in range(len(guess[0]))]], 1)
            seconds = steep(1 + len(tree))
            planner.observe_pass(1 + len(tree), seconds)
            right = len(tree) if answer < 10 else 0  # it was right in the first ones
            if tree.tokens:
                planner.observe("d", f"a{answer}", len(tree), right)
            planner.observe_round([Turn(f"a{answer}", len(tree), 1 + right, ("d",) if tree else ())], seconds)
            if answer >= 10:
                spent, rounds = spent + seconds, rounds + 1
        planner.forget(f"a{answer}")
    assert spent < 1.02 * rounds
    assert "more could be lost" in Decision(1, 0, 1.4, waits=True).text("d", PassCost(0.1))


@pytest.mark.parametrize("requests", [1, 4])
@pytest.mark.parametrize("ask_s", [0.01, 0.06])
def test_who_is_right_again_is_asked_again(requests: int, ask_s: float) -> None:
    """Asking takes time, so a drafter that was wrong is asked rarely: yet it comes back soon."""
    game = Game(steep, lambda n: LONG if n // 200 % 2 == 0 else 0, 0.95, ask_s=ask_s).play(600, requests)
    back = [nodes > 0 for nodes in game.drafted[400:]]
    assert back.index(True) < 10
    assert sum(back[14:34]) >= 18
    wrong = Game(steep, lambda _: 0, 0.95, ask_s=ask_s).play(1500, requests)
    assert wrong.speed(requests) > 0.97


def test_questions_in_vain_take_little_of_the_time() -> None:
    for seconds, every in ((0.001, 2), (0.02, 3), (0.1, 4)):
        asking = Asking(value=0.0)
        asking.observe(0.0, seconds)
        assert [asking.due(1.0) for _ in range(24)].count(True) == 24 // every
    costly = Asking(costly=True, value=0.0)
    costly.observe(0.0, 0.1)
    assert [costly.due(1.0) for _ in range(24)].count(True) == 24 // 8


def test_a_newcomer_is_worth_a_question_if_any_was() -> None:
    asking = Asking()
    for questions, gain, worth in ((40, 0.0, True), (300, 0.0, False), (40, 0.3, True)):
        for _ in range(questions):
            asking.observe(gain, 0.03)
        for _ in range(20):
            asking.observe(0.0, 0.03)
        assert not all(asking.due(1.0) for _ in range(4))
        asking.newcomer(0)
        assert asking.due(1.0) == worth


def test_a_question_that_stalled_is_no_reason_to_ask_rarely() -> None:
    asking = Asking(costly=True)
    for seconds in (*[0.05] * 20, 8.0):
        asking.observe(0.3, seconds)
    assert all(asking.due(1.0) for _ in range(16))


def test_guesses_that_were_right_are_a_reason_to_ask_at_once() -> None:
    asking = Asking(value=0.0)
    asking.observe(0.0, 0.1)
    asked = [asking.due(1.0) for _ in range(12)]
    assert asked == [False, False, False, True] * 3
    for right, due in (([True], True), ([False], False), ([True, False], False), ([True, True, False], True)):
        while not asking.due(1.0):
            pass
        for one in right:
            asking.hear(one)
        assert asking.due(1.0) == due
