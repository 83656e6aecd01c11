"""Whatever was drafted, accepted and rejected, the cache holds what a fresh prefill of the same tokens would."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from exactness import FEW
from slipstream import SamplingParams, SpeculationParams
from slipstream.core.draft import ROOT, Tree
from slipstream.core.verdict import Verdict
from slipstream.drafters.base import DraftRequest, HostDrafter
from slipstream.engine import eager
from slipstream.kv.cache import Moves, compaction
from stepping import Arrival, Stepper, cache_error

BIAS = dict.fromkeys(tuple(FEW)[:2], 60.0)  # nothing else is ever said, so that every second blind guess is right
CLOSE = 1e-5


class Dice(HostDrafter):
    """Trees drawn at random from the letters that can come: bushy, deep or none at all."""

    name: ClassVar[str] = "dice"
    bounded: ClassVar[bool] = True
    default_draft_tokens: ClassVar[int] = 24

    def __init__(self) -> None:
        self.dice = random.Random(0)
        self.verdicts: list[Verdict] = []

    def propose(self, requests: Sequence[DraftRequest], budget: Sequence[int]) -> Sequence[Tree]:
        return [self._tree(nodes) for nodes in budget]

    def observe(self, verdicts: Sequence[Verdict]) -> None:
        self.verdicts.extend(verdicts)

    def _tree(self, budget: int) -> Tree:
        nodes: list[tuple[int, int]] = []  # parent, token
        reach = self.dice.choice((1, 3, 12))
        for _ in range(self.dice.randint(0, budget)):
            node = (max(ROOT, len(nodes) - self.dice.randint(1, reach)), self.dice.choice(tuple(BIAS)))
            if node not in nodes:
                nodes.append(node)
        return Tree(tuple(token for _, token in nodes), tuple(parent for parent, _ in nodes))


class Bench(Stepper):
    drafter: Dice

    def error(self) -> float:
        """The largest error over everything that is committed now."""
        engine = self.engine
        return max(
            (
                cache_error(engine.target, engine.cache, answer.table, answer.tokens[: answer.cached])
                for answer in engine.scheduler.running
                if answer.table is not None
            ),
            default=0.0,
        )


@pytest.fixture(scope="module")
def bench(tiny_target: Path) -> Bench:
    # 20 small pages for three requests of up to 40 tokens: pages are handed on, and taken away
    drafter = Dice()
    bench = Bench(
        tiny_target, drafter, pages=20, page_size=4, max_num_seqs=3, max_num_batched_tokens=7, max_model_len=48
    )
    bench.drafter = drafter
    return bench


def drive(bench: Bench, jobs: Sequence[Arrival], seed: int) -> tuple[float, list[list[int]]]:
    """Run the jobs to their end, checking the cache after each round: the largest error, and all answers."""
    bench.drafter.dice.seed(seed)
    errors = [0.0]
    outputs = bench.run(jobs, lambda: errors.append(bench.error()))
    assert all(answer.error is None for answer in outputs)
    return max(errors), [answer.token_ids for answer in outputs]


@st.composite
def params(draw: st.DrawFn) -> SamplingParams:
    return SamplingParams(
        temperature=draw(st.sampled_from((0.0, 1.0))),
        seed=draw(st.integers(0, 99)),
        n=draw(st.sampled_from((1, 1, 1, 2))),
        max_tokens=draw(st.integers(1, 24)),
        frequency_penalty=draw(st.sampled_from((0.0, 1.0))),
        ignore_eos=True,
        logit_bias=BIAS,
    )


jobs = st.lists(st.builds(Arrival, st.integers(1, 16), params(), st.integers(0, 8)), min_size=1, max_size=5)


@settings(deadline=None, max_examples=30, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(jobs=jobs, seed=st.integers(0, 10**6))
def test_the_cache_is_what_a_prefill_makes_it(bench: Bench, jobs: list[Arrival], seed: int) -> None:
    worst, _ = drive(bench, jobs, seed)
    assert worst < CLOSE


def busy_day() -> list[Arrival]:
    """Nine answers, more than the pages hold at once."""
    common = SamplingParams(temperature=1.0, max_tokens=26, ignore_eos=True, logit_bias=BIAS)
    return [Arrival(3 + 2 * i, replace(common, seed=i, n=1 + i % 2), 2 * i) for i in range(6)]


def test_the_test_reaches_what_it_is_about(bench: Bench) -> None:
    """Paths that move, requests that are preempted, and the tokens of plain decoding all the same."""
    bench.drafter.verdicts.clear()
    before = bench.engine.scheduler.preemptions
    worst, tokens = drive(bench, busy_day(), seed=3)
    assert worst < CLOSE
    moved = [v for v in bench.drafter.verdicts if v.path != tuple(range(v.accepted))]
    assert len(moved) > 20
    assert max(v.accepted for v in moved) >= 3
    assert bench.engine.scheduler.preemptions > before
    off = SpeculationParams(enabled=False)
    plainly = [replace(job, params=replace(job.params, speculation=off)) for job in busy_day()]
    assert drive(bench, plainly, seed=3)[1] == tokens


def test_a_cache_that_is_not_compacted_is_found_out(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def stay(*given: object) -> Moves:
        moves = compaction(*given)  # type: ignore[arg-type]
        return Moves(moves.src, moves.src)

    monkeypatch.setattr(eager, "compaction", stay)
    worst, _ = drive(bench, busy_day()[:2], seed=3)
    assert worst > 100 * CLOSE
