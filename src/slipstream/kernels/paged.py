"""Attention over the paged cache on a GPU: chains, trees and prompt chunks in one kernel.

Row-independent, as everything that decides a token in bf16 must be: a row's keys are read in the order of their
positions, in blocks that begin at fixed positions, in runs of `SPLIT_KEYS` that are added up in order. So a row comes
out the same as the root of a plain step, in the middle of a chain, or on a branch of a tree: in a tree each row reads
its own ancestors at the positions where they would stand. The runs of a long context are computed by different
programs; the last to finish adds them up.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.core.errors import UnsupportedModel
from slipstream.kernels.attention import paged_attention
from slipstream.kernels.jit import jit, on_gpu, tl, triton
from slipstream.kernels.layout import RowLayout

SPLIT_KEYS = 512
"""Keys that one program reads at most: fixed, because it is part of the order in which a row is added up."""

WIDE_TILE = 64
_LOG2_E = 1.4426950408889634


@jit(sizes=["N", "P", "depths"], pointers=["positions_ptr", "slots_ptr"])
def _attend_kernel(
    query_ptr: tl.tensor,  # [N, H, D]
    keys_ptr: tl.tensor,  # [slots, H_kv, D]
    values_ptr: tl.tensor,
    out_ptr: tl.tensor,  # [N, H, D]
    part_ptr: tl.tensor,  # [splits, N, H, D] fp32: of those that have more than one
    part_max_ptr: tl.tensor,  # [splits, N, H] fp32
    part_sum_ptr: tl.tensor,
    count_ptr: tl.tensor,  # [tiles, H_kv] int32, 0 before and after
    sinks_ptr: tl.tensor,  # [H] or not read
    tiles_ptr: tl.tensor,  # [T, 4] int32
    positions_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    lengths_ptr: tl.tensor,
    pages_ptr: tl.tensor,
    ancestors_ptr: tl.tensor,
    N: tl.tensor,
    P: tl.tensor,
    depths: tl.tensor,  # columns of ancestors
    scale: tl.tensor,
    softcap: tl.tensor,
    window: tl.tensor,
    H: tl.constexpr,
    H_KV: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_Q: tl.constexpr,  # rows of the tile: TILE_ROWS tokens times the heads of a group, padded
    TILE_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    SPLIT: tl.constexpr,
    TREE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    GROUP: tl.constexpr = H // H_KV
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    lane = tl.load(tiles_ptr + tile * 4)
    row_start = tl.load(tiles_ptr + tile * 4 + 1)
    row_end = tl.load(tiles_ptr + tile * 4 + 2)
    end_key = tl.load(tiles_ptr + tile * 4 + 3)
    if (lane >= 0) & (split * SPLIT < end_key):
        used = (end_key + SPLIT - 1) // SPLIT  # programs that this tile has work for
        q_range = tl.arange(0, BLOCK_Q)
        row = row_start + q_range // GROUP
        head = kv_head * GROUP + q_range % GROUP
        q_real = (q_range < TILE_ROWS * GROUP) & (row < row_end)
        d_range = tl.arange(0, BLOCK_D)
        d_real = d_range < D
        position = tl.load(positions_ptr + row, mask=q_real, other=-1).to(tl.int32)
        q_place = (row.to(tl.int64) * H + head) * D

        begin = split * SPLIT
        end_key = tl.minimum(end_key, begin + SPLIT)
        if WINDOW:
            # whole blocks that no row of the tile sees are left out; masked ones change nothing
            lowest = tl.min(tl.where(q_real, position, 2147483647), 0) - window + 1
            begin = tl.maximum(begin, (lowest // BLOCK_KEYS) * BLOCK_KEYS)
        shared_end = end_key
        length = end_key
        if TREE:
            length = tl.load(lengths_ptr + lane).to(tl.int32)
            shared_end = tl.minimum(end_key, (length // BLOCK_KEYS) * BLOCK_KEYS)
        k_range = tl.arange(0, BLOCK_KEYS)
        pages = pages_ptr + lane.to(tl.int64) * P
        if OVERLAP:
            # the layout of the pass is older than the kernel before this one: only what that wrote is awaited
            _touch(pages + (begin + k_range) // PAGE, begin + k_range < end_key)
            tl.extra.cuda.gdc_wait()
        q = tl.load(query_ptr + q_place[:, None] + d_range[None, :], mask=q_real[:, None] & d_real[None, :], other=0.0)

        top = tl.full((BLOCK_Q,), -float("inf"), tl.float32)
        total = tl.zeros((BLOCK_Q,), tl.float32)
        acc = tl.zeros((BLOCK_Q, BLOCK_D), tl.float32)
        for key in range(begin, shared_end, BLOCK_KEYS):
            at = key + k_range
            page = tl.load(pages + at // PAGE, mask=at < end_key, other=0).to(tl.int64)
            slot = page * PAGE + at % PAGE
            place = (slot * H_KV + kv_head) * D
            there = (at < end_key)[:, None] & d_real[None, :]
            k = tl.load(keys_ptr + place[:, None] + d_range[None, :], mask=there, other=0.0)
            v = tl.load(values_ptr + place[:, None] + d_range[None, :], mask=there, other=0.0)
            seen = q_real[:, None] & (at[None, :] <= position[:, None])
            if WINDOW:
                seen = seen & (at[None, :] > position[:, None] - window)
            top, total, acc = _block(q, k, v, seen, top, total, acc, scale, softcap, SOFTCAP, PRECISION)
        if TREE:
            # from the block on in which the draft begins, each row has keys of its own
            own = tl.maximum(begin, (length // BLOCK_KEYS) * BLOCK_KEYS)
            for key in range(own, end_key, BLOCK_KEYS):
                at = key + k_range
                for t in range(TILE_ROWS):
                    r = row_start + t
                    if r < row_end:
                        depth = at - length
                        page = tl.load(pages + at // PAGE, mask=depth < 0, other=0).to(tl.int64)
                        ancestor = tl.load(
                            ancestors_ptr + r * depths + depth, mask=(depth >= 0) & (depth < depths), other=-1
                        )
                        guest = tl.load(slots_ptr + ancestor, mask=ancestor >= 0, other=0)
                        slot = tl.where(depth < 0, page * PAGE + at % PAGE, guest)
                        place = (slot * H_KV + kv_head) * D
                        known = (depth < 0) | (ancestor >= 0)
                        there = known[:, None] & d_real[None, :]
                        k = tl.load(keys_ptr + place[:, None] + d_range[None, :], mask=there, other=0.0)
                        v = tl.load(values_ptr + place[:, None] + d_range[None, :], mask=there, other=0.0)
                        seen = (q_real & (row == r))[:, None] & known[None, :] & (at[None, :] <= position[:, None])
                        if WINDOW:
                            seen = seen & (at[None, :] > position[:, None] - window)
                        top, total, acc = _block(q, k, v, seen, top, total, acc, scale, softcap, SOFTCAP, PRECISION)

        o_mask = q_real[:, None] & d_real[None, :]
        if used > 1:
            part = (split * N + row.to(tl.int64)) * H + head
            tl.store(part_ptr + part[:, None] * D + d_range[None, :], acc, mask=o_mask)
            tl.store(part_max_ptr + part, top, mask=q_real)
            tl.store(part_sum_ptr + part, total, mask=q_real)
            tl.debug_barrier()
            done = tl.atomic_add(count_ptr + tile * H_KV + kv_head, 1, sem="acq_rel")
            if done == used - 1:  # the last one adds all of them up, in order
                top = tl.full((BLOCK_Q,), -float("inf"), tl.float32)
                total = tl.zeros((BLOCK_Q,), tl.float32)
                acc = tl.zeros((BLOCK_Q, BLOCK_D), tl.float32)
                for s in range(used):
                    part = (s * N + row.to(tl.int64)) * H + head
                    s_top = tl.load(part_max_ptr + part, mask=q_real, other=-float("inf"), cache_modifier=".cg")
                    s_total = tl.load(part_sum_ptr + part, mask=q_real, other=0.0, cache_modifier=".cg")
                    s_place = part_ptr + part[:, None] * D + d_range[None, :]
                    s_acc = tl.load(s_place, mask=o_mask, other=0.0, cache_modifier=".cg")
                    new = tl.maximum(top, s_top)
                    safe = tl.where(new == -float("inf"), 0.0, new)
                    ours = tl.exp2(top - safe)
                    theirs = tl.exp2(s_top - safe)
                    total = total * ours + s_total * theirs
                    acc = acc * ours[:, None] + s_acc * theirs[:, None]
                    top = new
                tl.store(count_ptr + tile * H_KV + kv_head, 0)
                _finish(out_ptr, sinks_ptr, q_place, d_range, o_mask, head, q_real, top, total, acc, SINKS)
        else:
            _finish(out_ptr, sinks_ptr, q_place, d_range, o_mask, head, q_real, top, total, acc, SINKS)


@jit
def _touch(pointers: tl.tensor, real: tl.tensor) -> None:
    """Have these close by when they are read; nobody waits for them."""
    address = tl.where(real, pointers.to(tl.int64), 0)
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.u64 p, $1, 0; @p prefetch.global.L1 [$1]; mov.u32 $0, 0; }",
        "=r,l",
        [address],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@jit
def _block(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    seen: tl.tensor,
    top: tl.tensor,
    total: tl.tensor,
    acc: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """One block of keys into the running softmax (to base 2: `scale` has log2 e in it)."""
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    if SOFTCAP:
        x = scores / softcap
        scores = softcap * (1.0 - 2.0 / (tl.exp2(x * 2.8853900817779268) + 1.0)) * 1.4426950408889634
    scores = tl.where(seen, scores, -float("inf"))
    new = tl.maximum(top, tl.max(scores, 1))
    safe = tl.where(new == -float("inf"), 0.0, new)
    p = tl.exp2(scores - safe[:, None])
    keep = tl.exp2(top - safe)
    total = total * keep + tl.sum(p, 1)
    acc = acc * keep[:, None]
    acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
    return new, total, acc


@jit
def _finish(
    out_ptr: tl.tensor,
    sinks_ptr: tl.tensor,
    q_place: tl.tensor,
    d_range: tl.tensor,
    o_mask: tl.tensor,
    head: tl.tensor,
    q_real: tl.tensor,
    top: tl.tensor,
    total: tl.tensor,
    acc: tl.tensor,
    SINKS: tl.constexpr,
) -> None:
    if SINKS:
        sink = tl.load(sinks_ptr + head, mask=q_real, other=0.0).to(tl.float32) * 1.4426950408889634
        new = tl.maximum(top, sink)
        total = total * tl.exp2(top - new) + tl.exp2(sink - new)
        acc = acc * tl.exp2(top - new)[:, None]
    total = tl.where(total == 0.0, 1.0, total)
    tl.store(
        out_ptr + q_place[:, None] + d_range[None, :], (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=o_mask
    )


def attend(
    query: Tensor,  # [N, H, D]
    keys: Tensor,  # [slots, H_kv, D]
    values: Tensor,  # [slots, H_kv, D]
    layout: RowLayout,
    *,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,  # [H]
    overlap: bool = False,
    wide: bool = False,  # many rows a request: larger tiles
) -> Tensor:  # [N, H, D]
    """One layer's attention for all rows of a pass, whose K and V are in the cache. Does not modify the cache."""
    if not on_gpu(query):
        return attend_twin(query, keys, values, layout, scaling=scaling, window=window, softcap=softcap, sinks=sinks)
    return _launch(query, keys, values, layout, scaling, window, softcap, sinks, overlap, wide)


def _launch(
    query: Tensor, keys: Tensor, values: Tensor, layout: RowLayout, scaling: float, window: int | None,
    softcap: float | None, sinks: Tensor | None, overlap: bool, wide: bool,
) -> Tensor:  # fmt: skip
    rows, heads, dim = query.shape
    if values.shape[2] != dim:
        raise UnsupportedModel(
            f"heads whose keys have {dim} numbers and whose values have {values.shape[2]}: on a GPU they must have as "
            "many; run it with device=cpu"
        )
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    block_q = _block_q(group, wide)
    tiles = layout.tiles(block_q // group)
    splits = triton.cdiv(layout.max_keys, SPLIT_KEYS)
    out = torch.empty_like(query)
    part = part_max = part_sum = count = out  # not read where one program sees all keys
    if splits > 1:
        part = torch.empty((splits, rows, heads, dim), dtype=torch.float32, device=query.device)
        part_max, part_sum = torch.empty((2, splits, rows, heads), dtype=torch.float32, device=query.device).unbind(0)
        count = _counters(query.device, tiles.shape[0] * kv_heads)
    _attend_kernel[(tiles.shape[0], kv_heads, splits)](
        query, keys, values, out, part, part_max, part_sum, count, sinks, tiles, layout.positions, layout.slots,
        layout.lengths, layout.pages, layout.ancestors, rows, layout.pages.shape[1],
        0 if layout.ancestors is None else layout.ancestors.shape[1],
        scaling if softcap is not None else scaling * _LOG2_E, softcap or 0.0, window or 0,
        H=heads, H_KV=kv_heads, D=dim, BLOCK_D=max(16, triton.next_power_of_2(dim)), PAGE=layout.page_size,
        BLOCK_Q=block_q, TILE_ROWS=block_q // group, BLOCK_KEYS=_block_keys(dim, query.element_size()),
        SPLIT=SPLIT_KEYS, TREE=layout.ancestors is not None, SOFTCAP=softcap is not None, WINDOW=window is not None,
        SINKS=sinks is not None, PRECISION="ieee" if query.dtype == torch.float32 else "tf32", OVERLAP=overlap,
        num_warps=4 if block_q < 128 else 8, num_stages=2 if dim > 128 else 3, launch_pdl=overlap,
    )  # fmt: skip
    return out


def prepare(layout: RowLayout, heads: int, kv_heads: int, *, wide: bool = False) -> None:
    """Make what `attend` reads of the layout before its input is there. Called before the first layer."""
    if on_gpu(layout.positions):
        group = heads // kv_heads
        layout.tiles(_block_q(group, wide) // group)


def _block_q(group: int, wide: bool) -> int:
    return int(max(WIDE_TILE if wide else 16, triton.next_power_of_2(group)))


def attend_twin(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    layout: RowLayout,
    *,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    spans = layout.spans()
    real = spans[-1].end
    out = paged_attention(
        query[:real], keys, values, spans, scaling=scaling, window=window, softcap=softcap, sinks=sinks
    )
    return torch.cat((out, query.new_zeros(query.shape[0] - real, query.shape[1], values.shape[2])))


def _block_keys(dim: int, size: int) -> int:
    """Keys of one block: like the runs, part of the order in which a row is added up."""
    return 128 if dim * size <= 256 else 64 if dim * size <= 512 else 32


_zeros: dict[torch.device, Tensor] = {}


def _counters(device: torch.device, size: int) -> Tensor:
    """Zeros that every launch leaves as zeros. Made once: a graph keeps their address."""
    if device not in _zeros:
        _zeros[device] = torch.zeros(1 << 17, dtype=torch.int32, device=device)
    assert size <= _zeros[device].numel(), f"{size} programs share counters for {_zeros[device].numel()}"
    return _zeros[device]
