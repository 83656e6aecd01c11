"""Two drafters on the device for the same requests: the better one guesses, by what each would bring alone."""

from __future__ import annotations

import random
from collections import defaultdict
from types import SimpleNamespace
from typing import Any, cast

import pytest

from slipstream.core.params import SamplingParams, SpeculationParams
from slipstream.drafters.base import DeviceDrafter, Needs
from slipstream.drafters.ngram import NgramDrafter
from slipstream.engine.caps import NodeCaps
from slipstream.engine.following import Following
from slipstream.engine.gathering import Gathering
from slipstream.engine.plans import Gathered
from slipstream.engine.room import DraftRoom
from slipstream.plan.adaptive import AdaptivePlanner
from slipstream.plan.cost import SIZES, PassCost
from slipstream.plan.forecast import Engine, Guesser, _Assumed, forecast
from slipstream.plan.measured import Curve, DraftSeen, MeasuredCosts
from slipstream.plan.planner import Beside, TreeBudget
from slipstream.plan.rivals import RUN, Rivals
from slipstream.plan.traits import Traits

DEEP = 5
PASSES = Curve((1, 64, 256), (4.0, 4.9, 9.0))
LEVEL = {"head": 0.22, "small": 0.08}
"""Milliseconds of passes of a 7B-class target on a GPU, and of a guess."""


def _planner() -> AdaptivePlanner:
    made = AdaptivePlanner(PassCost(0.001))
    made.pad_passes()
    drafts = {name: (DraftSeen(1, Curve((1, DEEP), (ms, DEEP * ms))),) for name, ms in LEVEL.items()}
    made.adopt(MeasuredCosts(PASSES, drafts=drafts))
    return made


class Game:
    """Rounds of one request with two drafters, each of which has so many guesses right."""

    def __init__(self) -> None:
        self.planner = _planner()
        self.planner.start("a", Traits())
        self.plans: list[dict[str, int]] = []

    def play(self, rounds: int, **right: int) -> None:
        for _ in range(rounds):
            self.planner.next_round(1, 300)
            plan: dict[str, int] = {}
            for name in ("small", "head"):
                beside = [[Beside(other, nodes) for other, nodes in plan.items() if nodes]]
                plan[name] = self.planner.budget(name, ["a"], [DEEP], 1, beside if any(plan.values()) else ())[0]
            self.plans.append(plan)
            rows = next(size for size in SIZES if size > sum(plan.values()))
            self.planner.observe_pass(rows, float(PASSES.at(cast(Any, float(rows)))))
            for name, nodes in plan.items():
                if nodes:
                    self.planner.observe_draft(name, nodes, LEVEL[name] * nodes)
                    self.planner.observe(name, "a", nodes, min(nodes, right[name]))

    def share(self, name: str, last: int) -> float:
        """Of rounds in which it alone guesses."""
        return sum(bool(plan[name]) and sum(map(bool, plan.values())) == 1 for plan in self.plans[-last:]) / last


class Crowd:
    """The same of many requests, which come to their end by turns."""

    def __init__(self, requests: int) -> None:
        self.planner = _planner()
        self.planner.limit_rows(256)
        self.requests, self.ids, self.guessed = requests, list[str](), list[dict[str, set[str]]]()
        self.renew()

    def renew(self) -> None:
        """Others take their places."""
        for request_id in self.ids:
            self.planner.forget(request_id)
        self.ids = [f"{len(self.guessed)}-{number}" for number in range(self.requests)]
        for request_id in self.ids:
            self.planner.start(request_id, Traits())

    def play(self, rounds: int, **right: int) -> None:
        planner, rows = self.planner, self.requests
        for _ in range(rounds):
            planner.next_round(rows, 300 * rows, rows)
            granted = {
                name: planner.budget(name, self.ids, [DEEP] * rows, rows)
                for name in ("small", "head")
                if planner.asks(name, rows)
            }
            nodes = sum(sum(given) for given in granted.values())
            planner.observe_pass(PassCost.filled(rows + nodes), float(PASSES.at(cast(Any, float(rows + nodes)))))
            guessed: dict[str, set[str]] = {}
            for name, given in granted.items():
                for request_id, size in zip(self.ids, given, strict=True):
                    if size:
                        guessed.setdefault(name, set()).add(request_id)
                        planner.observe(name, request_id, size, min(size, right[name]))
                if any(given):
                    planner.observe_draft(name, max(given), LEVEL[name] * max(given), rows)
            self.guessed.append(guessed)

    def share(self, name: str, last: int = 20) -> float:
        return sum(set(guessed) == {name} for guessed in self.guessed[-last:]) / last


def test_the_better_one_guesses_alone_and_the_turn_goes_over_when_the_text_changes() -> None:
    game = Game()
    game.play(200, head=5, small=1)
    assert game.share("head", 100) > 0.9
    game.play(300, head=0, small=4)
    assert game.share("small", 100) > 0.9
    game.play(600, head=5, small=1)
    assert game.share("head", 100) > 0.9


def test_whoever_is_hardly_better_does_not_take_the_turn() -> None:
    rivals = Rivals()
    assert rivals.has_turn("one", ["a"], 4, 1.50, 1)
    assert not rivals.has_turn("two", ["a"], 4, 1.52, 1)
    assert rivals.has_turn("one", ["a"], 4, 1.50, 2)
    assert not rivals.has_turn("two", ["a"], 4, 5.0, 2), "the other guesses in this round already"
    assert not rivals.has_turn("one", ["a"], 4, 1.68, 3)
    assert rivals.has_turn("two", ["a"], 4, 1.70, 3)
    assert rivals.has_turn("one", ["a"], 64, 1.1, 3), "with more requests somebody else may be the better one"
    assert rivals.has_turn("one", ["a"], 4, 1.58, 30), "the other has not been heard of for long"
    assert rivals.beside([[Beside("two", 3), Beside("free", 2)]]) == [[Beside("free", 2)]]


def test_in_every_round_just_one_guesses() -> None:
    """Rivals are asked one by one, and what they promise is known only then."""
    rivals = Rivals()
    dice, turns = random.Random(1), []
    for now in range(1, 400):
        one, two = dice.uniform(1, 2), dice.uniform(1, 2) + 0.5 * (now // 50 % 2)
        turns.append((rivals.has_turn("one", "a", 4, one, now), rivals.has_turn("two", "a", 4, two, now)))
    assert {sum(turn) for turn in turns} == {1}
    assert {turn.index(True) for turn in turns} == {0, 1}


@pytest.mark.parametrize("declines", [0.05, 0.3])
def test_not_even_where_some_decline_do_two_guess(declines: float) -> None:
    rivals, dice = Rivals(), random.Random(2)
    for now in range(1, 3000):
        guess = 0
        for name in ("one", "two"):
            if not rivals.asks(name, 4, now) or not rivals.has_turn(name, "a", 4, dice.uniform(1, 2), now):
                continue
            if dice.random() < declines:
                rivals.decline(name, 4, now)
            else:
                guess += 1
        assert guess <= 1


def test_a_round_that_is_planned_again_counts_once() -> None:
    once, twice = Rivals(), Rivals()
    for now, speed in enumerate([1.5, 1.9, 1.2, 1.4], start=1):
        for rivals, times in ((once, 1), (twice, 3)):
            for _ in range(times):
                rivals.has_turn("one", "a", 4, speed, now)
                rivals.decline("one", 4, now)
    assert once._promises[4, False]["one"].speed == pytest.approx(twice._promises[4, False]["one"].speed)
    assert once._declined[4].lasts == twice._declined[4].lasts


def test_one_good_round_is_no_reason_to_take_the_turn() -> None:
    """What is promised wavers, and to begin again costs."""
    rivals = Rivals()
    for now in range(1, 20):
        assert rivals.has_turn("one", "a", 4, 1.5, now)
        assert not rivals.has_turn("two", "a", 4, 3.0 if now == 8 else 1.4, now)
    for now in range(20, 40):
        rivals.has_turn("one", "a", 4, 1.5, now)
        took = rivals.has_turn("two", "a", 4, 1.7, now)
    assert took, "but it does not take many"


def test_whoever_is_not_asked_in_a_round_does_not_get_the_turn_of_the_one_that_is() -> None:
    rivals = Rivals()
    for now in range(1, 9):
        if now % 4 == 0:
            rivals.has_turn("one", "a", 4, 1.6, now)
        assert rivals.has_turn("two", "a", 4, 1.9, now) or now == 1
    assert not rivals.asks("one", 4, 9)
    assert rivals.has_turn("two", "a", 4, 0.001, 9), "worse than the other, who was passed over in this round"
    assert rivals.asks("one", 4, 10)
    assert rivals.has_turn("one", "a", 4, 1.6, 10)
    assert not rivals.has_turn("two", "a", 4, 0.001, 10)


def test_drafters_of_different_requests_are_no_rivals() -> None:
    """Each request named a drafter of its own: none of them goes without because the other's is better."""
    rivals = Rivals()
    for now in range(1, 4):
        assert rivals.has_turn("one", "a", 4, 1.2, now)
        assert rivals.has_turn("two", "b", 4, 1.8, now)
    assert rivals.has_turn("one", "c", 4, 1.2, 4), "these requests are new, but that they were apart is known"
    assert not rivals.has_turn("two", "cd", 4, 1.8, 4), "now both may guess for one of them, and the other does"
    assert not rivals.has_turn("one", "c", 4, 1.2, 5)
    assert rivals.has_turn("two", "cd", 4, 1.8, 5)


def test_a_round_without_free_guesses_does_not_go_by_promises_beside_them() -> None:
    """Beside good free guesses nobody promises much. Where there are none for once, whoever is asked first is not the
    better one for that: else both guess in such a round."""
    rivals = Rivals()
    assert rivals.has_turn("one", "a", 1, 1.3, 1)
    assert not rivals.has_turn("two", "a", 1, 2.0, 1)
    for now in range(2, 20):
        assert not rivals.has_turn("one", "a", 1, 1.0, now, beside=True)
        assert rivals.has_turn("two", "a", 1, 1.0, now, beside=True)
    assert not rivals.has_turn("one", "a", 1, 1.3, 20)
    assert rivals.has_turn("two", "a", 1, 2.0, 20)


def test_a_turn_outlives_the_requests() -> None:
    rivals = Rivals()
    assert rivals.has_turn("one", "a", 1, 1.5, 1)
    assert not rivals.has_turn("two", "a", 1, 1.8, 1)
    assert not rivals.has_turn("one", "b", 1, 1.5, 2)
    assert rivals.has_turn("two", "b", 1, 1.8, 2)


@pytest.mark.parametrize(("untried", "takes"), [(1.0, True), (0.6, True), (0.5, False), (0.0, False)])
def test_a_turn_that_was_had_with_other_requests_is_no_claim(untried: float, takes: bool) -> None:
    """Who has it knows as little of these as a rival that promises a little more."""
    rivals = Rivals()
    for now in range(1, 20):
        assert rivals.has_turn("one", "ab", 16, 1.5, now)
        assert not rivals.has_turn("two", "ab", 16, 1.58, now)
    rivals.has_turn("one", "cd", 16, 1.5, 21, untried=untried)
    assert rivals.asks("two", 16, 21) is takes, "with 16 requests it is asked in every 16th round, but for such"
    if takes:
        rivals.has_turn("two", "cd", 16, 1.58, 21, untried=1.0)
    assert rivals.has_turn("two", "cd", 16, 1.58, 22, untried=1.0) is takes


def test_a_probe_of_a_rival_goes_as_far_as_it_would() -> None:
    """How often two guesses are right says little of five."""
    game = Game()
    game.play(400, head=5, small=3)
    probes = {plan["small"] for plan in game.plans[50:] if plan["head"] and plan["small"]}
    assert game.share("head", 100) > 0.9
    assert probes
    assert max(probes) >= 3


@pytest.mark.parametrize(("requests", "is_tried"), [(16, True), (32, True), (64, False)])
def test_among_many_a_rival_is_tried_for_a_sample_beside_whose_turn_it_is(requests: int, is_tried: bool) -> None:
    rivals, trial = Rivals(), set[int]()
    for now in range(1, 40):
        assert rivals.has_turn("one", "ab", requests, 1.5, now)
        assert rivals.tries(requests, now) is None, "nobody loses the turn for it"
        if rivals.tries(requests, now, is_sample=True) == "two":
            trial.add(now)
            assert rivals.asks("one", requests, now)
            assert rivals.asks("two", requests, now)
        if rivals.asks("two", requests, now):
            assert not rivals.has_turn("two", "ab", requests, 1.4, now, untried=1.0)
    assert trial == (set(range(2, 2 + RUN)) if is_tried else set())


def test_a_trial_among_many_is_for_some_of_them_and_whoever_becomes_better_is_found() -> None:
    game = Crowd(16)
    game.play(150, small=3, head=3)
    samples = [guessed["head"] for guessed in game.guessed if len(guessed) == 2 and len(guessed["head"]) < 16]
    assert len(samples) >= RUN
    assert max(map(len, samples)) <= 8
    assert samples[0] == samples[RUN - 1], "what was read of them serves all its rounds"
    assert game.share("small") > 0.9
    game.renew()
    game.play(100, small=3, head=5)
    assert game.share("head", 30) > 0.9


def test_one_that_is_off_leaves_its_turn() -> None:
    """The guard silences it: the other one guesses in the next round, and nobody asks the first one beside it."""
    rivals = Rivals()
    for now in range(1, 20):
        rivals.has_turn("small", "ab", 16, 1.9, now)
        rivals.has_turn("head", "ab", 16, 1.3, now)
    assert rivals.whose(16, 20) == "small"
    rivals.leave("small", 16)
    assert rivals.asks("head", 16, 20)
    assert rivals.has_turn("head", "ab", 16, 1.3, 20)
    assert rivals.company(("head", "small")) == ("small",)
    assert rivals.company(("suffix", "head", "small")) == ("suffix", "small"), "judged by what they bring together"
    assert rivals.company(("small", "suffix")) == ("small", "suffix")


def test_who_may_guess_for_nobody_leaves_its_turn_and_who_is_compared_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    game = Crowd(16)
    game.play(60, small=5, head=4)
    planner = game.planner
    assert game.share("small") > 0.9
    planner.silence("small", game.ids, 16)
    game.play(1, small=5, head=4)
    assert game.share("small", 1) == 1, "that was a round to compare with"
    off: set[tuple[str, ...]] = {("small",)}
    monkeypatch.setattr(planner._gains, "drafts", lambda _, drafters=(): drafters not in off)
    planner.silence("small", game.ids, 16)
    planner.next_round(16, 4800, 16)
    assert planner.asks("head", 16)
    assert any(planner.budget("head", game.ids, [DEEP] * 16, 16))
    assert not planner.speculates(game.ids[0], ("head", "small"))


def test_each_request_has_the_drafter_that_it_named() -> None:
    planner = Game().planner
    planner.start("b", Traits())
    granted: dict[str, int] = {"head": 0, "small": 0}
    for _ in range(100):
        planner.next_round(2, 300)
        for name, request in (("small", "a"), ("head", "b")):
            (nodes,) = planner.budget(name, [request], [DEEP], 2)
            granted[name] += nodes > 0
            planner.observe(name, request, nodes, nodes)
        planner.observe_pass(16, float(PASSES.at(cast(Any, 16.0))))
    assert min(granted.values()) > 90


class _Device(DeviceDrafter):
    needs = Needs(device=True)

    def __init__(self, name: str, nodes: int, planned: int = 0) -> None:
        self.call(name)
        vars(self).update(default_draft_tokens=nodes, planned_draft_tokens=planned)

    def propose(self, requests: Any, budget: Any) -> Any:
        raise NotImplementedError


def _answer(params: SamplingParams, drafters: tuple[str, ...]) -> Any:
    """One that runs, of ten tokens so far."""
    found = SimpleNamespace(params=params, tokens=[1] * 20, prompt_length=10, drafters=drafters, queued=0)
    found.coming, found.doubted, found.refused, found.constraint = 0, False, {}, None
    found.id = str(id(found))
    return found


def test_nothing_is_kept_for_those_whose_turn_it_is_not() -> None:
    """Of 64 requests each has room for three nodes: whoever guesses may have all of them."""
    drafters = {"ngram": NgramDrafter(), "small": _Device("small", 5), "head": _Device("head", 63)}
    caps = NodeCaps(drafters, draft_tokens=None, max_rows=256, max_len=2048)
    answers = [_answer(SamplingParams(max_tokens=100), tuple(drafters))]
    assert caps.of("small", answers, [0], 64, exclusive=True) == [3]
    assert caps.of("head", answers, [0], 64, exclusive=True) == [3]
    assert caps.of("head", answers, [2], 64, exclusive=True) == [1], "what the host guessed takes room"
    assert caps.of("ngram", answers, [0], 64, exclusive=True) == [1], "one of them will guess"
    assert caps.of("ngram", answers, [0], 64) == [0]
    assert caps.of("small", answers, [0], 64) == [1], "together, each has a part"


@pytest.mark.parametrize(("requests", "others", "room"), [(16, 7, 8), (16, 3, 11), (16, 15, 0), (1, 7, 11), (32, 5, 2)])
def test_one_that_is_tried_has_what_the_pass_has_room_for(requests: int, others: int, room: int) -> None:
    """Beside the guesses of whose turn it is; what it is made for is its own."""
    drafters = {"head": _Device("head", 63), "small": _Device("small", 5, planned=11)}
    caps = NodeCaps(drafters, draft_tokens=None, max_rows=256, max_len=2048)
    gathering = Gathering(drafters, caps, DraftRoom(lambda _, nodes: nodes), Following(drafters), defaultdict(int))
    decodes = [_answer(SamplingParams(max_tokens=100), tuple(drafters)) for _ in range(requests)]
    gathered, planner = Gathered.of(requests), AdaptivePlanner(PassCost(0.001))
    for i in range(requests):
        gathered.grant(i, "head", others)
    found = gathering.group(planner, "small", list(range(requests)), decodes, gathered, asked=True)
    assert found is not None
    assert list(found.group.caps) == [min(11, 256 // requests - 1)] * requests, "as if it were alone"
    wanted = TreeBudget([11] * requests, 0)
    assert gathering.granted(found.group, wanted, gathered, found.requests) == [room] * requests


@pytest.mark.parametrize("company", [("small",), ("small", "head")])
def test_a_planner_may_go_further_than_what_a_drafter_is_made_for(company: tuple[str, ...]) -> None:
    """Where text is easy five guesses of a small model are too few; where nobody judges what pays they are usual."""
    drafters = {"small": _Device("small", 5, planned=11), "head": _Device("head", 63)}
    caps = NodeCaps(drafters, draft_tokens=None, max_rows=256, max_len=2048)

    def of(params: SamplingParams, *, exclusive: bool = True) -> list[int]:
        return caps.of("small", [_answer(params, company)], [0], 4, exclusive=exclusive)

    assert of(SamplingParams(max_tokens=100)) == [11]
    assert of(SamplingParams(max_tokens=15)) == [4], "what is left of the answer"
    assert of(SamplingParams(max_tokens=100), exclusive=False) == [5]
    rejecting = SpeculationParams(verifier="rejection")
    assert of(SamplingParams(max_tokens=100, temperature=1.0, speculation=rejecting)) == [5], "there is room for five"
    assert of(SamplingParams(max_tokens=100, speculation=SpeculationParams(draft_tokens=3))) == [3]


@pytest.mark.parametrize(("gain", "drafts"), [(1.03, False), (1.06, True)])
def test_who_stopped_has_to_catch_up_and_so_must_promise_more(gain: float, drafts: bool) -> None:
    costs = MeasuredCosts(PASSES, drafts={"head": (DraftSeen(1, Curve((1, DEEP), (0.22, 1.1))),)})
    engine = Engine(costs, 0.001, is_padded=True, rows=64, context=0)
    found = (forecast(engine, Guesser("head", DEEP, is_free=False), 1, n / 2000) for n in range(2000))
    alpha = next(one.alpha for one in found if one.gain >= gain)

    def planned(*alphas: float) -> bool:
        planner = AdaptivePlanner(PassCost(0.001))
        planner.pad_passes()
        planner.adopt(costs)
        for chance in alphas:
            planner.next_round(1, 0)
            planner.assume("head", cast(Any, _Assumed(chance)))
            nodes = planner.budget("head", ["a"], [DEEP], 1)
        return nodes != [0]

    assert planned(alpha)
    assert planned(0.9, alpha), "who guesses goes on"
    assert planned(0.9, 0.0, alpha) == drafts
