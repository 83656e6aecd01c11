"""What changes the logits before the rule of sampling sees them: penalties, bias and forbidden tokens.

A new setting of this kind is one function here, called by `adjusted`. It must give a row the same bits whatever other
rows are in the pass. Everything downstream (the rule, its GPU kernels,
drafters and rejection sampling) takes the logits as they are after it. Rows of requests that ask for nothing stay the
same, bit for bit. A row deep in a draft is judged as if its path had been emitted: plain decoding would have found that
there, so speculation is no special case.

Forbidding adds -inf instead of writing it: a NaN stays a NaN, and the row is still found to be broken.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from slipstream.kernels.gpu.forbid_bits import forbid_bits_
from slipstream.sampling.rows import SampleRows, row_blocks, rows_where
from slipstream.sampling.table import PADDING, Features, SamplingTable, last_tokens


def adjusted(
    logits: Tensor,
    rows: SampleRows,
    table: SamplingTable,
    features: Features,
    allowed: Tensor | None = None,
    overwrite: bool = False,
) -> Tensor:
    """The logits [R, V] in fp32 after all that requests ask for; the caller's own tensor where they ask for nothing.

    allowed: bits [R, W] int32, 32 tokens a word: what grammars permit. overwrite: `logits` may be used as scratch.
    """
    changes = features.adjusts or allowed is not None
    logits = logits.to(torch.float32, copy=changes and not overwrite)
    if features.penalties:
        _penalize_(logits, rows, table)
    if features.bias:
        logits.scatter_add_(1, table.bias_ids[rows.slots].clamp(min=0), table.bias[rows.slots])
    if features.min_tokens:
        _forbid_ends_(logits, rows, table)
    if features.bad_words:
        _forbid_bad_words_(logits, rows, table)
    if features.allowed:
        forbid_bits_(logits, table.allowed[rows.slots])
    if allowed is not None:
        forbid_bits_(logits, allowed)
    return logits


def _penalize_(logits: Tensor, rows: SampleRows, table: SamplingTable) -> None:
    """Repetition, frequency and presence penalties; tokens are counted along the row's draft path, too."""
    index = rows_where(table.penalized[rows.slots])  # [r]
    for block in row_blocks(index.shape[0], logits.shape[1], logits.device):
        here = index[block]
        slots = rows.slots[here]
        counts = table.counts[slots]  # [b, V] int32, a copy
        if rows.path is not None:
            path = rows.path[here]  # [b, D]
            counts.scatter_add_(1, path.clamp(min=0), (path >= 0).to(torch.int32))
        emitted = counts > 0  # [b, V]
        seen = emitted | table.prompt_seen[slots]  # [b, V]

        scores = logits[here]  # [b, V]
        repetition = table.repetition[slots, None]  # [b, 1]
        repeated = torch.where(scores > 0, scores / repetition, scores * repetition)
        scores = torch.where(seen, repeated, scores)
        scores -= table.frequency[slots, None] * counts
        scores -= table.presence[slots, None] * emitted
        logits.index_copy_(0, here, scores)


def _forbid_ends_(logits: Tensor, rows: SampleRows, table: SamplingTable) -> None:
    """Forbid the end ids of rows that come before their request's `min_tokens`."""
    ids = table.end_ids[rows.slots]  # [R, E]
    too_early = rows.generated < table.min_tokens[rows.slots]  # [R]
    _forbid_(logits, ids, too_early[:, None] & (ids >= 0))


def _forbid_bad_words_(logits: Tensor, rows: SampleRows, table: SamplingTable) -> None:
    """Forbid the last token of each bad word whose other tokens were just emitted, draft path included."""
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
