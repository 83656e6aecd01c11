"""Products with a weight in fp32 or in codes, shared among the threads of a team.

A decoding pass is as fast as its weights are read, so each weight is read once, in order, and prefetched. With the many
rows of a prompt, pieces are cut so that both operands stay in a core's caches. The inner loops take 4 rows of the
weight times up to 6 rows of the input, in vectors of 16 numbers. A weight in codes is decoded in registers for a few
input rows; for more it is decoded once, into a panel that stays in the core's second cache. The order of the sums is
the same in each case, so the bits are too. docs/decisions.md has the comparison with MKL.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba.extending import intrinsic

from slipstream.kernels.cpu.interface import BLOCK, LANES, PANEL, TILE, block_bytes
from slipstream.kernels.cpu.llvm import (
    F32,
    LOOKS_UP,
    NARROW,
    STRIP,
    SUM,
    VECTOR,
    WIDE,
    Vectors,
    body,
    floats,
    inner,
    number,
    zeros,
)
from slipstream.kernels.cpu.team import shared

_NEAR_BYTES = 512
"""The prefetch distance for weights in the second cache, in bytes."""
_STRETCH = 192
"""Rows of the input in a piece of a product."""
_FEW = 24
"""Rows of the input up to which codes are decoded in registers; with more, they are decoded into a panel first."""
_AHEAD = np.int64(4096)
"""The prefetch distance for codes, in bytes."""
_MOST = 6 if STRIP == LANES else 4
"""Rows of the input in a tile of plain weights: the sums of more do not fit the registers."""
_MOST_CODED, _SHORT = 8, 1024
"""Rows of the input in a tile of weights in codes, if rows have at most `_SHORT` numbers: 8 longer ones do not fit the
first cache."""


def tile(height: int, rows: int, bits: int, near: bool = False) -> Any:
    """A function for compiled code: (weight, input, k, out, ld_out, ahead) with addresses and sizes, all int64.

    out[m, n] = sum over k of weight[n, k] * input[m, k], for `height` rows n and `rows` rows m; `ld_out` numbers lie
    between two rows of `out`. bits: 32 for a plain weight, k being a multiple of 16; 4 or 8 for codes.
    The order of each sum does not depend on height, rows or bits.
    ahead: bytes from the current weights to those to prefetch; 0 if they are in a cache already.
    near: the weight is in the second cache: prefetch into the first.
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
                v.prefetch(b.add(b.add(address, at), number(_NEAR_BYTES) if near else ahead), near=near)
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
    """A function for compiled code: (codes, blocks, out, ahead), which decodes `blocks` blocks."""

    def emit(v: Vectors, codes: Any, blocks: Any, out: Any, ahead: Any) -> None:
        b = v.b

        def one(block: Any) -> list[Any]:
            at = b.add(codes, b.mul(block, number(block_bytes(bits))))
            v.prefetch(b.add(at, ahead))
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
    """The weights of one step of one row, register by register. Plain ones are loaded on demand."""
    if bits == 32:
        return lambda part: v.load(v.b.add(address, number(4 * STRIP * part)), SUM)
    return [strip for vector in _weights(v, address, bits) for strip in v.strips(vector)].__getitem__


def _weights(v: Vectors, address: ir.Value, bits: int) -> list[ir.Value]:
    """The weights of a block of codes, as two vectors of 16."""
    b = v.b
    scale, low = (v.spread(v.load(b.add(address, number(4 * i)), F32)) for i in range(2))
    codes = b.add(address, number(8))
    if bits == 4:
        if LOOKS_UP:  # a block has 16 different numbers, which takes fewer instructions than computing all 32
            table = v.fma(ir.Constant(VECTOR, [float(code) for code in range(16)]), scale, low)
            both = b.zext(v.load(codes, NARROW), WIDE)
            return [v.looked_up(table, both), v.looked_up(table, b.lshr(both, ir.Constant(WIDE, [4] * LANES)))]
        both = v.load(codes, NARROW)
        halves = b.and_(both, ir.Constant(NARROW, [15] * LANES)), b.lshr(both, ir.Constant(NARROW, [4] * LANES))
        return [v.fma(b.uitofp(b.zext(half, WIDE), VECTOR), scale, low) for half in halves]
    parts = [b.sext(v.load(b.add(codes, number(LANES * part)), NARROW), WIDE) for part in range(BLOCK // LANES)]
    return [v.fma(b.sitofp(part, VECTOR), scale, low) for part in parts]


@inner()
def share_start(count: int, member: int, team: int) -> int:
    """The start of a member's share of `count` things; it ends where the next member's begins."""
    return count * member // team


def _few_of(bits: int) -> Any:
    """A compiled function for 4 rows of a weight times up to 4 rows of the input."""
    tile1, tile2, tile3, tile4 = (tile(TILE, rows, bits) for rows in range(1, 5))

    @inner(inline="always")
    def few(weight: int, k: int, x: int, rows: int, out: int, ld_out: int, ahead: int) -> None:
        if rows == 1:
            tile1(weight, x, k, out, ld_out, ahead)
        elif rows == 2:
            tile2(weight, x, k, out, ld_out, ahead)
        elif rows == 3:
            tile3(weight, x, k, out, ld_out, ahead)
        else:
            tile4(weight, x, k, out, ld_out, ahead)

    return few


def _some_of(bits: int) -> Any:
    """A compiled function for 2 rows of a weight in codes times 5 to 8 rows of the input."""
    tile5, tile6, tile7, tile8 = (tile(TILE // 2, rows, bits) for rows in range(5, 9))

    @inner(inline="always")
    def some(weight: int, k: int, x: int, rows: int, out: int, ld_out: int, ahead: int) -> None:
        if rows == 5:
            tile5(weight, x, k, out, ld_out, ahead)
        elif rows == 6:
            tile6(weight, x, k, out, ld_out, ahead)
        elif rows == 7:
            tile7(weight, x, k, out, ld_out, ahead)
        else:
            tile8(weight, x, k, out, ld_out, ahead)

    return some


_few4, _few8, _few32 = _few_of(4), _few_of(8), _few_of(32)
_some4, _some8 = _some_of(4), _some_of(8)
_five, _six = tile(TILE, 5, 32), tile(TILE, 6, 32)
_most_near = tile(TILE, _MOST, 32, near=True)
_decode4, _decode8 = decoder(4), decoder(8)


@inner(inline="always")
def _coded_block(weight: int, k: int, bits: int, x: int, rows: int, out: int, ld_out: int, ahead: int) -> None:
    """4 rows of a weight in codes times up to 8 rows of the input."""
    if rows > 4:
        half = TILE // 2 * k // BLOCK * (8 + BLOCK * bits // 8)
        for n in range(2):
            if bits == 4:
                _some4(weight + n * half, k, x, rows, out + n * TILE // 2 * 4, ld_out, ahead)
            else:
                _some8(weight + n * half, k, x, rows, out + n * TILE // 2 * 4, ld_out, ahead)
    elif bits == 4:
        _few4(weight, k, x, rows, out, ld_out, ahead)
    else:
        _few8(weight, k, x, rows, out, ld_out, ahead)


@inner()
def _decode(codes: int, blocks: int, bits: int, out: int, ahead: int) -> None:
    """Decode `blocks` blocks; ahead: bytes from each block to the one to prefetch."""
    if bits == 4:
        _decode4(codes, blocks, out, ahead)
    else:
        _decode8(codes, blocks, out, ahead)


@inner()
def _group(left: int, most: int) -> int:
    """The number of input rows in the next tile: 4 + 4 rather than 6 + 2, because small tiles stall."""
    return left - left // 2 if most < left <= most * 3 // 2 else min(left, most)


@inner(inline="always")
def _plain_block(weight: int, k: int, x: int, rows: int, out: int, ld_out: int, ahead: int) -> None:
    """4 rows of a plain weight times up to `_MOST` rows of the input."""
    if rows == _MOST and ahead == 0:
        _most_near(weight, x, k, out, ld_out, ahead)
    elif rows == 6:
        _six(weight, x, k, out, ld_out, ahead)
    elif rows == 5:
        _five(weight, x, k, out, ld_out, ahead)
    else:
        _few32(weight, k, x, rows, out, ld_out, ahead)


@inner()
def _piece(
    first: int, last: int, weight: int, bits: int, bias: int, n: int, k: int, x: int, rows: int, out: int, parts: int,
    panel: int,
) -> None:  # fmt: skip
    """Pieces `first` to `last` of a product: neighbouring rows of the weight times a stretch of the input."""
    given, given_bits = weight, bits
    for piece in range(first, last):
        begin, end = share_start(n // TILE, piece % parts, parts), share_start(n // TILE, piece % parts + 1, parts)
        done, count = piece // parts * _STRETCH, min(rows, (piece // parts + 1) * _STRETCH)
        if given_bits != 32 and rows > _FEW:
            blocks, code_bytes = (end - begin) * TILE * k // BLOCK, 8 + BLOCK * given_bits // 8
            at = begin * TILE * k // BLOCK * code_bytes
            _decode(given + at, blocks, given_bits, panel, _AHEAD)
            weight, bits = panel - begin * TILE * k * 4, 32
        row_bytes = k * 4 if bits == 32 else k // BLOCK * (8 + BLOCK * bits // 8)
        most = _MOST if bits == 32 or k > _SHORT else _MOST_CODED
        ahead = 0 if weight != given else TILE * row_bytes
        while done < count:  # these rows of the input stay in the first cache, those of the weight in the second
            some = _group(count - done, most)
            a = x + done * k * 4
            for block in range(begin, end):
                w, c = weight + block * TILE * row_bytes, out + (done * n + block * TILE) * 4
                if block + 1 == n // TILE:
                    ahead = 0
                if bits == 32:
                    _plain_block(w, k, a, some, c, n, ahead)
                else:
                    _coded_block(w, k, bits, a, some, c, n, ahead)
            done += some
            ahead = 0
        if bias != 0:
            b = floats(bias)
            for row in range(piece // parts * _STRETCH, count):
                numbers = floats(out + row * n * 4)
                for i in range(begin * TILE, end * TILE):
                    numbers[i] += b[i]


_in_pieces = shared(_piece)


@inner()
def product(
    stage: int, team: int, weight: int, bits: int, bias: int, n: int, k: int, x: int, rows: int, out: int,
    panel: int,
) -> None:  # fmt: skip
    """out [rows, n] = x [rows, k] times weight [n, k], plus bias [n] unless its address is 0. All fp32.

    bits: of a number of the weight; 32 is plain, less is in codes. n is a multiple of 4, k of 16 (in codes of 32).
    panel: scratch of this thread, `PANEL` numbers or 4 rows of the weight.
    All threads of a team call it together (`team.py`).
    """
    blocks = n // TILE
    # rows of the weight that are read more than once are few enough to stay in the second cache
    tall = max(1, PANEL // (TILE * k))
    parts = min(blocks, max(8 * team, 0 if rows <= _MOST else (blocks + tall - 1) // tall))
    stretches = (rows + _STRETCH - 1) // _STRETCH
    _in_pieces(stage, parts * stretches, np.int64(1), weight, bits, bias, n, k, x, rows, out, parts, panel)
