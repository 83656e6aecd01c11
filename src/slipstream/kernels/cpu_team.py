"""How the threads of a team share a pass: each stage of it is cut into pieces, and a free thread takes the next one.

Another program may hold a core for milliseconds at any time. A thread that is not running then keeps one piece, and
the others take the rest. A thread that finds no piece left looks for some microseconds whether all are done, and then
sleeps until they are: if it went on looking, it would use up its share of a core and be the next to lose it.
"""

from __future__ import annotations

import platform
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from slipstream.kernels.cpu_address import inner

_DONE, _ASLEEP = 8, 16
"""Where a stage's record counts pieces that are done, and threads that went to sleep; at its begin, pieces taken."""
_X86 = platform.machine() == "x86_64"
_FUTEX = np.int64(202 if _X86 else 98)
_WAIT, _WAKE, _ALL, _NO_TIMEOUT = np.int64(128), np.int64(129), np.int64(1 << 30), np.int64(0)
_LOOKS = 500
"""Looks before a thread sleeps, some 20 µs: as long as falling asleep and waking up take."""

_syscall = types.ExternalFunction("syscall", types.int64(*[types.int64] * 5))


@intrinsic
def _add(typing: Any, address: Any, value: Any) -> Any:
    """Add to the number at an address, in one step for all threads; gives back what it was."""

    def generate(context: Any, builder: ir.IRBuilder, _: Any, arguments: Any) -> Any:
        place = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", place, arguments[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate


@intrinsic
def _read(typing: Any, address: Any) -> Any:
    """The number at an address, as other threads left it."""

    def generate(context: Any, builder: ir.IRBuilder, _: Any, arguments: Any) -> Any:
        return builder.load_atomic(builder.inttoptr(arguments[0], ir.IntType(64).as_pointer()), "seq_cst", 8)

    return types.int64(types.int64), generate


@intrinsic
def _pause(typing: Any) -> Any:
    """Let the core rest for a moment."""

    def generate(context: Any, builder: ir.IRBuilder, _: Any, arguments: Any) -> Any:
        name, given = ("llvm.x86.sse2.pause", []) if _X86 else ("llvm.aarch64.isb", [ir.Constant(ir.IntType(32), 15)])
        kind = ir.FunctionType(ir.VoidType(), [value.type for value in given])
        builder.call(cgutils.get_or_insert_function(builder.module, kind, name), given)
        return context.get_dummy_value()

    return types.void(), generate


@inner()
def _finish(stage: int, mine: int, pieces: int) -> None:
    """This thread has done so many pieces and found no more: wait until all are done."""
    if mine > 0 and _add(stage + _DONE, mine) + mine == pieces:
        if _read(stage + _ASLEEP) > 0:
            _syscall(_FUTEX, stage + _DONE, _WAKE, _ALL, _NO_TIMEOUT)
        return
    looks = 0
    done = _read(stage + _DONE)
    while done < pieces:
        looks += 1
        if looks < _LOOKS:
            _pause()
        else:  # the system looks once more before it lets the thread sleep
            _add(stage + _ASLEEP, np.int64(1))
            _syscall(_FUTEX, stage + _DONE, _WAIT, done, _NO_TIMEOUT)
        done = _read(stage + _DONE)


def shared(work: Any) -> Any:
    """A compiled function that does work(first, last, *given) for all units of a stage together with the other threads.

    It is called as (stage, units, size, *given), `size` being the units of a piece, and returns when all are done.
    """

    @inner()
    def run(stage: int, units: int, size: int, *given: Any) -> None:
        mine = np.int64(0)
        first = _add(stage, np.int64(1)) * size
        while first < units:
            work(first, min(first + size, units), *given)
            mine += 1
            first = _add(stage, np.int64(1)) * size
        _finish(stage, mine, (units + size - 1) // size)

    return run


@inner()
def piece_of(units: int, least: int, team: int) -> int:
    """Units of a piece, so that each thread gets some 8 of them, but no less than `least`."""
    return max(least, (units + 8 * team - 1) // (8 * team))
