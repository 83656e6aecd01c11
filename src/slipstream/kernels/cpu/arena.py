"""Memory for weights in huge pages.

A CPU that reads all weights once a step spends much of its time on address translation with 4 KB pages: a plain read of
538 MB takes 25 to 30 ms, and 15 to 20 ms with pages of 2 MB. Weights share large pieces of memory, because a piece for
each weight would waste half a huge page.
"""

from __future__ import annotations

import mmap
import sys
from contextlib import suppress

import torch
from torch import Tensor

_HUGE = 2 << 20
_PIECE = 32 * _HUGE
_LINE = 64


class Arena:
    """Allocates memory for weights from large pieces. A piece lives as long as one of its tensors."""

    def __init__(self) -> None:
        self._piece = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def bytes(self, size: int) -> Tensor:  # [size] uint8
        """Memory that starts at a cache line."""
        self._used = -(-self._used // _LINE) * _LINE
        if self._used + size > len(self._piece):
            self._piece, self._used = _piece(max(_PIECE, -(-size // _HUGE) * _HUGE)), 0
        start, self._used = self._used, self._used + size
        return self._piece[start : start + size]

    def floats(self, n: int, k: int) -> Tensor:  # [n, k] fp32
        return self.bytes(n * k * 4).view(torch.float32).view(n, k)

    def take_back(self, last: Tensor) -> None:
        """Return the tensor that was allocated last."""
        self._used -= last.numel() * last.element_size()


def _piece(size: int) -> Tensor:
    """[size] uint8, aligned to 2 MB; only pages in use are resident."""
    if sys.platform != "linux":
        return torch.empty(size, dtype=torch.uint8)
    memory = mmap.mmap(-1, size + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # the system has no huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    start = -whole.data_ptr() % _HUGE
    return whole[start : start + size]
