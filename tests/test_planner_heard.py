"""What a planner makes of what it hears: of rounds that waited, of drafters that nobody waits for, of late hosts, of
rivals that were not tried yet."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from queueing import Queue
from slipstream import SamplingParams
from slipstream.core.draft import Tree
from slipstream.drafters.base import DeviceDrafter
from slipstream.drafters.guard import Failure
from slipstream.engine.peeks import peek
from slipstream.plan.acceptance import Acceptance
from slipstream.plan.adaptive import AdaptivePlanner
from slipstream.plan.cost import PassCost
from slipstream.plan.draft_cost import DraftCost
from slipstream.plan.gains import Gains, Turn
from slipstream.plan.measured import Curve, DraftSeen, MeasuredCosts
from slipstream.plan.rest import PlanRest
from slipstream.plan.rivals import Rivals
from slipstream.plan.sizes import CapturedSizes
from slipstream.plan.traits import Traits
from slipstream.plan.waits import Waits
from stepping import Arrival

PASSES = Curve((1, 64, 256), (4e-3, 4.6e-3, 8e-3))


def new_planner() -> AdaptivePlanner:
    planner = AdaptivePlanner(PassCost(0.001))
    planner.pad_passes()
    planner.adopt(MeasuredCosts(PASSES))
    return planner


# --- waits ------------------------------------------------------------------------------------------------------------


def test_rounds_are_added_up_and_not_their_speeds() -> None:
    """Every second round brings six tokens in one pass, the others one token in five: 7 in 6, where 12 would come."""
    waits = Waits()
    waits.observe(1e-3)
    for now in range(12):
        waits.weigh(*((6.0, 2.0) if now % 2 else (1.0, 10.0)), 4e-3, now, 4)
    assert waits.rests(12, 4)


def listen(planner: AdaptivePlanner, tokens: int, rounds: int, rows: int = 4) -> None:
    """Rounds that wait for the drafter for a quarter of a pass, and bring so many tokens in all."""
    for _ in range(rounds):
        planner.next_round(rows, 300 * rows)
        if not planner.rests("host", rows):
            planner.observe_wait("host", 1e-3)
            planner.observe_waited(["host"], rows, tokens, 5e-3)


def test_what_counts_is_what_waited_rounds_brought() -> None:
    planner = new_planner()
    listen(planner, 12, 40)
    assert not planner.rests("host", 4)
    listen(planner, 4, 40)
    assert planner.rests("host", 4)


def test_what_the_device_brought_is_forgotten_when_it_guesses_no_more() -> None:
    """A head made rounds 2.5 times as fast; now requests name another drafter, which makes them 1.6 times as fast."""
    planner = new_planner()
    planner.next_round(1, 300)
    planner._hear_alone(1, 2.5)
    assert planner._spare(1) == 2.5
    for _ in range(20):
        planner.next_round(1, 300)
    for _ in range(100):
        planner.next_round(1, 300)
        if not planner.rests("host", 1):
            planner.observe_wait("host", 1e-3)
            planner.observe_waited(["host"], 1, 2, 5e-3)
    assert not planner.rests("host", 1)


def test_what_it_would_bring_alone_is_reckoned_beside_others() -> None:
    planner = new_planner()
    planner.next_round(1, 300)
    planner._suppose_alone(
        1, planner._cost.curve, np.array([[0.0], [0.8], [1.4]]), np.array([[0], [1], [3]]), np.array([0.0, 1e-3, 2e-3])
    )
    assert planner._spare(1) == pytest.approx(2.4 * 4e-3 / (PASSES.at(np.array([4.0]))[0] + 2e-3), rel=0.05)


def test_a_drafter_that_rests_is_waited_for_when_it_has_much_to_say() -> None:
    planner = new_planner()
    ids = ["a", "b", "c", "d"]
    listen(planner, 4, 40)
    assert list(planner.peeks("host", 4, 3)) == [0, 1, 2]
    assert not planner.peeks("another", 4, 4)
    little, much = [[0.5, 0.25]] * 4, [[0.99] * 20] * 4
    trees = [Tree.chain(range(2))] * 4, [Tree.chain(range(20))] * 4
    assert not planner.peek("host", ids, trees[0], little, 4)
    assert planner.rests("host", 4)
    assert planner.peek("host", ids, trees[1], much, 4)
    assert not planner.rests("host", 4)


def test_a_peek_asks_whom_it_may_and_wakes_who_is_worth_it(tiny_target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = Queue(tiny_target, "ngram", planner="adaptive")
    queue.add([5, 6, 7, 5, 6, 7, 5, 6], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
    for _ in range(4):
        queue.engine.step()
    engine = queue.engine
    guard, planner = engine.drafting.guards["ngram"], engine.drafting.planner
    heard: list[int] = []

    def hear(name: str, ids: list[str], trees: list[Tree], promises: object, rows: int) -> bool:
        heard.append(len(trees))
        return True

    monkeypatch.setattr(planner, "peek", hear)
    monkeypatch.setattr(planner, "peeks", lambda name, rows, requests: range(requests) if name == "ngram" else ())
    running = list(engine.scheduler.running)
    assert peek(planner, guard, running, 1.0).is_worth
    assert heard == [1]
    assert not peek(planner, guard, [], 1.0).is_worth
    guard.dropped = Failure("late", "it was late")
    assert not peek(planner, guard, running, 1.0).is_worth
    assert heard == [1]


# --- late hosts -------------------------------------------------------------------------------------------------------


def test_a_host_that_was_late_makes_no_pass_dear() -> None:
    cost = PassCost(0.001, PASSES)
    cost.late = True
    usual = cost.seconds(64)
    cost.observe(64, 20e-3)
    assert cost.seconds(64) == pytest.approx(usual), "what was measured counts for more"
    for seconds in (20e-3, 4.6e-3, 9e-3, 4.7e-3):
        cost.observe(64, seconds)
    assert cost.seconds(64) < 1.05 * usual
    for _ in range(9):
        cost.observe(64, 6e-3)
    assert cost.seconds(64) == pytest.approx(6e-3), "it did become slower"


def test_nor_a_draft() -> None:
    costs = {late: DraftCost(0.001, (DraftSeen(64, Curve((1, 5), (1e-3, 5e-3))),), late=late) for late in (False, True)}
    for cost in costs.values():
        cost.observe(3, 64, 30e-3)
    assert costs[True].curve(3, 64)[-1] == pytest.approx(3e-3)
    assert costs[False].curve(3, 64)[-1] == pytest.approx(30e-3)


def test_one_slow_round_of_many_silences_nobody() -> None:
    gains = Gains(0.001)
    gains.hiccups = True
    for i in range(64):
        gains.start(f"r{i}", Traits())
    for _ in range(3):
        gains.next_round(64)
        gains.observe([Turn(f"r{i}", 0, 1) for i in range(64)], 1.0)
    for number in range(40):
        gains.next_round(64)
        lasts = 3.9 if number % 5 == 0 else 1.25
        gains.observe([Turn(f"r{i}", 1, 1 + (i % 3 > 0), ("d",)) for i in range(64)], lasts, 1.3)
        assert gains.drafts("r0", ("d",)), number
        assert not gains.resting()
    for _ in range(30):
        gains.next_round(64)
        gains.observe([Turn(f"r{i}", 1, 1, ("d",)) for i in range(64)], 1.5, 1.3)
    assert [kind.rpartition("; ")[2] for kind in gains.resting()] == ["d"]


# --- rivals -----------------------------------------------------------------------------------------------------------


def test_a_rival_that_was_not_tried_is_for_a_few_rounds() -> None:
    rivals = Rivals()

    def turns(now: int, untried: float, rows: int = 1, promise: float = 1.8) -> list[str]:
        asked = {"one": (2.0, 0.0), "two": (promise, untried)}
        return [
            name for name, (speed, new) in asked.items() if rivals.has_turn(name, ["a"], rows, speed, now, untried=new)
        ]

    assert turns(1, untried=1.0) == ["one"]
    assert [turns(now, untried=1.0) for now in (2, 3, 4)] == [["two"]] * 3
    assert rivals.tries(1, 4) == "two"
    assert [turns(now, untried=1.0) for now in range(5, 50)] == [["one"]] * 45
    for untried, rows, promise in ((0.0, 1, 1.8), (0.4, 16, 1.8), (1.0, 1, 1.2)):
        rivals = Rivals()
        assert [turns(now, untried, rows, promise) for now in range(1, 30)] == [["one"]] * 29, (untried, rows, promise)


def test_who_has_the_turn_and_does_not_guess_leaves_it_to_others() -> None:
    """It promises more all the time, and each time that it turns out to be nothing it waits for longer."""
    rivals = Rivals()
    empty = []
    for now in range(1, 400):
        if rivals.has_turn("one", ["a"], 64, 1.4, now):
            rivals.decline("one", 64, now)
            empty.append(now)
        rivals.has_turn("two", ["a"], 64, 1.1, now)
    assert empty[:3] == [1, 18, 51]
    assert len(empty) < 10


def test_a_trial_of_one_who_does_not_guess_is_over() -> None:
    rivals = Rivals()
    for now in (1, 2, 3):
        ours = rivals.has_turn("one", ["a"], 1, 2.0, now)
        if rivals.has_turn("two", ["a"], 1, 1.9, now, untried=1.0):
            rivals.decline("two", 1, now)
        assert ours == (now != 2), now


def test_those_who_guess_for_others_are_asked_in_every_round() -> None:
    rivals = Rivals()
    for now in range(1, 20):
        for name, request in (("one", "a"), ("two", "b")):
            assert rivals.asks(name, 2, now)
            assert rivals.has_turn(name, [request], 2, 1.5, now)


def test_a_trial_concerns_rivals_only() -> None:
    rivals = Rivals()
    rivals.has_turn("one", ["a"], 1, 2.0, 1)
    rivals.has_turn("two", ["a"], 1, 1.9, 1, untried=1.0)
    assert rivals.tries(1, 2) == "two"
    assert [rivals.asks(name, 1, 2) for name in ("one", "two", "suffix")] == [False, True, True]


@pytest.mark.parametrize(("requests", "every"), [(4, 4), (8, 4), (16, 16), (64, 16)])
def test_those_without_the_turn_are_asked_now_and_then(requests: int, every: int) -> None:
    rivals = Rivals()
    asked = []
    for now in range(1, 161):
        for name, speed in (("one", 2.0), ("two", 1.1)):
            if rivals.asks(name, requests, now):
                asked.append(name)
                rivals.has_turn(name, ["a"], requests, speed, now)
    assert asked.count("one") == 160
    assert asked.count("two") == pytest.approx(160 / every, abs=3)


def test_how_far_guesses_hold_is_known_by_kind() -> None:
    """Of sampled texts the second guess is hardly ever right, of greedy ones it nearly always is, if the first is."""
    kinds = {f"{warm}{i}": Traits(warm=warm) for warm in (False, True) for i in range(40)}
    acceptance = Acceptance(kinds)
    for i in range(39):
        for _ in range(3):
            acceptance.observe(f"False{i}", 2, 2 * (i % 2))
            acceptance.observe(f"True{i}", 2, i % 2)
    greedy, sampled = acceptance.paths(["False39", "True39"], 2).T
    assert greedy[1] / greedy[0] > 0.8
    assert sampled[1] / sampled[0] < 0.4
    assert acceptance.paths(["True39"], 2).T[0] == pytest.approx(sampled)


def test_what_makes_text_easy_for_one_does_for_the_other() -> None:
    """Both were tried on hard text; then one of them alone on easy text, of which the other hears."""
    traits = {name: Traits() for name in ("hard", "easy", "new")}
    one, two = Acceptance(traits), Acceptance(traits)
    one.peers = two.peers = [one, two]
    for _ in range(60):
        one.observe("hard", 5, 1)
        two.observe("hard", 5, 1)
    before = one.alpha("new")
    for _ in range(60):
        two.observe("easy", 5, 5)
    assert one.alpha("easy") > before + 0.1
    assert one.alpha("hard") == pytest.approx(before, abs=0.05), "of what was seen of it, it knows itself"


# --- sizes, and who is left -------------------------------------------------------------------------------------------


def test_a_size_stays_unless_another_is_clearly_better_or_for_long() -> None:
    sizes = CapturedSizes()
    rate = np.array([1.0, 1.0, 1.5, 1.52, 0.0, 1.0])
    for size in (3, 2):
        sizes.use("model", size)
    chosen = []
    for _ in range(8):
        chosen.append(sizes.best("model", rate))
        sizes.use("model", chosen[-1])
    assert chosen == [2] * 6 + [3] * 2
    sizes.use("model", 2)
    assert sizes.best("model", np.array([1.0, 1.0, 1.5, 1.6, 0.0, 1.0])) == 3
    sizes.use("model", 2)
    assert sizes.best("model", np.array([1.0, 1.0, 1.015, 1.04, 0.0, 1.0])) == 3, "the last one would not pay at all"


def test_newcomers_among_many_are_not_read_for_those_who_do_not_guess() -> None:
    rest = PlanRest()
    for _ in range(100):
        rest.next_round(16, drafts=True)
        rest.guess("one")
    assert rest.leaves("two")
    assert not rest.leaves("one")
    rest.next_round(1, drafts=True)
    assert not rest.leaves("two"), "of few it is soon tried again"
    rest.next_round(64, drafts=True)
    assert not rest.leaves("two"), "of so many nothing is known yet"


def test_who_was_left_reads_the_prompt_when_it_guesses(
    tiny_target: Path, tiny_draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same answers and as many guesses right, and no prompt was read for it beside the target's."""
    jobs = [Arrival(40, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)) for _ in range(3)]
    found = []
    for left in (False, True):
        queue = Queue(tiny_target, f"model:{tiny_draft}", planner="fixed")
        drafting = queue.engine.drafting
        drafter = drafting.drafters["model"]
        assert isinstance(drafter, DeviceDrafter)
        read: list[int] = []
        caught: list[list[int]] = []
        monkeypatch.setattr(drafting.planner, "leaves", lambda name, left=left: left)
        reads, catches = drafter.read, drafter.catch_up
        monkeypatch.setattr(drafter, "read", lambda batch, read=read, go=reads: (read.append(1), go(batch)))
        monkeypatch.setattr(
            drafter,
            "catch_up",
            lambda views, known, caught=caught, go=catches: (caught.append([*known]), go(views, known)),
        )
        answers = queue.run(jobs)
        found.append(([answer.token_ids for answer in answers], drafting.totals["model"].accepted))
        assert bool(read) != left
        assert any(0 in known for known in caught) == left
    assert found[0] == found[1]
