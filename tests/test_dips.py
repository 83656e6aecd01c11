"""When some requests end and the next are still read, fewer decode for some rounds: that is no other load."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import pytest

from slipstream.plan.adaptive import AdaptivePlanner
from slipstream.plan.cost import PassCost
from slipstream.plan.dips import Dips
from slipstream.plan.gains import Turn
from slipstream.plan.measured import Curve
from slipstream.plan.rivals import Rivals


@pytest.mark.parametrize(
    ("rounds", "usual"),
    [
        ([4, 4, 2], 4),
        ([4, 4, 1], 4),
        ([4, *[2] * 7], 4),
        ([4, *[2] * 8], 2),  # it stays so
        ([64, 64, 1], 1),  # the load fell
        ([64, 64, 16], 64),
        ([1, 1, 4], 4),
        ([4, 0, 2], 4),
        ([4, 0], 0),
        ([1], 1),
    ],
)
def test_how_many_are_usual(rounds: Sequence[int], usual: int) -> None:
    dips = Dips()
    for requests in rounds:
        dips.next_round(requests)
    assert dips.usual == usual


def test_a_few_less_are_the_same_crowd() -> None:
    dips = Dips()
    dips.next_round(64)
    assert not dips.is_dip(40)
    assert dips.is_dip(32)
    assert not dips.is_dip(65)
    assert not dips.is_dip(15)  # the load falls


@pytest.mark.parametrize(("running", "usual"), [(64, 64), (16, 64), (15, 11), (0, 11)])
def test_however_few_decode_what_counts_is_how_many_run(running: int, usual: int) -> None:
    dips = Dips()
    dips.next_round(64, 64)
    dips.next_round(11, running)
    assert dips.usual == usual
    assert dips.is_dip(11) == (usual == 64)


def test_in_a_dip_only_rivals_wait_for_whose_turn_it_is() -> None:
    rivals, few = Rivals(), ["a", "b"]
    assert rivals.whose(4, 0) is None
    rivals.has_turn("cheap", few, 4, 2.0, 1)
    rivals.has_turn("deep", few, 4, 1.5, 1)
    assert rivals.whose(4, 2) == "cheap"
    assert rivals.waits("deep", 4, 2)
    assert not rivals.waits("cheap", 4, 2)
    assert not rivals.waits("suffix", 4, 2)  # it guesses beside whoever has the turn
    rivals.has_turn("other", ["c", "d"], 4, 1.5, 2)
    rivals.has_turn("cheap", few, 4, 2.0, 2)
    assert not rivals.waits("other", 4, 3)  # which guesses for others


class Scene:
    """Two drafters: a deep one that is the better for a single request, and a cheap one for four."""

    SECONDS: ClassVar = {"deep": 2e-4, "cheap": 1e-4}  # of a guess, times the requests squared
    RIGHT: ClassVar = {"deep": 5, "cheap": 3}

    def __init__(self) -> None:
        self.planner = AdaptivePlanner(PassCost(0.01, Curve((1, 64, 256), (4e-3, 4.6e-3, 8e-3))))
        self.planner.pad_passes()

    def round(self, requests: int, running: int = 0) -> set[str]:
        """Who guesses in it."""
        planner, ids = self.planner, [str(i) for i in range(requests)]
        planner.next_round(requests, 300 * requests, running)
        given = {}
        for name in self.SECONDS:
            if planner.asks(name, requests):
                given[name] = planner.budget(name, ids, [5] * requests, requests)
        turns = []
        guessing = {name for name, nodes in given.items() if any(nodes)}
        for i, request_id in enumerate(ids):
            for name in guessing:
                nodes = given[name][i]
                planner.observe(name, request_id, nodes, min(nodes, self.RIGHT[name]))
            most = max([given[name][i] for name in guessing], default=0)
            emitted = 1 + max([min(given[name][i], self.RIGHT[name]) for name in guessing], default=0)
            turns.append(Turn(request_id, most, emitted, tuple(sorted(guessing))))
        for name in guessing:
            depth = max(given[name])
            planner.observe_draft(name, depth, self.SECONDS[name] * requests**2 * depth, requests)
        draft_s = sum([self.SECONDS[name] * requests**2 * max(given[name]) for name in guessing])
        planner.observe_round(turns, 4e-3 + draft_s, 300 * requests)
        return guessing


def test_a_dip_changes_no_turn_and_a_load_that_stays_does() -> None:
    scene = Scene()
    for requests in (1, 4):
        for _ in range(60):
            scene.round(requests)
    assert [scene.round(4) for _ in range(6)] == [{"cheap"}] * 6
    alone = [scene.round(1) for _ in range(12)]
    assert alone[:7] == [{"cheap"}] * 7
    assert alone[8:] == [{"deep"}] * 4
    assert [scene.round(4) for _ in range(12)] == [{"cheap"}] * 12


def test_who_stopped_is_not_woken_for_a_dip() -> None:
    scene = Scene()
    for requests in (1, 64):
        for _ in range(40):
            scene.round(requests)
    assert [scene.round(64) for _ in range(6)] == [set()] * 6  # guesses for so many take too long
    assert [scene.round(1, 64) for _ in range(7)] == [set()] * 7  # the others are being read
    assert {"deep"} in [scene.round(1, 64) for _ in range(20)]  # which takes long: then it is what it is
    for _ in range(60):
        scene.round(64)
    assert {"deep"} in [scene.round(1, 1) for _ in range(2)]  # the load fell
