"""Probes of drafters that have something to catch up on: for a few of many requests, and by what is behind in truth."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

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


class Play:
    """So many requests and a draft model, whose guesses are right with such a chance."""

    def __init__(self, requests: int = MANY) -> None:
        self.planner = AdaptivePlanner(PassCost(0.001))
        self.planner.pad_passes()
        self.planner.limit_rows(256)
        self.planner.adopt(MeasuredCosts(PASSES, drafts={"draft": DRAFT}))
        self.ids = [str(number) for number in range(requests)]
        for request_id in self.ids:
            self.planner.start(request_id, Traits())
        self.caps = [3] * requests
        self.behind: set[str] = set()
        self.dice = np.random.default_rng(3)
        self.drafted: list[set[str]] = []  # by round: for whom
        self.caught_up: list[int] = []  # by round that did: requests

    def play(self, rounds: int, right: float) -> float:
        """How fast they are, by plain ones."""
        tokens, seconds = 0, 0.0
        for _ in range(rounds):
            won, lasted = self._round(right)
            tokens, seconds = tokens + won, seconds + lasted
        return tokens / seconds / (len(self.ids) / pass_s(len(self.ids)))

    def _round(self, right: float) -> tuple[int, float]:
        planner, rows = self.planner, len(self.ids)
        planner.next_round(rows, 300 * rows)
        granted = [0] * rows
        if not planner.idles(rows) and planner.asks("draft", rows):
            planner.lag("draft", self.behind)
            granted = planner.budget("draft", self.ids, self.caps, rows)
        guessed = {request_id for request_id, nodes in zip(self.ids, granted, strict=True) if nodes}
        self.drafted.append(guessed)
        tokens, seconds = rows, pass_s(rows + sum(granted))
        lagging = guessed & self.behind
        if lagging:
            read_s = 1.8e-3 + EACH * len(lagging)
            planner.observe_catch_up("draft", len(lagging), read_s)
            self.caught_up.append(len(lagging))
            seconds += read_s
        self.behind = self.behind - lagging if guessed else set(self.ids)
        for request_id, nodes in zip(self.ids, granted, strict=True):
            if nodes:
                kept = int(np.argmin(np.append(self.dice.random(nodes) < right, False)))
                planner.observe("draft", request_id, nodes, kept)
                tokens += kept
        if guessed:
            draft_s = 0.1e-3 + 0.1e-3 * max(granted)
            planner.observe_draft("draft", max(granted), draft_s, rows)
            seconds += draft_s
        if not lagging:
            planner.observe_pass(PassCost.filled(rows + sum(granted)), seconds)
        return tokens, seconds


def pass_s(rows: int) -> float:
    return float(PASSES.at(np.array([float(PassCost.filled(rows))]))[0])


def test_of_many_a_few_are_probed_for_some_rounds_and_little_is_lost() -> None:
    play = Play()
    play.play(100, 0.05)
    begun = len(play.drafted)
    assert play.play(1500, 0.05) > 0.985
    probed = [members for members in play.drafted[begun:] if members]
    assert probed
    assert max(map(len, probed)) <= 8
    assert len(set.union(*probed)) > 16, "others each time"
    rounds = [number for number, members in enumerate(play.drafted[begun:]) if members]
    assert {1} <= set(np.diff(rounds).tolist()), "a probe lasts for some rounds: what was read serves them all"


@pytest.mark.parametrize("requests", [16, 20, 23, 40])
def test_nobody_else_is_read_in_the_rounds_of_a_probe(requests: int) -> None:
    play = Play(requests)
    play.play(1200, 0.0)
    assert len(play.caught_up) > 1
    assert max(play.caught_up[1:]) <= 8
    assert max(len(members) for members in play.drafted[300:]) <= 8


def test_a_probe_ends_where_the_load_changes() -> None:
    play = Play()
    play.play(200, 0.0)
    while not (len(play.drafted[-1]) and not play.drafted[-2]):
        play.play(1, 0.0)  # the first round of a probe
    planner = play.planner
    run = planner._goes_on("draft", MANY)
    assert run is not None
    assert run.request_ids == play.drafted[-1]
    planner.next_round(2, 600)
    assert planner._goes_on("draft", 2) is None, "its other rounds were for 64"
    planner.next_round(MANY, 300 * MANY)
    assert planner._goes_on("draft", MANY) is None


def test_who_can_have_no_guesses_is_not_probed() -> None:
    play = Play()
    play.caps = [3] * 32 + [0] * 32
    play.play(1500, 0.05)
    probed = [members for members in play.drafted[200:] if members]
    assert probed
    assert all({*map(int, members)} <= set(range(32)) for members in probed)


def test_a_draft_that_became_good_is_found_again_among_many() -> None:
    play = Play()
    play.play(300, 0.05)
    assert len(play.behind) == MANY
    play.play(700, 0.85)
    assert play.play(200, 0.85) > 1.3


def test_who_has_nothing_to_catch_up_on_begins_again_at_once() -> None:
    """It pays by a few hundredths: too little to read all texts for, but newcomers were read along with the target."""
    play = Play()
    play.play(40, 0.35)
    planner, newcomers = play.planner, [f"new {number}" for number in range(MANY)]
    for old, new in zip(play.ids, newcomers, strict=True):
        planner.forget(old)
        planner.start(new, Traits())
    granted = []
    for lagging in (newcomers, newcomers[:32], []):
        planner._granting = set()  # it did not guess in the last round
        planner.next_round(MANY, 300 * MANY)
        planner.lag("draft", lagging)
        granted.append(planner.budget("draft", newcomers, [3] * MANY, MANY))
    assert not any(granted[0])
    assert sum(granted[2]) >= MANY // 2


def test_who_is_behind_is_held_against_nobody_else() -> None:
    """Of eight requests much is expected, and nothing has to be read of them; the others are poor, and behind."""
    play = Play()
    planner, good = play.planner, play.ids[:8]
    for _ in range(12):
        planner.next_round(MANY, 300 * MANY)
        for request_id in play.ids:
            planner.observe("draft", request_id, 3, 3 if request_id in good else 0)
    for _ in range(2):
        planner.next_round(MANY, 300 * MANY)
    planner._begun.add("draft")
    planner.lag("draft", play.ids[8:])
    granted = planner.budget("draft", play.ids, [3] * MANY, MANY)
    assert all(granted[:8])
    assert sum(map(bool, granted)) < 20


def test_a_round_that_is_planned_again_is_no_second_round() -> None:
    probes = Probes(PassCost(0.001))

    def due(now: int) -> bool:
        return probes.due("one", 0.01, lambda: True, now=now)

    first = next(now for now in range(100) if due(now))
    assert due(first), "the same answer"
    assert not due(first + 1)
    waited = next(now for now in range(first + 1, first + 200) if due(now) or due(now)) - first
    assert waited > first, "a second question is no second round"


def test_the_engine_tells_who_is_behind(tiny_target: Path, tiny_draft: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = Queue(tiny_target, f"model:{tiny_draft}", planner="adaptive")
    queue.add([5, 6, 7, 8] * 12, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
    engine = queue.engine
    told: list[int] = []
    monkeypatch.setattr(engine.drafting.planner, "lag", lambda drafter, request_ids: told.append(len(request_ids)))
    for _ in range(4):
        engine.step()
    assert set(told) == {0}
    answer = engine.scheduler.running[0]
    following: Following = engine.drafting.following
    assert following.lags("model", [answer], 1) == []
    answer.behind["model"] = 0
    assert following.lags("model", [answer], 1) == [answer.id]


def test_who_stopped_is_probed_once_before_long_however_dear_that_is() -> None:
    """It may have stopped when it was least lucky."""
    probes = Probes(PassCost(0.001))
    probes.drafts("draft")

    def rounds() -> list[int]:
        return [now for now in range(1, 3000) if probes.due("draft", 10.0, lambda: True, now=begun + now)]

    begun = 0
    assert rounds() == [64, 64 + 1000, 64 + 2000]
    probes.drafts("draft")
    probes.succeeded("draft")
    begun = 3000
    assert rounds()[:2] == [64, 64 + 1000]
