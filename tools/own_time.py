"""Time by the work of the thread that computes: what other programs take of a shared machine's cores is left out.

One thread computes, and its clock goes on only while it does. What is measured so is not what a user waits for, but two
settings, or a simulation and its original, can be compared on a machine that is never quiet. What others do to the
caches and to memory still counts.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class OwnTime:
    """A thread's clock, with time in between in which nothing is to be done."""

    def __init__(self) -> None:
        self._skipped = 0.0

    def __call__(self) -> float:
        return time.thread_time() + self._skipped

    def skip_to(self, moment: float) -> None:
        self._skipped += max(0.0, moment - self())


@contextmanager
def by_own_time(clock: OwnTime | None = None) -> Iterator[None]:
    """The engine, its planner and who listens to it measure by the clock of the thread that asks.

    clock: for all threads; None: each its own, but for this one, which waits and does not compute.
    """
    real, threads, this = time.perf_counter, torch.get_num_threads(), threading.get_ident()

    def own() -> float:
        return real() if threading.get_ident() == this else time.thread_time()

    torch.set_num_threads(1)
    time.perf_counter = clock or own
    try:
        yield
    finally:
        time.perf_counter = real
        torch.set_num_threads(threads)
