"""Decisions in words: the reason that is said is the one that counted."""

from __future__ import annotations

from slipstream.core.draft import Tree
from slipstream.plan.adaptive import AdaptivePlanner
from slipstream.plan.cost import PassCost
from slipstream.plan.decisions import Decision
from slipstream.plan.forecast import Engine, Guesser, forecast
from slipstream.plan.measured import Curve, DraftSeen, MeasuredCosts


def said(decision: Decision, min_gain: float = 1.0) -> str:
    return decision.text("d", PassCost(1.5), min_gain=min_gain)


def test_the_bar_is_named_where_it_is_the_reason() -> None:
    assert said(Decision(1, 0, 2.48), 4) == "off: 2.48x expected of the best draft, and min_gain asks for 4"
    assert "min_gain" not in said(Decision(1, 0, 1.01), 4), "it would be off without it as well"
    assert "min_gain" not in said(Decision(1, 0, 5.0), 4)
    planner = AdaptivePlanner(PassCost(0.01), min_gain=50)
    for _ in range(20):
        planner.next_round(1)
        planner.observe_pass(1, 1.0)
        planner.observe_pass(2, 1.01)
        planner.trim("d", ["a"], [Tree.chain([1])], [[0.9]], 1)
    assert planner.reasons()["d"].endswith("x expected of the best draft, and min_gain asks for 50")


def test_the_larger_part_is_the_reason() -> None:
    """Rows, or guesses."""
    assert "no spare arithmetic" in said(Decision(4, 0, 1.0, 0.4))
    assert said(Decision(1, 0, 1.0)) == "off: a pass has no spare arithmetic here (a second row costs 150% more)"
    assert said(Decision(4, 0, 1.0, 1.78)) == "off: its guesses take 178% of a pass, no draft is expected to be faster"
    assert said(Decision(4, 0, 0.9, 1.78)).endswith("of a pass, 0.90x expected of the best draft")


def test_where_plain_is_best_the_smallest_guess_is_told_of() -> None:
    """A draft of ten takes two passes, and a guess hardly anything: it is wrong guesses that do not pay."""
    costs = MeasuredCosts(
        Curve((1, 2, 64), (1.0, 1.02, 1.2)), drafts={"d": (DraftSeen(1, Curve((1, 10), (0.1, 2.0))),)}
    )
    engine = Engine(costs, slope=0.001, is_padded=False, rows=64, context=100)
    why = forecast(engine, Guesser("d", 10, is_free=False), 1, 0.05).why
    assert why == "off: no draft is expected to be faster"
