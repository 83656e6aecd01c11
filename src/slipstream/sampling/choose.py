"""The one rule of sampling: the next token is argmax(log p + gumbel), at temperature 0 without the noise.

`processed` writes log p out in full; `choose` gives the same tokens with less work: no sort and no noise where none can
matter. On a GPU the kernels of `fused.py` do it, of which this is the torch twin. Every row is computed alone, bit for
bit: the other rows, their order and their number cannot change its token. `raw_logprobs` is for reports to callers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.kernels.gpu.jit import on_gpu
from slipstream.sampling.adjust import adjusted
from slipstream.sampling.filters import CANDIDATES, Candidates, Tempering, narrow, top_ids
from slipstream.sampling.fused import choose_fused
from slipstream.sampling.noise import gumbel_of_hashes
from slipstream.sampling.rows import SampleRows, put_rows, row_blocks, row_groups, take_rows
from slipstream.sampling.table import Features, SamplingTable

NOTHING = -1
"""Chosen where a row has NaN or +inf among its logits, or no possible token."""


def choose(
    logits: Tensor,
    rows: SampleRows,
    table: SamplingTable,
    features: Features,
    *,
    allowed: Tensor | None = None,
    overwrite: bool = False,
    candidates: int = CANDIDATES,
) -> Tensor:
    """The tokens [R] int64 that the rows of `logits` [R, V] choose; -1 for a row that can choose nothing.

    allowed: bits [R, W] int32, 32 tokens a word: what grammars permit. overwrite: `logits` may be used as scratch; else
        it stays as it is.
    candidates: the number of tokens that a partial sort looks at. It changes the speed, never a token.
    """
    logits = adjusted(logits, rows, table, features, allowed, overwrite)
    if on_gpu(logits):
        return choose_fused(logits, rows, table, features)
    if features.sampled and not features.greedy:
        largest, tokens = logits.amax(dim=1), torch.zeros_like(rows.slots)  # amax alone is several times faster
    else:
        largest, tokens = logits.max(dim=1)  # of equals the first: ties go to the lowest id
    if features.sampled:
        tempering, keys = _tempering(rows, table, features, largest), table.noise_keys(rows)
        if features.top_k or features.top_p:
            for index in row_groups(tempering.filtered, logits.shape[1]):
                some, wishes, own_keys = take_rows(logits, index), tempering.at(index), take_rows(keys, index)
                found = _choose_filtered(some, wishes, own_keys, table.token_hashes, candidates)
                put_rows(tokens, index, tempering.filtered, found)
        for index in row_groups(tempering.free, logits.shape[1]):
            some, wishes, own_keys = take_rows(logits, index), tempering.at(index), take_rows(keys, index)
            put_rows(tokens, index, tempering.free, _choose_free(some, wishes, own_keys, table.token_hashes))
    return tokens.masked_fill_(~largest.isfinite(), NOTHING)


def processed(
    logits: Tensor,
    rows: SampleRows,
    table: SamplingTable,
    features: Features,
    *,
    allowed: Tensor | None = None,
    candidates: int = CANDIDATES,
) -> Tensor:
    """log p up to a constant, [R, V] fp32: what the noise is added to. -inf is impossible, 0 the likeliest token.

    A greedy row has one possible token; a row that can choose nothing has none. The host never waits for an
    accelerator: there the whole vocabulary is sorted at once.
    """
    if logits.device.type != "cpu":
        candidates = logits.shape[1]
    logits = adjusted(logits, rows, table, features, allowed, False)
    largest, best = logits.max(dim=1)
    tempering = _tempering(rows, table, features, largest)
    filtered, free = tempering.filtered, tempering.free
    scores = tempering.scores(logits)
    scores.masked_fill_(~(free[:, None] & (scores >= tempering.log_min_p[:, None])), -math.inf)
    scores.scatter_(1, best[:, None], 0.0)  # the likeliest token is always possible
    if features.top_k or features.top_p:
        for index in row_groups(filtered, logits.shape[1]):
            found = _filtered_scores(take_rows(logits, index), tempering.at(index), candidates)
            scores[index] = torch.where(filtered[index, None], found, scores[index])
    return scores.masked_fill_(~largest.isfinite()[:, None], -math.inf)


def _tempering(rows: SampleRows, table: SamplingTable, features: Features, largest: Tensor) -> Tempering:
    slots = rows.slots
    return Tempering(
        largest, table.temperature[slots], table.top_k[slots], table.top_p[slots], table.log_min_p[slots], features
    )


def _choose_filtered(
    logits: Tensor, tempering: Tempering, keys: Tensor, token_hashes: Tensor, candidates: int
) -> Tensor:
    """Tokens [R] for rows with top-k or top-p: noise at the candidates only."""
    found = narrow(logits, tempering, candidates)
    tokens = _best(found, keys, token_hashes)
    rest = _uncertain(found)
    if rest.shape[0]:
        found = narrow(take_rows(logits, rest), tempering.at(rest), logits.shape[1])
        tokens[rest] = _best(found, keys[rest], token_hashes)
    return tokens


def _filtered_scores(logits: Tensor, tempering: Tempering, candidates: int) -> Tensor:
    """Scores [R, V] of rows with top-k or top-p."""
    scores = torch.full_like(logits, -math.inf)
    found = narrow(logits, tempering, candidates)
    scores.scatter_(1, found.ids, found.scores)
    if candidates >= logits.shape[1]:
        return scores
    rest = _uncertain(found)
    if rest.shape[0]:
        found = narrow(take_rows(logits, rest), tempering.at(rest), logits.shape[1])
        scores[rest] = torch.empty_like(found.scores).scatter_(1, found.ids, found.scores)
    return scores


def _uncertain(found: Candidates) -> Tensor:
    """Indices of the rows with too few candidates, whose whole vocabulary must be sorted. Waits for a device."""
    return (~found.certain).nonzero()[:, 0]


def _best(found: Candidates, keys: Tensor, token_hashes: Tensor) -> Tensor:
    scores = found.scores + gumbel_of_hashes(keys, token_hashes[found.ids])  # [R, C]
    is_best = scores == scores.amax(dim=1, keepdim=True)
    return found.ids.masked_fill(~is_best, torch.iinfo(torch.int64).max).amin(dim=1)  # ties go to the lowest id


def _choose_free(logits: Tensor, tempering: Tempering, keys: Tensor, token_hashes: Tensor) -> Tensor:
    """Tokens [R] for rows that may choose from the whole vocabulary."""
    tokens = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    shared = _shared(keys)
    noise = gumbel_of_hashes(shared.keys, token_hashes)  # [U, V]
    for block in row_blocks(logits.shape[0], logits.shape[1], logits.device):
        scores = tempering.block_scores(logits, block)  # [b, V]
        if tempering.features.min_p:
            scores.masked_fill_(scores < tempering.log_min_p[block, None], -math.inf)
        scores += noise[block] if noise.shape[0] == logits.shape[0] else noise[shared.of_row[block]]
        tokens[block] = scores.max(dim=1).indices  # of equals the first: ties go to the lowest id
    return tokens


@dataclass(frozen=True, slots=True)
class _SharedKeys:
    """The distinct keys of R rows: rows of a tree at the same depth share one, so its noise is computed once."""

    keys: Tensor  # [U, 2] int32
    of_row: Tensor  # [R] int64, index into keys


def _shared(keys: Tensor) -> _SharedKeys:
    """On the CPU the distinct keys; elsewhere every row's own, as counting them would make the host wait."""
    own = torch.arange(keys.shape[0], device=keys.device)
    if keys.device.type != "cpu" or keys.shape[0] < 2:
        return _SharedKeys(keys, own)
    same = (keys[:, None] == keys[None]).all(dim=2)  # [R, R]
    first = same.to(torch.uint8).argmax(dim=1)  # [R] the first row with the same key
    is_first = first == own
    return _SharedKeys(keys[is_first], (is_first.cumsum(0) - 1)[first])


@dataclass(frozen=True, slots=True)
class RawLogprobs:
    """Log probabilities of R rows under the raw model: before temperature, penalties and masks."""

    chosen: Tensor  # [R] fp32: log probability of the chosen token; -inf where none was chosen
    ranks: Tensor  # [R] int64: 1 is the likeliest; equals share the better rank; 0 where none was chosen
    top_ids: Tensor  # [R, T] int64, likeliest first, then lowest id
    top: Tensor  # [R, T] fp32: their log probabilities


def raw_logprobs(logits: Tensor, chosen: Tensor, top: int) -> RawLogprobs:
    """Log probabilities of `chosen` [R] (-1: none) and of the `top` likeliest tokens under `logits` [R, V]."""
    logits = logits.to(torch.float32)
    total = logits.logsumexp(dim=1, keepdim=True)  # [R, 1]
    own = logits.gather(1, chosen.clamp(min=0)[:, None])  # [R, 1]
    none = chosen < 0
    top = min(top, logits.shape[1])
    ids = top_ids(logits, top) if top else chosen.new_empty(chosen.shape[0], 0)  # [R, T]
    return RawLogprobs(
        chosen=(own - total)[:, 0].masked_fill(none, -math.inf),
        ranks=((logits > own).sum(dim=1) + 1).masked_fill(none, 0),
        top_ids=ids,
        top=logits.gather(1, ids) - total,
    )
