"""Probes of drafters that have something to catch up on: for a few of many requests, and by what is behind in truth."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from queueing import Queue
from slipstream import SamplingParams
from slipstream.engine.following import Following
from slipstream.plan.adaptive import AdaptivePlanner
from slipstream.plan.cost import PassCost
from slipstream.plan.measured import Curve, DraftSeen, MeasuredCosts
from slipstream.plan.probes import Probes
from slipstream.plan.traits import Traits

PASSES = Curve((1, 64, 96, 128, 256), (3.7e-3, 4.7e-3, 5.1e-3, 5.8e-3, 8.3e-3))
DRAFT = (DraftSeen(64, Curve((1, 5), (0.2e-3, 0.6e-3))),)
MANY, EACH = 64, 0.45e-3
PLAIN_S = 4.7e-3


class Play:
    """64 requests and a draft model, whose guesses are right with such a chance."""

    def __init__(self) -> None:
        self.planner = AdaptivePlanner(PassCost(0.001))
        self.planner.pad_passes()
        self.planner.limit_rows(256)
        self.planner.adopt(MeasuredCosts(PASSES, drafts={"draft": DRAFT}))
        self.ids = [str(number) for number in range(MANY)]
        for request_id in self.ids:
            self.planner.start(request_id, Traits())
        self.behind: set[str] = set()
        self.dice = np.random.default_rng(3)
        self.drafted: list[set[str]] = []  # by round: for whom

    def play(self, rounds: int, right: float) -> float:
        """How fast they are, by plain ones."""
        tokens, seconds = 0, 0.0
        for _ in range(rounds):
            won, lasted = self._round(right)
            tokens, seconds = tokens + won, seconds + lasted
        return tokens / seconds / (MANY / PLAIN_S)

    def _round(self, right: float) -> tuple[int, float]:
        planner = self.planner
        planner.next_round(MANY, 300 * MANY)
        granted = [0] * MANY
        if not planner.idles(MANY) and planner.asks("draft", MANY):
            planner.lag("draft", len(self.behind))
            granted = planner.budget("draft", self.ids, [3] * MANY, MANY)
        guessed = {request_id for request_id, nodes in zip(self.ids, granted, strict=True) if nodes}
        self.drafted.append(guessed)
        tokens, seconds = MANY, float(PASSES.at(np.array([float(PassCost.filled(MANY + sum(granted)))]))[0])
        lagging = guessed & self.behind
        if lagging:
            read_s = 1.8e-3 + EACH * len(lagging)
            planner.observe_catch_up("draft", len(lagging), read_s)
            seconds += read_s
        self.behind = self.behind - lagging if guessed else set(self.ids)
        for request_id, nodes in zip(self.ids, granted, strict=True):
            if nodes:
                kept = int(np.argmin(np.append(self.dice.random(nodes) < right, False)))
                planner.observe("draft", request_id, nodes, kept)
                tokens += kept
        if guessed:
            draft_s = 0.1e-3 + 0.1e-3 * max(granted)
            planner.observe_draft("draft", max(granted), draft_s, MANY)
            seconds += draft_s
        if not lagging:
            planner.observe_pass(PassCost.filled(MANY + sum(granted)), seconds)
        return tokens, seconds


def test_of_many_a_few_are_probed_for_some_rounds_and_little_is_lost() -> None:
    play = Play()
    play.play(100, 0.05)
    begun = len(play.drafted)
    assert play.play(1500, 0.05) > 0.985
    probed = [members for members in play.drafted[begun:] if members]
    assert probed
    assert max(map(len, probed)) <= 8
    rounds = [number for number, members in enumerate(play.drafted[begun:]) if members]
    assert {1} <= set(np.diff(rounds).tolist()), "a probe lasts for some rounds: what was read serves them all"


def test_a_draft_that_became_good_is_found_again_among_many() -> None:
    play = Play()
    play.play(300, 0.05)
    assert len(play.behind) == MANY
    play.play(700, 0.85)
    assert play.play(200, 0.85) > 1.3


def test_who_has_nothing_to_catch_up_on_begins_again_at_once() -> None:
    """It pays by a tenth: too little to read all texts for, but newcomers were read along with the target."""
    play = Play()
    play.play(40, 0.38)
    planner, newcomers = play.planner, [f"new {number}" for number in range(MANY)]
    for old, new in zip(play.ids, newcomers, strict=True):
        planner.forget(old)
        planner.start(new, Traits())
    granted = []
    for lagging in (MANY, 0):
        planner._granting = set()  # it did not guess in the last round
        planner.next_round(MANY, 300 * MANY)
        planner.lag("draft", lagging)
        granted.append(sum(planner.budget("draft", newcomers, [3] * MANY, MANY)))
    assert granted[0] == 0
    assert granted[1] >= MANY // 2


def test_a_round_that_is_planned_again_is_no_second_round() -> None:
    probes = Probes(PassCost(0.001))

    def due(now: int, *, drafts: bool = False) -> bool:
        return probes.due("one", drafts, 0.01, lambda: True, now=now, rounds=2)

    first = next(now for now in range(100) if due(now))
    assert due(first), "the same answer"
    assert due(first + 1)
    assert due(first + 1)
    assert not due(first + 2)
    assert not due(first + 2, drafts=True)


def test_the_engine_tells_who_is_behind(tiny_target: Path, tiny_draft: Path) -> None:
    queue = Queue(tiny_target, f"model:{tiny_draft}", planner="adaptive")
    queue.add([5, 6, 7, 8] * 12, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
    engine = queue.engine
    told: list[int] = []
    engine.drafting.planner.lag = lambda drafter, requests: told.append(requests)  # type: ignore[method-assign]
    for _ in range(4):
        engine.step()
    assert set(told) == {0}
    answer = engine.scheduler.running[0]
    following: Following = engine.drafting.following
    assert following.lags("model", [answer], 1) == 0
    answer.behind["model"] = 0
    assert following.lags("model", [answer], 1) == 1
