"""Triton where it is installed. Every kernel has a torch twin, so a machine without it runs the twins.

The package must import on machines that have no Triton (a CPU installation does not bring it), and a kernel must be
a function of its module; so where Triton is missing its decorator leaves the function as it is, and nobody calls it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

try:
    import triton
    import triton.language as tl

    jit: Callable[..., Any] = triton.jit
    has_triton = True
except ImportError:  # pragma: no cover - seen on machines without it
    triton = None
    tl = None

    def jit(function: Any) -> Any:
        return function

    has_triton = False


def on_gpu(tensor: Tensor) -> bool:
    """Do kernels run on this tensor for real?"""
    return has_triton and tensor.is_cuda


__all__ = ["has_triton", "jit", "on_gpu", "tl", "triton"]
