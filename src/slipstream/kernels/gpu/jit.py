"""Triton where it is installed. Every kernel has a torch twin, which machines without Triton run.

The package must import without Triton (a CPU installation does not bring it), and a kernel must be a function of its
module. So without Triton the decorator returns the function unchanged; it is never called.
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
    """`triton.jit`. Triton compiles a kernel again when an argument is 1 or divisible by 16 and was not before.

    sizes: numbers that change from pass to pass; pointers: tensors of any alignment. Neither is specialized on.
    """
    if function is None:
        return partial(jit, sizes=sizes, pointers=pointers)
    if triton is None:
        return function
    return triton.jit(function, do_not_specialize=[*sizes], do_not_specialize_on_alignment=[*sizes, *pointers])


@cache
def has_kernels(device: torch.device) -> bool:
    """Whether our kernels run on this device: NVIDIA's Hopper or later (programmatic launches, large tiles)."""
    if not has_triton or device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


def on_gpu(tensor: Tensor) -> bool:
    """Whether kernels run on this tensor, on a GPU and not interpreted."""
    return tensor.is_cuda and has_kernels(tensor.device)


@cache
def shared_bytes(device: torch.device) -> int:
    """The largest shared memory of one program, in bytes."""
    if device.type != "cuda":
        return 227 * 1024
    return int(getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 99 * 1024))


def room_for(requests: int) -> int:
    """The smallest of 16, 64, 256 and the larger powers of two that is at least `requests`.

    Kernels are compiled for each of these sizes, perhaps while a request waits, so the sizes are few.
    """
    bits = max(4, (requests - 1).bit_length())
    return 1 << (bits + bits % 2 if bits < 8 else bits)


class _Recording(threading.local):
    on = False


_recording = _Recording()


@contextmanager
def recording() -> Iterator[None]:
    """Marks host work that is recorded in a graph or tried out before that: it happens once and may be slow."""
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
