"""Attention over the paged cache on a GPU: the rows of decoding passes, chains and trees.

Row-independent, as everything that decides a token in bf16 must be: a row's keys are read in the order of their
positions, in blocks that begin at fixed positions, in runs of `SPLIT_KEYS` that are added up in order. So a row comes
out the same as the root of a plain step, in the middle of a chain, or on a branch of a tree: in a tree each row reads
its own ancestors at the positions where they would stand. The runs of a long context are computed by different
programs, of which the last to finish adds them up, or one after another where there are programs enough. The many rows
of a prompt have a kernel of their own (`paged_wide.py`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.core.errors import UnsupportedModel
from slipstream.kernels.attention import paged_attention
from slipstream.kernels.jit import jit, on_gpu, tl, triton
from slipstream.kernels.layout import RowLayout
from slipstream.kernels.paged_keys import read_run
from slipstream.kernels.softmax import LOG2_E, finish, join

SPLIT_KEYS = 512
"""Keys that one program reads at most: fixed, because it is part of the order in which a row is added up."""

_MANY_PROGRAMS = 264
"""With fewer, two a multiprocessor or less, each reads further ahead. More of them wait for the memory side by side."""

_MOST_RUNS = 16384
"""Where many programs would have more runs than these together, each reads all of its own: what they keep until it is
added up would grow with the context."""


@jit(sizes=["N", "P", "W"], pointers=["positions_ptr", "pages_ptr"])
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
    lengths_ptr: tl.tensor,
    pages_ptr: tl.tensor,
    own_ptr: tl.tensor,  # [N, W] int32: where each row's own keys lie; not read unless in a tree
    N: tl.tensor,
    P: tl.tensor,
    W: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    window: tl.tensor,
    H: tl.constexpr,
    H_KV: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_Q: tl.constexpr,  # rows of the tile: its tokens times the heads of a group, padded
    BLOCK_KEYS: tl.constexpr,
    SPLIT: tl.constexpr,
    TREE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
    SERIAL: tl.constexpr,  # one program reads all runs of its tile, else each has one
    INDEX: tl.constexpr,  # what a place in the cache is counted by
    STAGES: tl.constexpr,  # of the loop over keys: where they lie is read two before, they one before they are used
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
        used = (end_key + SPLIT - 1) // SPLIT
        q_range = tl.arange(0, BLOCK_Q)
        row = row_start + q_range // GROUP
        head = kv_head * GROUP + q_range % GROUP
        q_real = row < row_end
        d_range = tl.arange(0, BLOCK_D)
        d_real = d_range < D
        position = tl.load(positions_ptr + row, mask=q_real, other=-1).to(tl.int32)
        q_place = (row.to(tl.int64) * H + head) * D

        length = end_key
        if TREE:
            length = tl.load(lengths_ptr + lane).to(tl.int32)
        pages = pages_ptr + lane.to(tl.int64) * P
        keys = keys_ptr + kv_head * D + d_range[None, :]
        values = values_ptr + kv_head * D + d_range[None, :]
        if OVERLAP:  # the layout of the pass is older than the kernel before this one: only what that wrote is awaited
            tl.extra.cuda.gdc_wait()
        q = tl.load(query_ptr + q_place[:, None] + d_range[None, :], mask=q_real[:, None] & d_real[None, :], other=0.0)
        if SERIAL:
            top = tl.full((BLOCK_Q,), -float("inf"), tl.float32)
            total = tl.zeros((BLOCK_Q,), tl.float32)
            acc = tl.zeros((BLOCK_Q, BLOCK_D), tl.float32)
            for run in range(used):
                run_top, run_total, run_acc = read_run(
                    q, keys, values, pages, own_ptr, position, row, q_real, row_start, row_end, run, end_key, length,
                    d_real, scale, softcap, window, W, H_KV, D, BLOCK_D, PAGE, BLOCK_Q, BLOCK_KEYS, SPLIT,
                    TREE, SOFTCAP, WINDOW, PRECISION, INDEX, STAGES,
                )  # fmt: skip
                top, total, acc = join(top, total, acc, run_top, run_total, run_acc)
        else:
            top, total, acc = read_run(
                q, keys, values, pages, own_ptr, position, row, q_real, row_start, row_end, split, end_key, length,
                d_real, scale, softcap, window, W, H_KV, D, BLOCK_D, PAGE, BLOCK_Q, BLOCK_KEYS, SPLIT, TREE,
                SOFTCAP, WINDOW, PRECISION, INDEX, STAGES,
            )  # fmt: skip
        o_mask = q_real[:, None] & d_real[None, :]
        if (used > 1) & (not SERIAL):
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
                for s in tl.range(0, used, num_stages=4):
                    part = (s * N + row.to(tl.int64)) * H + head
                    s_top = tl.load(part_max_ptr + part, mask=q_real, other=-float("inf"), cache_modifier=".cg")
                    s_total = tl.load(part_sum_ptr + part, mask=q_real, other=0.0, cache_modifier=".cg")
                    s_place = part_ptr + part[:, None] * D + d_range[None, :]
                    s_acc = tl.load(s_place, mask=o_mask, other=0.0, cache_modifier=".cg")
                    top, total, acc = join(top, total, acc, s_top, s_total, s_acc)
                tl.store(count_ptr + tile * H_KV + kv_head, 0)
                finish(out_ptr, sinks_ptr, q_place, d_range, o_mask, head, q_real, top, total, acc, SINKS)
        else:
            finish(out_ptr, sinks_ptr, q_place, d_range, o_mask, head, q_real, top, total, acc, SINKS)


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
) -> Tensor:  # [N, H, D]
    """One layer's attention for all rows of a pass, whose K and V are in the cache. Does not modify the cache."""
    if not on_gpu(query):
        return attend_twin(query, keys, values, layout, scaling=scaling, window=window, softcap=softcap, sinks=sinks)
    return _launch(query, keys, values, layout, scaling, window, softcap, sinks, overlap)


def _launch(
    query: Tensor, keys: Tensor, values: Tensor, layout: RowLayout, scaling: float, window: int | None,
    softcap: float | None, sinks: Tensor | None, overlap: bool = False,
) -> Tensor:  # fmt: skip
    check_heads(query, values)
    rows, heads, dim = query.shape
    kv_heads = keys.shape[1]
    block_q, block_keys = block_q_of(heads // kv_heads), block_keys_of(dim, query.element_size())
    tiles, own = layout.table(_tile_rows(layout, heads, kv_heads), block_keys)
    programs, splits = tiles.shape[0] * kv_heads, triton.cdiv(layout.max_keys, SPLIT_KEYS)
    serial = programs >= _MANY_PROGRAMS and programs * splits > _MOST_RUNS
    if serial:
        splits = 1
    out = torch.empty_like(query)
    count = _counters(query.device, programs if splits > 1 else 0)
    part = part_max = part_sum = count.view(torch.float32)  # not read where one program sees all keys
    if splits > 1:
        part = torch.empty((splits, rows, heads, dim), dtype=torch.float32, device=query.device)
        part_max, part_sum = torch.empty((2, splits, rows, heads), dtype=torch.float32, device=query.device).unbind(0)
    _attend_kernel[(tiles.shape[0], kv_heads, splits)](
        query, keys, values, out, part, part_max, part_sum, count, sinks, tiles, layout.positions,
        layout.lengths, layout.pages, own, rows, layout.pages.shape[1], 0 if own is None else own.shape[1],
        scaling if softcap is not None else scaling * LOG2_E, softcap or 0.0, window or 0,
        H=heads, H_KV=kv_heads, D=dim, BLOCK_D=max(16, triton.next_power_of_2(dim)), PAGE=layout.page_size,
        BLOCK_Q=block_q, BLOCK_KEYS=block_keys, SPLIT=SPLIT_KEYS, TREE=own is not None, SOFTCAP=softcap is not None,
        WINDOW=window is not None,
        SINKS=sinks is not None, PRECISION="ieee" if query.dtype == torch.float32 else "tf32", OVERLAP=overlap,
        SERIAL=serial, INDEX=tl.int32 if keys.numel() < 2**31 else tl.int64,
        STAGES=5 if programs * splits <= _MANY_PROGRAMS else 3, num_warps=4, launch_pdl=overlap,
    )  # fmt: skip
    return out


def check_heads(query: Tensor, values: Tensor) -> None:
    if values.shape[2] != query.shape[2]:
        raise UnsupportedModel(
            f"heads whose keys have {query.shape[2]} numbers and whose values have {values.shape[2]}: on a GPU they "
            "must have as many; run it with device=cpu"
        )


def prepare(layout: RowLayout, heads: int, keys: Tensor) -> None:
    """Make what `attend` reads of the layout before its input is there. Called before the first layer."""
    if on_gpu(layout.positions):
        rows = _tile_rows(layout, heads, keys.shape[1])
        layout.table(rows, block_keys_of(keys.shape[2], keys.element_size()))


def _tile_rows(layout: RowLayout, heads: int, kv_heads: int) -> int:
    """Rows of a tile. Those of a tree read their own keys one after another: while there are multiprocessors to spare,
    in smaller tiles. No row comes out otherwise for it."""
    rows = block_q_of(heads // kv_heads) * kv_heads // heads
    if layout.ancestors is not None:
        splits = -(-layout.max_keys // SPLIT_KEYS)
        while rows > 1 and layout.tile_count(rows // 2) * kv_heads * splits <= _MANY_PROGRAMS:
            rows //= 2
    return rows


def kept_bytes(heads: int, kv_heads: int, dim: int, max_keys: int) -> int:
    """What a launch keeps of its runs until they are added up, at most, however many rows it has."""
    splits = -(-max_keys // SPLIT_KEYS)
    most = max(_MANY_PROGRAMS * splits, _MOST_RUNS)
    return most * block_q_of(heads // kv_heads) * dim * 4 if splits > 1 else 0


def block_q_of(group: int) -> int:
    return max(16, 1 << (group - 1).bit_length())


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


def block_keys_of(dim: int, size: int) -> int:
    """Keys of one block: like the runs, part of the order in which a row is added up."""
    return next(keys for keys in (128, 64, 32, 16) if keys == 16 or keys * dim * size <= 16384)


_zeros: dict[torch.device, Tensor] = {}


def _counters(device: torch.device, size: int) -> Tensor:
    """Zeros that every launch leaves as zeros. Made once: a graph keeps their address."""
    if device not in _zeros:
        _zeros[device] = torch.zeros(1 << 17, dtype=torch.int32, device=device)
    assert size <= _zeros[device].numel(), f"{size} programs share counters for {_zeros[device].numel()}"
    return _zeros[device]
