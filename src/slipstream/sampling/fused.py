"""The rule of sampling as GPU kernels: what `choose` does after penalties and masks, in at most five launches.

The torch form sorts, and asks the host whether it sorted enough. Here nothing is sorted and the host asks nothing, so
a captured graph can hold it. Each row is cut into chunks, a program each:

    peaks    the largest logit of each chunk
    survey   rows without top-k and top-p: the chunk's best score with noise. Others: how many tokens, and how much
             mass, lie within 16 distances of the largest logit
    refine   the same within the one interval that holds the cut, for 16 parts of it
    select   tokens before the part with the cut are surely kept, and the chunk's best of them is found; tokens in that
             part, few as a rule, are listed
    settle   one program a row: searches the list for the cut, and takes the best of all that is kept

Greedy rows need peaks and settle; survey comes with sampled rows, refine and select with top-k and top-p. Sums are
of integers, so the order in which programs come by changes nothing, nor do the other rows. Arithmetic that a token
depends on is that of `filters.py` and `noise.py`, operation by operation.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.kernels.jit import jit, tl, triton
from slipstream.sampling.fused_cut import settle_listed
from slipstream.sampling.fused_rule import (
    NO_ID,
    TALLY,
    TALLY_WORDS,
    WAYS,
    add_tally,
    coarse_cut,
    constant,
    fine_cut,
    first_best,
    is_finite,
    places_of,
    row_key,
    store_best,
)
from slipstream.sampling.rows import SampleRows
from slipstream.sampling.table import Features, SamplingTable

CHUNK = 2048
"""Tokens a program. A chunk's mass stays below 2^48, so that mass and count fit into one word."""

LIST_BLOCK = 1024
"""Listed tokens that `settle` looks at in one step."""

_SURVEY, _REFINE = constant(0), constant(1)


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
    chunks = triton.cdiv(vocab_size, chunk)
    width = triton.next_power_of_2(max(128, chunks))  # the same for most vocabularies: less to compile
    values = logits.new_empty(2, count, width)  # the peak of each chunk, and its best score
    ids = torch.empty(2, count, width, dtype=torch.int32, device=logits.device)  # and the tokens that have them
    tally = torch.empty(count, TALLY_WORDS, dtype=torch.int64, device=logits.device)
    listed = torch.empty(count, vocab_size if filtered else 0, dtype=torch.int32, device=logits.device)
    line = (logits, logits.stride(0), vocab_size)
    scratch = (values[0], ids[0], values[1], ids[1], tally, listed, chunks)
    slots, positions = rows.slots.contiguous(), rows.positions.contiguous()
    wish = (slots, table.temperature, table.top_k, table.top_p, table.log_min_p, positions, table.streams)
    sizes = {"CHUNKS": width, "FILTERED": filtered}

    grid = (count, chunks)
    _peaks[grid](*line, values[0], ids[0], tally, CHUNK=chunk, **sizes, num_warps=4)
    for step in range(3 if filtered else int(features.sampled)):  # survey, refine, select
        _visit[grid](*line, *scratch, *wish, CHUNK=chunk, **sizes, STEP=step, num_warps=4)
    _settle[(count,)](*line, *scratch, *wish, tokens, LIST=LIST_BLOCK, **sizes, SAMPLED=features.sampled, num_warps=8)
    return tokens


# --- over chunks: grid (R, chunks) ----------------------------------------------------------------------------------


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
    peaks: tl.tensor, peak_ids: tl.tensor, tally: tl.tensor,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, FILTERED: tl.constexpr,
) -> None:  # fmt: skip
    row, chunk = tl.program_id(0), tl.program_id(1)
    ids, x = _load_chunk(logits, stride, vocab_size, row, chunk, CHUNK)
    value, token = first_best(tl.where(x == x, x, float("inf")), ids)  # NaN breaks a row as +inf does
    tl.store(peaks + row * CHUNKS + chunk, value)
    tl.store(peak_ids + row * CHUNKS + chunk, token)
    if FILTERED and chunk == 0:
        at = tl.arange(0, 128)
        tl.store(tally + row * TALLY + at, tl.zeros([128], tl.int64), mask=at < TALLY)


@jit(pointers=["slots", "positions"])
def _visit(
    logits: tl.tensor, stride: tl.tensor, vocab_size: tl.tensor,
    peaks: tl.tensor, peak_ids: tl.tensor, best: tl.tensor, best_ids: tl.tensor,
    tally: tl.tensor, listed: tl.tensor, chunks: tl.tensor,
    slots: tl.tensor, temperature: tl.tensor, top_k: tl.tensor, top_p: tl.tensor, log_min_p: tl.tensor,
    positions: tl.tensor, streams: tl.tensor,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, FILTERED: tl.constexpr, STEP: tl.constexpr,
) -> None:  # fmt: skip
    """One step of survey, refine and select on one chunk; rows that the step does not concern are left at once."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + row)
    t, k, p = tl.load(temperature + slot), tl.load(top_k + slot), tl.load(top_p + slot)
    # filters that features did not announce are left out: a padding row may have any slot
    is_free = ((k == 0) & (p >= 1)) | (not FILTERED)
    at = tl.arange(0, CHUNKS)
    largest = tl.max(tl.load(peaks + row * CHUNKS + at, mask=at < chunks, other=float("-inf")))
    if (t > 0) & is_finite(largest) & ((STEP == _SURVEY) | (is_free == 0)):
        ids, x = _load_chunk(logits, stride, vocab_size, row, chunk, CHUNK)
        scores = tl.div_rn(x - largest, t)
        possible = x > float("-inf")
        likely = scores >= tl.load(log_min_p + slot)
        places = places_of(x, scores, largest, k > 0)
        key = row_key(row, slot, positions, streams)
        tally += row * TALLY
        here = row * CHUNKS + chunk
        if STEP == _SURVEY:
            if is_free:
                store_best(best + here, best_ids + here, likely, scores, ids, key)
            else:
                add_tally(tally, places // WAYS, possible, scores)
        elif STEP == _REFINE:
            coarse, _, _, _ = coarse_cut(tally, k, p)
            counted = possible & (places // WAYS == coarse)
            if tl.max(counted.to(tl.int32)) > 0:
                add_tally(tally + 2 * WAYS, places % WAYS, counted, scores)
        else:
            cut, _, _, _ = fine_cut(tally, k, p)
            both = (k > 0) & (p < 1)  # what top-p needs is known when top-k has cut: until then nothing is sure
            sure = possible & likely & (places < cut) & (both == 0)
            unsure = possible & ((places == cut) | (both & (places < cut)))
            if tl.max(sure.to(tl.int32)) > 0:
                store_best(best + here, best_ids + here, sure, scores, ids, key)
            else:
                tl.store(best + here, float("-inf"))
                tl.store(best_ids + here, NO_ID)
            found = tl.sum(unsure.to(tl.int32))
            if found > 0:
                start = tl.atomic_add(tally + 4 * WAYS, found.to(tl.int64), sem="relaxed")
                line = start + tl.cumsum(unsure.to(tl.int32), 0) - 1
                tl.store(listed + row.to(tl.int64) * vocab_size + line, ids, mask=unsure)


@jit(pointers=["slots", "positions"])
def _settle(
    logits: tl.tensor, stride: tl.tensor, vocab_size: tl.tensor,
    peaks: tl.tensor, peak_ids: tl.tensor, best: tl.tensor, best_ids: tl.tensor,
    tally: tl.tensor, listed: tl.tensor, chunks: tl.tensor,
    slots: tl.tensor, temperature: tl.tensor, top_k: tl.tensor, top_p: tl.tensor, log_min_p: tl.tensor,
    positions: tl.tensor, streams: tl.tensor, tokens: tl.tensor,
    LIST: tl.constexpr, CHUNKS: tl.constexpr, FILTERED: tl.constexpr, SAMPLED: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0)
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
                count = tl.load(tally + 4 * WAYS).to(tl.int32)
                if count > 0:  # never for a row without top-k and top-p
                    logits += row.to(tl.int64) * stride
                    listed += row.to(tl.int64) * vocab_size
                    min_p, key = tl.load(log_min_p + slot), row_key(row, slot, positions, streams)
                    other, own = settle_listed(
                        logits, vocab_size, tally, listed, count, largest, t, k, p, min_p, key, LIST
                    )
                    token = tl.where((other > value) | ((other == value) & (own < token)), own, token)
    tl.store(tokens + row, tl.where(is_finite(largest), token, -1).to(tl.int64))
