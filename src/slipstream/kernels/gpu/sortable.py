"""Floats as integers of the same order: a warp finds the largest integer in one step, the largest float in ten."""

from __future__ import annotations

from slipstream.kernels.gpu.jit import has_triton, jit, tl

NOTHING = tl.constexpr(-2139095041) if has_triton else -2139095041
"""The integer of minus infinity: a candidate that is missing or taken."""


@jit
def sortable(x: tl.tensor) -> tl.tensor:
    """int32 keys of fp32 numbers; both zeros have one key."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@jit
def unsorted(key: tl.tensor) -> tl.tensor:
    """The fp32 number of a key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
