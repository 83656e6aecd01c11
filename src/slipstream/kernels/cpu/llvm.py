"""Vectors of 16 numbers as LLVM instructions, for the inner loops that decide the speed of a CPU pass.

Compilers do not derive these loops from scalar ones: the speed depends on which numbers stay in registers, and on
prefetching. numba compiles what is written here. Also pointers and bit casts, which numba lacks.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from slipstream.kernels.cpu.interface import LANES

I32, I64, F32 = ir.IntType(32), ir.IntType(64), ir.FloatType()
VECTOR = ir.VectorType(F32, LANES)
WIDE = ir.VectorType(I32, LANES)
NARROW = ir.VectorType(ir.IntType(8), LANES)
_BITS = ir.VectorType(ir.IntType(1), LANES)
_BYTES = ir.IntType(8).as_pointer()
_READ, _FIRST_CACHE, _SECOND_CACHE, _DATA = 0, 3, 2, 1

LOOKS_UP = MASKS = platform.machine() == "x86_64"
"""Whether the machine can look up 16 numbers in a register, and load some lanes of a vector. Without masked loads each
lane is loaded by itself."""
STRIP = LANES if MASKS else 4
"""Lanes of a register. A vector of 16 may take several: sums that must stay in registers are no wider."""
SUM = ir.VectorType(F32, STRIP)


class Vectors:
    """Writes vector instructions into a function under construction. Addresses and sizes are int64."""

    def __init__(self, builder: ir.IRBuilder) -> None:
        self.b = builder

    def load(self, address: ir.Value, kind: ir.Type = VECTOR) -> ir.Value:
        loaded = self.b.load(self.b.inttoptr(address, kind.as_pointer()))
        loaded.align = 1
        return loaded

    def store(self, value: ir.Value, address: ir.Value) -> None:
        stored = self.b.store(value, self.b.inttoptr(address, value.type.as_pointer()))
        stored.align = 1

    def first_lanes(self, count: ir.Value) -> ir.Value:
        """The lanes below a count: none for 0 or less, all for 16 or more."""
        lanes = ir.Constant(ir.VectorType(I64, LANES), list(range(LANES)))
        return self.b.icmp_signed("<", lanes, self.spread(count))

    def load_some(self, address: ir.Value, lanes: ir.Value) -> ir.Value:
        """Load these lanes; the others are 0."""
        load = self._declared("llvm.masked.load.v16f32.p0", VECTOR, [_BYTES, I32, _BITS, VECTOR])
        return self.b.call(load, [self.b.inttoptr(address, _BYTES), ir.Constant(I32, 1), lanes, zeros()])

    def store_some(self, value: ir.Value, address: ir.Value, lanes: ir.Value) -> None:
        store = self._declared("llvm.masked.store.v16f32.p0", ir.VoidType(), [VECTOR, _BYTES, I32, _BITS])
        self.b.call(store, [value, self.b.inttoptr(address, _BYTES), ir.Constant(I32, 1), lanes])

    def either(self, whole: ir.Value, emit: Callable[[Callable[..., ir.Value], Callable[..., None]], None]) -> None:
        """emit(load_some, store_some) for code whose last vector may be partial. whole: the last vector is complete.

        Where masks are slow, the code is emitted twice, and the function chooses at run time.
        """
        if MASKS:
            emit(self.load_some, self.store_some)
            return
        with self.b.if_else(whole) as (then, otherwise):
            with then:
                emit(lambda address, _: self.load(address), lambda value, address, _: self.store(value, address))
            with otherwise:
                emit(self.load_some, self.store_some)

    def spread(self, value: ir.Value) -> ir.Value:
        """One number in every lane."""
        one = self.b.insert_element(
            ir.Constant(ir.VectorType(value.type, LANES), ir.Undefined), value, ir.Constant(I32, 0)
        )
        return self.b.shuffle_vector(one, one, ir.Constant(WIDE, [0] * LANES))

    def fma(self, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
        return self.b.call(self._declared(f"llvm.fma.v{a.type.count}f32", a.type, [a.type] * 3), [a, b, c])

    def larger(self, a: ir.Value, b: ir.Value) -> ir.Value:
        return self.b.call(self._declared("llvm.maxnum.v16f32", VECTOR, [VECTOR] * 2), [a, b])

    def largest(self, a: ir.Value) -> ir.Value:
        """The largest number of a vector, ignoring NaN unless all are NaN."""
        for swap in (8, 4, 2, 1):
            a = self.larger(a, self._pick(a, a, [lane ^ swap for lane in range(LANES)]))
        return self.b.extract_element(a, ir.Constant(I32, 0))

    def looked_up(self, table: ir.Value, indices: ir.Value) -> ir.Value:
        """The numbers of a table of 16 at the indices, of which only the low 4 bits are used."""
        permute = self._declared("llvm.x86.avx512.permvar.sf.512", VECTOR, [VECTOR, WIDE])
        return self.b.call(permute, [table, indices])

    def prefetch(self, address: ir.Value, *, near: bool = False) -> None:
        """Prefetch into the core's second cache; near: into the first."""
        prefetch = self._declared("llvm.prefetch.p0", ir.VoidType(), [_BYTES, I32, I32, I32])
        hints = [ir.Constant(I32, hint) for hint in (_READ, _FIRST_CACHE if near else _SECOND_CACHE, _DATA)]
        self.b.call(prefetch, [self.b.inttoptr(address, _BYTES), *hints])

    def strips(self, vector: ir.Value) -> list[ir.Value]:
        """A vector of 16 as registers."""
        return [vector] if STRIP == LANES else [self.part(vector, at, STRIP) for at in range(0, LANES, STRIP)]

    def totals(self, sums: Sequence[ir.Value]) -> ir.Value:
        """The totals of 4 vectors as one vector of 4: the sums of halves, then of quarters, side by side."""
        quarters = self._quarters(sums) if sums[0].type.count == LANES else self._side_by_side(sums)
        for swap in (2, 1):
            quarters = self.b.fadd(quarters, self._pick(quarters, quarters, [lane ^ swap for lane in range(LANES)]))
        return self._pick(quarters, quarters, [0, 4, 8, 12])

    def _side_by_side(self, sums: Sequence[ir.Value]) -> ir.Value:
        """4 vectors of 4 as one of 16."""
        both = list(range(8))
        return self._pick(self._pick(sums[0], sums[1], both), self._pick(sums[2], sums[3], both), list(range(LANES)))

    def _quarters(self, sums: Sequence[ir.Value]) -> ir.Value:
        """4 vectors of 16, each reduced to 4 lanes, side by side."""
        b = self.b
        low, high = [*range(8), *range(16, 24)], [*range(8, 16), *range(24, 32)]
        first = b.fadd(self._pick(sums[0], sums[1], low), self._pick(sums[0], sums[1], high))  # 8 lanes each of 0, 1
        second = b.fadd(self._pick(sums[2], sums[3], low), self._pick(sums[2], sums[3], high))  # 8 lanes each of 2, 3
        even = [*range(4), *range(8, 12), *range(16, 20), *range(24, 28)]
        odd = [lane + 4 for lane in even]
        return b.fadd(self._pick(first, second, even), self._pick(first, second, odd))  # 4 lanes each of 0, 1, 2, 3

    def part(self, vector: ir.Value, start: int, size: int) -> ir.Value:
        """Neighbouring lanes of a vector."""
        return self._pick(vector, vector, list(range(start, start + size)))

    def repeat(
        self, times: ir.Value, starts: Sequence[ir.Value], body: Callable[..., list[ir.Value]]
    ) -> list[ir.Value]:
        """A loop of at least one turn: body(turn, *values) returns the next values; returns the last ones."""
        b = self.b
        before = b.block
        loop, after = b.append_basic_block("turns"), b.append_basic_block("turned")
        b.branch(loop)
        b.position_at_end(loop)
        turn = b.phi(I64)
        values = [b.phi(start.type) for start in starts]
        results = body(turn, *values)
        following = b.add(turn, number(1))
        for phi, start, result in zip((turn, *values), (number(0), *starts), (following, *results), strict=True):
            phi.add_incoming(start, before)
            phi.add_incoming(result, b.block)
        b.cbranch(b.icmp_unsigned("<", following, times), loop, after)
        b.position_at_end(after)
        return results

    def _pick(self, left: ir.Value, right: ir.Value, lanes: list[int]) -> ir.Value:
        return self.b.shuffle_vector(left, right, ir.Constant(ir.VectorType(I32, len(lanes)), lanes))

    def _declared(self, name: str, result: ir.Type, arguments: list[ir.Type]) -> ir.Function:
        return cgutils.get_or_insert_function(self.b.module, ir.FunctionType(result, arguments), name)


def body(arguments: int, emit: Callable[..., None]) -> Any:
    """The (signature, codegen) pair of an intrinsic with int64 arguments; emit(vectors, *arguments) writes its body."""

    def generate(context: Any, builder: ir.IRBuilder, _: Any, values: Any) -> Any:
        builder.function.attributes.add("noinline")  # inlining it into every caller would take long to compile
        emit(Vectors(builder), *values)
        return context.get_dummy_value()

    return types.void(*[types.int64] * arguments), generate


def number(value: int) -> ir.Constant:
    return ir.Constant(I64, value)


def zeros(kind: ir.VectorType = VECTOR) -> ir.Constant:
    return ir.Constant(kind, [0.0] * kind.count)


def inner(**options: Any) -> Any:
    """Decorates functions that only compiled code calls: compiling entry points from Python would double the time."""
    return njit(error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True, **options)


def _pointer_to(kind: Any) -> Any:
    @intrinsic
    def pointer(typing: Any, address: Any) -> Any:
        target = types.CPointer(kind)

        def generate(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(target))

        return target(types.int64), generate

    return pointer


floats = _pointer_to(types.float32)
"""The fp32 numbers at an address."""
integers = _pointer_to(types.int64)
"""The int64 numbers at an address."""
bytes_at = _pointer_to(types.uint8)
"""The bytes at an address."""


@intrinsic
def float_of_bits(typing: Any, bits: Any) -> Any:
    """The fp32 number with the bits of this int32."""

    def generate(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], context.get_value_type(types.float32))

    return types.float32(types.int32), generate


@intrinsic
def anything(typing: Any, address: Any) -> Any:
    """An untyped pointer, as `carray` takes it."""

    def generate(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.int64), generate
