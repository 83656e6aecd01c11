"""The Python interpreter: processes that we start, turns of threads, garbage collection."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_PR_SET_PDEATHSIG = 1
_SWITCH_S = 0.0001
"""Seconds that a thread may compute while another waits for the interpreter. Python's own 5 ms are a whole step."""

_RARELY = 2000
"""Young collections of garbage to one of all generations. Python's own 10 come within seconds among many requests; this
is a minute where there is always work."""


def command(*arguments: str) -> list[str]:
    """This Python with these arguments, for a process that imports the modules of this one; use with `surroundings`.

    -P: without it, `-m` and `-c` take modules first of all from the folder that the program happens to be started in.
    """
    return [sys.executable, "-P", *arguments]


def surroundings(**more: str) -> dict[str, str]:
    """Our environment, with these changed."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([path or os.getcwd() for path in sys.path]), **more}


def end_with(parent: int) -> None:
    """In a process that we started: have Linux kill it when its parent's thread ends, whatever it is doing.

    On other systems the process has to notice that by itself.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(1)


@contextmanager
def responsive() -> Iterator[None]:
    """Let threads take turns quickly, without pauses for garbage collection of old objects."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(before, _SWITCH_S))
    try:
        with rarely_searched():
            yield
    finally:
        sys.setswitchinterval(before)


@contextmanager
def rarely_searched() -> Iterator[None]:
    """Collect no garbage among the objects that exist now (torch, the model), and rarely among all later ones.

    A large body or many requests at once trigger collections. `tidy` makes up for it when there is time.
    """
    searches = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*searches[:2], max(searches[2], _RARELY))
    try:
        yield
    finally:
        gc.set_threshold(*searches)
        gc.unfreeze()


def tidy() -> None:
    """Collect the garbage that `rarely_searched` left; nothing to do outside of it."""
    young, _, everything = gc.get_threshold()
    if young and everything >= _RARELY and gc.get_count()[2]:
        gc.collect()
