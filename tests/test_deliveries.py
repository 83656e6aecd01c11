"""Outputs on their way to an event loop, by a clock of the test's own: at once for few, in batches for a crowd."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

import pytest

from slipstream.core.outputs import RequestOutput
from slipstream.engine.streams import Deliveries, OutputStream


class Clock:
    """An event loop's time and timers."""

    def __init__(self) -> None:
        self.now = 100.0
        self.woken = 0
        self._timers: list[tuple[float, int, Callable[[], None]]] = []

    def time(self) -> float:
        return self.now

    def is_closed(self) -> bool:
        return False

    def call_later(self, delay: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._timers, (self.now + delay, len(self._timers), action))

    def call_soon_threadsafe(self, action: Callable[[], None]) -> None:
        self.woken += 1
        action()

    def run(self, until: float) -> None:
        while self._timers and self._timers[0][0] <= until:
            self.now, _, action = heapq.heappop(self._timers)
            action()
        self.now = until


@pytest.fixture
def clock() -> Clock:
    return Clock()


def crowd(clock: Clock, count: int) -> tuple[Deliveries, list[OutputStream]]:
    loop: Any = clock
    deliveries = Deliveries(loop)
    return deliveries, [OutputStream(deliveries, lambda: None) for _ in range(count)]


def a_round(deliveries: Deliveries, streams: list[OutputStream], *, last: bool = False) -> None:
    for stream in streams:
        stream.put(RequestOutput("r", None, [], [], last))
    deliveries.flush()


def test_few_hear_of_every_round(clock: Clock) -> None:
    deliveries, streams = crowd(clock, 3)
    for rounds in range(1, 6):
        a_round(deliveries, streams)
        assert [len(stream._arrived) for stream in streams] == [rounds] * 3


def test_a_crowd_hears_of_several_rounds_together(clock: Clock) -> None:
    deliveries, streams = crowd(clock, 32)
    a_round(deliveries, streams)
    assert {len(stream._arrived) for stream in streams} == {1}  # the first comes at once
    for _ in range(3):
        clock.run(clock.now + 0.0005)
        a_round(deliveries, streams)
    assert {len(stream._arrived) for stream in streams} == {1}
    assert clock.woken == 2  # the loop looks again by itself
    clock.run(clock.now + 0.0005)
    assert {len(stream._arrived) for stream in streams} == {4}
    clock.run(clock.now + 0.010)
    a_round(deliveries, streams, last=True)  # slow rounds come at once again
    assert {len(stream._arrived) for stream in streams} == {5}
    assert all(stream.finished for stream in streams)


def test_nothing_stays_behind_when_no_round_follows(clock: Clock) -> None:
    deliveries, streams = crowd(clock, 32)
    a_round(deliveries, streams)
    clock.run(clock.now + 0.0005)
    a_round(deliveries, streams, last=True)
    assert not any(stream.finished for stream in streams)
    clock.run(clock.now + 0.002)
    assert all(stream.finished for stream in streams)
