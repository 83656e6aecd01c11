"""Sharing a pass among threads: each stage is cut into pieces, and a free thread takes the next one.

Another program may hold a core for milliseconds at any time. A thread that is suspended then keeps one piece, and the
others take the rest. A thread that finds no piece left polls for some microseconds until all are done, and then sleeps:
by polling on it would use up its share of a core and be suspended next.
"""

from __future__ import annotations

import platform
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from slipstream.kernels.cpu.llvm import inner

_DONE, _ASLEEP = 8, 16
"""Offsets in a stage's record of the count of finished pieces and of sleeping threads; pieces taken are at 0."""
_X86 = platform.machine() == "x86_64"
_FUTEX = np.int64(202 if _X86 else 98)
_WAIT, _WAKE, _ALL, _NO_TIMEOUT = np.int64(128), np.int64(129), np.int64(1 << 30), np.int64(0)
_LOOKS = 500
"""Polls before a thread sleeps, some 20 µs: the time of falling asleep and waking up."""

_syscall = types.ExternalFunction("syscall", types.int64(*[types.int64] * 5))


@intrinsic
def _add(typing: Any, address: Any, value: Any) -> Any:
    """Atomically add to the number at an address; returns the old value."""

    def generate(context: Any, builder: ir.IRBuilder, _: Any, arguments: Any) -> Any:
        place = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", place, arguments[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate


@intrinsic
def _read(typing: Any, address: Any) -> Any:
    """Atomically read the number at an address."""

    def generate(context: Any, builder: ir.IRBuilder, _: Any, arguments: Any) -> Any:
        return builder.load_atomic(builder.inttoptr(arguments[0], ir.IntType(64).as_pointer()), "seq_cst", 8)

    return types.int64(types.int64), generate


@intrinsic
def _pause(typing: Any) -> Any:
    """A pause instruction."""

    def generate(context: Any, builder: ir.IRBuilder, _: Any, arguments: Any) -> Any:
        name, given = ("llvm.x86.sse2.pause", []) if _X86 else ("llvm.aarch64.isb", [ir.Constant(ir.IntType(32), 15)])
        kind = ir.FunctionType(ir.VoidType(), [value.type for value in given])
        builder.call(cgutils.get_or_insert_function(builder.module, kind, name), given)
        return context.get_dummy_value()

    return types.void(), generate


@inner()
def _finish(stage: int, mine: int, pieces: int) -> None:
    """Report `mine` finished pieces, then wait until all are done."""
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
        else:  # the system checks the value again before the thread sleeps
            _add(stage + _ASLEEP, np.int64(1))
            _syscall(_FUTEX, stage + _DONE, _WAIT, done, _NO_TIMEOUT)
        done = _read(stage + _DONE)


def shared(work: Any) -> Any:
    """A compiled function with which all threads of a team together call work(first, last, *given) for all units.

    It is called as (stage, units, size, *given) by each thread, `size` being the units of a piece, and returns when all
    units are done.
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
    """Units of a piece: each thread gets some 8 pieces, of at least `least` units."""
    return max(least, (units + 8 * team - 1) // (8 * team))
