"""How Python treats threads that wait for each other, in a process where one computes and others hear of requests."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_SWITCH_S = 0.0001
"""How long a thread may compute while another waits for the interpreter; Python's own, 5 ms, would be a whole round."""


@contextmanager
def responsive() -> Iterator[None]:
    """Inside, threads take turns quickly, and none is held up by a search through all that is there already.

    Whatever makes many objects at once, a large body or a crowd of requests, has Python look for garbage: not among
    all that torch and the model have brought.
    """
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(before, _SWITCH_S))
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        sys.setswitchinterval(before)
