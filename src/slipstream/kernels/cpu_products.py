"""Products with a weight that lies plain in memory or in codes, shared out among the threads of a team.

A decoding pass is as fast as its weights are read, so each weight is read once, in order, and asked for before it is
needed. With the many rows of a prompt, pieces are made so that both sides stay in a core's caches. Measured against MKL
in docs/decisions.md.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from slipstream.kernels.codes import BLOCK, LANES, PANEL, TILE
from slipstream.kernels.cpu_address import floats, inner
from slipstream.kernels.cpu_team import shared
from slipstream.kernels.cpu_tile import decoder, tile
from slipstream.kernels.cpu_vectors import STRIP

_STRETCH = 192
"""Rows of the input in a piece of a product."""
_FEW = 24
"""Rows of the input up to which codes are decoded in registers. With more, they are decoded into a panel first."""
_AHEAD = np.int64(4096)
"""Bytes of codes to ask for in advance."""
_MOST = 6 if STRIP == LANES else 4
"""Rows of the input in a tile of plain weights: the sums of more do not fit the registers."""
_MOST_CODED, _SHORT = 8, 1024
"""Rows of the input in a tile of weights in codes, if rows have no more numbers: else 8 do not fit the first cache."""


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
    """Write the numbers of so many blocks of codes; ahead: bytes from each block to the one to ask for meanwhile."""
    if bits == 4:
        _decode4(codes, blocks, out, ahead)
    else:
        _decode8(codes, blocks, out, ahead)


@inner()
def _group(left: int, most: int) -> int:
    """Rows of the input that are taken together, of those that are left: rather 4 + 4 than 6 + 2, which would wait."""
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
    """Some neighbouring rows of the weight times some of the input: pieces `first` to `last` of a product."""
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
    """out [rows, n] = x [rows, k] times weight [n, k], plus bias [n] where its address is not 0. All fp32.

    bits: of a number of the weight; 32 is plain, less is in codes. n is a multiple of 4, k of 16 (in codes of 32).
    panel: scratch of this thread, `PANEL` numbers or 4 rows of the weight.
    Done by all threads of a team together (`cpu_team.py`).
    """
    blocks = n // TILE
    # where rows of the weight are read more than once, few enough of them to stay in the second cache
    tall = max(1, PANEL // (TILE * k))
    parts = min(blocks, max(8 * team, 0 if rows <= _MOST else (blocks + tall - 1) // tall))
    stretches = (rows + _STRETCH - 1) // _STRETCH
    _in_pieces(stage, parts * stretches, np.int64(1), weight, bits, bias, n, k, x, rows, out, parts, panel)
