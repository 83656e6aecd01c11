"""What a decoder does between its products, as compiled loops: norms, rotary embedding, attention, SiLU.

Next to no arithmetic, but as operations of torch it costs a third of a plain step: some 15 small calls a layer.
Everything works row by row and in one order, so that a row's bits do not depend on who else is in the pass, nor on
whether a key was committed before or came with the draft.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from slipstream.kernels.codes import LANES, QUERIES
from slipstream.kernels.cpu_address import float_of_bits, floats, inner, integers
from slipstream.kernels.cpu_attend import KEYS, MIXED, largest_of, mix_values, score_keys

_ORDER_MAY_CHANGE = {"reassoc", "contract", "nsz"}
"""Lets a loop be added up in vectors. Not the rest of `fastmath`: NaN must stay NaN."""

_LOG2_E = np.float32(1.4426950408889634)
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
_LOWEST, _HIGHEST = np.float32(-87.3), np.float32(88.3)
_ONE, _HALF, _ZERO, _INFINITE = np.float32(1), np.float32(0.5), np.float32(0), np.float32(np.inf)
_E2, _E3, _E4 = np.float32(0.5), np.float32(1.6666665459e-1), np.float32(4.1665795894e-2)
_E5, _E6, _E7 = np.float32(8.3334519073e-3), np.float32(1.3981999507e-3), np.float32(1.9875691500e-4)


@inner(fastmath=_ORDER_MAY_CHANGE, inline="always")
def _exp(x: Any) -> Any:
    """e^x to fp32 rounding, in steps that a loop can do in vectors; the C library's is one number at a time."""
    near: Any = min(max(x, _LOWEST), _HIGHEST)
    power = np.floor(near * _LOG2_E + _HALF)  # fp32: what `math.floor` gives is an int64, and the rest in fp64
    rest = near - power * _LN2_HIGH - power * _LN2_LOW
    series = ((((_E7 * rest + _E6) * rest + _E5) * rest + _E4) * rest + _E3) * rest + _E2
    grown = (series * rest * rest + rest + _ONE) * float_of_bits((np.int32(power) + np.int32(127)) << np.int32(23))
    return x if x != x else grown  # NaN


@inner(fastmath=_ORDER_MAY_CHANGE)
def _norm_head(x: int, weight: int, size: int, eps: float, out: int) -> None:
    """RMS norm of `size` numbers; in place where out is x."""
    a, w, c = floats(x), floats(weight), floats(out)
    total = _ZERO
    for i in range(size):
        total += a[i] * a[i]
    scale = _ONE / np.float32(math.sqrt(total / np.float32(size) + np.float32(eps)))
    for i in range(size):
        c[i] = a[i] * scale * w[i]


@inner(fastmath=_ORDER_MAY_CHANGE)
def add_and_norm(first: int, last: int, x: int, delta: int, weight: int, size: int, eps: float, out: int) -> None:
    """x [rows, size] += delta, where its address is not 0; out = RMS norm of x times weight: rows `first` to `last`."""
    for row in range(first, last):
        at = row * size * 4
        if delta != 0:
            a, d = floats(x + at), floats(delta + at)
            for i in range(size):
                a[i] += d[i]
        _norm_head(x + at, weight, size, eps, out + at)


@inner(fastmath=_ORDER_MAY_CHANGE)
def _turn(head: int, cos: int, sin: int, rotary: int) -> None:
    """Rotary embedding of one head in place; what lies beyond `rotary` numbers stays as it is."""
    h, c, s = floats(head), floats(cos), floats(sin)
    half = rotary // 2
    for i in range(half):
        low, high = h[i], h[i + half]
        h[i] = low * c[i] - high * s[i]
        h[i + half] = high * c[i + half] + low * s[i + half]


@inner()
def turn_and_keep(
    first: int,
    last: int,
    qkv: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    q_norm: int,
    q_eps: float,
    k_norm: int,
    k_eps: float,
    cos: int,
    sin: int,
    rotary: int,
    slots: int,
    keys: int,
    values: int,
) -> None:
    """Norm (where the weights' addresses are not 0) and turn queries and keys; put keys and values into the cache.

    Heads `first` to `last` of qkv [rows, heads + 2 * kv_heads, head_dim], which are changed in place;
    cos and sin [rows, rotary]; slots [rows]; keys and values [slots, kv_heads, head_dim]: one layer of the cache.
    """
    width = heads + 2 * kv_heads
    slot = integers(slots)
    for unit in range(first, last):
        row, index = unit // width, unit % width
        head = qkv + unit * head_dim * 4
        if index < heads:
            if q_norm != 0:
                _norm_head(head, q_norm, head_dim, q_eps, head)
        elif index < heads + kv_heads and k_norm != 0:
            _norm_head(head, k_norm, head_dim, k_eps, head)
        if index < heads + kv_heads:
            _turn(head, cos + row * rotary * 4, sin + row * rotary * 4, rotary)
        if index >= heads:
            place = slot[row] * kv_heads + (index - heads) % kv_heads
            kept = floats((keys if index < heads + kv_heads else values) + place * head_dim * 4)
            h = floats(head)
            for i in range(head_dim):
                kept[i] = h[i]


@inner()
def list_keys(
    start: int, end: int, sees: int, prefix: int, oldest: int, pages: int, page_size: int, positions: int, slots: int,
    seen: int,
) -> int:  # fmt: skip
    """Write the cache slots that a row may look at to `seen`, in the order of the text; returns how many.

    start, end: the rows of its request that it may look at; sees: which of them, bit by bit, and all where it is 0;
    prefix: its tokens in the cache before the pass; pages: its page ids; oldest: the least position that it sees.
    What is not seen leaves no trace, so the sums are those of plain decoding.
    """
    page, slot, position, out = integers(pages), integers(slots), integers(positions), integers(seen)
    count = 0
    at = max(oldest, 0)
    while at < prefix:
        base = page[at // page_size] * page_size - at // page_size * page_size
        last = min((at // page_size + 1) * page_size, prefix)
        for i in range(at, last):
            out[count] = base + i
            count += 1
        at = last
    for other in range(start, end):
        if position[other] >= oldest and (sees == 0 or (sees >> (other - start)) & 1 == 1):
            out[count] = slot[other]
            count += 1
    return count


_score1, _score2, _mix1, _mix2 = score_keys(1), score_keys(2), mix_values(1), mix_values(2)
if QUERIES > 2:
    _score3, _score4, _score6, _mix3, _mix4, _mix6 = (kind(n) for kind in (score_keys, mix_values) for n in (3, 4, 6))
else:  # never asked for
    _score3 = _score4 = _score6 = _score2
    _mix3 = _mix4 = _mix6 = _mix2


@inner()
def _together(left: int) -> int:
    """Queries to take together, of those that are left."""
    some = min(left, QUERIES)
    return 3 if some == 5 else some


@inner()
def _score(
    queries: int, query: int, keys: int, stride: int, seen: int, count: int, size: int, scores: int, ld: int
) -> None:
    """scores[q, j] = query q times key j of those seen, for all of up to `QUERIES` queries."""
    slot = integers(seen)
    last = count - 1  # repeated where the keys run out: what it writes there is overwritten
    for j in range(0, count, KEYS):
        a, b = keys + slot[j] * stride, keys + slot[min(j + 1, last)] * stride
        c, d = keys + slot[min(j + 2, last)] * stride, keys + slot[min(j + 3, last)] * stride
        out = scores + j * 4
        if queries == 1:
            _score1(query, a, b, c, d, size, out, ld)
        elif queries == 2:
            _score2(query, a, b, c, d, size, out, ld)
        elif queries == 3:
            _score3(query, a, b, c, d, size, out, ld)
        elif queries == 4:
            _score4(query, a, b, c, d, size, out, ld)
        else:
            _score6(query, a, b, c, d, size, out, ld)


@inner()
def _mix(
    queries: int, values: int, stride: int, seen: int, first: int, last: int, scores: int, ld: int, size: int, out: int,
    ld_out: int,
) -> None:  # fmt: skip
    """out[q] += the sum of scores[q, j] times value j of those seen, j from `first` to `last`."""
    count = last - first
    if count <= 0:
        return
    slots, weights = seen + first * 8, scores + first * 4
    for start in range(0, size, MIXED):
        v, o, left = values + start * 4, out + start * 4, size - start
        if queries == 1:
            _mix1(v, stride, slots, count, weights, ld, left, o, ld_out)
        elif queries == 2:
            _mix2(v, stride, slots, count, weights, ld, left, o, ld_out)
        elif queries == 3:
            _mix3(v, stride, slots, count, weights, ld, left, o, ld_out)
        elif queries == 4:
            _mix4(v, stride, slots, count, weights, ld, left, o, ld_out)
        else:
            _mix6(v, stride, slots, count, weights, ld, left, o, ld_out)


@inner(fastmath=_ORDER_MAY_CHANGE)
def _soften(scores: int, count: int, scaling: float) -> Any:
    """e^(scaling * (score - largest)) in place; returns their sum. There is room for 32 numbers more than `count`."""
    score = floats(scores)
    padded = -(-count // LANES) * LANES
    for j in range(count, padded):
        score[j] = -_INFINITE
    largest_of(scores, padded // LANES, scores + padded * 4)
    factor, largest = np.float32(scaling), score[padded]
    for start in range(0, padded, LANES):  # always 16 at a time, as below
        some = floats(scores + start * 4)
        for i in range(LANES):
            some[i] = _exp((some[i] - largest) * factor)
    mass = _ZERO
    for j in range(count):
        mass += score[j]
    return mass


@inner(fastmath=_ORDER_MAY_CHANGE)
def attend(
    rows: int, heads: int, head_dim: int, query: int, width: int, keys: int, values: int, stride: int, seen: int,
    count: int, scaling: float, scores: int, ld: int, out: int, ld_out: int,
) -> None:  # fmt: skip
    """`heads` heads that share their keys, of `rows` rows of one request. Each row sees one key more than the last one.

    seen: slots, of which the last row sees `count`; keys and values: the heads', `stride` numbers from slot to slot.
    query: the first row's first head, and `width` numbers to that of the next row; out and ld_out: likewise.
    scores: scratch, `QUERIES` rows of `ld` numbers, at least 32 more than `count`, and as many of 2 * head_dim.
    """
    asked = scores + QUERIES * ld * 4
    mixed = asked + QUERIES * head_dim * 4
    unit, units = 0, rows * heads
    while unit < units:
        queries = _together(units - unit)
        for q in range(queries):
            at = floats(query + ((unit + q) // heads * width + (unit + q) % heads * head_dim) * 4)
            copy, result = floats(asked + q * head_dim * 4), floats(mixed + q * head_dim * 4)
            for i in range(head_dim):
                copy[i], result[i] = at[i], _ZERO
        shared_keys = count - (rows - 1 - unit // heads)  # those that the first of these queries sees
        longest = count - (rows - 1 - (unit + queries - 1) // heads)
        _score(queries, asked, keys, stride * 4, seen, longest, head_dim, scores, ld)
        masses = floats(asked)  # the queries were copied, and are not needed any more
        for q in range(queries):
            masses[q] = _soften(scores + q * ld * 4, count - (rows - 1 - (unit + q) // heads), scaling)
        _mix(queries, values, stride * 4, seen, np.int64(0), shared_keys, scores, ld * 4, head_dim, mixed, head_dim * 4)
        for q in range(queries):
            end = count - (rows - 1 - (unit + q) // heads)
            weights, to = scores + q * ld * 4, mixed + q * head_dim * 4
            _mix(np.int64(1), values, stride * 4, seen, shared_keys, end, weights, ld * 4, head_dim, to, head_dim * 4)
            result, final = floats(to), floats(out + ((unit + q) // heads * ld_out + (unit + q) % heads * head_dim) * 4)
            for i in range(head_dim):
                final[i] = result[i] / masses[q]
        unit += queries


@inner(fastmath=_ORDER_MAY_CHANGE)
def silu_times(first: int, last: int, gate_up: int, size: int, out: int) -> None:
    """out [rows, size] = silu(gate) * up, where gate_up [rows, 2 * size] holds both halves of each row.

    Vectors `first` to `last` of 16 numbers; size is a multiple of 16. Always 16 at a time: the left-overs of a loop
    would be computed in other steps.
    """
    parts = size // LANES
    for unit in range(first, last):
        row, part = unit // parts, unit % parts
        gate = floats(gate_up + (2 * row * size + part * LANES) * 4)
        up = floats(gate_up + ((2 * row + 1) * size + part * LANES) * 4)
        result = floats(out + unit * LANES * 4)
        for i in range(LANES):
            result[i] = gate[i] / (_ONE + _exp(-gate[i])) * up[i]
