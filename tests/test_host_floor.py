"""Where the host has more to do for a round than the device, fewer guesses make no round shorter."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from queueing import PARAMS, Queue
from slipstream.engine.marks import Marks
from slipstream.engine.tickets import Ticket
from slipstream.plan.adaptive import AdaptivePlanner
from slipstream.plan.cost import PassCost
from slipstream.plan.floor import HostFloor
from slipstream.plan.gains import Turn, Waited
from slipstream.plan.measured import Curve


def floor_of(rounds: Sequence[float], requests: int = 64) -> HostFloor:
    """rounds: how long the host took to make each of them ready."""
    floor = HostFloor()
    for now, ready_s in enumerate(rounds):
        floor.observe(requests, True, ready_s, now)
    return floor


def test_it_is_what_the_host_mostly_takes() -> None:
    floor = floor_of([6.4, 60.0, 6.5, 6.4, 6.3])
    assert floor.seconds(64, True, 5) == 6.4  # one of them was a hiccup
    assert floor.seconds(60, True, 5) == 6.4
    assert floor.seconds(64, False, 5) == floor.seconds(16, True, 5) == 0


def test_two_rounds_say_nothing() -> None:
    assert floor_of([6.4] * 2).seconds(64, True, 2) == 0


def test_rounds_with_newcomers_are_no_floor() -> None:
    """Some take the host twice as long, also the first ones of a burst: those that are left can be short."""
    assert floor_of([9.4, 9.0, 8.8, 4.1, 4.2, 4.0, 4.1, 9.2, 4.1]).seconds(64, True, 9) == 4.2
    assert floor_of([9.4] * 9 + [4.1] * 5).seconds(64, True, 14) == 4.1, "nor what is over"


def test_it_is_forgotten_after_a_while() -> None:
    floor = floor_of([6.4] * 9)
    assert floor.seconds(64, True, 8 + 512) == 6.4
    assert floor.seconds(64, True, 8 + 513) == 0
    floor.observe(64, True, 5.0, 600)
    assert floor.seconds(64, True, 600) == 0


PASS_MS = {64: 4.66, 128: 5.75, 192: 7.4, 256: 8.25}
"""Of 64 requests, with none to three guesses for each."""


@pytest.mark.parametrize(("host_ms", "in_time", "nodes"), [(5.0, True, 1), (7.8, True, 3), (2.05, False, 1)])
def test_more_is_guessed_where_small_rounds_are_no_shorter(host_ms: float, in_time: bool, nodes: int) -> None:
    """One guess for each brings 1.6 tokens in 5.75 ms, three bring 2.2 in 8.25: unless the host needs as long. Where it
    cannot begin in time, it takes what it takes after every pass, and is no reason for more."""
    curve = Curve((1, *PASS_MS), tuple([1e-3 * ms for ms in (3.7, *PASS_MS.values())]))
    planner = AdaptivePlanner(PassCost(0.01, curve))
    planner.pad_passes()
    ids, guessed = [str(i) for i in range(64)], 0
    for round in range(60):
        planner.next_round(64, 64 * 300)
        guessed = max(planner.budget("model", ids, [3] * 64, 64))
        right = [min(guessed, max(0, (i + round) % 5 - 1)) for i in range(64)]
        for request_id, accepted in zip(ids, right, strict=True):
            planner.observe("model", request_id, guessed, accepted)
        pass_s = 1e-3 * PASS_MS[64 * (1 + guessed)]
        beside_s = pass_s if in_time else 0.0
        host_s = max(0.0, 1e-3 * host_ms - beside_s) if guessed else 0.0
        planner.observe_pass(64 * (1 + guessed), pass_s)
        authors = ("model",) if guessed else ()
        turns = [Turn(name, guessed, 1 + accepted, authors) for name, accepted in zip(ids, right, strict=True)]
        ready_s = 1e-3 * (host_ms if guessed else 4.0) if in_time else 0.0
        planner.observe_round(turns, pass_s + host_s, 64 * 300, waited=Waited(beyond=host_s), ready_s=ready_s)
    assert guessed == nodes


@pytest.fixture
def bench(tiny_target: Path, monkeypatch: pytest.MonkeyPatch) -> Queue:
    """An engine whose device takes 0.1 s for a round."""
    monkeypatch.setattr(Ticket, "wait", lambda ticket: time.sleep(0.1))
    monkeypatch.setattr(Marks, "since", lambda marks, *times: time.perf_counter() - max(times))
    return Queue(tiny_target, None)


def readied(bench: Queue) -> list[float]:
    """Seconds of the host for each round of one request."""
    bench.add([5, 6, 7], replace(PARAMS, max_tokens=8))
    seen = []
    while bench.engine.busy:
        bench.engine.step()
        seen += [ticket.ready_s for ticket in bench.tickets if ticket.decodes]
    bench.drain()
    return seen


def test_what_the_host_takes_is_known_if_another_round_is_under_way(bench: Queue) -> None:
    """Of one that begins when nothing is, the device waits for all that the host does."""
    seen = readied(bench)
    assert len(seen) >= 5
    assert min(seen) > 0, "its prompt was under way"
    assert median(seen) < 0.1, "what it waits for the device is not among it"
    for number in range(2):
        bench.add([5, 6, 7 + number], replace(PARAMS, max_tokens=4))
    bench.engine.step()
    assert [ticket.ready_s for ticket in bench.tickets] == [0.0]


def test_what_it_took_for_the_round_before_is_not_counted_twice(bench: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every other round is waited for, and then the host thinks for long."""
    engine, waits = bench.queued, [False]
    queue = engine._queue

    def must_wait() -> bool:
        waits[0] = not waits[0] and any(answer.queued for answer in engine.scheduler.running)
        return waits[0]

    def slowly(schedule: Any) -> Ticket:
        time.sleep(0.2 * waits[0])
        return queue(schedule)

    monkeypatch.setattr(engine, "_must_wait", must_wait)
    monkeypatch.setattr(engine, "_queue", slowly)
    seen = readied(bench)
    assert 0.0 in seen, "one that was waited for"
    assert 0 < median([ready_s for ready_s in seen if ready_s]) < 0.2


def test_a_device_without_a_clock_says_nothing(tiny_target: Path) -> None:
    """There the host computes what it queues."""
    assert set(readied(Queue(tiny_target, None))) == {0.0}
