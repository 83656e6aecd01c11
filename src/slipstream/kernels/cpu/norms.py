"""Norms, rotary embedding and SiLU of a decoder, compiled: the steps between its products, except attention.

It is little arithmetic, but as operations of torch it takes a third of a plain step: some 15 small calls a layer.
Everything works row by row and in one order, so that a row's bits do not depend on the other rows of the pass.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from slipstream.kernels.cpu.interface import LANES
from slipstream.kernels.cpu.llvm import float_of_bits, floats, inner, integers

ORDER_MAY_CHANGE = {"reassoc", "contract", "nsz"}
"""Lets the compiler add up a loop in vectors. Not the rest of `fastmath`: NaN must stay NaN."""

_LOG2_E = np.float32(1.4426950408889634)
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
_LOWEST, _HIGHEST = np.float32(-87.3), np.float32(88.3)
_ONE, _HALF, ZERO, INFINITE = np.float32(1), np.float32(0.5), np.float32(0), np.float32(np.inf)
_E2, _E3, _E4 = np.float32(0.5), np.float32(1.6666665459e-1), np.float32(4.1665795894e-2)
_E5, _E6, _E7 = np.float32(8.3334519073e-3), np.float32(1.3981999507e-3), np.float32(1.9875691500e-4)


@inner(fastmath=ORDER_MAY_CHANGE, inline="always")
def exp(x: Any) -> Any:
    """e^x to fp32 rounding, vectorizable; the C library's takes one number at a time."""
    near: Any = min(max(x, _LOWEST), _HIGHEST)
    power = np.floor(near * _LOG2_E + _HALF)  # fp32: `math.floor` returns int64, and the rest would be fp64
    rest = near - power * _LN2_HIGH - power * _LN2_LOW
    series = ((((_E7 * rest + _E6) * rest + _E5) * rest + _E4) * rest + _E3) * rest + _E2
    grown = (series * rest * rest + rest + _ONE) * float_of_bits((np.int32(power) + np.int32(127)) << np.int32(23))
    return x if x != x else grown  # NaN


@inner(fastmath=ORDER_MAY_CHANGE)
def _norm_head(x: int, weight: int, size: int, eps: float, out: int) -> None:
    """RMS norm of `size` numbers; out may be x."""
    a, w, c = floats(x), floats(weight), floats(out)
    total = ZERO
    for i in range(size):
        total += a[i] * a[i]
    scale = _ONE / np.float32(math.sqrt(total / np.float32(size) + np.float32(eps)))
    for i in range(size):
        c[i] = a[i] * scale * w[i]


@inner(fastmath=ORDER_MAY_CHANGE)
def add_and_norm(first: int, last: int, x: int, delta: int, weight: int, size: int, eps: float, out: int) -> None:
    """x [rows, size] += delta, unless its address is 0; out = RMS norm of x times weight: rows `first` to `last`."""
    for row in range(first, last):
        at = row * size * 4
        if delta != 0:
            a, d = floats(x + at), floats(delta + at)
            for i in range(size):
                a[i] += d[i]
        _norm_head(x + at, weight, size, eps, out + at)


@inner(fastmath=ORDER_MAY_CHANGE)
def _turn(head: int, cos: int, sin: int, rotary: int) -> None:
    """Rotary embedding of one head in place; numbers beyond `rotary` stay as they are."""
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
    """Norm (unless a weight's address is 0) and rotate queries and keys; write keys and values to the cache.

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


@inner(fastmath=ORDER_MAY_CHANGE)
def silu_times(first: int, last: int, gate_up: int, size: int, out: int) -> None:
    """out [rows, size] = silu(gate) * up; gate_up [rows, 2 * size] holds both halves of each row.

    Vectors `first` to `last` of 16 numbers; size is a multiple of 16. Always 16 at a time: the compiler would
    compute the remainder of a longer loop by other instructions.
    """
    parts = size // LANES
    for unit in range(first, last):
        row, part = unit // parts, unit % parts
        gate = floats(gate_up + (2 * row * size + part * LANES) * 4)
        up = floats(gate_up + ((2 * row + 1) * size + part * LANES) * 4)
        result = floats(out + unit * LANES * 4)
        for i in range(LANES):
            result[i] = gate[i] / (_ONE + exp(-gate[i])) * up[i]
