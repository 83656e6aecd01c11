"""Of many requests a few are looked at, while nobody waits for a drafter on the host: is it worth it again?"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from slipstream.core.draft import Tree
from slipstream.plan.adaptive import AdaptivePlanner
from slipstream.plan.cost import PassCost
from slipstream.plan.gains import Turn
from slipstream.plan.measured import Curve, MeasuredCosts
from slipstream.plan.samples import Sample
from slipstream.plan.traits import Traits
from slipstream.plan.waits import Waits

SIZES = (1, 16, 64, 96, 128, 192, 256)
PASSES = Curve(SIZES, (3.7e-3, 3.8e-3, 4.7e-3, 5.2e-3, 5.9e-3, 7.4e-3, 8.7e-3))
MANY, DEEP, LONG, SURE = 64, 3, 24, 0.95
RIGHT, WRONG = 100, 7
PHASE = 50


class Play:
    """An engine of many requests and one drafter on the host, that promises the same however right it is."""

    def __init__(self, wait_s: float) -> None:
        self.planner = AdaptivePlanner(PassCost(0.001))
        self.planner.pad_passes()
        self.planner.limit_rows(256)
        self.planner.adopt(MeasuredCosts(PASSES))
        self.wait_s = wait_s
        self.ids = [f"r{number}" for number in range(MANY)]
        self.looked: list[list[int]] = []
        for request_id in self.ids:
            self.planner.start(request_id, Traits())

    def round(self, is_right: Callable[[int], bool]) -> float:
        """Nodes for each. is_right: is it right about this request?"""
        planner = self.planner
        planner.next_round(MANY, 300 * MANY)
        awake = not planner.rests("host", MANY) or self._peeks()
        sizes = [0] * MANY
        silent = planner.silences and not planner.speculates(self.ids[0], ("host",))
        asked = awake and not silent and planner.asks("host", MANY)
        if asked:
            drafts = [Tree.chain(range(RIGHT, RIGHT + DEEP))] * MANY
            taken = planner.trim("host", self.ids, drafts, [promise(DEEP)] * MANY, MANY)
            sizes = [len(tree.tokens) for tree in taken]
            planner.observe_wait("host", self.wait_s)
        rows = next(size for size in SIZES if size >= MANY + sum(sizes))
        seconds = float(PASSES.at(np.array([float(rows)]))[0]) + asked * self.wait_s
        kept = [size * is_right(number) for number, size in enumerate(sizes)]
        turns = [
            Turn(request_id, size, right + 1, ("host",) if size else ())
            for request_id, size, right in zip(self.ids, sizes, kept, strict=True)
        ]
        planner.observe_round(turns, seconds, 300 * MANY)
        if asked:
            planner.observe_waited(["host"], MANY, sum(kept) + MANY, seconds)
        for number, (request_id, size) in enumerate(zip(self.ids, sizes, strict=True)):
            if size:
                planner.observe("host", request_id, size, kept[number])
            planner.hear("host", request_id, RIGHT if is_right(number) else WRONG)
        return sum(sizes) / MANY

    def _peeks(self) -> bool:
        at = list(self.planner.peeks("host", MANY, MANY))
        self.looked.append(at)
        drafts = [Tree.chain(range(RIGHT, RIGHT + LONG))] * len(at)
        return self.planner.peek("host", [self.ids[i] for i in at], drafts, [promise(LONG)] * len(at), MANY)


def promise(guesses: int) -> list[float]:
    return [SURE ** (depth + 1) for depth in range(guesses)]


def always(_: int) -> bool:
    return True


def never(_: int) -> bool:
    return False


@pytest.mark.parametrize("between", [PHASE, 1500])
@pytest.mark.parametrize("wait_s", [0.3e-3, 1e-3, 2e-3, 3e-3])
def test_a_text_that_echoes_again_is_followed_among_many(wait_s: float, between: int) -> None:
    play = Play(wait_s)
    first = [play.round(always) for _ in range(PHASE)]
    silent = [play.round(never) for _ in range(between)]
    last = [play.round(always) for _ in range(PHASE)]
    assert first[-1] == DEEP
    assert not any(silent[10:])
    assert all(last[20:]), last


def test_a_few_texts_that_echo_do_not_speak_for_all() -> None:
    """It is right about two requests of 64, whenever somebody looks."""
    play = Play(2e-3)
    for _ in range(PHASE):
        play.round(always)
    later = [play.round(lambda number: number in (8, 9)) for _ in range(6 * PHASE)]
    assert sum(map(bool, later)) < 25, later
    assert len(play.looked) > 5 * PHASE


def test_who_was_woken_in_vain_is_not_heeded_for_a_while() -> None:
    waits, now, pauses = Waits(), 0, []
    waits.observe(2e-3)
    for _ in range(3):
        waits.until = now + 1
        waits.wake(now)
        for _ in range(16):
            waits.weigh(1.0, 2.0, 4.7e-3, now, MANY)
        pauses.append(waits.deaf - now)
        now = waits.deaf
    assert pauses == [64, 128, 256]
    waits.until = now + 1
    waits.wake(now)
    for _ in range(16):
        waits.weigh(3.0, 2.0, 4.7e-3, now, MANY)
    assert (waits.vain, waits.deaf) == (0, now)


def test_all_are_looked_at_by_turns() -> None:
    sample, seen = Sample(), set[int]()
    for _ in range(2 * 12):
        chosen = sample.choose(10)
        assert len(chosen) == 4
        seen |= set(chosen)
        sample.add([0.0] * len(chosen))
    assert seen == set(range(10))


def test_two_groups_have_been_looked_at_twice_and_more_before_it_counts() -> None:
    sample, told = Sample(), list[float | None]()
    for _ in range(9):
        told.append(sample.add([1.5] * len(sample.choose(64))))
    assert told == [None] * 7 + [1.5 * 64] * 2
    before = sample.choose(64)
    sample.begin()
    assert before != sample.choose(64), "others from the beginning"
    assert [sample.add([1.5] * len(sample.choose(64))) for _ in range(8)] == told[:8]
