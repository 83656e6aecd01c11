"""Repetition, frequency and presence penalties, counted along each row's own draft path.

A row deep in a draft is judged as if its path had been emitted: counts are the table's plus the path's. That is what
plain decoding would have counted on reaching that row, so penalties need no special case under speculation.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.sampling.blocks import row_blocks, rows_where
from slipstream.sampling.rows import SampleRows
from slipstream.sampling.table import SamplingTable


def penalize_(logits: Tensor, rows: SampleRows, table: SamplingTable) -> None:
    """Apply the penalties to `logits` [R, V] fp32 in place. Rows of requests without penalties stay as they are."""
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
