"""Memory that replaced weights leave behind, given back at once.

A checkpoint is mapped into memory as a whole, so all of it stays resident while the model still uses one tensor of it
(the embedding); and the C library keeps what the joined copies used. Without this a model whose weights were packed
takes twice its size.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from torch import Tensor

_MAPS = Path("/proc/self/maps")
_DONTNEED = 4  # of <sys/mman.h>, on every Linux


def release(tensors: Iterable[Tensor]) -> None:
    """Give back the memory of weights that are used no more.

    Pages of a mapped file are only forgotten, and read again should someone still use them: so a tensor that shares
    its memory with another one may be released too. Tensors that are no part of a file are left to their owner.
    Does nothing where the machine offers no way.
    """
    if sys.platform != "linux":
        return
    with suppress(OSError, AttributeError):  # another C library, no /proc: then there is nothing to be done
        libc = ctypes.CDLL(None)
        files = _mapped_files()
        for tensor in tensors:
            start, end = _whole_pages(tensor)
            if start < end and any(first <= start and end <= last for first, last in files):
                libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _DONTNEED)
        libc.malloc_trim(ctypes.c_size_t(0))


def _mapped_files() -> list[tuple[int, int]]:
    """Address ranges of checkpoints that are mapped: a range has a file where its inode is not 0."""
    found = []
    for line in _MAPS.read_text().splitlines():
        addresses, _, _, _, inode, *path = line.split(maxsplit=5)
        if inode != "0" and path and path[0].endswith(".safetensors"):
            first, last = addresses.split("-")
            found.append((int(first, 16), int(last, 16)))
    return found


def _whole_pages(tensor: Tensor) -> tuple[int, int]:
    """The pages that hold nothing but this tensor; empty where it does not lie in one piece in this memory."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        return 0, 0
    start, size = tensor.data_ptr(), tensor.numel() * tensor.element_size()
    return -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, (start + size) // mmap.PAGESIZE * mmap.PAGESIZE
