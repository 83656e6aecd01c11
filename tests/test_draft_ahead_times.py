"""What drafts that were begun ahead take of a round's time, by the device's clock, and what becomes of its events."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from conftest import EOS
from exactness import FEW
from queueing import Echo, Letters
from slipstream import SpeculationParams
from slipstream.engine import queued
from slipstream.engine.listening import RoundTimes
from slipstream.engine.tickets import Heard
from slipstream.plan.planner import Planner
from slipstream.plan.types import StepSeen
from test_draft_ahead import LONG, Bench, Sizes


class Clock:
    """Time that passes only where a test says so: a draft takes 5 s, a pass 10, and the host thinks for 2."""

    now = 0.0

    def __init__(self) -> None:
        self.events: list[Event] = []

    def taking(self, seconds: float, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            self.now += seconds
            return real(*given)

        return call


class Event:
    """As CUDA's."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.at = clock, -1.0
        clock.events.append(self)

    def record(self) -> None:
        self.at = self.clock.now

    def synchronize(self) -> None:
        assert self.at >= 0

    def elapsed_time(self, other: Event) -> float:
        return (other.at - self.at) * 1e3


class TestTimes:
    @pytest.fixture
    def clock(self) -> Clock:
        return Clock()

    @pytest.fixture
    def bench(self, tiny_target: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock) -> Bench:
        """An engine with a clock."""
        bench = Bench(tiny_target, [Letters(), Echo()])

        monkeypatch.setattr(Echo, "draft", clock.taking(5, Echo.draft))
        monkeypatch.setattr(Letters, "propose", clock.taking(2, Letters.propose))
        monkeypatch.setattr(bench.engine.target, "run", clock.taking(10, bench.engine.target.run))
        monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: Event(clock))
        monkeypatch.setattr(queued, "time", SimpleNamespace(perf_counter=lambda: clock.now))
        monkeypatch.setattr(bench.queued._marks, "has_clock", True)
        return bench

    def test_the_device_waits_only_behind_a_draft_in_hand(self, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
        """And that draft is the round's own: it may be in vain, and then its time was lost by waiting."""
        waits: list[float] = []
        parts: list[tuple[bool | None, float, RoundTimes]] = []  # was it taken; what the planner heard; …
        times = bench.queued._times
        monkeypatch.setattr(Planner, "observe_wait", lambda _, drafter, requests, seconds: waits.append(seconds))
        told: list[StepSeen] = []
        monkeypatch.setattr(Planner, "observe_step", lambda _, step: told.append(step))

        def note(heard: Heard) -> RoundTimes:
            found, ahead = times(heard), heard.ticket.ahead
            if heard.ticket.steady:
                parts.append((None if ahead is None else ahead.taken, waits[-1], found))
            return found

        monkeypatch.setattr(bench.queued, "_times", note)
        bench.engine.drafting.planner = Sizes(3, 3, 3, 3, 3, 1, 1, 1)
        bench.add([1, 2, 3], LONG)
        bench.drain()
        taken = [(wait, t.draft, t.verify) for was, wait, t in parts if was]
        wasted = [(wait, t.draft, t.verify) for was, wait, t in parts if was is False]
        assert len(taken) > 5
        assert taken == [(2, 5, 10)] * len(taken)
        assert wasted == [(7, 5, 10)] * len(wasted) != []
        # between two rounds that are heard behind the next draft lies all that a round takes
        sums = [t.draft + t.verify + t.host for (was, _, t), (after, *_) in pairwise(parts) if was and after]
        assert sums == [17] * len(sums) != []
        assert len(told) == len(parts), "every step that waited is told, with all that it took"
        assert {(step.waited, step.load.requests) for step in told} == {(("letters",), 1)}
        assert [step.total_s for step in told] == [t.draft + t.verify + t.host for *_, t in parts]

    @pytest.mark.parametrize("drafts", [False, True])
    def test_a_step_is_told_of_whatever_prompts_it_reads(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch, clock: Clock, drafts: bool
    ) -> None:
        told: list[StepSeen] = []
        times, reading = bench.queued._times, list[StepSeen]()
        monkeypatch.setattr(Planner, "observe_step", lambda _, step: told.append(step))

        def note(heard: Heard) -> RoundTimes:
            before, found = len(told), times(heard)
            reading.extend(told[before:] if heard.ticket.read_rows else ())
            return found

        monkeypatch.setattr(bench.queued, "_times", note)

        monkeypatch.setattr(bench.engine.target, "forward", clock.taking(3, bench.engine.target.forward))
        params = replace(LONG, speculation=SpeculationParams(enabled=drafts))
        bench.add([1, 2, 3], params)
        for _ in range(4):
            bench.engine.step()
        bench.add([3, 2, 1], params)
        bench.drain()
        plain = [(step.load.requests, step.total_s) for step in reading]
        assert plain == [(1, 12.0 if drafts else 10.0)], "a pass takes 10 s, and the prompts beside it are not of it"

    @pytest.mark.parametrize("drafts", [False, True])
    def test_who_listens_hears_of_prompts_by_themselves_and_who_read_along(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch, clock: Clock, drafts: bool
    ) -> None:
        heard: list[RoundTimes] = []

        def note(answers: object, verdicts: object, kept: object, times: RoundTimes) -> None:
            heard.append(times)

        monkeypatch.setattr(bench.engine.target, "forward", clock.taking(3, bench.engine.target.forward))
        bench.engine.listen(cast(Any, SimpleNamespace(round=note, drew=lambda *_: None, offered=lambda _: None)))
        params = replace(LONG, speculation=SpeculationParams(enabled=drafts, drafter="letters+echo"))
        bench.add([1, 2, 3], params)
        for _ in range(4):
            bench.engine.step()
        bench.add([3, 2, 1], params)
        bench.drain()
        reading = [times for times in heard if times.read_rows]
        assert [(t.rows > 0, t.read, t.newcomers, t.along) for t in reading] == [
            (False, 3, 1, drafts),
            (True, 3, 1, drafts),
        ]
        assert reading[1].verify == 13, "the decodes' pass and the prompts'"
        assert {(t.read, t.newcomers, t.along) for t in heard if not t.read_rows} == {(0, 0, False)}

    def test_every_event_is_given_back_once(self, bench: Bench, clock: Clock) -> None:
        """Also those of a draft that has no round to be in, since its request turns out to have ended."""
        ending = replace(LONG, ignore_eos=False, logit_bias={**FEW, EOS: 6.0})
        for seed in range(6):
            _, heard = bench.add([1, 2, 3], replace(ending, seed=seed))
            bench.drain()
            ended = [answer.finish_reason for output in heard for answer in output.outputs]
            if ended == ["stop"] and bench.wasted:
                break
        else:
            pytest.fail("none of them ended by itself")
        bench.queued._marks.rest()  # but for the one behind the last round, by which the next would be timed
        assert sorted(map(id, bench.queued._marks._free)) == sorted(map(id, clock.events))
        assert len(clock.events) < 16  # they are used again
