"""Work on a GPU as one launch. Recording it takes far longer than running it, so it is counted; and so is compiling
kernels of work that is not recorded: both happen once, while somebody waits."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from slipstream.kernels.jit import is_recording, recording, triton


@dataclass(slots=True)
class Recorded:
    """How many graphs this process recorded, and kernels it compiled beside them; and how long all of that took."""

    graphs: int = 0
    seconds: float = 0.0
    kernels: int = 0


recorded = Recorded()


def count_compiling() -> None:
    """From now on, kernels that are compiled while no graph is recorded are counted, too."""
    settings = getattr(getattr(triton, "knobs", None), "compilation", None)
    if settings is not None and not isinstance(before := getattr(settings, "listener", None), _Counting):
        settings.listener = _Counting(before)


class _Counting:
    """Hears of every kernel that Triton compiles, or finds compiled. before: who heard of them so far."""

    def __init__(self, before: Callable[..., None] | None) -> None:
        self._before = before

    def __call__(self, *, times: Any, cache_hit: bool, **told: Any) -> None:
        if not is_recording():  # a recording is timed as a whole
            recorded.seconds += times.total / 1e6
            recorded.kernels += not cache_hit
        if self._before is not None:
            self._before(times=times, cache_hit=cache_hit, **told)


@cache
def _side(device: int) -> torch.cuda.Stream:
    """Where graphs are recorded: always the same, since memory that was freed on one stream is not used on another."""
    return torch.cuda.Stream(device)


def captured(work: Callable[[], None], pool: Any) -> Callable[[], None]:
    """The same work as one launch. A first run compiles what must be compiled.

    pool: memory that graphs share. What one of them leaves there lasts until another one runs.
    """
    start = time.perf_counter()
    side = _side(torch.cuda.current_device())
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), recording():
        work()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.current_stream().synchronize()  # what was freed on another stream may be used in the graph
    graph = torch.cuda.CUDAGraph()
    # `torch.cuda.graph` would also give all unused memory back to the driver, and it would be asked for again
    with torch.cuda.stream(side), recording():
        # what other threads do with the device is none of the capture's business
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            work()
        finally:
            graph.capture_end()
    recorded.graphs += 1
    recorded.seconds += time.perf_counter() - start
    return graph.replay
