"""Functions for `EngineProcess.call`: they run in the engine's process. Nothing here may need pytest."""

from __future__ import annotations

import ctypes
import gc
import itertools
import logging
import os
import sys
import threading
from typing import Any

from slipstream import LLM

_open = threading.Event()
_reached = threading.Event()


def everything_is_free(llm: LLM) -> None:
    llm._loop.call(lambda: None)  # behind whatever was asked for before
    assert not llm.engine.jobs
    assert not llm.engine.busy
    assert llm.engine.pool.free_pages == llm.engine.pool.num_pages


def hold(llm: LLM, passes: int = 0, then: str = "") -> None:
    """After `passes` more passes, hold the engine before the next one until it is released.

    then: "lock": native code goes on with the interpreter's lock; "device": the device fails.
    """
    forward, made = llm.engine.target.forward, itertools.count()
    _open.clear()
    _reached.clear()

    def held(batch: Any, cache: Any) -> Any:
        if next(made) >= passes:
            _reached.set()
            assert _open.wait(120)
            if then == "lock":
                ctypes.PyDLL(None).sleep(1000)
            if then == "device":
                raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return forward(batch, cache)

    llm.engine.target.forward = held  # type: ignore[method-assign]


def reached(llm: LLM) -> bool:
    """Waits until a pass was stopped."""
    return _reached.wait(60)


def release(llm: LLM) -> None:
    _open.set()


def kept(llm: LLM) -> int:
    """Jobs that this process keeps for the server: running, or compiled and not started."""
    child: Any = llm._loop.after_turn.__self__  # type: ignore[attr-defined]
    return len(child._jobs)


def generated_tokens(llm: LLM) -> int:
    return llm.snapshot().generated_tokens


def raises(llm: LLM, error: BaseException) -> None:
    raise error


def gives_what_cannot_be_sent(llm: LLM) -> Any:
    return threading.Lock()


def gives_what_cannot_be_read(llm: LLM) -> Any:
    return Unreadable()


class Unreadable:
    """Pickles, and cannot be unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _not_here, ()


def _not_here() -> None:
    raise ImportError("it is elsewhere")


def process_id(llm: LLM) -> int:
    return os.getpid()


def logs(llm: LLM, text: str) -> None:
    logging.getLogger("slipstream.inside").warning(text)


def turns(llm: LLM) -> tuple[float, bool]:
    """The switch interval, and whether old objects are frozen."""
    return sys.getswitchinterval(), gc.get_freeze_count() > 0
