"""The inner loops of a CPU product, in vectors of 16 numbers: 4 rows of the weight times up to 6 rows of the input.

A weight in codes is decoded in registers for some input rows. For many it is decoded once, into a panel that stays in
the core's second cache, and taken from there. Same numbers, same order: same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.extending import intrinsic

from slipstream.kernels.codes import BLOCK, LANES, block_bytes
from slipstream.kernels.cpu_vectors import F32, LOOKS_UP, NARROW, STRIP, SUM, VECTOR, WIDE, Vectors, body, number, zeros

_NEAR_BYTES = 512
"""How far ahead of the weights used now those of the second cache are asked for."""


def tile(height: int, rows: int, bits: int, near: bool = False) -> Any:
    """A function for compiled code: (weight, input, k, out, ld_out, ahead) with addresses and sizes, all int64.

    out[m, n] = sum over k of weight[n, k] * input[m, k], for `height` rows n and `rows` rows m; `ld_out` numbers lie
    between two rows of `out`. bits: 32 for a plain weight, k being a multiple of 16; 4 or 8 for codes (`codes.py`).
    Each sum is added up in the same order whatever height, rows and bits are.
    ahead: bytes from the weights used now to those to ask for; 0 where they were asked for already.
    near: the weight is in the second cache: what follows is asked for into the first.
    """
    vectors = 1 if bits == 32 else BLOCK // LANES  # of weights that one step takes from a row
    step_bytes = 4 * LANES if bits == 32 else block_bytes(bits)

    def emit(v: Vectors, weight: Any, x: Any, k: Any, out: Any, ld_out: Any, ahead: Any) -> None:
        b = v.b
        steps = b.udiv(k, number(LANES * vectors))
        weights = [b.add(weight, b.mul(b.mul(steps, number(step_bytes)), number(n))) for n in range(height)]
        inputs = [b.add(x, b.mul(k, number(4 * m))) for m in range(rows)]

        def along_k(step: Any, *sums: Any) -> list[Any]:
            grown = list(sums)
            at, x_at = b.mul(step, number(step_bytes)), b.mul(step, number(4 * LANES * vectors))
            for address in weights:
                v.ask_for(b.add(b.add(address, at), number(_NEAR_BYTES) if near else ahead), near=near)
            decoded = [_strips(v, b.add(address, at), bits) for address in weights]
            for part in range(vectors * LANES // STRIP):
                taken = [strips(part) for strips in decoded]
                for m in range(rows):
                    value = v.load(b.add(b.add(inputs[m], x_at), number(4 * STRIP * part)), SUM)
                    for n in range(height):
                        grown[m * height + n] = v.fma(taken[n], value, grown[m * height + n])
            return grown

        sums = v.repeat(steps, [zeros(SUM)] * (height * rows), along_k)
        places = [
            b.add(b.add(out, b.mul(number(4 * m), ld_out)), number(4 * n)) for m in range(rows) for n in range(height)
        ]
        for first in range(0, len(sums), 4):
            totals = v.totals((sums[first : first + 4] * 2)[:4])
            for i in range(0, len(sums[first : first + 4]), height):
                v.store(v.part(totals, i, height), places[first + i])

    @intrinsic
    def product(typing: Any, weight: Any, x: Any, k: Any, out: Any, ld_out: Any, ahead: Any) -> Any:
        return body(6, emit)

    return product


def decoder(bits: int) -> Any:
    """A function for compiled code: (codes, blocks, out, ahead), that writes the numbers of so many blocks of codes."""

    def emit(v: Vectors, codes: Any, blocks: Any, out: Any, ahead: Any) -> None:
        b = v.b

        def one(block: Any) -> list[Any]:
            at = b.add(codes, b.mul(block, number(block_bytes(bits))))
            v.ask_for(b.add(at, ahead))
            place = b.add(out, b.mul(block, number(4 * BLOCK)))
            for part, numbers in enumerate(_weights(v, at, bits)):
                v.store(numbers, b.add(place, number(4 * LANES * part)))
            return []

        v.repeat(blocks, [], one)

    @intrinsic
    def decode(typing: Any, codes: Any, blocks: Any, out: Any, ahead: Any) -> Any:
        return body(4, emit)

    return decode


def _strips(v: Vectors, address: ir.Value, bits: int) -> Callable[[int], ir.Value]:
    """The weights of one step of one row, register by register. Plain ones are loaded when they are asked for."""
    if bits == 32:
        return lambda part: v.load(v.b.add(address, number(4 * STRIP * part)), SUM)
    return [strip for vector in _weights(v, address, bits) for strip in v.strips(vector)].__getitem__


def _weights(v: Vectors, address: ir.Value, bits: int) -> list[ir.Value]:
    """The weights of a block of codes, as two vectors of 16."""
    b = v.b
    scale, low = (v.spread(v.load(b.add(address, number(4 * i)), F32)) for i in range(2))
    codes = b.add(address, number(8))
    if bits == 4:
        if LOOKS_UP:  # a block has 16 different numbers: fewer instructions than to compute all 32
            table = v.fma(ir.Constant(VECTOR, [float(code) for code in range(16)]), scale, low)
            both = b.zext(v.load(codes, NARROW), WIDE)
            return [v.looked_up(table, both), v.looked_up(table, b.lshr(both, ir.Constant(WIDE, [4] * LANES)))]
        both = v.load(codes, NARROW)
        halves = b.and_(both, ir.Constant(NARROW, [15] * LANES)), b.lshr(both, ir.Constant(NARROW, [4] * LANES))
        return [v.fma(b.uitofp(b.zext(half, WIDE), VECTOR), scale, low) for half in halves]
    parts = [b.sext(v.load(b.add(codes, number(LANES * part)), NARROW), WIDE) for part in range(BLOCK // LANES)]
    return [v.fma(b.sitofp(part, VECTOR), scale, low) for part in parts]
