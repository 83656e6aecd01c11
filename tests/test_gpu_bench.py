"""The GPU benchmark without a GPU: its work, its clock and its passes. Only the time is another's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._C._autograd import DeviceType
from transformers import AutoTokenizer

from gpu_bench import (
    CPU,
    FakeClock,
    FakeTime,
    clocks,
    heads,
    kernels,
    tokens,
    write_prompts,
)
from slipstream.drafters import features
from slipstream.kernels.gpu.rows import last_rows
from slipstream.models.runner import Runner, open_unchecked


@pytest.fixture
def runner(tiny_target: Path) -> Runner:
    return open_unchecked(tiny_target, torch.float32, CPU)


@pytest.fixture
def prompts_file(tmp_path: Path) -> Path:
    return write_prompts(tmp_path)


# --- the work ---------------------------------------------------------------------------------------------------------


def test_the_spread_is_four_of_the_multi_turn_group_and_two_of_each_other(prompts_file: Path) -> None:
    assert tokens.spread(prompts_file) == [
        *("coding 0?", "humanities 20?", "reasoning 40?", "stem 60?"),
        *("qa 83?", "qa 110?", "rag 163?", "rag 190?"),
    ]


def test_prompts_are_encoded_as_a_chat_and_cut(tiny_target: Path, prompts_file: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_target)
    ids = tokens.encode(tokenizer, "Hi")
    assert tokenizer.decode(ids) == "<|user|>Hi\n<|assistant|>"
    assert tokens.encode(tokenizer, "Hi", 2) == ids[:2]
    assert {len(ids) for ids in tokens.prompts_for(tokenizer, prompts_file, context=10, max_tokens=4)} == {5}


def test_a_stream_is_the_turns_of_the_file(tiny_target: Path, prompts_file: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_target)
    assert tokenizer.decode(tokens.stream_of(tokenizer, prompts_file, 25)) == "coding 0?and then 0coding 1?and then 1"


def test_windows_follow_each_other_and_begin_again() -> None:
    assert tokens.windows(range(10), 1, 4, 3) == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 0, 1, 2]]


def test_rates_count_what_comes_after_the_warm_up() -> None:
    clock, asked, warm_at = FakeTime(), [], []

    def generate(prompts: Sequence[list[int]]) -> list[list[int]]:
        asked.append(len(prompts))
        clock.now += 0.5
        return [[7] * len(prompt) for prompt in prompts]

    def answer_shortly(prompts: Sequence[list[int]]) -> list[list[int]]:
        quick.append(len(prompts))
        return [[0]]

    quick: list[int] = []
    found = tokens.rates(
        generate,
        [[1], [1, 2, 3]],
        (4,),
        quick=answer_shortly,
        warm=lambda: warm_at.append(len(asked)),
        seconds=clock,
    )
    assert quick == [1, 1]
    assert warm_at == [2], "both batches"
    assert asked == [4, 4, 1, 1, 4, 4]
    assert found == {"tokens": 4, "tok_s@1": 4 / 1.0, "answers": [[7], [7, 7, 7]], "tok_s@4": 16 / 1.0}
    asked.clear()
    tokens.rates(generate, [[1], [1, 2, 3]], (), seconds=clock)
    assert asked == [1, 1, 1, 1], "whole answers warm up where nothing quicker is given"


def test_what_crowds_say_of_their_rounds() -> None:
    def answer(drafted: int) -> SimpleNamespace:
        return SimpleNamespace(rounds=2, drafted=drafted, accepted=1, draft_s=0.5, verify_s=1.0, host_s=0.25)

    found = tokens._crowds([answer(4)] * 4 + [answer(8)] * 6, (2, 3))
    times = {"draft_s": 2.0, "verify_s": 4.0, "host_s": 1.0}
    assert found["2"] == {"drafted_per_round": 2.0, "accepted_per_round": 0.5, **times}
    assert found["3"] == {"drafted_per_round": 4.0, "accepted_per_round": 0.5, **{k: 1.5 * v for k, v in times.items()}}


def test_reading_prompts_is_a_median_over_different_ones() -> None:
    clock, asked = FakeTime(), []
    times = iter([9.0, 1.0, 4.0, 2.0, 9.0, *(0.1 * n for n in range(1, 8))])

    def generate(prompts: Sequence[list[int]]) -> list[list[int]]:
        asked.append(prompts[0])
        clock.now += next(times)
        return [[1]]

    found = tokens.prefill_part(generate, range(100_000), 8192, clock)
    assert (found.tokens, found.first_tokens) == (8000, 1024)
    assert found.tok_s == pytest.approx(8000 / 2.0)
    assert found.first_ms == pytest.approx(400)
    assert len({tuple(prompt) for prompt in asked}) == 12
    assert sum(map(len, asked)) == tokens.PREFILL_TOKENS


# --- the clock --------------------------------------------------------------------------------------------------------


def test_works_are_done_in_turn() -> None:
    done: list[str] = []
    found = clocks.host_clock({name: lambda name=name: done.append(name) for name in "ab"}, 3)
    assert done == list("ab" * 4), "the first of each warms up"
    assert set(found) == {"a", "b"}
    assert clocks.clock_of(CPU) is clocks.host_clock
    assert clocks.clock_of(torch.device("cuda")) is clocks.graph_clock


class FakeCuda:
    """Enough of `torch.cuda` to see what is captured, and what is replayed between which events."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.capturing: str | None = None
        self.graphs = 0
        self.milliseconds = 0.0
        cuda = self

        class Graph:
            def __init__(self) -> None:
                cuda.graphs += 1
                self.name = str(cuda.graphs)

            def replay(self) -> None:
                cuda.log.append(f"replay {self.name}")
                cuda.milliseconds += float(self.name)

        class Event:
            def __init__(self, enable_timing: bool = False) -> None:
                assert enable_timing

            def record(self) -> None:
                self.at = cuda.milliseconds

            def elapsed_time(self, end: Event) -> float:
                assert cuda.log[-1] == "synchronized"
                return end.at - self.at

        @contextmanager
        def capture(graph: Graph, **options: Any) -> Iterator[None]:
            assert options == {"capture_error_mode": "thread_local"}
            cuda.capturing = graph.name
            yield
            cuda.capturing = None

        stream = SimpleNamespace(wait_stream=lambda other: None)
        for name, fake in {
            "CUDAGraph": Graph,
            "Event": Event,
            "graph": capture,
            "Stream": lambda: stream,
            "current_stream": lambda: stream,
            "stream": nullcontext,
            "synchronize": lambda: self.log.append("synchronized"),
        }.items():
            monkeypatch.setattr(torch.cuda, name, fake)

    def work(self) -> None:
        assert torch.is_inference_mode_enabled()
        self.log.append(f"capture {self.capturing}" if self.capturing else "run")


def test_on_a_gpu_works_are_captured_once_and_replayed_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch)
    assert clocks.graph_clock({"a": cuda.work, "b": cuda.work}, 3) == {"a": 0.001, "b": 0.002}
    assert cuda.log == ["run", "capture 1", "run", "capture 2", *["replay 1", "replay 2"] * 4, "synchronized"]


def test_idle_is_asked_of_the_profiler(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCuda(monkeypatch)
    spans = [(DeviceType.CUDA, t, t + 0.25) for t in range(8)] + [(DeviceType.CPU, t, t + 1.0) for t in range(8)]
    events = [SimpleNamespace(name="k", device_type=k, time_range=SimpleNamespace(start=a, end=b)) for k, a, b in spans]
    profile = SimpleNamespace(events=lambda: events)
    monkeypatch.setattr(torch.profiler, "profile", lambda activities: nullcontext(profile))
    done: list[int] = []
    assert clocks.idle_share(lambda: done.append(1)) == pytest.approx(0.75)
    assert done == [1]


def test_bandwidth_counts_what_is_read_and_what_is_written() -> None:
    assert clocks.copy_bandwidth(CPU, FakeClock({"copy": 0.25})) == 2 * 2**26 / 0.25


def test_idle_is_what_no_kernel_fills() -> None:
    spans = [(float(t), t + 0.5) for t in range(8)]
    assert clocks.idle_of(spans) == pytest.approx(0.5)
    assert clocks.idle_of([(float(t), t + 1.5) for t in reversed(range(8))]) == 0, "they may overlap, in any order"
    assert clocks.idle_of([]) is None
    assert clocks.idle_of([(1.0, 2.0)] * 8) is None


def test_each_moment_belongs_to_the_kernel_that_ends_next() -> None:
    """One that begins early only waits; a gap belongs to nobody."""
    spans = [(0.0, 4.0, "a"), (1.0, 6.0, "b"), (5.0, 7.0, "a"), (10.0, 11.0, "b")]
    found = clocks.kernel_times([clocks.Span(*span) for span in reversed(spans)], 2)
    assert found == [clocks.KernelTime("a", 1, 2.5), clocks.KernelTime("b", 1, 1.5)]


def test_kernels_are_those_of_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch)
    monkeypatch.setattr(clocks, "watched", lambda work: (work(), [clocks.Span(0.0, 3.0, "k")])[1])
    assert clocks.by_kernel(cuda.work, 3) == [clocks.KernelTime("k", 1 / 3, 1.0)]
    assert cuda.log == ["run", "capture 1", *["replay 1", "synchronized"] * 6]


def test_every_work_that_is_looked_into_runs(runner: Runner) -> None:
    seen: list[int] = []

    def watch(work: Any, repeats: int) -> list[Any]:
        work()
        seen.append(repeats)
        return [clocks.KernelTime(f"k{i}", 1, 30.0 - i) for i in range(14)]

    found = kernels.kernel_part(runner, watch, context=20)
    assert next(iter(found)) == "plain step"
    assert "tree of 64 rows" in found
    assert len(seen) == len(found) == 5
    assert found["plain step"][-1] == {"name": "others", "launches": 2, "us": 18.0 + 17.0}


def test_crowds_are_looked_into_with_a_head_as_it_is_opened(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their trees have 256 rows together; of each request a head reads 8 rows again, or 4 of small trees."""
    read: list[int] = []

    def noted(state: Any, lanes: Tensor, count: int, **options: Any) -> Any:
        read.append(len(lanes) * count)
        return last_rows(state, lanes, count, **options)

    monkeypatch.setattr(features, "last_rows", noted)
    sizes: list[int] = []

    def watch(work: Any, repeats: int) -> list[Any]:
        found = work()
        sizes.append(len(found) if isinstance(found, Tensor) else found.tokens.numel())
        return [clocks.KernelTime("k", 1, 3.0)]

    found = kernels.kernel_part(runner, watch, context=20, requests=(16, 64))
    assert list(found) == [
        *(
            "16 requests: plain step",
            "16 requests: trees of 16 rows",
            "16 requests: EAGLE-3 draft of 15 nodes in 8 bits",
        ),
        *("64 requests: plain step", "64 requests: trees of 4 rows", "64 requests: EAGLE-3 draft of 3 nodes in 8 bits"),
    ]
    assert sizes == [16, 256, 16 * 15, 64, 256, 64 * 4]
    assert read == [16 * 8, 64 * 4]
    assert heads.EagleDrafter(heads.random_head(runner, "plain")).depth == heads.OPENED_DEPTH
