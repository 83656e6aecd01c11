"""The planner's contract: it takes what is fastest, follows changes, loses next to nothing, and says why."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planning import CPU, GPU, Drafter, Play
from slipstream.core.draft import Tree
from slipstream.plan.choose import shared_out
from slipstream.plan.cost import Costs
from slipstream.plan.planner import AdaptivePlanner
from slipstream.plan.types import Curve, DraftSeen, Levels, Load, MeasuredCosts, Offer, StepSeen, TreeSeen, Turn


def always(chance: float) -> Drafter:
    return Drafter(lambda step: chance, 0.0002)


def test_siblings_share_the_chance_of_their_parent() -> None:
    assert shared_out(Tree((1, 2, 3), (-1, -1, 0)), 0.6) == pytest.approx([0.6, 0.24, 0.36])


def test_more_rows_never_cost_less() -> None:
    costs = Costs(0.1)
    costs.adopt(MeasuredCosts(Curve((1, 4, 8), (0.010, 0.030, 0.020))))
    seconds = costs.passes(8).tolist()
    assert seconds == sorted(seconds)
    assert seconds[8] == pytest.approx(0.030)


def test_nothing_is_drafted_where_nothing_pays() -> None:
    play = Play({"head": always(0.3)}, Curve((1, 64), (0.010, 0.640)))
    assert play.run(300) > 0.97
    assert play.drafted.get("head", 0) < 20
    play = Play({"head": always(0.0)})
    assert play.run(300) > 0.97


@pytest.mark.parametrize(("passes", "requests", "least"), [(GPU, 1, 2.5), (GPU, 32, 1.8), (CPU, 1, 1.6)])
def test_what_pays_is_drafted(passes: Curve, requests: int, least: float) -> None:
    assert Play({"head": always(0.85)}, passes, requests).run(400) > least


@pytest.mark.parametrize("requests", [1, 8])
def test_of_two_drafters_the_better_one_guesses(requests: int) -> None:
    play = Play({"good": always(0.85), "poor": always(0.5)}, GPU, requests)
    play.run(100)
    alone = Play({"good": always(0.85)}, GPU, requests)
    alone.run(100)
    assert play.run(400) > 0.95 * alone.run(400)


def test_a_slower_drafter_that_is_right_more_often_is_weighed_by_both() -> None:
    quick, deep = Drafter(lambda step: 0.6, 0.0001), Drafter(lambda step: 0.9, 0.004)
    play = Play({"quick": quick, "deep": deep})
    play.run(100)
    before = dict(play.drafted)
    play.run(300)
    assert play.drafted["quick"] - before["quick"] > 250


def test_it_follows_a_text_that_changes() -> None:
    head = Drafter(lambda step: 0.9 if step // 300 % 2 else 0.02, 0.0005)
    play = Play({"head": head}, CPU, answer=10_000)
    play.run(300)
    assert play.run(100) > 0.9, "it needs a probe to find out"
    assert play.run(200) > 2.0
    play.run(20)
    assert play.run(280) > 0.95


def test_it_follows_the_load() -> None:
    play = Play({"head": always(0.7)}, CPU)
    assert play.run(200) > 1.1
    play.requests = 32
    play.run(30)
    assert play.run(300) > 0.96, "rows are dear now"
    play.requests = 1
    play.run(30)
    assert play.run(200) > 1.1


def test_the_guard_shuts_what_loses_though_it_promises_to_pay() -> None:
    play = Play({"head": Drafter(lambda step: 0.8, 0.0002, hidden_s=0.050)})
    play.run(200)
    assert play.planner.why_off("head") is not None
    assert play.run(2000) > 0.95
    assert "as fast as none" in play.planner.reasons()["head"]
    assert list(play.planner.gains()) == ["head; 1 at once"]


def test_no_probe_goes_beyond_its_budget() -> None:
    play = Play({"head": Drafter(lambda step: 0.0, 0.004), "other": Drafter(lambda step: 0.0, 0.004)})
    play.run(200)
    assert play.run(1500) > 0.97
    assert play.drafted["head"] > 3, "it is tried again and again"


ADVERSARIES = {
    "always wrong": Drafter(lambda step: 0.0, 0.0002),
    "wrong and sure": Drafter(lambda step: 0.0, promise=0.95),
    "wrong and silent": Drafter(lambda step: 0.0),
    "slow": Drafter(lambda step: 0.9, 0.010),
    "alternating": Drafter(lambda step: 0.95 * (step // 40 % 2), promise=0.95),
    "alternating quickly": Drafter(lambda step: 0.95 * (step // 5 % 2), 0.0005),
}


@pytest.mark.parametrize("name", ADVERSARIES)
@pytest.mark.parametrize("passes", [CPU, GPU])
@pytest.mark.parametrize("requests", [1, 4, 64])
@pytest.mark.parametrize("answer", [40])
def test_adversaries_cost_little(name: str, passes: Curve, requests: int, answer: int) -> None:
    play = Play({"it": ADVERSARIES[name]}, passes, requests, answer=answer)
    assert play.run(400) >= 0.95


def test_min_gain_is_asked_for() -> None:
    play = Play({"head": always(0.55)}, CPU, min_gain=2.0)
    play.run(100)
    assert play.run(300) == pytest.approx(1.0, abs=0.05)
    assert "min_gain asks for 2" in play.planner.reasons()["head"]


def test_it_says_why() -> None:
    play = Play({"head": always(0.9)})
    play.run(50)
    decision = play.planner.decision("head")
    assert decision is not None
    assert decision.nodes
    assert "expected" in play.planner.words("head", decision)
    assert play.planner.gain("0/0").measured > 1.5
    slow = Play({"head": Drafter(lambda step: 0.9, 0.010)})
    slow.run(50)
    assert "its guesses take" in slow.planner.reasons()["head"]


def test_what_is_assumed_is_not_told_as_seen() -> None:
    play = Play({"head": always(0.2)}, Curve((1, 64), (0.010, 0.640)))
    play.run(1)
    why = play.planner.reasons()["head"]
    assert "no spare arithmetic" in why
    assert "assuming that 60% of its guesses are right: none was compared yet" in why
    play.run(250)
    assert re.search(r"\d of its last \d guesses for all requests were right", play.planner.reasons()["head"])


CHANCES = st.floats(0, 1, allow_nan=False)
SECONDS = st.just(0.0) | st.floats(1e-6, 1)
TREES = st.integers(0, 8).flatmap(
    lambda nodes: st.tuples(*[st.integers(-1, i - 1) for i in range(nodes)]).map(
        lambda parents: Tree(tuple(range(len(parents))), parents)
    )
)


@settings(max_examples=30, deadline=None)
@given(data=st.data(), requests=st.integers(1, 5), padded=st.booleans(), measured=st.booleans())
def test_plans_keep_to_their_limits(data: st.DataObject, requests: int, padded: bool, measured: bool) -> None:
    """Whatever it is told: no request gets more than its cap, and of a draft that is there a tree is left."""
    planner = AdaptivePlanner(0.15)
    if padded:
        planner.pad_passes()
    if measured:
        planner.adopt(MeasuredCosts(CPU, 1e-8, 1e-9, {"head": (DraftSeen(1, Curve((1, 4), (0.001, 0.002))),)}))
    ids = [str(i) for i in range(requests)]
    levels = (Levels(1, 8), Levels(2, 63), Levels(4, 63))
    for _ in range(data.draw(st.integers(1, 12))):
        load = Load(requests, 100 * requests)
        if planner.asks("host", requests):
            trees = [data.draw(TREES) for _ in ids]
            said = [data.draw(st.none() | st.lists(CHANCES, min_size=len(t), max_size=len(t))) for t in trees]
            whole = data.draw(st.booleans())
            for tree, kept in zip(trees, planner.trim("host", ids, trees, said, requests, whole=whole), strict=True):
                assert len(kept) in ((0, len(tree)) if whole else range(len(tree) + 1))
                assert set(kept.tokens) <= set(tree.tokens)
                if kept:
                    right = data.draw(st.integers(0, len(kept)))
                    planner.observe("host", ids[trees.index(tree)], len(kept), right)
        caps = [data.draw(st.integers(0, 63)) for _ in ids]
        lagging = frozenset(data.draw(st.sets(st.sampled_from(ids))))
        offers = [Offer("head", ids, caps, levels, lagging), Offer("chain", ids, [min(cap, 9) for cap in caps])]
        budgets = planner.plan(offers, load)
        drafted = [0] * requests
        for offer, budget in zip(offers, budgets, strict=True):
            assert all(0 <= nodes <= cap for nodes, cap in zip(budget.nodes, offer.caps, strict=True))
            assert not any(budget.nodes) or budget.levels in ((1, 2, 4) if offer.levels else (0,))
            for i, nodes in enumerate(budget.nodes):
                assert not (nodes and drafted[i]), "one drafter guesses for a request"
                drafted[i] += nodes
                if nodes:
                    right = data.draw(st.integers(0, min(nodes, budget.levels or nodes)))
                    seen = TreeSeen(nodes, tuple(range(right))) if offer.levels else None
                    planner.observe(offer.drafter, ids[i], min(nodes, budget.levels or nodes), right, seen)
        seconds = data.draw(SECONDS)
        turns = [Turn(name, nodes, 1, ("head",)) for name, nodes in zip(ids, drafted, strict=True)]
        planner.observe_step(StepSeen(load, turns, seconds, requests + sum(drafted), seconds))
        planner.observe_draft("head", 2, data.draw(SECONDS), requests)
        planner.observe_wait("host", requests, data.draw(SECONDS))
    assert all(isinstance(why, str) for why in planner.reasons().values())
    for name in ids:
        planner.forget(name)


EDGY = Curve((1, 32, 64, 128, 192, 256), (0.004, 0.0055, 0.006, 0.0075, 0.0097, 0.011))
"""A GPU's passes over 32 requests: rows beyond 128 are dear."""


def test_free_guesses_count_for_what_they_add_to_the_drafter_beside_them() -> None:
    def rate(**free: Drafter) -> float:
        play = Play({"model": Drafter(lambda step: 0.6, 0.0001), **free}, EDGY, requests=32)
        play.planner.pad_passes()
        play.run(100)
        return play.run(300)

    alone = rate()
    assert rate(free=Drafter(lambda step: 0.4, promise=0.6)) > 0.97 * alone, "the model has them right too"
    assert rate(free=Drafter(lambda step: 0.95, promise=0.95)) > 1.5 * alone


def test_a_drafter_in_use_does_not_keep_out_free_guesses_that_are_as_good() -> None:
    def rate(**drafters: Drafter) -> float:
        play = Play(drafters, GPU, requests=16)
        play.planner.pad_passes()
        play.run(100)
        return play.run(300)

    free = Drafter(lambda step: 0.8 if step > 60 else 0.1)
    alone = rate(free=free)
    assert rate(model=Drafter(lambda step: 0.8, 0.0008), free=free) > 0.95 * alone
