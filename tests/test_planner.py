"""The planner's contract: it takes what is fastest, follows changes, loses next to nothing, and says why."""

from __future__ import annotations

import pytest

from planner_play import CPU, GPU, Drafter, Play
from slipstream.plan.types import Curve


def always(chance: float) -> Drafter:
    return Drafter(lambda step: chance, 0.0002)


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
    play = Play({"head": always(0.2)}, Curve((1, 64), (0.010, 0.640)))
    play.run(50)
    assert "no spare arithmetic" in play.planner.reasons()["head"]
    slow = Play({"head": Drafter(lambda step: 0.9, 0.010)})
    slow.run(50)
    assert "its guesses take" in slow.planner.reasons()["head"]
