"""How long rounds took, by the device's clock."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slipstream.engine.marks import Marks


class Device:
    """Its clock, and events that note it."""

    def __init__(self) -> None:
        self.now, self.made = 0.0, 0

    def event(self, enable_timing: bool) -> Any:
        assert enable_timing
        self.made += 1
        event = SimpleNamespace(at=-1.0)
        event.record = lambda: setattr(event, "at", self.now)
        event.elapsed_time = lambda other: 1e3 * (other.at - event.at)
        return event

    def round(self, marks: Marks, seconds: float) -> Any:
        """A ticket of a round that takes so long, the last half of it for the pass."""
        found = [marks.put()]
        for _ in range(2):
            self.now += seconds / 2
            found.append(marks.put())
        return SimpleNamespace(begun=found[0], ended=found[-1], free_marks=lambda: found)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    monkeypatch.setattr(torch.cuda, "Event", made.event)
    return made


def test_a_round_lasts_from_the_end_of_the_one_before(device: Device) -> None:
    marks = Marks(has_clock=True)
    first = device.round(marks, 4)
    second = device.round(marks, 6)  # queued behind it
    device.now += 3  # the host was late
    third = device.round(marks, 2)
    device.now += 100  # and hears of them when all is long over
    assert [marks.close(ticket) for ticket in (first, second, third)] == [4, 6, 5]


def test_behind_a_rest_a_round_begins_by_itself(device: Device) -> None:
    marks = Marks(has_clock=True)
    assert marks.close(device.round(marks, 4)) == 4
    device.now += 50
    marks.rest()
    assert marks.close(device.round(marks, 6)) == 6


def test_events_are_used_again(device: Device) -> None:
    marks = Marks(has_clock=True)
    for _ in range(9):
        assert marks.close(device.round(marks, 4)) == 4
    assert device.made == 4  # three of a round, and the one behind the round before it


def test_without_a_clock_there_are_none(device: Device) -> None:
    assert Marks(has_clock=False).put() is None
    assert device.made == 0
