"""The layout of a pass on the device: which row belongs to which request, for the attention of all its layers.

A tile is the work of one attention program: a few neighbouring rows of one request. The table of tiles, and for trees
the table of each row's own keys, are made once a pass, by one launch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.kernels.attention import Span
from slipstream.kernels.gpu.jit import jit, on_gpu, room_for, tl, triton


class Tables(NamedTuple):
    """The lookup tables of attention programs."""

    tiles: Tensor
    """[T, 4] int32: lane, first row, end row and number of keys of each tile; the lane of an empty entry is -1."""
    own: Tensor | None
    """[N, W] int32: cache slots of each row's keys, from the block in which its request's draft begins.

    Keys before the draft lie on pages, keys of the draft at the slots of its ancestors; -1 means no key. None if all
    rows are chains, whose keys lie on pages alone.
    """


@dataclass(frozen=True, slots=True)
class RowLayout:
    """The layout of a pass. All tensors are on the device."""

    positions: Tensor  # [N] int64: places among the request's keys
    slots: Tensor  # [N] int64: cache slots of the rows
    starts: Tensor  # [B + 1] int32: first row of each request
    lanes: Tensor  # [B] int64: the request's row in `lengths` and `pages`
    lengths: Tensor  # [S] int64: tokens in the cache before the pass; read for trees only
    pages: Tensor  # [S, P] int32
    ancestors: Tensor | None  # [N, K + 1] int32: row of the ancestor at each depth; None: all chains
    page_size: int
    max_keys: int  # the largest number of keys that a row of this pass may see; none beyond it are read
    guests: Tensor | None = None  # [G] int64: slots that `ancestors` names; None: the slots of the pass's own rows
    # made once a pass, read by every layer
    tables: dict[tuple[int, int], Tables] = field(init=False, default_factory=dict)  # by rows a tile, keys a block
    host_spans: list[Span] = field(init=False, default_factory=list)  # for the twin

    def table(self, tile_rows: int, block_keys: int = 0) -> Tables:
        """block_keys: of the attention kernel; unused if all rows are chains."""
        asked = (tile_rows, 0 if self.ancestors is None else block_keys)
        if asked not in self.tables:
            self.tables[asked] = _tables(self, tile_rows, block_keys)
        return self.tables[asked]

    def tile_count(self, tile_rows: int) -> int:
        """The size of the table of tiles: the largest number of tiles, however the rows are divided among requests."""
        rows = self.positions.shape[0]
        return rows // tile_rows + min(self.lanes.shape[0], rows)

    def spans(self) -> list[Span]:
        """The layout for the twin, on the host. One transfer, because a small pass has hundreds of spans."""
        if not self.host_spans:
            starts, lanes = self.starts.tolist(), self.lanes.tolist()
            mine = [
                (lane, start, end) for lane, start, end in zip(lanes, starts, starts[1:], strict=False) if start < end
            ]
            known = (self.positions if self.guests is None else self.lengths).tolist()
            prefixes = [known[start if self.guests is None else lane] for lane, start, _ in mine]
            at = torch.arange(max(prefixes, default=0), device=self.positions.device)
            pages = self.pages[[lane for lane, _, _ in mine]][:, at // self.page_size].long()  # [mine, L]
            committed = pages * self.page_size + at % self.page_size
            above = None if self.ancestors is None or self.guests is None else self.ancestors.tolist()
            for i, (_, start, end) in enumerate(mine):
                own = committed[i, : prefixes[i]]
                self.host_spans.append(self._span(own, start, end, None if above is None else above[start:end]))
        return self.host_spans

    def _span(self, committed: Tensor, start: int, end: int, above: list[list[int]] | None) -> Span:
        """above: the guests that each row sees, by depth; None: there are none."""
        prefix, positions, device = len(committed), self.positions[start:end], self.positions.device
        if above is not None and self.guests is not None:
            depths = {guest: depth for row in reversed(above) for depth, guest in enumerate(row) if guest >= 0}
            named = sorted(depths)  # [G]: the guests that a row of this span sees
            visible = torch.tensor(
                [[guest in row for guest in named] for row in above], dtype=torch.bool, device=device
            )
            places = torch.tensor([prefix + depths[guest] for guest in named], dtype=torch.int64, device=device)
            keys = torch.cat((committed, self.guests[torch.tensor(named, dtype=torch.int64, device=device)]))
            return Span(start, end, keys, prefix, positions, visible, places)
        rows_visible = None
        if self.ancestors is not None:
            rows = torch.arange(start, end, device=device)
            rows_visible = (self.ancestors[start:end, None, :] == rows[:, None]).any(dim=-1)  # [M, M]
        return Span(start, end, torch.cat((committed, self.slots[start:end])), prefix, positions, rows_visible)


@jit
def _write_tiles(
    starts_ptr: tl.tensor,
    lanes_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    tiles_ptr: tl.tensor,
    part: tl.tensor,
    B: tl.tensor,
    T: tl.tensor,
    TILE_ROWS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_R: tl.constexpr,
) -> None:
    tile = part * BLOCK_T + tl.arange(0, BLOCK_T)
    request = tl.arange(0, BLOCK_B)
    first = tl.load(starts_ptr + request, mask=request < B, other=0)
    end = tl.load(starts_ptr + request + 1, mask=request < B, other=0)
    lane = tl.load(lanes_ptr + request, mask=request < B, other=-1).to(tl.int32)
    count = (end - first + TILE_ROWS - 1) // TILE_ROWS
    after = tl.cumsum(count, 0)
    mine = (tile[:, None] >= (after - count)[None, :]) & (tile[:, None] < after[None, :])  # [T, B]
    there = tl.sum(mine.to(tl.int32), 1) > 0
    begin = tl.sum(tl.where(mine, first[None, :] + (tile[:, None] - (after - count)[None, :]) * TILE_ROWS, 0), 1)
    stop = tl.minimum(tl.sum(tl.where(mine, end[None, :], 0), 1), begin + TILE_ROWS)
    row = begin[:, None] + tl.arange(0, BLOCK_R)[None, :]
    position = tl.load(positions_ptr + row, mask=row < stop[:, None], other=-1).to(tl.int32)
    place = tiles_ptr + tile * 4
    tl.store(place, tl.where(there, tl.sum(tl.where(mine, lane[None, :], 0), 1), -1), mask=tile < T)
    tl.store(place + 1, begin, mask=tile < T)
    tl.store(place + 2, stop, mask=tile < T)
    tl.store(place + 3, tl.max(position, 1) + 1, mask=tile < T)


@jit
def _write_own(
    starts_ptr: tl.tensor,
    lanes_ptr: tl.tensor,
    lengths_ptr: tl.tensor,
    pages_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    ancestors_ptr: tl.tensor,
    own_ptr: tl.tensor,
    row: tl.tensor,
    B: tl.tensor,
    P: tl.tensor,
    depths: tl.tensor,
    PAGE: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    W: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_W: tl.constexpr,
) -> None:
    request = tl.arange(0, BLOCK_B)
    first = tl.load(starts_ptr + request, mask=request < B, other=0)
    end = tl.load(starts_ptr + request + 1, mask=request < B, other=0)
    mine = (first <= row) & (row < end)
    real = tl.sum(mine.to(tl.int32), 0) > 0  # else it is padding
    lane = tl.sum(tl.where(mine, tl.load(lanes_ptr + request, mask=request < B, other=0), 0), 0)
    length = tl.load(lengths_ptr + lane).to(tl.int32)
    j = tl.arange(0, BLOCK_W)
    at = length // BLOCK_KEYS * BLOCK_KEYS + j
    depth = at - length
    page = tl.load(pages_ptr + lane * P + at // PAGE, mask=real & (depth < 0), other=0)
    inside = real & (depth >= 0) & (depth < depths)
    above = tl.load(ancestors_ptr + row * depths + depth, mask=inside, other=-1)
    guest = tl.load(slots_ptr + above, mask=above >= 0, other=-1).to(tl.int32)
    slot = tl.where(depth < 0, page * PAGE + at % PAGE, guest)
    tl.store(own_ptr + row * W + j, tl.where(real, slot, -1), mask=j < W)


@jit(
    sizes=["B", "P", "T", "rows", "depths"],
    pointers=["lanes_ptr", "positions_ptr", "slots_ptr", "lengths_ptr", "pages_ptr"],
)
def _tables_kernel(
    starts_ptr: tl.tensor,  # [B + 1]
    lanes_ptr: tl.tensor,  # [B]
    positions_ptr: tl.tensor,  # [N]
    lengths_ptr: tl.tensor,  # [S]
    pages_ptr: tl.tensor,  # [S, P]
    slots_ptr: tl.tensor,  # named by `ancestors`
    ancestors_ptr: tl.tensor,  # [N, depths]
    tiles_ptr: tl.tensor,  # [T, 4] out
    own_ptr: tl.tensor,  # [N, W] out; unused for chains
    B: tl.tensor,
    P: tl.tensor,
    T: tl.tensor,
    rows: tl.tensor,  # N for trees, 0 for chains
    depths: tl.tensor,
    TREE: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    W: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_W: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    program = tl.program_id(0)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()  # the next kernel starts when this one ends: attention does not wait for tables
    if program >= rows:
        _write_tiles(
            starts_ptr, lanes_ptr, positions_ptr, tiles_ptr, program - rows, B, T, TILE_ROWS, BLOCK_T, BLOCK_B, BLOCK_R
        )
    elif TREE:
        _write_own(
            starts_ptr, lanes_ptr, lengths_ptr, pages_ptr, slots_ptr, ancestors_ptr, own_ptr, program, B, P, depths,
            PAGE, BLOCK_KEYS, W, BLOCK_B, BLOCK_W,
        )  # fmt: skip


def _tables(layout: RowLayout, tile_rows: int, block_keys: int) -> Tables:
    requests, count = layout.lanes.shape[0], layout.tile_count(tile_rows)
    ancestors, device = layout.ancestors, layout.positions.device
    tiles = torch.empty((count, 4), dtype=torch.int32, device=device)
    rows, depths, width, own = 0, 0, 1, None
    if ancestors is not None:
        rows, depths = ancestors.shape
        width = triton.cdiv(block_keys - 1 + depths, block_keys) * block_keys
        own = torch.empty((rows, width), dtype=torch.int32, device=device)
    block, overlap = 64, on_gpu(layout.positions)
    _tables_kernel[(rows + triton.cdiv(count, block),)](
        layout.starts, layout.lanes, layout.positions, layout.lengths, layout.pages,
        layout.slots if layout.guests is None else layout.guests, ancestors, tiles, own, requests,
        layout.pages.shape[1], count, rows, depths, TREE=own is not None, PAGE=layout.page_size,
        BLOCK_KEYS=block_keys, W=width, TILE_ROWS=tile_rows, BLOCK_T=block, BLOCK_B=room_for(requests),
        BLOCK_R=triton.next_power_of_2(tile_rows), BLOCK_W=triton.next_power_of_2(width), OVERLAP=overlap,
        num_warps=2, launch_pdl=overlap,
    )  # fmt: skip
    return Tables(tiles, own)
