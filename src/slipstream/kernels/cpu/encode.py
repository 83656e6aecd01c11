"""Encodes weights (`interface.py`), compiled: every weight is tried at load, which must not take noticeable time."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from slipstream.kernels.cpu.interface import BLOCK
from slipstream.kernels.cpu.llvm import bytes_at, floats, inner, integers
from slipstream.kernels.cpu.products import share_start

_ZERO, _HALF, _ONE = np.float32(0), np.float32(0.5), np.float32(1)
_HALF_BLOCK = BLOCK // 2


@intrinsic
def _as_half(typing: Any, value: Any) -> Any:
    """An fp32 number rounded to fp16, the type of scales in quantized formats."""

    def generate(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
        return builder.fpext(builder.fptrunc(arguments[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.float32), generate


@inner(inline="always")
def _code(weight: float, low: float, inverse: float) -> Any:
    return np.int32(math.floor((weight - low) * inverse + _HALF))


@inner(inline="always")
def _differs(code: int, scale: float, low: float, weight: float, least: int, most: int) -> Any:
    """0 if the code reproduces the weight, else 1. (code * scale is exact in fp32, so a fused addition is the same.)"""
    same = np.float32(code) * scale + low == weight and least <= code <= most
    return np.int32(0) if same else np.int32(1)


@inner()
def _encode_block(weight: int, bits: int, codes: int) -> Any:
    """Write the codes of 32 weights; False if codes do not reproduce them. Loops without exits are vectorized."""
    w, parameters, out = floats(weight), floats(codes), bytes_at(codes + 8)
    least, most = w[0], w[0]
    for i in range(1, BLOCK):
        least, most = min(least, w[i]), max(most, w[i])
    if bits == 4:
        scale, low = _as_half((most - least) / np.float32(15)), least
    else:
        scale, low = _as_half(max(most, -least) / np.float32(127)), _ZERO
    inverse = _ONE / scale if scale != _ZERO else _ZERO
    parameters[0], parameters[1] = scale, low
    wrong = np.int32(0)
    if bits == 4:
        for i in range(_HALF_BLOCK):
            early, late = _code(w[i], low, inverse), _code(w[i + _HALF_BLOCK], low, inverse)
            wrong += _differs(early, scale, low, w[i], 0, 15) + _differs(late, scale, low, w[i + _HALF_BLOCK], 0, 15)
            out[i] = np.uint8((early & 15) | ((late & 15) << 4))
    else:
        for i in range(BLOCK):
            code = _code(w[i], low, inverse)
            wrong += _differs(code, scale, low, w[i], -128, 127)
            out[i] = np.uint8(code & 255)
    return wrong == 0


@inner()
def encode(weight: int, n: int, k: int, bits: int, codes: int, failed: int, member: int, team: int) -> None:
    """Write the codes of weight [n, k]; integers(failed)[member] becomes 1 if this member's part has none."""
    size = 8 + BLOCK * bits // 8
    blocks = n * k // BLOCK
    for i in range(share_start(blocks, member, team), share_start(blocks, member + 1, team)):
        if not _encode_block(weight + i * BLOCK * 4, bits, codes + i * size):
            integers(failed)[member] = 1
            return
