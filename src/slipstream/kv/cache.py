"""The tensors behind the pages: K and V of every layer, hidden states that drafters read, and a commit's moves.

The cache begins as zeros: a reader that masks weights but not values would otherwise multiply 0 by whatever NaN lay in
fresh memory. On the CPU the zeros are the operating system's own, untouched until a page is first written, so an idle
cache costs no resident memory.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from slipstream.kv.pages import PageCopy


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The shape of a token's entries in one layer."""

    kv_heads: int
    key_dim: int
    value_dim: int

    @property
    def numel(self) -> int:
        return self.kv_heads * (self.key_dim + self.value_dim)


@dataclass(frozen=True, slots=True)
class Moves:
    """Cache entries to move, all at once; `src == dst` is no move."""

    src: Tensor  # [M] int64 slots
    dst: Tensor  # [M] int64 slots


def compaction(slot_of_row: Tensor, path: Tensor, accepted: Tensor) -> Moves:
    """The moves that bring the accepted nodes of each request together, behind the row of its last committed token.

    slot_of_row [B, K + 1]: the slot that each row wrote; row 0 is the last committed token, row 1 + i is node i.
    path [B, K], accepted [B]: as in `Verdicts`. Chains need no moves. Reads no value on the host.
    """
    rank = torch.arange(path.shape[1], device=path.device)  # [K]
    kept = rank < accepted[:, None]  # [B, K]
    # Row 0 is never the destination of a move, so the ranks that were not accepted rewrite it with itself.
    src_row = torch.where(kept, path + 1, 0)
    dst_row = torch.where(kept, rank + 1, 0)
    return Moves(slot_of_row.gather(1, src_row).flatten(), slot_of_row.gather(1, dst_row).flatten())


class KVCache:
    """K and V of all layers in pages of `page_size` slots. Slot = page * page_size + offset; a `PagePool` owns the
    pages.

    Layers with entries of one shape share a tensor, so moving entries is one gather and one scatter for all.
    features: the width of a token's hidden states, which are kept beside K and V; 0: none.
    """

    def __init__(
        self,
        layers: Sequence[LayerShape],
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        features: int = 0,
    ) -> None:
        self.layers = tuple(layers)
        self.num_pages = num_pages
        self.page_size = page_size
        self.dtype = dtype
        self.device = device
        self.features = _zeros((num_pages * page_size, features), dtype, device) if features else None  # [slots, F]
        slots = num_pages * page_size
        sides = [(shape.kv_heads, dim) for shape in layers for dim in (shape.key_dim, shape.value_dim)]
        self._planes = {
            side: _zeros((sides.count(side), slots, *side), dtype, device) for side in dict.fromkeys(sides)
        }  # each [P, slots, kv_heads, dim]
        unused = {side: iter(planes.unbind(0)) for side, planes in self._planes.items()}
        views = [next(unused[side]) for side in sides]
        self._keys, self._values = views[0::2], views[1::2]

    @staticmethod
    def bytes_per_page(layers: Sequence[LayerShape], page_size: int, dtype: torch.dtype, features: int = 0) -> int:
        return (sum(shape.numel for shape in layers) + features) * page_size * dtype.itemsize

    @property
    def bytes(self) -> int:
        features = 0 if self.features is None else self.features.shape[1]
        return self.num_pages * self.bytes_per_page(self.layers, self.page_size, self.dtype, features)

    def keys(self, layer: int) -> Tensor:
        """The layer's keys, all slots."""  # [slots, kv_heads, key_dim]
        return self._keys[layer]

    def values(self, layer: int) -> Tensor:
        """The layer's values, all slots."""  # [slots, kv_heads, value_dim]
        return self._values[layer]

    @property
    def planes(self) -> tuple[Tensor, ...]:
        """All contents: one tensor for each shape of entries."""  # each [P, slots, kv_heads, dim]
        kept = tuple(self._planes.values())
        return kept if self.features is None else (*kept, self.features[None, :, None])

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Put k [N, kv_heads, key_dim] and v [N, kv_heads, value_dim] into slots [N]."""
        if k.dtype != self.dtype:
            k, v = k.to(self.dtype), v.to(self.dtype)
        self._keys[layer].index_copy_(0, slots, k)
        self._values[layer].index_copy_(0, slots, v)

    def move(self, src: Tensor, dst: Tensor) -> None:
        """Copy slots src [M] to slots dst [M] in all layers. All reads come before the first write."""
        if src.device.type == "cpu":  # counting does not wait here, and most accepted paths move little or nothing
            moving = src != dst
            src, dst = src[moving], dst[moving]
            if not src.numel():
                return
        for planes in self.planes:
            planes.index_copy_(1, dst, planes.index_select(1, src))

    def copy_pages(self, copies: Sequence[PageCopy]) -> None:
        """Copy whole pages in all layers, for a fork."""
        if copies:
            self.move(self._slots_of([c.src for c in copies]), self._slots_of([c.dst for c in copies]))

    def clear(self, pages: Sequence[int]) -> None:
        """Zero these pages. Required before a request that met NaN releases them."""
        if pages:
            for planes in self.planes:
                planes.index_fill_(1, self._slots_of(pages), 0)

    def _slots_of(self, pages: Sequence[int]) -> Tensor:  # [len(pages) * page_size]
        first = torch.tensor(pages, dtype=torch.int64, device=self.device)[:, None] * self.page_size
        return (first + torch.arange(self.page_size, device=self.device)).flatten()


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that take no resident memory before they are written, where the system can do that."""
    size = prod(shape) * dtype.itemsize
    if device.type != "cpu" or size == 0 or sys.platform == "win32":
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if sys.platform == "linux":
        with suppress(OSError):  # huge pages would make the first token of each layer resident by 2 MB
            memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
