"""Python processes that we start: they find the modules that this one finds, where it finds them, and no others."""

from __future__ import annotations

import os
import sys


def command(*arguments: str) -> list[str]:
    """This Python with these arguments; with `surroundings`.

    -P: without it, `-m` and `-c` take modules first of all from the folder that the program happens to be started in.
    """
    return [sys.executable, "-P", *arguments]


def surroundings(**more: str) -> dict[str, str]:
    """Our environment, with these changed."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([path or os.getcwd() for path in sys.path]), **more}
