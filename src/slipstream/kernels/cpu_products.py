"""Products of a few rows with a weight that lies plain in memory, shared out among the threads of a team.

A decoding pass is as fast as its weights are read, so each weight is read once, in order, and asked for before it is
needed. Up to about 12 rows the arithmetic hides behind the reading. Measured against MKL's packed form in
docs/decisions.md.
"""

from __future__ import annotations

from typing import Any

from numba import njit

from slipstream.kernels.codes import BLOCK, TILE
from slipstream.kernels.cpu_address import floats
from slipstream.kernels.cpu_tile import tile

BLOCK_ROWS = 96
"""Rows of the input that pass by before the next ones do: they must stay in a core's own cache."""


@njit(error_model="numpy")
def share_start(count: int, member: int, team: int) -> int:
    """Where the member's part of `count` things begins; it ends where the next one's begins."""
    return count * member // team


def _block_of(bits: int) -> Any:
    """A compiled function for 4 rows of a weight times all rows of the input."""
    tile1, tile2, tile3, tile4, tile5, tile6 = (tile(rows, bits) for rows in range(1, 7))

    @njit(error_model="numpy")
    def block(weight: int, k: int, x: int, rows: int, out: int, ld_out: int, ahead: int) -> None:
        done = 0
        while done < rows:
            left = rows - done
            # rather 4 + 4 than 6 + 2: small tiles wait for their operands
            size = left - left // 2 if 6 < left < 10 else min(left, 6)
            a, c = x + done * k * 4, out + done * ld_out * 4
            if size == 1:
                tile1(weight, a, k, c, ld_out, ahead)
            elif size == 2:
                tile2(weight, a, k, c, ld_out, ahead)
            elif size == 3:
                tile3(weight, a, k, c, ld_out, ahead)
            elif size == 4:
                tile4(weight, a, k, c, ld_out, ahead)
            elif size == 5:
                tile5(weight, a, k, c, ld_out, ahead)
            else:
                tile6(weight, a, k, c, ld_out, ahead)
            done += size
            ahead = 0

    return block


_block4, _block8, _block32 = _block_of(4), _block_of(8), _block_of(32)


@njit(error_model="numpy")
def product(
    weight: int, bits: int, bias: int, n: int, k: int, x: int, rows: int, out: int, member: int, team: int
) -> None:
    """out [rows, n] = x [rows, k] times weight [n, k], plus bias [n] where its address is not 0. All fp32.

    bits: of a number of the weight; 32 is plain, less is in codes. n is a multiple of 4, k of 16 (in codes of 32).
    Done by all members of a team together: each takes neighbouring rows of the weight. Nobody waits for the others.
    """
    row_bytes = k * 4 if bits == 32 else k // BLOCK * (8 + BLOCK * bits // 8)
    blocks = n // TILE
    first, last = share_start(blocks, member, team), share_start(blocks, member + 1, team)
    for row in range(0, rows, BLOCK_ROWS):
        some = min(BLOCK_ROWS, rows - row)
        for block in range(first, last):
            at = block * TILE
            ahead = TILE * row_bytes if block + 1 < last else 0
            w, a, c = weight + at * row_bytes, x + row * k * 4, out + (row * n + at) * 4
            if bits == 4:
                _block4(w, k, a, some, c, n, ahead)
            elif bits == 8:
                _block8(w, k, a, some, c, n, ahead)
            else:
                _block32(w, k, a, some, c, n, ahead)
    if bias != 0:
        b = floats(bias)
        for row in range(rows):
            c = floats(out + row * n * 4)
            for i in range(first * TILE, last * TILE):
                c[i] += b[i]
