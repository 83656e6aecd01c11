"""Attention over the paged cache on a GPU: the many rows of prompts.

One program reads all keys of a tile of rows, block after block: there are enough tiles to keep a GPU busy, and programs
share no partial results. The cuts of a prompt depend on its own tokens alone, so its bits need not match a decoding
pass.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.kernels.gpu.jit import jit, on_gpu, tl, triton
from slipstream.kernels.gpu.layout import RowLayout
from slipstream.kernels.gpu.paged import LOG2_E, add_block, attend_twin, check_heads, finish

_TILE = 64  # rows times the heads of a group


@jit(sizes=["P"], pointers=["positions_ptr", "pages_ptr"])
def _attend_kernel(
    query_ptr: tl.tensor,  # [N, H, D]
    keys_ptr: tl.tensor,  # [slots, H_kv, D]
    values_ptr: tl.tensor,
    out_ptr: tl.tensor,  # [N, H, D]
    sinks_ptr: tl.tensor,  # [H] or not read
    tiles_ptr: tl.tensor,  # [T, 4] int32
    positions_ptr: tl.tensor,
    pages_ptr: tl.tensor,
    P: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    window: tl.tensor,
    H: tl.constexpr,
    H_KV: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    GROUP: tl.constexpr = H // H_KV
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # tiles with the most keys first
    kv_head = tl.program_id(1)
    lane = tl.load(tiles_ptr + tile * 4)
    row_start = tl.load(tiles_ptr + tile * 4 + 1)
    row_end = tl.load(tiles_ptr + tile * 4 + 2)
    end_key = tl.load(tiles_ptr + tile * 4 + 3)
    if lane >= 0:
        q_range = tl.arange(0, BLOCK_Q)
        row = row_start + q_range // GROUP
        head = kv_head * GROUP + q_range % GROUP
        q_real = (q_range < TILE_ROWS * GROUP) & (row < row_end)
        d_range = tl.arange(0, BLOCK_D)
        d_real = d_range < D
        q_mask = q_real[:, None] & d_real[None, :]
        position = tl.load(positions_ptr + row, mask=q_real, other=-1).to(tl.int32)
        q_place = (row.to(tl.int64) * H + head) * D
        q = tl.load(query_ptr + q_place[:, None] + d_range[None, :], mask=q_mask, other=0.0)
        begin = 0
        lowest = tl.min(tl.where(q_real, position, 2147483647), 0)
        if WINDOW:  # skip blocks that no row of the tile sees
            begin = tl.maximum(0, (lowest - window + 1) // BLOCK_KEYS * BLOCK_KEYS)
        whole = (lowest + 1) // BLOCK_KEYS * BLOCK_KEYS  # every row sees the blocks before it
        pages = pages_ptr + lane.to(tl.int64) * P
        k_range = tl.arange(0, BLOCK_KEYS)
        top = tl.full((BLOCK_Q,), -float("inf"), tl.float32)
        total = tl.zeros((BLOCK_Q,), tl.float32)
        acc = tl.zeros((BLOCK_Q, BLOCK_D), tl.float32)
        if WINDOW:
            whole = begin
        for key in range(begin, whole, BLOCK_KEYS):
            at = key + k_range
            slot = tl.load(pages + at // PAGE).to(tl.int64) * PAGE + at % PAGE
            place = (slot * H_KV + kv_head) * D
            k = tl.load(keys_ptr + place[:, None] + d_range[None, :], mask=d_real[None, :], other=0.0)
            v = tl.load(values_ptr + place[:, None] + d_range[None, :], mask=d_real[None, :], other=0.0)
            top, total, acc = add_block(q, k, v, None, top, total, acc, scale, softcap, False, SOFTCAP, PRECISION)
        for key in range(whole, end_key, BLOCK_KEYS):
            at = key + k_range
            page = tl.load(pages + at // PAGE, mask=at < end_key, other=0).to(tl.int64)
            place = ((page * PAGE + at % PAGE) * H_KV + kv_head) * D
            there = (at < end_key)[:, None] & d_real[None, :]
            k = tl.load(keys_ptr + place[:, None] + d_range[None, :], mask=there, other=0.0)
            v = tl.load(values_ptr + place[:, None] + d_range[None, :], mask=there, other=0.0)
            seen = q_real[:, None] & (at[None, :] <= position[:, None])
            if WINDOW:
                seen = seen & (at[None, :] > position[:, None] - window)
            top, total, acc = add_block(q, k, v, seen, top, total, acc, scale, softcap, True, SOFTCAP, PRECISION)
        finish(out_ptr, sinks_ptr, q_place, d_range, q_mask, head, q_real, top, total, acc, SINKS)


def attend_wide(
    query: Tensor,  # [N, H, D]
    keys: Tensor,  # [slots, H_kv, D]
    values: Tensor,
    layout: RowLayout,
    *,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,  # [H]
) -> Tensor:  # [N, H, D]
    """One layer's attention for the rows of prompts, whose K and V are in the cache. Chains only."""
    assert layout.ancestors is None, "a tree is a decoding pass's"
    if not on_gpu(query):
        return attend_twin(query, keys, values, layout, scaling=scaling, window=window, softcap=softcap, sinks=sinks)
    return _launch(query, keys, values, layout, scaling, window, softcap, sinks)


def _launch(
    query: Tensor, keys: Tensor, values: Tensor, layout: RowLayout, scaling: float, window: int | None,
    softcap: float | None, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    check_heads(query, values)
    heads, dim = query.shape[1:]
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    block_q = _block_q(group)
    tiles = layout.table(block_q // group).tiles
    out = torch.empty_like(query)
    width = dim * query.element_size()
    _attend_kernel[(tiles.shape[0], kv_heads)](
        query, keys, values, out, sinks, tiles, layout.positions, layout.pages, layout.pages.shape[1],
        scaling if softcap is not None else scaling * LOG2_E, softcap or 0.0, window or 0,
        H=heads, H_KV=kv_heads, D=dim, BLOCK_D=max(16, triton.next_power_of_2(dim)), PAGE=layout.page_size,
        BLOCK_Q=block_q, TILE_ROWS=block_q // group,
        BLOCK_KEYS=128 if width <= 128 else 64 if width <= 256 else 32, SOFTCAP=softcap is not None,
        WINDOW=window is not None, SINKS=sinks is not None,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        num_warps=4 if block_q < 128 else 8, num_stages=2 if dim > 128 else 3,
    )  # fmt: skip
    return out


def prepare_wide(layout: RowLayout, heads: int, keys: Tensor) -> None:
    """As `paged.prepare`."""
    if on_gpu(layout.positions):
        group = heads // keys.shape[1]
        layout.table(_block_q(group) // group)


def wide_tile_rows(heads: int, kv_heads: int) -> int:
    """Rows of a tile."""
    group = max(1, heads // kv_heads)
    return _block_q(group) // group


def _block_q(group: int) -> int:
    return max(_TILE, 1 << (group - 1).bit_length())
