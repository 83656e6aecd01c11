"""Triton where it is installed. Every kernel has a torch twin, so a machine without it runs the twins.

The package must import on machines that have no Triton (a CPU installation does not bring it), and a kernel must be
a function of its module; so where Triton is missing its decorator leaves the function as it is, and nobody calls it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, overload

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl

    has_triton = True
except ImportError:  # pragma: no cover - seen on machines without it
    triton = None
    tl = None
    has_triton = False

try:
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # pragma: no cover - without them the tiles are loaded as on older GPUs
    TensorDescriptor = None


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


@cache
def shared_bytes(device: torch.device) -> int:
    """The shared memory that one program may have."""
    if device.type != "cuda":
        return 227 * 1024
    return int(getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 99 * 1024))


def room_for(requests: int) -> int:
    """16, 64, 256 or a larger power of two that has room for so many: for each of them kernels are compiled anew,
    perhaps while somebody waits for an answer, so they are few."""
    bits = max(4, (requests - 1).bit_length())
    return 1 << (bits + bits % 2 if bits < 8 else bits)


class _Recording(threading.local):
    on = False


_recording = _Recording()


@contextmanager
def recording() -> Iterator[None]:
    """What the host does in here is recorded, or tried out before: it happens once, and may take its time."""
    before, _recording.on = _recording.on, True
    try:
        yield
    finally:
        _recording.on = before


def is_recording() -> bool:
    return _recording.on


__all__ = [
    "TensorDescriptor",
    "has_kernels",
    "has_triton",
    "is_recording",
    "jit",
    "on_gpu",
    "recording",
    "room_for",
    "shared_bytes",
    "tl",
    "triton",
]
