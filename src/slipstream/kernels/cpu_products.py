"""Products of a few rows with a weight that lies plain in memory or in codes, shared out among the threads of a team.

A decoding pass is as fast as its weights are read, so each weight is read once, in order, and asked for before it is
needed. Measured against MKL's packed form in docs/decisions.md.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from slipstream.kernels.codes import BLOCK, LANES, TILE
from slipstream.kernels.cpu_address import floats, inner
from slipstream.kernels.cpu_tile import decoder, tile
from slipstream.kernels.cpu_vectors import STRIP

_DIRECT = 8
"""Rows of the input up to which codes are decoded in registers. With more, they are decoded into a panel first."""
_MOST = 6 if STRIP == LANES else 4
"""Rows of the input in a tile of plain weights: the sums of more do not fit the registers."""


@inner()
def share_start(count: int, member: int, team: int) -> int:
    """Where the member's part of `count` things begins; it ends where the next one's begins."""
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
def decode(codes: int, blocks: int, bits: int, out: int, ahead: int) -> None:
    """Write the numbers of so many blocks of codes; ahead: bytes from each block to the one to ask for meanwhile."""
    if bits == 4:
        _decode4(codes, blocks, out, ahead)
    else:
        _decode8(codes, blocks, out, ahead)


@inner(inline="always")
def _plain_block(weight: int, k: int, x: int, rows: int, out: int, ld_out: int, ahead: int) -> None:
    """4 rows of a plain weight times all rows of the input."""
    done = 0
    while done < rows:
        left = rows - done
        # rather 4 + 4 than 6 + 2: small tiles wait for their operands
        size = left - left // 2 if _MOST < left <= _MOST * 3 // 2 else min(left, _MOST)
        a, c = x + done * k * 4, out + done * ld_out * 4
        if size == 6:
            _six(weight, a, k, c, ld_out, ahead)
        elif size == 5:
            _five(weight, a, k, c, ld_out, ahead)
        else:
            _few32(weight, k, a, size, c, ld_out, ahead)
        done += size
        ahead = 0


@inner()
def product(
    weight: int, bits: int, bias: int, n: int, k: int, x: int, rows: int, out: int, panel: int, member: int, team: int
) -> None:
    """out [rows, n] = x [rows, k] times weight [n, k], plus bias [n] where its address is not 0. All fp32.

    bits: of a number of the weight; 32 is plain, less is in codes. n is a multiple of 4, k of 16 (in codes of 32).
    panel: scratch of this member, [4, k].
    Done by all members of a team together: each takes neighbouring rows of the weight. Nobody waits for the others.
    """
    row_bytes = k * 4 if bits == 32 else k // BLOCK * (8 + BLOCK * bits // 8)
    blocks = n // TILE
    first, last = share_start(blocks, member, team), share_start(blocks, member + 1, team)
    for block in range(first, last):
        at = block * TILE
        ahead = TILE * row_bytes if block + 1 < last else 0
        w, c = weight + at * row_bytes, out + at * 4
        if bits == 32:
            _plain_block(w, k, x, rows, c, n, ahead)
        elif rows > _DIRECT:
            decode(w, TILE * k // BLOCK, bits, panel, ahead)
            _plain_block(panel, k, x, rows, c, n, np.int64(0))
        else:
            _coded_block(w, k, bits, x, rows, c, n, ahead)
    if bias != 0:
        b = floats(bias)
        for row in range(rows):
            c = floats(out + row * n * 4)
            for i in range(first * TILE, last * TILE):
                c[i] += b[i]
