"""Products of a few rows with a weight that lies plain in memory or in codes, shared out among the threads of a team.

A decoding pass is as fast as its weights are read, so each weight is read once, in order, and asked for before it is
needed. Measured against MKL's packed form in docs/decisions.md.
"""

from __future__ import annotations

from typing import Any

from numba import njit

from slipstream.kernels.codes import BLOCK, TILE
from slipstream.kernels.cpu_address import floats
from slipstream.kernels.cpu_tile import decoder, tile

_DIRECT = 4
"""Rows of the input up to which codes are decoded in registers, for each of them. With more, once for all, in a panel."""


@njit(error_model="numpy")
def share_start(count: int, member: int, team: int) -> int:
    """Where the member's part of `count` things begins; it ends where the next one's begins."""
    return count * member // team


def _block_of(bits: int) -> Any:
    """A compiled function for 4 rows of a weight in codes times up to 4 rows of the input."""
    tile1, tile2, tile3, tile4 = (tile(rows, bits) for rows in range(1, _DIRECT + 1))

    @njit(error_model="numpy")
    def block(weight: int, k: int, x: int, rows: int, out: int, ld_out: int, ahead: int) -> None:
        if rows == 1:
            tile1(weight, x, k, out, ld_out, ahead)
        elif rows == 2:
            tile2(weight, x, k, out, ld_out, ahead)
        elif rows == 3:
            tile3(weight, x, k, out, ld_out, ahead)
        else:
            tile4(weight, x, k, out, ld_out, ahead)

    return block


_few4, _few8, _few32 = _block_of(4), _block_of(8), _block_of(32)
_five, _six = tile(5, 32), tile(6, 32)
_decode4, _decode8 = decoder(4), decoder(8)


@njit(error_model="numpy")
def decode(codes: int, blocks: int, bits: int, out: int, ahead: int) -> None:
    """Write the numbers of so many blocks of codes; ahead: bytes from each block to the one to ask for meanwhile."""
    if bits == 4:
        _decode4(codes, blocks, out, ahead)
    else:
        _decode8(codes, blocks, out, ahead)


@njit(error_model="numpy")
def _plain_block(weight: int, k: int, x: int, rows: int, out: int, ld_out: int, ahead: int) -> None:
    """4 rows of a plain weight times all rows of the input."""
    done = 0
    while done < rows:
        left = rows - done
        # rather 4 + 4 than 6 + 2: small tiles wait for their operands
        size = left - left // 2 if 6 < left < 10 else min(left, 6)
        a, c = x + done * k * 4, out + done * ld_out * 4
        if size == 6:
            _six(weight, a, k, c, ld_out, ahead)
        elif size == 5:
            _five(weight, a, k, c, ld_out, ahead)
        else:
            _few32(weight, k, a, size, c, ld_out, ahead)
        done += size
        ahead = 0


@njit(error_model="numpy")
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
            _plain_block(panel, k, x, rows, c, n, 0)
        elif bits == 4:
            _few4(w, k, x, rows, c, n, ahead)
        else:
            _few8(w, k, x, rows, c, n, ahead)
    if bias != 0:
        b = floats(bias)
        for row in range(rows):
            c = floats(out + row * n * 4)
            for i in range(first * TILE, last * TILE):
                c[i] += b[i]
