"""What a decoder does between its products, as compiled loops: norms, rotary embedding, attention, SiLU.

Next to no arithmetic, but as operations of torch it costs a third of a plain step: some 15 small calls a layer.
Everything works row by row and in one order, so that a row's bits do not depend on who else is in the pass, nor on
whether a key was committed before or came with the draft. Threads take parts by `member` of `team`; nobody waits here.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from slipstream.kernels.codes import LANES
from slipstream.kernels.cpu_address import float_of_bits, floats, inner, integers
from slipstream.kernels.cpu_attend import KEYS, MIXED, largest_of, mix_values, score_keys
from slipstream.kernels.cpu_products import share_start

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
    power = math.floor(near * _LOG2_E + _HALF)
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
def add_and_norm(
    x: int, delta: int, weight: int, rows: int, size: int, eps: float, out: int, member: int, team: int
) -> None:
    """x [rows, size] += delta, where its address is not 0; out [rows, size] = RMS norm of x times weight [size]."""
    for row in range(share_start(rows, member, team), share_start(rows, member + 1, team)):
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
    qkv: int,
    rows: int,
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
    member: int,
    team: int,
) -> None:
    """Norm (where the weights' addresses are not 0) and turn queries and keys; put keys and values into the cache.

    qkv [rows, heads + 2 * kv_heads, head_dim] is changed in place; cos and sin [rows, rotary]; slots [rows];
    keys and values [slots, kv_heads, head_dim]: one layer of the cache.
    """
    width = heads + 2 * kv_heads
    slot = integers(slots)
    for unit in range(share_start(rows * width, member, team), share_start(rows * width, member + 1, team)):
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
def visible_keys(
    row: int,
    start: int,
    end: int,
    prefix: int,
    pages: int,
    page_size: int,
    tree: int,
    masks: int,
    positions: int,
    slots: int,
    window: int,
    seen: int,
) -> int:
    """Write the cache slots that a row may look at to `seen`, in the order of the text; returns how many.

    start, end: the rows of its request; prefix: its tokens in the cache before the pass; pages: its page ids;
    tree: 0 or 1; window: 0 for none. What is not seen leaves no trace, so the sums are those of plain decoding.
    """
    page, slot, position, out = integers(pages), integers(slots), integers(positions), integers(seen)
    oldest = position[row] - window + 1 if window > 0 else 0
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
        sees = (integers(masks)[row] >> (other - start)) & 1 == 1 if tree != 0 else other <= row
        if sees and position[other] >= oldest:
            out[count] = slot[other]
            count += 1
    return count


@inner(fastmath=_ORDER_MAY_CHANGE)
def attend_head(
    query: int,
    keys: int,
    values: int,
    stride: int,
    head_dim: int,
    seen: int,
    count: int,
    scaling: float,
    scores: int,
    out: int,
) -> None:
    """One head of one row over `count` keys; keys and values are the head's own, `stride` numbers between two slots.

    scores: scratch, a multiple of 16 and 16 more than `count` numbers.
    """
    slot, score, result = integers(seen), floats(scores), floats(out)
    for j in range(0, count, KEYS):
        last = count - 1  # repeated where the keys run out: what it writes there is overwritten
        score_keys(
            query,
            keys + slot[j] * stride * 4,
            keys + slot[min(j + 1, last)] * stride * 4,
            keys + slot[min(j + 2, last)] * stride * 4,
            keys + slot[min(j + 3, last)] * stride * 4,
            head_dim,
            scores + j * 4,
        )
    padded = -(-count // LANES) * LANES
    for j in range(count, padded):
        score[j] = -_INFINITE
    largest_of(scores, padded // LANES, scores + padded * 4)
    factor, largest = np.float32(scaling), score[padded]
    mass = _ZERO
    for start in range(0, padded, LANES):  # always 16 at a time, as below
        some = floats(scores + start * 4)
        for i in range(LANES):
            some[i] = _exp((some[i] - largest) * factor)
    for j in range(count):
        mass += score[j]
    for start in range(0, head_dim, MIXED):
        mix_values(values + start * 4, stride * 4, seen, count, scores, head_dim - start, out + start * 4)
    for i in range(head_dim):
        result[i] /= mass


@inner(fastmath=_ORDER_MAY_CHANGE)
def silu_times(gate_up: int, rows: int, size: int, out: int, member: int, team: int) -> None:
    """out [rows, size] = silu(gate) * up, where gate_up [rows, 2 * size] holds both halves of each row.

    size is a multiple of 16. Always 16 at a time: the left-overs of a loop would be computed in other steps.
    """
    parts = size // LANES
    for unit in range(share_start(rows * parts, member, team), share_start(rows * parts, member + 1, team)):
        row, part = unit // parts, unit % parts
        gate = floats(gate_up + (2 * row * size + part * LANES) * 4)
        up = floats(gate_up + ((2 * row + 1) * size + part * LANES) * 4)
        result = floats(out + unit * LANES * 4)
        for i in range(LANES):
            result[i] = gate[i] / (_ONE + _exp(-gate[i])) * up[i]
