"""How Python treats threads that wait for each other, in a process where one computes and others hear of requests."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_SWITCH_S = 0.0001
"""How long a thread may compute while another waits for the interpreter; Python's own, 5 ms, would be a whole round."""

_RARELY = 2000
"""Python's searches for garbage among what is young, to one through everything; Python's own is 10, and among many
requests some seconds. Where there is always something to do it is a minute."""


@contextmanager
def responsive() -> Iterator[None]:
    """Inside, threads take turns quickly, and none is held up by a search through all that is there already."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(before, _SWITCH_S))
    try:
        with rarely_searched():
            yield
    finally:
        sys.setswitchinterval(before)


@contextmanager
def rarely_searched() -> Iterator[None]:
    """Whatever makes many objects at once, a large body or a crowd of requests, has Python look for garbage: inside not
    among all that torch and the model have brought, and among all that came later rarely, or when there is time
    (`tidy`).
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
    """There is time for what `rarely_searched` puts off. Nothing is done where it does not, or where nothing was."""
    young, _, everything = gc.get_threshold()
    if young and everything >= _RARELY and gc.get_count()[2]:
        gc.collect()
