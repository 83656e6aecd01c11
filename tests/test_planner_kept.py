"""Promises of drafters whose guesses take time are bent by what became of them."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.plan.adaptive import AdaptivePlanner
from slipstream.plan.calibration import Calibration
from slipstream.plan.cost import PassCost
from slipstream.plan.kept import Foretold, KeptPromises
from slipstream.plan.measured import Curve, DraftSeen, MeasuredCosts
from slipstream.plan.rivals import Rivals

ROUND = Foretold(tokens=12.0, seconds=0.005, nodes=20)
EAGLE, MODEL = frozenset({"eagle"}), frozenset({"model"})


def told(rounds: int, *, tokens: int = 12, seconds: float = 0.005, nodes: int = 20, requests: int = 4) -> KeptPromises:
    """The draft model's rounds are these; the head's, as many, are as foretold."""
    promises = KeptPromises()
    for name in ("model", "eagle"):
        promises.foretell(name, 4, ROUND)
    for _ in range(rounds):
        promises.observe(EAGLE, 4, 12, 0.005, 20)
        promises.observe(MODEL, requests, tokens, seconds, nodes)
    return promises


def test_a_promise_that_is_kept_stays_as_it_is() -> None:
    assert told(30).kept("model", 4) == pytest.approx(1.0)
    assert KeptPromises().kept("model", 4) == 1.0, "of whom nothing is known is believed"


def test_fewer_tokens_or_longer_rounds_make_less_of_it() -> None:
    assert told(30, tokens=10).kept("model", 4) < 0.95 < told(30, tokens=10).kept("eagle", 4)
    assert told(30, seconds=0.006).kept("model", 4) < 0.95
    assert told(30, seconds=0.0042).kept("model", 4) > 1.04
    assert told(2, tokens=10).kept("model", 4) > told(30, tokens=10).kept("model", 4), "two rounds say little"


@pytest.mark.parametrize("slower", [1.1, 1.25, 1.5])
def test_where_all_are_slower_nobody_is_to_blame(slower: float) -> None:
    """Whoever has the turn, is tried, or comes back after long has no other promise for it."""
    promises, lasts = told(0), ROUND.seconds * slower
    for _ in range(40):
        promises.observe(EAGLE, 4, 12, lasts, 20)
    assert promises.kept("eagle", 4) == pytest.approx(1.0, abs=0.02)
    assert promises.kept("model", 4) == 1.0
    for _ in range(3):
        promises.observe(MODEL, 4, 12, lasts, 20)
    for _ in range(300):
        promises.observe(EAGLE, 4, 12, lasts, 20)
    assert promises.kept("model", 4) == pytest.approx(promises.kept("eagle", 4), abs=0.02)


def test_rounds_of_another_kind_say_nothing_of_it() -> None:
    """A probe has fewer nodes; others at once are another matter; and somebody else's rounds are not its own."""
    assert told(30, tokens=4, nodes=2).kept("model", 4) == 1.0
    assert told(30, tokens=4, requests=64).kept("model", 4) == 1.0
    assert told(30, tokens=4).kept("model", 64) == 1.0
    assert told(30, tokens=4).kept("medusa", 4) == 1.0


def test_what_was_is_forgotten_in_rounds_of_others() -> None:
    promises = told(30, tokens=8)
    before = promises.kept("model", 4)
    for _ in range(800):
        promises.observe(EAGLE, 4, 12, 0.005, 20)
    assert before < 0.9
    assert promises.kept("model", 4) > 0.96


@given(st.lists(st.tuples(st.sampled_from([EAGLE, MODEL]), st.integers(0, 40), st.floats(1e-4, 1.0)), max_size=60))
def test_no_promise_is_bent_further_than_so_far(rounds: list[tuple[frozenset[str], int, float]]) -> None:
    promises = told(0)
    for who, tokens, seconds in rounds:
        promises.observe(who, 4, tokens, seconds, 20)
    assert 0.7 <= promises.kept("model", 4) <= 1.2


@pytest.mark.parametrize("is_slower", [False, True])
def test_a_rival_that_breaks_its_word_has_no_turn(is_slower: bool) -> None:
    """Both are right as often; one costs less, as far as anybody measured it, but its rounds last longer."""
    planner = AdaptivePlanner(PassCost(0.001))
    planner.pad_passes()
    costs = {"liar": Curve((1, 4), (0.1e-3, 0.4e-3)), "fair": Curve((1, 4), (0.2e-3, 0.8e-3))}
    seen = {name: (DraftSeen(4, curve),) for name, curve in costs.items()}
    planner.adopt(MeasuredCosts(Curve((1, 64), (4e-3, 4.5e-3)), 0.0, 0.0, seen))
    for name in seen:
        planner._promises.foretell(name, 4, ROUND)
    for _ in range(30):
        planner._promises.observe(frozenset({"liar"}), 4, 12, 0.007 if is_slower else 0.005, 20)
        planner._promises.observe(frozenset({"fair"}), 4, 12, 0.005, 20)
    ids, turns = list("abcd"), {"liar": 0, "fair": 0}
    for _ in range(12):
        planner.next_round(4, 400)
        for name in seen:
            planner.observe(name, "a", 4, 3)
            turns[name] += any(planner.budget(name, ids, [4] * 4, 4))
    assert (turns["fair"] > turns["liar"]) == is_slower


@pytest.mark.parametrize(
    ("requests", "promise", "untried", "loses", "trials"),
    [
        (8, 1.5, 1.0, 0.0, 3),
        (64, 1.95, 1.0, 0.0, 0),
        (8, 1.3, 1.0, 0.0, 0),
        (8, 1.5, 0.4, 0.0, 0),
        (8, 1.5, 1.0, 0.3, 2),
        (8, 1.5, 1.0, 3.0, 1),
        (16, 1.95, 1.0, 0.7, 2),
        (16, 1.3, 1.0, 0.0, 0),
    ],
)
def test_who_is_tried(requests: int, promise: float, untried: float, loses: float, trials: int) -> None:
    """Who promises nearly as much as the best and has not guessed for most of the requests yet; more rarely each
    time, and the more so the more it costs. Of many nobody is."""
    rivals, ids = Rivals(), [str(i) for i in range(requests)]
    found = []
    for now in range(200):
        rivals.has_turn("eagle", ids, requests, 2.0, now)
        rivals.has_turn("model", ids, requests, promise, now, untried=untried, loses=loses)
        found.append("model" in (rivals.tries(requests, now), rivals.tries(requests, now, is_sample=True)))
    assert sum(now and not before for before, now in pairwise([False, *found])) == trials


def test_two_broken_promises_weigh_more_than_what_others_of_its_kind_kept() -> None:
    """A text that echoed has gone on: what is left of trust fades with every further draft of which nothing came."""
    word = Calibration()
    for _ in range(40):
        word.promise("a", 5.0)
        word.observe("a", 5)
    factors = []
    for _ in range(16):
        word.promise("a", 5.0)
        word.observe("a", 0)
        factors.append(word.factor("a"))
    assert factors[0] > 0.8
    assert factors[2] > 0.5  # by chance that happens to good guesses, too
    assert factors[-1] < 0.001  # a pass over a few more rows takes hardly longer, and yet this is worth none
    assert factors == sorted(factors, reverse=True)
    word.promise("a", 0.5)  # a small one that was not kept, either, is no reason to believe it again
    word.observe("a", 0)
    assert word.factor("a") < factors[-1]
    word.promise("a", 1.0)
    word.observe("a", 1)
    assert word.factor("a") > 0.2


def test_somebody_who_never_keeps_a_promise_is_not_taken_for_one_who_makes_none() -> None:
    """After thousands of them, too: what is left of trust is little, and it is not nothing."""
    word = Calibration()
    for _ in range(3000):
        word.promise("a", 5.0)
        word.observe("a", 0)
    assert 0 < word.factor("a") < 0.001


def test_a_clock_that_stands_still_says_nothing() -> None:
    kept = KeptPromises()
    kept.foretell("d", 1, Foretold(2.0, 1.0, 3))
    kept.observe(frozenset({"d"}), 1, 2, 0.0, 3)
    assert kept.kept("d", 1) == 1.0
