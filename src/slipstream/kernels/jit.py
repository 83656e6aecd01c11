"""Triton where it is installed. Every kernel has a torch twin, so a machine without it runs the twins.

The package must import on machines that have no Triton (a CPU installation does not bring it), and a kernel must be
a function of its module; so where Triton is missing its decorator leaves the function as it is, and nobody calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, overload

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor

    has_triton = True
except ImportError:  # pragma: no cover - seen on machines without it
    triton = None
    tl = None
    TensorDescriptor = None
    has_triton = False


@overload
def jit(function: Any, *, sizes: Sequence[str] = (), pointers: Sequence[str] = ()) -> Any: ...


@overload
def jit(*, sizes: Sequence[str] = (), pointers: Sequence[str] = ()) -> Callable[[Any], Any]: ...


def jit(function: Any = None, *, sizes: Sequence[str] = (), pointers: Sequence[str] = ()) -> Any:
    """`triton.jit`. A kernel is compiled anew where an argument is 1, or divisible by 16, and was not before.

    sizes: numbers that change from pass to pass; pointers: tensors that may begin anywhere. Neither is looked at so.
    """
    if function is None:
        return partial(jit, sizes=sizes, pointers=pointers)
    if triton is None:
        return function
    return triton.jit(function, do_not_specialize=[*sizes], do_not_specialize_on_alignment=[*sizes, *pointers])


@cache
def has_kernels(device: torch.device) -> bool:
    """Do our kernels run on this device? They ask for NVIDIA's Hopper or later (programmatic launches, large tiles)."""
    if not has_triton or device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


def on_gpu(tensor: Tensor) -> bool:
    """Do kernels run on this tensor for real?"""
    return tensor.is_cuda and has_kernels(tensor.device)


def capturing() -> bool:
    """Is a graph being captured, so that what the host does now is done once?"""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


__all__ = ["TensorDescriptor", "capturing", "has_kernels", "has_triton", "jit", "on_gpu", "tl", "triton"]
