"""`rank` as GPU kernels, in two launches: the best of each chunk of a row, then the best of these.

torch's own search for the k largest takes longer than a head's layer needs for its bytes. A program is one warp where
it can be: what is searched for is known to all its lanes at once, and nobody waits for another warp.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.kernels.gpu.jit import jit, on_gpu, tl, triton
from slipstream.kernels.gpu.sortable import NOTHING, sortable, unsorted
from slipstream.sampling.fused_rule import NO_ID, constant, first_best, gumbel_noise, row_key
from slipstream.sampling.rows import SampleRows
from slipstream.sampling.table import SamplingTable

CHUNK = 512
"""Tokens a program: those that one warp looks at."""

_LEAST = constant(-1e38)
"""Stands for tokens that cannot come: below all others, but above what is no token or was taken already."""


@jit(sizes=["vocab_size", "chunks"], pointers=["slots_ptr", "positions_ptr"])
def _chunks_kernel(
    logits_ptr: tl.tensor,  # [R, Vd] fp32
    ids_ptr: tl.tensor,  # [Vd] int64: the target's ids, or not read
    largest_ptr: tl.tensor,  # [R]: of a row, or not read
    floor_ptr: tl.tensor,  # [R]: scores below cannot come, or not read
    slots_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    streams_ptr: tl.tensor,
    values_ptr: tl.tensor,  # [R, chunks, COUNT] int32 out: the best scores of each chunk, as `sortable`
    columns_ptr: tl.tensor,  # [R, chunks, COUNT] int32 out: whose they are
    sums_ptr: tl.tensor,  # [R, chunks] out: sum of exp(score - the chunk's best)
    vocab_size: tl.tensor,
    chunks: tl.tensor,
    COUNT: tl.constexpr,
    CHUNK: tl.constexpr,
    SAMPLED: tl.constexpr,
    FLOORED: tl.constexpr,
    MAPPED: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    row, chunk = tl.program_id(0), tl.program_id(1)
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    columns = chunk * CHUNK + tl.arange(0, CHUNK)
    real = columns < vocab_size
    x = tl.load(logits_ptr + row.to(tl.int64) * vocab_size + columns, mask=real, other=float("-inf"))
    x = tl.where(x == x, x, float("-inf"))
    if SAMPLED:
        slot = tl.load(slots_ptr + row)
        t = tl.load(temperature_ptr + slot)
        if t > 0:
            x = tl.div_rn(x - tl.load(largest_ptr + row), t)
            if FLOORED:
                x = tl.where(x >= tl.load(floor_ptr + row), x, float("-inf"))
            ids = columns
            if MAPPED:
                ids = tl.load(ids_ptr + columns, mask=real, other=0).to(tl.int32)
            x += gumbel_noise(row_key(row, slot, positions_ptr, streams_ptr), ids)
    x = tl.where(real, tl.maximum(x, _LEAST), float("-inf"))
    x = tl.where(x == x, x, _LEAST)
    left = sortable(x)
    peak = unsorted(tl.max(left))
    place = row * chunks + chunk
    tl.store(sums_ptr + place, tl.sum(tl.where(x > _LEAST, tl.exp(x - peak), 0.0)))
    for k in tl.static_range(COUNT):
        value, column = first_best(left, columns)
        tl.store(values_ptr + place * COUNT + k, value)
        tl.store(columns_ptr + place * COUNT + k, column)
        left = tl.where(columns == column, NOTHING, left)


@jit(sizes=["chunks"])
def _merge_kernel(
    ids_ptr: tl.tensor,
    values_ptr: tl.tensor,
    columns_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    tokens_ptr: tl.tensor,  # [R, COUNT] int64 out
    scores_ptr: tl.tensor,  # [R, COUNT] fp32 out
    chunks: tl.tensor,
    hopeless: tl.tensor,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
    PLACES: tl.constexpr,  # power of two >= COUNT
    MAPPED: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    at = tl.arange(0, BLOCK)
    there = at < chunks * COUNT
    left = tl.load(values_ptr + row * chunks * COUNT + at, mask=there, other=NOTHING)
    columns = tl.load(columns_ptr + row * chunks * COUNT + at, mask=there, other=NO_ID)
    each = tl.arange(0, CHUNKS)
    peaks = tl.load(values_ptr + (row * chunks + each) * COUNT, mask=each < chunks, other=NOTHING)
    sums = tl.load(sums_ptr + row * chunks + each, mask=each < chunks, other=0.0)
    best = unsorted(tl.max(left))
    total = tl.log(tl.maximum(tl.sum(sums * tl.exp(unsorted(peaks) - best)), 1e-30))  # 1 or more, if anything can come
    # all of them before any is looked up: else each would wait for the one before
    place = tl.arange(0, PLACES)
    column = tl.zeros([PLACES], tl.int32)
    value = tl.full([PLACES], NOTHING, tl.int32)
    for k in tl.static_range(COUNT):
        next_value, next_column = first_best(left, columns)
        value = tl.where(place == k, next_value, value)
        column = tl.where(place == k, next_column, column)
        left = tl.where(columns == next_column, NOTHING, left)
    token = column.to(tl.int64)
    if MAPPED:
        token = tl.load(ids_ptr + column, mask=place < COUNT, other=0)
    found = unsorted(value)
    score = tl.minimum(found - best - total, 0.0)
    score = tl.where((found > _LEAST) & (score == score), tl.maximum(score, hopeless), hopeless)
    tl.store(tokens_ptr + row * COUNT + place, token, mask=place < COUNT)
    tl.store(scores_ptr + row * COUNT + place, score, mask=place < COUNT)


def rank_fused(
    logits: Tensor,  # [R, Vd] fp32
    rows: SampleRows,
    table: SamplingTable,
    count: int,
    vocab: Tensor | None,  # [Vd] int64
    floor: Tensor | None,  # [R] fp32
    hopeless: float,
    *,
    sampled: bool,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:  # [R, K] int64, [R, K] fp32
    """Tokens and scores, best first; of equals the first column."""
    logits = logits.contiguous()
    requests, vocab_size = logits.shape
    chunks = triton.cdiv(vocab_size, chunk)
    values, columns = torch.empty((2, requests, chunks, count), dtype=torch.int32, device=logits.device).unbind(0)
    sums = logits.new_empty((requests, chunks))
    tokens = torch.empty((requests, count), dtype=torch.int64, device=logits.device)
    scores = logits.new_empty((requests, count))
    largest = logits.amax(dim=1) if sampled else logits
    ids = logits if vocab is None else vocab
    mapped, overlap = vocab is not None, on_gpu(logits)
    block = triton.next_power_of_2(chunks * count)
    _chunks_kernel[(requests, chunks)](
        logits, ids, largest, logits if floor is None else floor.contiguous(), rows.slots.contiguous(),
        table.temperature, rows.positions.contiguous(), table.streams, values, columns, sums, vocab_size, chunks,
        COUNT=count, CHUNK=chunk, SAMPLED=sampled, FLOORED=floor is not None, MAPPED=mapped, OVERLAP=overlap,
        num_warps=max(1, chunk // CHUNK), launch_pdl=overlap,
    )  # fmt: skip
    _merge_kernel[(requests,)](
        ids, values, columns, sums, tokens, scores, chunks, hopeless, COUNT=count, BLOCK=block,
        CHUNKS=triton.next_power_of_2(chunks), PLACES=triton.next_power_of_2(count), MAPPED=mapped, OVERLAP=overlap,
        num_warps=min(8, max(1, block // 512)), launch_pdl=overlap,
    )  # fmt: skip
    return tokens, scores
