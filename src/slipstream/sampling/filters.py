"""top-k, top-p and min-p: which tokens of a row stay possible.

A full sort of the vocabulary costs more than all other sampling together, and the kept set is nearly always small, so
only the first tokens in order are looked at; `certain` says for which rows that was enough. Probability mass is
counted in integers: their sums do not depend on the order of summation, so neither on the number of candidates nor
on the other rows of the batch.

Tokens of a row have one total order: the larger value first, then the lower id. Logits often tie (bf16 has 8 bits of
mantissa), and a sort that breaks ties at will would make the edge of a top-k depend on how it was computed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.sampling.rows import put_rows, row_blocks, rows_where, take_rows
from slipstream.sampling.table import Features

CANDIDATES = 1024
MASS_OF_LIKELIEST = 2.0**36
"""Integer mass of the likeliest token. A vocabulary of 2^27 cannot overflow; what is lost is below 2^-37 a token."""


@dataclass(frozen=True, slots=True)
class Tempering:
    """The temperature and filters of R rows, applied after `adjust.py`."""

    largest: Tensor  # [R] fp32: the row's largest logit
    temperature: Tensor  # [R] fp32, above 0 where it matters
    top_k: Tensor  # [R] int64, 0 is off
    top_p: Tensor  # [R] fp64, 1 is off
    log_min_p: Tensor  # [R] fp32, -inf is off
    features: Features  # of all rows together; known on the host

    @property
    def filtered(self) -> Tensor:
        """Rows [R] with top-k or top-p, which need an order of the tokens."""
        return (self.temperature > 0) & ((self.top_k > 0) | (self.top_p < 1))

    @property
    def free(self) -> Tensor:
        """Rows [R] that are sampled from the vocabulary as it is."""
        return (self.temperature > 0) & (self.top_k == 0) & (self.top_p >= 1)

    def at(self, index: Tensor) -> Tempering:
        """The same for some of the rows, in rising order."""
        return Tempering(
            take_rows(self.largest, index),
            take_rows(self.temperature, index),
            take_rows(self.top_k, index),
            take_rows(self.top_p, index),
            take_rows(self.log_min_p, index),
            self.features,
        )

    def scores(self, logits: Tensor) -> Tensor:
        """log p up to a constant, [R, C]; 0 is the likeliest. Subtracting first keeps tiny temperatures finite."""
        return self.block_scores(logits, slice(None))

    def block_scores(self, logits: Tensor, block: slice) -> Tensor:
        """The scores of the rows `block` of `logits` [R, V]."""
        return (logits[block] - self.largest[block, None]).div_(self.temperature[block, None])


@dataclass(frozen=True, slots=True)
class Candidates:
    """The first C tokens of each row in order, and their scores."""

    ids: Tensor  # [R, C] int64
    scores: Tensor  # [R, C] fp32, -inf where filtered out
    certain: Tensor  # [R] bool: no token beyond these stays possible


def narrow(logits: Tensor, tempering: Tempering, count: int) -> Candidates:
    """Filter the rows of `logits` [R, V] fp32, looking at their `count` first tokens."""
    vocab_size = logits.shape[1]
    ids = top_ids(logits, count)  # [R, C]
    values = logits.gather(1, ids)
    scores = tempering.scores(values)
    by_k, by_p = tempering.top_k > 0, tempering.top_p < 1  # [R]

    ranks = torch.arange(ids.shape[1], device=ids.device)
    limit = torch.where(by_k, tempering.top_k, vocab_size)
    kept = (values > -math.inf) & (ranks < limit[:, None])  # [R, C]

    if tempering.features.top_p:
        mass = _mass(scores).mul_(kept)  # [R, C]
        total = torch.where(by_k, mass.sum(dim=1), _vocabulary_mass(logits, tempering, by_p & ~by_k))  # [R]
        mass_before = mass.cumsum(dim=1).sub_(mass)
        reached = mass_before.to(torch.float64) >= (tempering.top_p * total)[:, None]
        kept &= ~(reached & by_p[:, None])
    if tempering.features.min_p:
        kept &= scores >= tempering.log_min_p[:, None]

    seen_all = (values[:, -1] == -math.inf) | (ids.shape[1] == vocab_size)
    certain = seen_all | torch.where(by_k, tempering.top_k <= ids.shape[1], ~kept[:, -1])
    return Candidates(ids, scores.masked_fill_(~kept, -math.inf), certain)


def _mass(scores: Tensor) -> Tensor:
    return scores.exp().mul_(MASS_OF_LIKELIEST).to(torch.int64)


def _vocabulary_mass(logits: Tensor, tempering: Tempering, wanted: Tensor) -> Tensor:
    """Integer mass [R] of all tokens of the rows where `wanted` [R] holds; 0 elsewhere."""
    total = torch.zeros(logits.shape[0], dtype=torch.int64, device=logits.device)
    index = rows_where(wanted)
    if index.shape[0] == 0:
        return total
    some, tempering = take_rows(logits, index), tempering.at(index)
    blocks = row_blocks(index.shape[0], logits.shape[1], logits.device)
    mass = torch.cat([_mass(tempering.block_scores(some, block)).sum(dim=1) for block in blocks])
    put_rows(total, index, wanted, mass)
    return total


def order_keys(values: Tensor) -> Tensor:
    """Integers [R, V] int64, distinct within a row; larger stands first. `values` is [R, V] fp32."""
    bits = (values + 0.0).view(torch.int32)  # adding 0 makes -0 the same as 0
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # negative floats order backwards as integers: flip all but the sign
    ids = torch.arange(values.shape[1], 0, -1, device=values.device)
    return bits.to(torch.int64).mul_(1 << 32).add_(ids)


def top_ids(values: Tensor, count: int) -> Tensor:
    """Ids [R, count] int64 of the first `count` tokens of each row of `values` [R, V], in order."""
    keys = order_keys(values)
    if count >= values.shape[1]:
        return keys.argsort(dim=1, descending=True)
    return keys.topk(count, dim=1).indices
