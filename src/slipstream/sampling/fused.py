"""The rule of sampling as GPU kernels: what `choose` does after penalties and masks, in at most five launches.

The torch form sorts, and asks the host whether it sorted enough. Here nothing is sorted and the host asks nothing, so
a captured graph can hold it. Each row is cut into chunks, a program each:

    peaks    the largest logit of each chunk, and with top-k or top-p its smallest
    survey   rows with top-k or top-p: how many tokens, or how much mass, lie within 16 distances of the largest logit
    refine   the same for 16 parts of the one interval that holds the cut
    draw     tokens before the part with the cut are surely kept, and the chunk's best of them is found, noise added;
             tokens in that part, few as a rule, are listed. Without top-k and top-p all are sure
    settle   one program a row: searches the list for the cut, and takes the best of all that is kept

Greedy rows need peaks and settle; draw comes with sampled rows, survey and refine with top-k and top-p. Sums are
of integers, so the order in which programs come by changes nothing, nor do the other rows. Arithmetic that a token
depends on is that of `filters.py` and `noise.py`, operation by operation.

For one row the five are so short that their starts count: each may start while the one before ends, and then waits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.kernels.gpu.jit import jit, on_gpu, tl, triton
from slipstream.sampling.fused_cut import settle_listed
from slipstream.sampling.fused_rule import (
    NO_ID,
    PIECE,
    TALLY,
    TALLY_WORDS,
    WAYS,
    add_tally,
    coarse_cut,
    fine_cut,
    first_best,
    gumbel_noise,
    is_finite,
    keep_steps,
    kept_steps,
    mass_of,
    places_of,
    row_key,
    scores_of,
    steps_of,
    sums_up_to,
)
from slipstream.sampling.rows import SampleRows
from slipstream.sampling.table import Features, SamplingTable

CHUNK = 2048
"""Tokens a program, and half as many where all rows together have few. Survey and refine take half as many too, else
twice: a program sums up in its threads first, and it takes a while to bring together what these have."""

MANY_TOKENS = 1 << 20
"""From so many on, programs of any size fill the GPU."""

HELD = 4096
"""Listed tokens that `settle` holds while it searches; lists that are longer it reads again and again."""


def choose_fused(
    logits: Tensor, rows: SampleRows, table: SamplingTable, features: Features, *, chunk: int = CHUNK
) -> Tensor:
    """Tokens [R] int64 that the rows of `logits` [R, V] fp32 choose; -1 for a row that can choose nothing.

    V may be smaller than the table's vocabulary: the missing tokens are impossible. features: what the rows ask for,
    or more. chunk: a power of two up to 2048; it changes the speed, never a token. The host does not wait.
    """
    count, vocab_size = logits.shape
    tokens = torch.empty(count, dtype=torch.int64, device=logits.device)
    if count == 0:
        return tokens
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    filtered = features.sampled and (features.top_k or features.top_p)
    few = count * vocab_size < MANY_TOKENS
    chunk = chunk // 2 if few else chunk
    chunks = triton.cdiv(vocab_size, chunk)
    width = triton.next_power_of_2(max(256, chunks))  # the same for most vocabularies: less to compile
    values = logits.new_empty(3, count, width)  # of each chunk the peak, the smallest logit, and the best score
    ids = torch.empty(2, count, width, dtype=torch.int32, device=logits.device)  # who has the peak, and the best score
    tally = torch.empty(count, TALLY_WORDS, dtype=torch.int64, device=logits.device)
    listed = torch.empty(count, vocab_size if filtered else 0, dtype=torch.int32, device=logits.device)
    line = (logits, logits.stride(0), vocab_size)
    scratch = (values[0], values[1], ids[0], values[2], ids[1], tally, listed, chunks)
    slots, positions = rows.slots.contiguous(), rows.positions.contiguous()
    wish = (slots, table.temperature, table.top_k, table.top_p, table.log_min_p, positions, table.streams)
    overlap = on_gpu(logits)
    how = {"CHUNKS": width, "FILTERED": filtered, "OVERLAP": overlap}

    _peaks[(count, chunks)](*line, *scratch[:3], tally, CHUNK=chunk, **how, num_warps=4)
    if filtered:
        block, blocks = min(1024, max(512, chunk)), 1 if few else 4
        for refine in (False, True):
            _count[(count, triton.cdiv(vocab_size, block * blocks))](
                *line, *scratch, *wish, BLOCK=block, BLOCKS=blocks, **how, REFINE=refine, num_warps=4,
                launch_pdl=overlap,
            )  # fmt: skip
    if features.sampled:
        _draw[(count, chunks)](*line, *scratch, *wish, CHUNK=chunk, **how, num_warps=4, launch_pdl=overlap)
    _settle[(count,)](
        *line, *scratch, *wish, tokens, LIST=HELD, **how, SAMPLED=features.sampled,
        num_warps=16 if filtered else 8, launch_pdl=overlap,
    )  # fmt: skip
    return tokens


# --- over chunks: grid (R, chunks) ----------------------------------------------------------------------------------


@jit
def _ready(OVERLAP: tl.constexpr) -> None:
    """Let the next kernel start, and wait for the one before. Logits and wishes are older than all of them."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@jit
def _load_chunk(
    logits: tl.tensor, stride: tl.tensor, vocab_size: tl.tensor, row: tl.tensor, chunk: tl.tensor, CHUNK: tl.constexpr
) -> tl.tensor:
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row.to(tl.int64) * stride + ids, mask=ids < vocab_size, other=float("-inf"))
    return ids, x


@jit
def _peaks(
    logits: tl.tensor, stride: tl.tensor, vocab_size: tl.tensor,
    peaks: tl.tensor, lows: tl.tensor, peak_ids: tl.tensor, tally: tl.tensor,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, FILTERED: tl.constexpr, OVERLAP: tl.constexpr,
) -> None:  # fmt: skip
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    row, chunk = tl.program_id(0), tl.program_id(1)
    ids, x = _load_chunk(logits, stride, vocab_size, row, chunk, CHUNK)
    value, token = first_best(tl.where(x == x, x, float("inf")), ids)  # NaN breaks a row as +inf does
    tl.store(peaks + row * CHUNKS + chunk, value)
    tl.store(peak_ids + row * CHUNKS + chunk, token)
    if FILTERED:
        tl.store(lows + row * CHUNKS + chunk, tl.min(tl.where(x > float("-inf"), x, float("inf"))))
        if chunk == 0:
            at = tl.arange(0, 64)
            tl.store(tally + row * TALLY + at, tl.zeros([64], tl.int64), mask=at < TALLY)


@jit
def _largest(peaks: tl.tensor, row: tl.tensor, chunks: tl.tensor, CHUNKS: tl.constexpr) -> tl.tensor:
    at = tl.arange(0, CHUNKS)
    return tl.max(tl.load(peaks + row * CHUNKS + at, mask=at < chunks, other=float("-inf")))


@jit
def _lowest(lows: tl.tensor, row: tl.tensor, chunks: tl.tensor, CHUNKS: tl.constexpr) -> tl.tensor:
    at = tl.arange(0, CHUNKS)
    return tl.min(tl.load(lows + row * CHUNKS + at, mask=at < chunks, other=float("inf")))


@jit(sizes=["chunks"], pointers=["slots", "positions"])
def _count(
    logits: tl.tensor, stride: tl.tensor, vocab_size: tl.tensor,
    peaks: tl.tensor, lows: tl.tensor, peak_ids: tl.tensor, best: tl.tensor, best_ids: tl.tensor,
    tally: tl.tensor, listed: tl.tensor, chunks: tl.tensor,
    slots: tl.tensor, temperature: tl.tensor, top_k: tl.tensor, top_p: tl.tensor, log_min_p: tl.tensor,
    positions: tl.tensor, streams: tl.tensor,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, CHUNKS: tl.constexpr, FILTERED: tl.constexpr, OVERLAP: tl.constexpr,
    REFINE: tl.constexpr,
) -> None:  # fmt: skip
    """Survey or refine, on a part of a row; grid (R, parts)."""
    row, part = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + row)
    t, k, p = tl.load(temperature + slot), tl.load(top_k + slot), tl.load(top_p + slot)
    _, x = _load_chunk(logits, stride, vocab_size, row, part * BLOCKS, BLOCK)
    _ready(OVERLAP)
    largest = _largest(peaks, row, chunks, CHUNKS)
    if (t > 0) & is_finite(largest) & ((k > 0) | (p < 1)):
        tally += row * TALLY
        if REFINE:  # up to a part means: that part, those before it, and all before the interval
            coarse, _before, _need = coarse_cut(tally, k, p)
            steps, first, parts = kept_steps(tally), (coarse * WAYS).to(tl.float32), 1.0
            tally += WAYS
        else:
            steps, first, parts = steps_of(largest, _lowest(lows, row, chunks, CHUNKS), t, p, vocab_size), 0.0, 1 / WAYS
            if part == 0:
                keep_steps(tally, steps)
        high, low = tl.zeros([128, WAYS], tl.float32), tl.zeros([128, WAYS], tl.float32)
        for block in tl.range(BLOCKS):
            _, following = _load_chunk(
                logits, stride, tl.where(block + 1 < BLOCKS, vocab_size, 0), row, part * BLOCKS + block + 1, BLOCK
            )
            scores = scores_of(x, largest, t)
            bins = tl.floor((places_of(x, scores, largest, steps, k > 0) - first) * parts)
            worth = (x > float("-inf")).to(tl.float32)
            if k == 0:
                worth = mass_of(scores)
            upper = tl.floor(worth * (1 / PIECE))
            high += sums_up_to(bins, upper)
            low += sums_up_to(bins, worth - upper * PIECE)
            x = following
        add_tally(tally, high, low)


@jit(sizes=["chunks"], pointers=["slots", "positions"])
def _draw(
    logits: tl.tensor, stride: tl.tensor, vocab_size: tl.tensor,
    peaks: tl.tensor, lows: tl.tensor, peak_ids: tl.tensor, best: tl.tensor, best_ids: tl.tensor,
    tally: tl.tensor, listed: tl.tensor, chunks: tl.tensor,
    slots: tl.tensor, temperature: tl.tensor, top_k: tl.tensor, top_p: tl.tensor, log_min_p: tl.tensor,
    positions: tl.tensor, streams: tl.tensor,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, FILTERED: tl.constexpr, OVERLAP: tl.constexpr,
) -> None:  # fmt: skip
    row, chunk = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + row)
    t, min_p, key = tl.load(temperature + slot), tl.load(log_min_p + slot), row_key(row, slot, positions, streams)
    ids, x = _load_chunk(logits, stride, vocab_size, row, chunk, CHUNK)
    _ready(OVERLAP)
    largest = _largest(peaks, row, chunks, CHUNKS)
    if (t > 0) & is_finite(largest):
        scores = scores_of(x, largest, t)
        sure = (x > float("-inf")) & (scores >= min_p)
        if FILTERED:  # filters that features did not announce are left out: a padding row may have any slot
            k, p = tl.load(top_k + slot), tl.load(top_p + slot)
            if (k > 0) | (p < 1):
                tally += row * TALLY
                places = tl.floor(places_of(x, scores, largest, kept_steps(tally), k > 0)).to(tl.int32)
                cut, _, _ = fine_cut(tally, k, p)
                both = (k > 0) & (p < 1)  # what top-p needs is known when top-k has cut: until then nothing is sure
                sure = sure & (places < cut) & (both == 0)
                unsure = (x > float("-inf")) & ((places == cut) | (both & (places < cut)))
                found = tl.sum(unsure.to(tl.int32))
                if found > 0:
                    start = tl.atomic_add(tally + 2 * WAYS, found.to(tl.int64), sem="relaxed")
                    line = start + tl.cumsum(unsure.to(tl.int32), 0) - 1
                    tl.store(listed + row.to(tl.int64) * vocab_size + line, ids, mask=unsure)
        value, token = tl.full([], float("-inf"), tl.float32), tl.full([], NO_ID, tl.int32)
        if tl.max(sure.to(tl.int32)) > 0:  # in few chunks, where the cut is close to the largest logit
            value, token = first_best(tl.where(sure, scores + gumbel_noise(key, ids), float("-inf")), ids)
        tl.store(best + row * CHUNKS + chunk, value)
        tl.store(best_ids + row * CHUNKS + chunk, token)


@jit(sizes=["chunks"], pointers=["slots", "positions"])
def _settle(
    logits: tl.tensor, stride: tl.tensor, vocab_size: tl.tensor,
    peaks: tl.tensor, lows: tl.tensor, peak_ids: tl.tensor, best: tl.tensor, best_ids: tl.tensor,
    tally: tl.tensor, listed: tl.tensor, chunks: tl.tensor,
    slots: tl.tensor, temperature: tl.tensor, top_k: tl.tensor, top_p: tl.tensor, log_min_p: tl.tensor,
    positions: tl.tensor, streams: tl.tensor, tokens: tl.tensor,
    LIST: tl.constexpr, CHUNKS: tl.constexpr, FILTERED: tl.constexpr, OVERLAP: tl.constexpr, SAMPLED: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    at = tl.arange(0, CHUNKS)
    here, is_chunk = row * CHUNKS + at, at < chunks
    ids = tl.load(peak_ids + here, mask=is_chunk, other=NO_ID)
    largest, token = first_best(tl.load(peaks + here, mask=is_chunk, other=float("-inf")), ids)
    if SAMPLED:
        slot = tl.load(slots + row)
        t, k, p = tl.load(temperature + slot), tl.load(top_k + slot), tl.load(top_p + slot)
        if (t > 0) & is_finite(largest):
            ids = tl.load(best_ids + here, mask=is_chunk, other=NO_ID)
            value, token = first_best(tl.load(best + here, mask=is_chunk, other=float("-inf")), ids)
            if FILTERED:
                tally += row * TALLY
                count = tl.load(tally + 2 * WAYS).to(tl.int32)
                if count > 0:  # never for a row without top-k and top-p
                    logits += row.to(tl.int64) * stride
                    listed += row.to(tl.int64) * vocab_size
                    min_p, key = tl.load(log_min_p + slot), row_key(row, slot, positions, streams)
                    other, own = settle_listed(
                        logits, vocab_size, tally, listed, count, largest, t, k, p, min_p, key, LIST
                    )
                    token = tl.where((other > value) | ((other == value) & (own < token)), own, token)
    tl.store(tokens + row, tl.where(is_finite(largest), token, -1).to(tl.int64))
