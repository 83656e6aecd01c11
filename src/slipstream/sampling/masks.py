"""Logit bias, and the tokens that a row may not choose: ends before `min_tokens`, bad words.

What a grammar forbids is a mask of the whole vocabulary: `kernels/gpu/forbid_bits.py`.

Each adds to a few logits of every row (0 where there is nothing to do), so no row is treated apart. Forbidding adds
-inf instead of writing it: a NaN stays a NaN and a +inf becomes one, and the row is still found to be broken.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from slipstream.sampling.rows import SampleRows
from slipstream.sampling.table import PADDING, SamplingTable, last_tokens


def add_bias_(logits: Tensor, rows: SampleRows, table: SamplingTable) -> None:
    """Add each request's logit bias to `logits` [R, V] fp32 in place."""
    logits.scatter_add_(1, table.bias_ids[rows.slots].clamp(min=0), table.bias[rows.slots])


def forbid_ends_(logits: Tensor, rows: SampleRows, table: SamplingTable) -> None:
    """Forbid the end ids of rows that come before their request's `min_tokens`, in place."""
    ids = table.end_ids[rows.slots]  # [R, E]
    too_early = rows.generated < table.min_tokens[rows.slots]  # [R]
    _forbid_(logits, ids, too_early[:, None] & (ids >= 0))


def forbid_bad_words_(logits: Tensor, rows: SampleRows, table: SamplingTable) -> None:
    """Forbid the last token of each bad word whose other tokens were just emitted, draft path included, in place."""
    words = table.bad_words[rows.slots]  # [R, W, L]
    before = table.tails[rows.slots]  # [R, L - 1]
    if rows.path is not None:
        before = last_tokens(before, rows.path)
    starts, ends = words[:, :, :-1], words[:, :, -1]
    matches = ((starts == PADDING) | (starts == before[:, None])).all(dim=2)  # [R, W]
    _forbid_(logits, ends, matches & (ends >= 0))


def _forbid_(logits: Tensor, ids: Tensor, where: Tensor) -> None:
    """Forbid `ids` [R, N] where `where` [R, N] holds; other ids may be padding."""
    minus = torch.zeros(ids.shape, device=logits.device).masked_fill_(where, -math.inf)
    logits.scatter_add_(1, ids.clamp(min=0), minus)
