"""Log probabilities for the caller, from the raw model: before temperature, penalties and masks."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.sampling.order import top_ids


@dataclass(frozen=True, slots=True)
class RawLogprobs:
    """What R rows of logits say of the chosen tokens and of the likeliest ones."""

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
