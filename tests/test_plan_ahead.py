"""In queued rounds a plan is made one round ahead: while it is made, the device has a round to work on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from queueing import PARAMS, Echo, Queue
from slipstream.core.draft import Tree
from slipstream.plan.planner import Planner
from slipstream.plan.types import Budget, Load, Offer


class Watching(Planner):
    """Notes how many rounds are in the making whenever it plans another."""

    def __init__(self, bench: Queue) -> None:
        self._bench = bench
        self.queued: list[int] = []

    def plan(self, offers: Sequence[Offer], load: Load) -> list[Budget]:
        self.queued.append(len(self._bench.flights))
        return super().plan(offers, load)

    def trim(
        self, drafter: str, request_ids: Sequence[str], trees: Sequence[Tree], *_: object, **__: object
    ) -> list[Tree]:
        self.queued.append(len(self._bench.flights))
        return list(trees)


def test_plans_for_device_drafters_are_hidden_behind_a_round(tiny_target: Path) -> None:
    bench = Queue(tiny_target, Echo())
    planner = bench.engine.drafting.planner = Watching(bench)
    bench.add([5, 6, 7], PARAMS)
    bench.drain()
    assert len(planner.queued) > 3
    assert planner.queued[1:] == [1] * (len(planner.queued) - 1), "the round before is still in the making"


def test_host_drafters_make_it_wait(tiny_target: Path) -> None:
    bench = Queue(tiny_target, "ngram")
    planner = bench.engine.drafting.planner = Watching(bench)
    bench.add([5, 6, 7], PARAMS)
    bench.drain()
    assert set(planner.queued[1:]) == {0}, "they must know what was said"
