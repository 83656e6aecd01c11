"""The inner loop of a CPU product, in vectors of 16 numbers: 4 rows of the weight times up to 6 rows of the input.

Compilers do not find this loop from a scalar one: which numbers stay in registers decides the speed, and so does asking
for the next rows of the weight while these are being used. So it is written in LLVM's own terms. numba compiles it.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from slipstream.kernels.codes import BLOCK, LANES, TILE, block_bytes

_I32, _I64, _F32 = ir.IntType(32), ir.IntType(64), ir.FloatType()
_VECTOR = ir.VectorType(_F32, LANES)
_BYTES = ir.IntType(8).as_pointer()
_READ, _SECOND_CACHE, _DATA = 0, 2, 1


def tile(rows: int, bits: int) -> Any:
    """A function for compiled code: (weight, input, k, out, ld_out, ahead) with addresses and sizes, all int64.

    out[m, n] = sum over k of weight[n, k] * input[m, k], for 4 rows n and `rows` rows m; `ld_out` numbers lie between
    two rows of `out`. bits: 32 for a plain weight, k being a multiple of 16; 4 or 8 for one in codes (`codes.py`).
    Each sum is added up in the same order whatever `rows` and `bits` are.
    ahead: bytes from the weights used now to those to ask for; 0 where they were asked for already.
    """

    @intrinsic
    def product(typing: Any, weight: Any, x: Any, k: Any, out: Any, ld_out: Any, ahead: Any) -> Any:
        signature = types.void(*[types.int64] * 6)

        def generate(context: Any, builder: ir.IRBuilder, _: Any, arguments: Any) -> Any:
            builder.function.attributes.add("noinline")  # copies in every caller would take long to compile
            _Tile(builder, rows, bits).emit(*arguments)
            return context.get_dummy_value()

        return signature, generate

    return product


class _Tile:
    """Writes one tile into a function that is being built."""

    def __init__(self, builder: ir.IRBuilder, rows: int, bits: int) -> None:
        self.b = builder
        self.rows = rows
        self.bits = bits
        self.vectors = 1 if bits == 32 else BLOCK // LANES  # of weights that one step takes from a row
        self.step_bytes = 4 * LANES if bits == 32 else block_bytes(bits)
        self.fma = _declared(builder, "llvm.fma.v16f32", _VECTOR, [_VECTOR] * 3)
        self.prefetch = _declared(builder, "llvm.prefetch.p0", ir.VoidType(), [_BYTES, _I32, _I32, _I32])

    def emit(self, weight: Any, x: Any, k: Any, out: Any, ld_out: Any, ahead: Any) -> None:
        b, rows = self.b, self.rows
        steps = b.udiv(k, _int(LANES * self.vectors))
        weights = [b.add(weight, b.mul(b.mul(steps, _int(self.step_bytes)), _int(n))) for n in range(TILE)]
        inputs = [b.add(x, b.mul(k, _int(4 * m))) for m in range(rows)]

        before = b.block
        loop, after = b.append_basic_block("along_k"), b.append_basic_block("reduce")
        b.branch(loop)
        b.position_at_end(loop)
        step = b.phi(_I64)
        sums = [[b.phi(_VECTOR) for _ in range(TILE)] for _ in range(rows)]
        grown = [list(row) for row in sums]
        at, x_at = b.mul(step, _int(self.step_bytes)), b.mul(step, _int(4 * LANES * self.vectors))
        for address in weights:
            later = b.inttoptr(b.add(b.add(address, at), ahead), _BYTES)
            b.call(self.prefetch, [later, *(ir.Constant(_I32, hint) for hint in (_READ, _SECOND_CACHE, _DATA))])
        taken = [self._weights(b.add(address, at)) for address in weights]
        for m in range(rows):
            for v in range(self.vectors):
                value = self._load(b.add(b.add(inputs[m], x_at), _int(4 * LANES * v)), _VECTOR)
                for n in range(TILE):
                    grown[m][n] = b.call(self.fma, [taken[n][v], value, grown[m][n]])
        following = b.add(step, _int(1))
        step.add_incoming(_int(0), before)
        step.add_incoming(following, loop)
        for m in range(rows):
            for n in range(TILE):
                sums[m][n].add_incoming(ir.Constant(_VECTOR, [0.0] * LANES), before)
                sums[m][n].add_incoming(grown[m][n], loop)
        b.cbranch(b.icmp_unsigned("<", following, steps), loop, after)

        b.position_at_end(after)
        for m in range(rows):
            place = b.add(out, b.mul(_int(4 * m), ld_out))
            store = b.store(_reduced(b, grown[m]), b.inttoptr(place, ir.VectorType(_F32, TILE).as_pointer()))
            store.align = 4

    def _weights(self, address: ir.Value) -> list[ir.Value]:
        """The weights of one step of one row, as vectors."""
        if self.bits == 32:
            return [self._load(address, _VECTOR)]
        b = self.b
        scale, low = (self._spread(self._load(b.add(address, _int(4 * i)), _F32)) for i in range(2))
        codes = b.add(address, _int(8))
        wide, narrow = ir.VectorType(_I32, LANES), ir.VectorType(ir.IntType(8), LANES)
        if self.bits == 4:
            both = b.zext(self._load(codes, narrow), wide)
            numbers = [
                b.and_(both, ir.Constant(wide, [15] * LANES)),
                b.lshr(both, ir.Constant(wide, [4] * LANES)),
            ]
        else:
            numbers = [b.sext(self._load(b.add(codes, _int(LANES * v)), narrow), wide) for v in range(self.vectors)]
        return [b.call(self.fma, [b.sitofp(number, _VECTOR), scale, low]) for number in numbers]

    def _spread(self, value: ir.Value) -> ir.Value:
        one = self.b.insert_element(ir.Constant(_VECTOR, ir.Undefined), value, ir.Constant(_I32, 0))
        return self.b.shuffle_vector(one, one, ir.Constant(ir.VectorType(_I32, LANES), [0] * LANES))

    def _load(self, address: ir.Value, kind: ir.Type) -> ir.Value:
        loaded = self.b.load(self.b.inttoptr(address, kind.as_pointer()))
        loaded.align = 1
        return loaded


def _reduced(b: ir.IRBuilder, sums: list[ir.Value]) -> ir.Value:
    """The totals of 4 vectors as one vector of 4: halves, then quarters are added, the four side by side."""

    def pick(left: ir.Value, right: ir.Value, lanes: list[int]) -> ir.Value:
        return b.shuffle_vector(left, right, ir.Constant(ir.VectorType(_I32, len(lanes)), lanes))

    low, high = [*range(8), *range(16, 24)], [*range(8, 16), *range(24, 32)]
    first = b.fadd(pick(sums[0], sums[1], low), pick(sums[0], sums[1], high))  # 8 lanes each of sums 0, 1
    second = b.fadd(pick(sums[2], sums[3], low), pick(sums[2], sums[3], high))  # 8 lanes each of sums 2, 3
    even = [*range(4), *range(8, 12), *range(16, 20), *range(24, 28)]
    odd = [lane + 4 for lane in even]
    quarters = b.fadd(pick(first, second, even), pick(first, second, odd))  # 4 lanes each of sums 0, 1, 2, 3
    for swap in (2, 1):
        quarters = b.fadd(quarters, pick(quarters, quarters, [lane ^ swap for lane in range(LANES)]))
    return pick(quarters, quarters, [0, 4, 8, 12])


def _int(value: int) -> ir.Constant:
    return ir.Constant(_I64, value)


def _declared(b: ir.IRBuilder, name: str, result: ir.Type, arguments: list[ir.Type]) -> ir.Function:
    return cgutils.get_or_insert_function(b.module, ir.FunctionType(result, arguments), name)
