"""What the planner takes of rounds that wait for the host is found out from a recording, by the clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from slipstream.bench import replica
from slipstream.bench.deciding import with_planning
from slipstream.bench.recording import HostSeen, Made, Planning, Recording, Trace, WaitSeen
from slipstream.engine.drafting import Drafting
from slipstream.engine.plans import Plan
from slipstream.engine.state import Answer
from slipstream.plan.planner import AdaptivePlanner
from test_simulate import Clock, made_up


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goes on by a millisecond whenever rules are asked, and by 5 more and 2 a request where there is a planner."""
    clock = Clock()
    monkeypatch.setattr(replica, "time", SimpleNamespace(perf_counter=clock))
    known = Drafting.plan

    def plan(drafting: Drafting, answers: Sequence[Answer]) -> Plan:
        clock.now += 0.001
        if isinstance(drafting.planner, AdaptivePlanner):
            clock.now += 0.005 + 0.002 * len(answers)
        return known(drafting, answers)

    monkeypatch.setattr(Drafting, "plan", plan)


def recorded(*, queued: bool = True, **changes: Any) -> Recording:
    recording = made_up(0.0, queued=queued, **changes)
    costs = replace(recording.costs, host=(HostSeen(1, 0.0, 9),), waits=(WaitSeen(1, 1, 0, 0.002, 9),))
    return replace(recording, costs=costs)


def test_it_is_told_by_requests() -> None:
    found = with_planning(recorded()).planning
    assert (found.round_s, found.request_s) == pytest.approx((0.005, 0.002))
    assert found.seconds(3) == pytest.approx(0.011)


def test_of_an_engine_that_serves_one_at_a_time() -> None:
    found = with_planning(recorded(max_num_seqs=1)).planning
    assert (found.round_s, found.request_s) == pytest.approx((0.007, 0.0))


def test_nothing_is_found_out_where_nobody_waits_for_the_host() -> None:
    undrafted = replace(recorded(), traces=(Trace(50, 100, 0.0, 0.1, 1.0),))
    planned = replace(recorded(), made=Made(planner="adaptive"))  # whose waits have it
    for recording in (recorded(queued=False), made_up(0.0, queued=True), undrafted, planned):
        assert with_planning(recording) is recording


def test_nobody_takes_less_than_no_time() -> None:
    assert Planning(-0.01, 0.001).seconds(3) == 0
