"""Numbers as integers that sort alike: a warp finds the largest of integers in one step, and of floats in ten."""

from __future__ import annotations

from slipstream.kernels.jit import has_triton, jit, tl

NOTHING = tl.constexpr(-2139095041) if has_triton else -2139095041
"""Of minus infinity: what was taken already, or is not there."""


@jit
def sortable(x: tl.tensor) -> tl.tensor:
    """fp32 that are numbers, as int32; both zeros are one."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@jit
def unsorted(key: tl.tensor) -> tl.tensor:
    """The fp32 that a key stands for."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
