"""The likeliest choices of the rule, best first, for drafters that guess trees.

`choose` tells what a row would choose by its logits. A drafter that may guess several tokens wants the next ones as
well, and how sure it is of each: the share of exp(log q + noise), the very noise that the target will add. So at any
temperature the best is what `choose` gives, and shares of a path can be multiplied, or their logarithms added.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.kernels.gpu.jit import on_gpu
from slipstream.sampling.choose import adjusted
from slipstream.sampling.fused_rank import rank_fused
from slipstream.sampling.noise import gumbel_of_hashes
from slipstream.sampling.rows import SampleRows
from slipstream.sampling.table import Features, SamplingTable

CUT = 128
"""Tokens among which top-k and top-p look for their cut. One that keeps more is cut here: it costs a guess at most."""
HOPELESS = -1e30
"""The score of what cannot come: finite, so that sums of a few stay numbers."""


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
    """The `count` best tokens of each row. Nothing here looks at a value on the host."""
    if features.grow:
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
    """Over the target's vocabulary: penalties, biases and masks go by its ids."""
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
