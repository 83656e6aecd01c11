"""Attention over the paged cache on a GPU: the rows of decoding passes, chains and trees.

Row-independent, as everything that decides a token in bf16 must be: a row's keys are read in the order of their
positions, in blocks that begin at fixed positions, in runs of `SPLIT_KEYS` that are added up in order. So a row has the
same bits as the root of a plain step, in the middle of a chain, or on a branch of a tree: in a tree each row reads its
own ancestors at the positions that they would have in a chain. Different programs compute the runs of a long context,
and the last of them adds the runs up; if there are enough programs, one program computes all runs of its tile. The many
rows of a prompt have a kernel of their own (`paged_wide.py`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.core.errors import UnsupportedModel
from slipstream.kernels.attention import paged_attention
from slipstream.kernels.gpu.jit import jit, on_gpu, tl, triton
from slipstream.kernels.gpu.layout import RowLayout

LOG2_E = 1.4426950408889634
"""Scores are powers of 2: their scale contains log2 e, unless they are capped first."""

SPLIT_KEYS = 512
"""Keys that one program reads at most. Fixed, because it is part of the order of a row's sums."""

_MANY_PROGRAMS = 264
"""With fewer programs (two a multiprocessor), each prefetches further; with more, they hide each other's latency."""

_MOST_RUNS = 16384
"""With more runs than this in all programs together, each program reads all runs of its tile: the memory for partial
results would grow with the context."""


@jit
def capped(scores: tl.tensor, softcap: tl.tensor, SOFTCAP: tl.constexpr) -> tl.tensor:
    """softcap * tanh(scores / softcap), to base 2; the scores as they are without a softcap."""
    if SOFTCAP:
        x = scores / softcap
        scores = softcap * (1.0 - 2.0 / (tl.exp2(x * 2.8853900817779268) + 1.0)) * 1.4426950408889634
    return scores


@jit
def finite(top: tl.tensor) -> tl.tensor:
    """The maximum, or 0 if no key was seen, so that it can be subtracted."""
    return tl.where(top == -float("inf"), 0.0, top)


@jit
def add_block(
    q: tl.tensor,  # [Q, D]
    k: tl.tensor,  # [K, D]
    v: tl.tensor,
    seen: tl.tensor,  # [Q, K]; unused unless MASKED
    top: tl.tensor,  # [Q]
    total: tl.tensor,
    acc: tl.tensor,  # [Q, D]
    scale: tl.tensor,
    softcap: tl.tensor,
    MASKED: tl.constexpr,  # False: every row sees every key
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Add one block of keys to the running softmax (to base 2: `scale` contains log2 e)."""
    scores = capped(tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale, softcap, SOFTCAP)
    if MASKED:
        scores = tl.where(seen, scores, -float("inf"))
    new = tl.maximum(top, tl.max(scores, 1))
    safe = finite(new) if MASKED else new
    p = tl.exp2(scores - safe[:, None])
    keep = tl.exp2(top - safe)
    total = total * keep + tl.sum(p, 1)
    acc = tl.dot(p.to(v.dtype), v, acc * keep[:, None], input_precision=PRECISION)
    return new, total, acc


@jit
def join(
    top: tl.tensor,  # [Q]
    total: tl.tensor,
    acc: tl.tensor,  # [Q, D]
    next_top: tl.tensor,
    next_total: tl.tensor,
    next_acc: tl.tensor,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The softmax over the keys of both."""
    new = tl.maximum(top, next_top)
    ours = tl.exp2(top - finite(new))
    theirs = tl.exp2(next_top - finite(new))
    # an explicit fma, so that every kernel rounds in the same way
    total = tl.fma(total, ours, next_total * theirs)
    return new, total, tl.fma(acc, tl.broadcast_to(ours[:, None], acc.shape), next_acc * theirs[:, None])


@jit
def divided(acc: tl.tensor, total: tl.tensor) -> tl.tensor:
    """The weighted mean of a softmax; 0 if no key was seen."""
    return acc / tl.where(total == 0.0, 1.0, total)[:, None]


@jit
def finish(
    out_ptr: tl.tensor,
    sinks_ptr: tl.tensor,
    place: tl.tensor,  # [Q] of each row's head in `out`
    d_range: tl.tensor,
    mask: tl.tensor,  # [Q, D]
    head: tl.tensor,
    real: tl.tensor,  # [Q]
    top: tl.tensor,
    total: tl.tensor,
    acc: tl.tensor,
    SINKS: tl.constexpr,
) -> None:
    """Add the sinks, divide by the total and store."""
    if SINKS:
        sink = tl.load(sinks_ptr + head, mask=real, other=0.0).to(tl.float32) * 1.4426950408889634
        new = tl.maximum(top, sink)
        total = total * tl.exp2(top - new) + tl.exp2(sink - new)
        acc = acc * tl.exp2(top - new)[:, None]
    out = divided(acc, total).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + place[:, None] + d_range[None, :], out, mask=mask)


@jit
def read_pages(
    q: tl.tensor,  # [Q, D]
    keys: tl.tensor,  # [1, D]: of a head
    values: tl.tensor,
    pages: tl.tensor,  # of a request
    position: tl.tensor,  # [Q]: padding rows have positions before all keys
    begin: tl.tensor,
    end: tl.tensor,
    end_key: tl.tensor,  # the end of the keys
    d_real: tl.tensor,  # [D]
    top: tl.tensor,  # [Q]
    total: tl.tensor,
    acc: tl.tensor,  # [Q, D]
    scale: tl.tensor,
    softcap: tl.tensor,
    window: tl.tensor,
    H_KV: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
    INDEX: tl.constexpr,
    STAGES: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Add the keys on pages, block by block, to the running softmax."""
    for key in tl.range(begin, end, BLOCK_KEYS, num_stages=STAGES):
        at = key + tl.arange(0, BLOCK_KEYS)
        page = tl.load(pages + at // PAGE, mask=at < end_key, other=0).to(INDEX)
        place = (page * PAGE + at % PAGE) * (H_KV * D)
        there = (at < end_key)[:, None]
        if D < BLOCK_D:
            there = there & d_real[None, :]
        k = tl.load(keys + place[:, None], mask=there, other=0.0)
        v = tl.load(values + place[:, None], mask=there, other=0.0)
        seen = at[None, :] <= position[:, None]
        if WINDOW:
            seen = seen & (at[None, :] > position[:, None] - window)
        top, total, acc = add_block(q, k, v, seen, top, total, acc, scale, softcap, True, SOFTCAP, PRECISION)
    return top, total, acc


@jit
def read_run(
    q: tl.tensor,  # [Q, D]
    keys: tl.tensor,  # [1, D]: of a head
    values: tl.tensor,
    pages: tl.tensor,  # of a request
    own_ptr: tl.tensor,
    position: tl.tensor,  # [Q]
    row: tl.tensor,  # [Q]
    q_real: tl.tensor,  # [Q]
    row_start: tl.tensor,
    row_end: tl.tensor,
    run: tl.tensor,
    end_key: tl.tensor,  # of all runs
    length: tl.tensor,  # where a tree's own keys begin
    d_real: tl.tensor,  # [D]
    scale: tl.tensor,
    softcap: tl.tensor,
    window: tl.tensor,
    W: tl.tensor,
    H_KV: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    SPLIT: tl.constexpr,
    TREE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    PRECISION: tl.constexpr,
    INDEX: tl.constexpr,
    STAGES: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The softmax over one run of the keys."""
    begin = run * SPLIT
    end_key = tl.minimum(end_key, begin + SPLIT)
    if WINDOW:
        # skip blocks that no row of the tile sees; masked ones would change nothing
        lowest = tl.min(tl.where(q_real, position, 2147483647), 0) - window + 1
        begin = tl.maximum(begin, (lowest // BLOCK_KEYS) * BLOCK_KEYS)
    shared_end = end_key
    if TREE:
        shared_end = tl.minimum(end_key, (length // BLOCK_KEYS) * BLOCK_KEYS)
    top = tl.full((BLOCK_Q,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK_Q,), tl.float32)
    acc = tl.zeros((BLOCK_Q, BLOCK_D), tl.float32)
    top, total, acc = read_pages(
        q, keys, values, pages, position, begin, shared_end, end_key, d_real, top, total, acc, scale, softcap,
        window, H_KV, D, BLOCK_D, PAGE, BLOCK_KEYS, WINDOW, SOFTCAP, PRECISION, INDEX, STAGES,
    )  # fmt: skip
    if TREE:
        # from the block in which the draft begins, each row has its own keys
        own = length // BLOCK_KEYS * BLOCK_KEYS
        for key in range(tl.maximum(begin, own), end_key, BLOCK_KEYS):
            at = key + tl.arange(0, BLOCK_KEYS)
            for r in tl.range(row_start, row_end, num_stages=3):
                slot = tl.load(own_ptr + r * W + at - own, mask=at < end_key, other=-1)
                known = slot >= 0
                place = slot.to(INDEX) * (H_KV * D)
                there = known[:, None]
                if D < BLOCK_D:
                    there = there & d_real[None, :]
                k = tl.load(keys + place[:, None], mask=there, other=0.0)
                v = tl.load(values + place[:, None], mask=there, other=0.0)
                seen = (row == r)[:, None] & known[None, :] & (at[None, :] <= position[:, None])
                if WINDOW:
                    seen = seen & (at[None, :] > position[:, None] - window)
                top, total, acc = add_block(q, k, v, seen, top, total, acc, scale, softcap, True, SOFTCAP, PRECISION)
    return top, total, acc


@jit(sizes=["N", "P", "W"], pointers=["positions_ptr", "pages_ptr"])
def _attend_kernel(
    query_ptr: tl.tensor,  # [N, H, D]
    keys_ptr: tl.tensor,  # [slots, H_kv, D]
    values_ptr: tl.tensor,
    out_ptr: tl.tensor,  # [N, H, D]
    part_ptr: tl.tensor,  # [splits, N, H, D] fp32: partial results of tiles with several runs
    part_max_ptr: tl.tensor,  # [splits, N, H] fp32
    part_sum_ptr: tl.tensor,
    count_ptr: tl.tensor,  # [tiles, H_kv] int32: 0 before and after
    sinks_ptr: tl.tensor,  # [H]; unused unless SINKS
    tiles_ptr: tl.tensor,  # [T, 4] int32
    positions_ptr: tl.tensor,
    lengths_ptr: tl.tensor,
    pages_ptr: tl.tensor,
    own_ptr: tl.tensor,  # [N, W] int32: slots of each row's own keys; unused unless TREE
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
    BLOCK_Q: tl.constexpr,  # tokens of the tile times the heads of a group, padded
    BLOCK_KEYS: tl.constexpr,
    SPLIT: tl.constexpr,
    TREE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
    SERIAL: tl.constexpr,  # one program reads all runs of its tile; False: one run each
    INDEX: tl.constexpr,  # the integer type of cache offsets
    STAGES: tl.constexpr,  # of the loop over keys: slots are loaded two steps ahead, keys one
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
        if OVERLAP:  # the layout is older than the kernel before this one: wait only for what that kernel wrote
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
            if done == used - 1:  # the last program adds up all runs, in order
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
    part = part_max = part_sum = count.view(torch.float32)  # unused if each program sees all keys
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
            f"heads with keys of size {query.shape[2]} and values of size {values.shape[2]}: on a GPU both "
            "must be equal; use device=cpu"
        )


def prepare(layout: RowLayout, heads: int, keys: Tensor) -> None:
    """Make the tables that `attend` reads. Called before the first layer, so that no layer waits for them."""
    if on_gpu(layout.positions):
        rows = _tile_rows(layout, heads, keys.shape[1])
        layout.table(rows, block_keys_of(keys.shape[2], keys.element_size()))


def _tile_rows(layout: RowLayout, heads: int, kv_heads: int) -> int:
    """Rows of a tile. Rows of trees read their own keys one after another, so their tiles are smaller while there are
    idle multiprocessors. The result does not depend on it."""
    rows = block_q_of(heads // kv_heads) * kv_heads // heads
    if layout.ancestors is not None:
        splits = -(-layout.max_keys // SPLIT_KEYS)
        while rows > 1 and layout.tile_count(rows // 2) * kv_heads * splits <= _MANY_PROGRAMS:
            rows //= 2
    return rows


def kept_bytes(heads: int, kv_heads: int, dim: int, max_keys: int) -> int:
    """An upper bound of the memory for partial results of a launch, in bytes, for any number of rows."""
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
    """Keys of a block: part of the order of a row's sums, as the runs are."""
    return next(keys for keys in (128, 64, 32, 16) if keys == 16 or keys * dim * size <= 16384)


_zeros: dict[torch.device, Tensor] = {}


def _counters(device: torch.device, size: int) -> Tensor:
    """Zeros that every launch resets to zeros. Allocated once, because graphs keep their address."""
    if device not in _zeros:
        _zeros[device] = torch.zeros(1 << 17, dtype=torch.int32, device=device)
    assert size <= _zeros[device].numel(), f"{size} programs share counters for {_zeros[device].numel()}"
    return _zeros[device]
