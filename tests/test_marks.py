"""How long queued steps take, by the device's clock, and what they wait for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from queueing import PARAMS, Echo, Letters, Queue
from slipstream import SpeculationParams
from slipstream.engine import queued
from slipstream.engine.flight import StepTimes
from slipstream.engine.queued import Marks
from slipstream.engine.rounds import Round
from slipstream.models.batch import fetched
from slipstream.models.graphs import recorded
from slipstream.plan.planner import Planner
from slipstream.plan.types import StepSeen

LONG = replace(PARAMS, max_tokens=40)


class Clock:
    """Time passes only where a test says so; events note it."""

    def __init__(self) -> None:
        self.now, self.events = 0.0, list[Any]()

    def event(self, enable_timing: bool) -> Any:
        assert enable_timing
        event = SimpleNamespace(at=-1.0)
        event.record = lambda: setattr(event, "at", self.now)
        event.elapsed_time = lambda other: 1e3 * (other.at - event.at)
        event.synchronize = lambda: None
        self.events.append(event)
        return event

    def taking(self, seconds: float, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            self.now += seconds
            return real(*given)

        return call

    def step(self, marks: Marks, seconds: float) -> list[Any]:
        """The events of a step that takes this long, the second half of it for the pass."""
        found = [marks.put()]
        for _ in range(2):
            self.now += seconds / 2
            found.append(marks.put())
        return found


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(torch.cuda, "Event", made.event)
    return made


class TestMarks:
    def test_a_step_lasts_from_the_end_of_the_one_before(self, clock: Clock) -> None:
        marks = Marks(has_clock=True)
        first = clock.step(marks, 4)
        second = clock.step(marks, 6)  # queued behind it
        clock.now += 3  # the host was late
        third = clock.step(marks, 2)
        clock.now += 100  # and reads them when all is long over
        assert [marks.lasted(events) for events in (first, second, third)] == [4, 6, 5]

    def test_after_a_pause_a_step_begins_by_itself(self, clock: Clock) -> None:
        marks = Marks(has_clock=True)
        assert marks.lasted(clock.step(marks, 4)) == 4
        clock.now += 50
        marks.rest()
        assert marks.lasted(clock.step(marks, 6)) == 6

    def test_events_are_used_again(self, clock: Clock) -> None:
        marks = Marks(has_clock=True)
        for _ in range(9):
            assert marks.lasted(clock.step(marks, 4)) == 4
        assert len(clock.events) == 4  # three of a step, and the last one of the step before

    def test_without_a_clock_there_are_none(self, clock: Clock) -> None:
        assert Marks(has_clock=False).put() is None
        assert not clock.events


class TestTimes:
    """A device draft takes 5 s, a decoding pass 10, a prompt 3, and a host drafter 2."""

    @pytest.fixture
    def bench(self, tiny_target: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock) -> Queue:
        bench = Queue(tiny_target, [Letters(), Echo()])
        monkeypatch.setattr(Echo, "draft", clock.taking(5, Echo.draft))
        monkeypatch.setattr(Letters, "propose", clock.taking(2, Letters.propose))
        monkeypatch.setattr(bench.engine.target, "run", clock.taking(10, bench.engine.target.run))
        monkeypatch.setattr(bench.engine.target, "forward", clock.taking(3, bench.engine.target.forward))
        monkeypatch.setattr(queued, "time", SimpleNamespace(perf_counter=lambda: clock.now))
        monkeypatch.setattr("slipstream.engine.step.time", SimpleNamespace(perf_counter=lambda: clock.now))
        monkeypatch.setattr(bench.queued._marks, "has_clock", True)
        return bench

    @staticmethod
    def steps(bench: Queue, drafter: str) -> list[StepTimes]:
        """A request, and another one that joins after some steps."""
        heard: list[StepTimes] = []
        listener: Any = SimpleNamespace(step=lambda answers, verdicts, kept, times: heard.append(times))
        bench.engine.listen(listener)
        params = replace(LONG, speculation=SpeculationParams(enabled=bool(drafter), drafter=drafter or None))
        bench.add([1, 2, 3], params)
        for _ in range(4):
            bench.engine.step()
        bench.add([3, 2, 1], params)
        bench.drain()
        return heard

    @pytest.mark.parametrize("drafter", ["", "echo", "letters+echo"])
    def test_each_part_is_what_it_took(self, bench: Queue, drafter: str) -> None:
        heard = self.steps(bench, drafter)
        first, *others = [times for times in heard if times.read_rows]
        assert (first.rows, first.read, first.verify) == (0, 3, 3)
        assert [(times.rows > 0, times.read, times.verify) for times in others] == [(True, 3, 13)]
        plain = [times for times in heard if not times.read_rows]
        assert {(times.verify, times.read) for times in plain} == {(10, 0)}
        assert {times.draft for times in plain[:-2]} == {5 if drafter else 0}

    def test_the_device_waits_for_host_drafters(
        self, bench: Queue, clock: Clock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        seen: list[StepSeen] = []
        monkeypatch.setattr(Letters, "observe", clock.taking(3, Letters.observe))
        monkeypatch.setattr(Planner, "observe_step", lambda _, step: seen.append(step))
        self.steps(bench, "letters+echo")
        waited = [step for step in seen if step.waited]
        assert len(waited) > 3
        assert {step.waited for step in waited} == {("letters",)}
        # it is told of the last step, guesses, and its guesses are brought to the device's draft, which takes 5 s here
        assert {step.wait_s for step in waited} == {3 + 2 + 5.0}

    def test_the_planner_sees_steps_without_the_prompts_beside_them(
        self, bench: Queue, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        seen: list[StepSeen] = []
        monkeypatch.setattr(Planner, "observe_step", lambda _, step: seen.append(step))
        self.steps(bench, "")
        assert {step.total_s for step in seen} == {10.0}
        assert sum(step.read_s > 0 for step in seen) == 1

    def test_every_event_is_given_back_once(self, bench: Queue, clock: Clock) -> None:
        self.steps(bench, "letters+echo")
        bench.queued._marks.rest()  # it keeps the last one, from which the next step would be timed
        assert sorted(map(id, bench.queued._marks._free)) == sorted(map(id, clock.events))
        assert len(clock.events) < 16


def test_a_step_that_captured_while_a_drafter_caught_up_is_not_typical(
    tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Queue(tiny_target, Echo())
    told: list[str] = []
    monkeypatch.setattr(Planner, "observe_catch_up", lambda _, drafter, requests, seconds: told.append(drafter))
    monkeypatch.setattr(Planner, "observe_step", lambda _, step: told.append("step"))
    monkeypatch.setattr(recorded, "seconds", recorded.seconds)
    drafting = bench.engine.drafting

    def catch_up(lagging: Any) -> None:
        recorded.seconds += 5

    bench.add([1, 2, 3], PARAMS)
    for _ in range(3):
        bench.engine.step()
    monkeypatch.setattr(drafting.following, "lagging", lambda answers, plan: {"echo": list(answers)})
    monkeypatch.setattr(drafting, "catch_up", catch_up)
    bench.engine.step()
    monkeypatch.undo()
    assert bench.flights[-1].is_new
    assert not bench.flights[-1].steady
    assert "echo" not in told
    bench.drain()


def test_results_are_copied_before_the_mark_that_is_waited_for(
    tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy behind the mark would be read before it is there."""
    bench = Queue(tiny_target, Echo())
    order: list[str] = []
    put = bench.queued._marks.put

    def note(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            order.append(name)
            return real(*given)

        return call

    monkeypatch.setattr(queued, "fetched", note("copy", fetched))
    monkeypatch.setattr(Round, "result", note("copy", Round.result))
    monkeypatch.setattr(bench.queued._marks, "put", note("mark", put))
    launch = bench.queued.launch

    def launched(*given: Any, **how: Any) -> Any:
        order.clear()
        flight = launch(*given, **how)
        if flight.members:
            assert "copy" in order
            assert order[-1] == "mark"
        return flight

    monkeypatch.setattr(bench.queued, "launch", launched)
    bench.add([1, 2, 3], PARAMS)
    bench.add([3, 2, 1, 4], PARAMS)
    bench.drain()
