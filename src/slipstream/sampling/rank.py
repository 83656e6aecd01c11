"""The likeliest choices of the rule, best first, for drafters that guess trees.

`choose` gives the one token of a row. A drafter that guesses several wants the next ones as well, and its confidence in
each: the share of exp(log q + noise), with the noise that the target will add. So at any temperature the best is what
`choose` gives, and shares of a path can be multiplied, or their logarithms added.

On a GPU two kernels do it: the best of each chunk of a row, then the best of these. torch's own search for the k
largest takes longer than a layer of a head. A program is one warp where it can be: no warp waits for another.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.kernels.gpu.jit import jit, on_gpu, tl, triton
from slipstream.kernels.gpu.sortable import NOTHING, sortable, unsorted
from slipstream.sampling.adjust import adjusted
from slipstream.sampling.fused import NO_ID, constant, first_best, gumbel_noise, row_key
from slipstream.sampling.noise import gumbel_of_hashes
from slipstream.sampling.rows import SampleRows
from slipstream.sampling.table import Features, SamplingTable

CUT = 128
"""Tokens among which top-k and top-p look for their cut. A wider filter is cut here, which costs a guess at most."""
HOPELESS = -1e30
"""The score of an impossible token: finite, so that sums of a few stay numbers."""


CHUNK = 512
"""Tokens a program: those that one warp looks at."""

_LEAST = constant(-1e38)
"""Stands for tokens that cannot come: below all others, but above what is no token or was taken already."""


class Ranked(NamedTuple):
    tokens: Tensor  # [R, K] int64, of the target's vocabulary, all different
    scores: Tensor  # [R, K] fp32, at most 0 and falling: the logarithm of each one's share


def rank(
    logits: Tensor,  # [R, Vd]
    rows: SampleRows,
    table: SamplingTable,
    features: Features,
    count: int,
    vocab: Tensor | None = None,  # [Vd] int64: the target's id of each column; None: the first of the vocabulary
) -> Ranked:
    """The `count` best tokens of each row. Reads no value on the host."""
    if features.adjusts:
        logits, vocab = adjusted(_whole(logits, table.vocab_size, vocab), rows, table, features), None
    scores = logits.float()
    if on_gpu(scores):
        floor = _tempered(scores, rows, table, features).floor if _filters(features) else None
        found = rank_fused(scores, rows, table, count, vocab, floor, HOPELESS, sampled=features.sampled)
        return Ranked(*found)
    if features.sampled:
        scores = _noisy(scores, rows, table, features, vocab)
    total = scores.logsumexp(dim=1, keepdim=True)  # [R, 1]
    best = scores.topk(count, dim=1)
    shares = (best.values - total).nan_to_num(nan=HOPELESS, neginf=HOPELESS, posinf=0.0).clamp(HOPELESS, 0)
    return Ranked(best.indices if vocab is None else vocab[best.indices], shares)


def _whole(logits: Tensor, width: int, vocab: Tensor | None) -> Tensor:  # [R, V]
    """The logits over the target's vocabulary, by whose ids penalties, biases and masks go."""
    if vocab is None and logits.shape[1] == width:
        return logits
    ids = torch.arange(logits.shape[1], device=logits.device) if vocab is None else vocab
    return torch.full((logits.shape[0], width), -math.inf, device=logits.device).index_copy_(1, ids, logits.float())


class _Tempered(NamedTuple):
    scores: Tensor  # [R, Vd]: log q up to a constant, the likeliest 0; greedy rows at temperature 1
    floor: Tensor  # [R]: a token with less cannot come


def _filters(features: Features) -> bool:
    return features.sampled and (features.top_k or features.top_p or features.min_p)


def _noisy(
    logits: Tensor, rows: SampleRows, table: SamplingTable, features: Features, vocab: Tensor | None
) -> Tensor:  # [R, Vd]
    """Log q up to a constant, with the noise; without it in greedy rows."""
    sampled = table.temperature[rows.slots, None] > 0  # [R, 1]
    scores, floor = _tempered(logits, rows, table, features)
    if _filters(features):
        scores = scores.masked_fill(scores < floor[:, None], -math.inf)
    hashes = table.token_hashes[: logits.shape[1]] if vocab is None else table.token_hashes[vocab]
    return scores + gumbel_of_hashes(table.noise_keys(rows), hashes) * sampled


def _tempered(logits: Tensor, rows: SampleRows, table: SamplingTable, features: Features) -> _Tempered:
    warm = table.temperature[rows.slots, None]  # [R, 1]
    sampled = warm > 0
    scores = (logits - logits.amax(dim=1, keepdim=True)) / torch.where(sampled, warm, 1.0)
    floor = table.log_min_p[rows.slots, None]
    if features.top_k or features.top_p:
        floor = torch.maximum(floor, _cut(scores, rows, table, features))
    return _Tempered(scores, floor.masked_fill(~sampled, -math.inf)[:, 0])


def _cut(scores: Tensor, rows: SampleRows, table: SamplingTable, features: Features) -> Tensor:  # [R, 1]
    """The least score that top-k and top-p keep."""
    first = scores.topk(min(CUT, scores.shape[1]), dim=1).values  # [R, C]
    top_k, top_p = table.top_k[rows.slots, None], table.top_p[rows.slots, None]
    ranks = torch.arange(first.shape[1], device=first.device)
    kept = (top_k == 0) | (ranks < top_k)
    if features.top_p:
        mass = first.exp() * kept
        total = torch.where(top_k > 0, mass.sum(dim=1, keepdim=True), scores.exp().sum(dim=1, keepdim=True))
        kept = kept & ((top_p >= 1) | (mass.cumsum(dim=1) - mass < top_p * total))
    cut = first.masked_fill(~kept, math.inf).amin(dim=1, keepdim=True)
    return cut.masked_fill((top_k == 0) & (top_p >= 1), -math.inf)


# --- kernels ---------------------------------------------------------------------------------------------------------


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
