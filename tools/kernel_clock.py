"""Timing on a device: CUDA graphs, events, the profiler, bandwidth.

Code that only CUDA can run is here alone, so that tests can run the rest of the benchmark on a CPU.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

import torch

from slipstream.kernels.gpu.jit import recording

Work = Callable[[], object]
Clock = Callable[[Mapping[str, Work], int], dict[str, float]]
"""From works and repeats to the median seconds of each work. Works take turns, so that drift hits all."""

_COPY_BYTES = {"cuda": 1 << 32, "cpu": 1 << 26}


def clock_of(device: torch.device) -> Clock:
    return graph_clock if device.type == "cuda" else host_clock


@torch.inference_mode()
def graph_clock(works: Mapping[str, Work], repeats: int) -> dict[str, float]:
    """Capture each work as a CUDA graph, and time its replays by events, without waiting for the host in between."""
    graphs = {name: _captured(work) for name, work in works.items()}
    marks: dict[str, list[tuple[Any, Any]]] = {name: [] for name in works}
    for timed in (False, *([True] * repeats)):
        for name, graph in graphs.items():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            if timed:
                marks[name].append((begin, end))
    torch.cuda.synchronize()
    return {name: median(begin.elapsed_time(end) for begin, end in pairs) / 1e3 for name, pairs in marks.items()}


def _captured(work: Work) -> Any:
    """Capture a work as a round is captured; a first run on a side stream compiles its kernels."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), recording():  # products have other tiles there
        work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with recording(), torch.cuda.graph(graph, capture_error_mode="thread_local"):  # an engine's thread may be there too
        work()
    return graph


@torch.inference_mode()
def host_clock(works: Mapping[str, Work], repeats: int) -> dict[str, float]:
    """Time work on the host, by the host's clock."""
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for work in works.values():
        work()
    for _ in range(repeats):
        for name, work in works.items():
            start = time.perf_counter()
            work()
            seconds[name].append(time.perf_counter() - start)
    return {name: median(taken) for name, taken in seconds.items()}


def copy_bandwidth(device: torch.device, clock: Clock | None = None) -> float:
    """Bytes per second of a copy on the device, counting reads and writes."""
    source = torch.empty(_COPY_BYTES[device.type] // 8, dtype=torch.int64, device=device).random_()
    target = torch.empty_like(source)
    work = {"copy": lambda: torch.bitwise_not(source, out=target)}
    return 2 * source.numel() * 8 / (clock or clock_of(device))(work, 8)["copy"]


class Span(NamedTuple):
    """The time of a kernel's run, in microseconds."""

    start: float
    end: float
    name: str


def watched(work: Work) -> list[Span]:
    """All kernels that ran for a work."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        work()
        torch.cuda.synchronize()
    events: Any = profile.events()
    on_device = [event for event in events if str(event.device_type).endswith("CUDA")]
    return [Span(event.time_range.start, event.time_range.end, event.name) for event in on_device]


class KernelTime(NamedTuple):
    """The time of one kernel in a work."""

    name: str
    launches: float
    us: float


@torch.inference_mode()
def by_kernel(work: Work, repeats: int) -> list[KernelTime]:
    """The time of a work, captured as a graph, by kernel in descending order."""
    graph = _captured(work)

    def play() -> None:
        for _ in range(repeats):
            graph.replay()
            torch.cuda.synchronize()

    play()
    return kernel_times(watched(play), repeats)


def kernel_times(spans: Sequence[Span], repeats: int) -> list[KernelTime]:
    """Each moment counts for the kernel that ends next; kernels that have begun behind it only wait for it."""
    found: dict[str, list[float]] = {}
    last = -math.inf
    for span in sorted(spans, key=lambda span: span.end):
        found.setdefault(span.name, []).append(max(span.end - max(span.start, last), 0.0))
        last = span.end
    times = [KernelTime(name, len(us) / repeats, sum(us) / repeats) for name, us in found.items()]
    return sorted(times, key=lambda one: -one.us)


def free(device: torch.device) -> int:
    """Free unused memory of the device; returns the bytes that are still held."""
    gc.collect()
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated()
