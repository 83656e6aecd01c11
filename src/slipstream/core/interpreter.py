"""Python processes that we start: they find the modules that this one finds, where it finds them, and no others."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def command(*arguments: str) -> list[str]:
    """This Python with these arguments; with `surroundings`.

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
