"""Host drafters whose guesses take time: that time is counted once, as theirs, and not as the pass's or the wait's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar
from unittest.mock import Mock

import pytest

from queueing import Queue
from slipstream import SamplingParams
from slipstream.core.draft import Tree
from slipstream.drafters.base import DraftRequest, HostDrafter
from slipstream.engine import drafting, engine, gathering, queued
from slipstream.plan.adaptive import AdaptivePlanner
from slipstream.plan.cost import PassCost
from slipstream.plan.measured import Load
from slipstream.plan.planner import Planner
from stepping import Arrival, Stepper

TOOK = 5.0  # seconds that the guesses take


class Clock:
    """Goes on by what it is told, and a little whenever it is looked at."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1e-4
        return self.now


class Slow(HostDrafter):
    name: ClassVar[str] = "slow"
    bounded: ClassVar[bool] = True
    costly: ClassVar[bool] = True

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def propose(self, requests: Sequence[DraftRequest], budget: Sequence[int]) -> Sequence[Tree]:
        self.clock.now += TOOK
        return [Tree.chain([request.tokens[-1]] * nodes) for request, nodes in zip(requests, budget, strict=True)]


class Listening(Planner):
    def __init__(self) -> None:
        self.passes: list[float] = []
        self.drafts: list[float] = []

    def observe_pass(self, rows: int, seconds: float, load: Load | None = None, *, is_tree: bool = False) -> None:
        self.passes.append(seconds)

    def observe_draft(
        self, drafter: str, size: int, seconds: float, requests: int = 1, *, is_tree: bool = False
    ) -> None:
        self.drafts.append(seconds)


@pytest.mark.parametrize("kind", [Stepper, Queue])
def test_guesses_are_no_part_of_the_pass(
    tiny_target: Path, monkeypatch: pytest.MonkeyPatch, kind: Callable[..., Stepper]
) -> None:
    clock = Clock()
    bench = kind(tiny_target, Slow(clock))
    planner = bench.engine.drafting.planner = Listening()
    for module in (drafting, queued):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=clock))
    bench.run([Arrival(5, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))])
    assert len(planner.drafts) > 3
    assert all(TOOK <= seconds < TOOK + 1 for seconds in planner.drafts)
    assert planner.passes
    assert all(seconds < 1 for seconds in planner.passes)


def test_it_is_not_reckoned_in_every_round_what_does_not_pay(
    tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each look at the clock takes so long that reckoning is as dear as a pass: nobody would do it for nothing."""
    clock = Clock()
    bench = Stepper(tiny_target, Slow(clock), planner="adaptive")
    asked = Mock(wraps=bench.engine.drafting.planner.budget)
    monkeypatch.setattr(bench.engine.drafting.planner, "budget", asked)
    for module in (drafting, engine, gathering):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=clock))
    bench.run([Arrival(5, SamplingParams(temperature=0, max_tokens=160, ignore_eos=True))])
    assert 8 < asked.call_count < 60


def play(wait_s: float, draft_s: float, rounds: int = 200) -> int:
    """How many rounds ask a drafter whose two guesses are nearly always right; a pass takes 1 s."""
    planner, asked = AdaptivePlanner(PassCost(0.0)), 0
    planner.pad_passes()
    for _ in range(rounds):
        planner.next_round()
        planner.observe_pass(4, 1.0)
        if planner.rests("slow", 1):
            continue
        asked += 1
        budget = planner.budget("slow", ["a"], [2], 1)
        if budget[0]:
            planner.observe_draft("slow", budget[0], draft_s)
        trees = planner.trim("slow", ["a"], [Tree.chain([1] * budget[0])], [[0.95, 0.9][: budget[0]]], 1)
        planner.observe_wait("slow", wait_s)
        planner.observe("slow", "a", len(trees[0]), len(trees[0]))
        planner.observe_waited(["slow"], 1, 1 + len(trees[0]), 1.0 + wait_s + draft_s * (budget[0] > 0))
    return asked


def test_it_rests_where_both_together_do_not_pay() -> None:
    """Nearly three tokens for a pass: that is worth 1.5 s more, however they are spent, and not 3."""
    assert play(0.0, 1.5) == play(0.5, 1.0) == 200
    assert play(2.0, 0.5) < 100


def test_a_pass_of_which_no_time_is_left_says_nothing() -> None:
    """A drafter on the host took longer than the round is known to have lasted."""
    planner = AdaptivePlanner(PassCost(0.001))
    for _ in range(20):
        planner.next_round(1)
        planner.observe_pass(1, 0.0)
        planner.observe_draft("slow", 1, 1.0)
    assert planner.budget("slow", ["a"], [4], 1)[0] <= 4, "nothing is divided by nothing"
    planner.observe_pass(1, 0.01)
    assert planner._cost.seconds(1) == 0.01
