"""Both verifiers in one pass: requests that asked for rejection sampling get its choices, the others the target's own.

The two say their verdict in the same form (the token chosen at each row), so what follows need not know whose is whose.
A request that nothing was drafted for keeps the target's own choice too: it has the same distribution, because no token
before it depends on that position's noise, and without drafts the two verifiers are one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.core.draft import Draft
from slipstream.sampling.choose import processed
from slipstream.sampling.rows import SampleRows
from slipstream.sampling.table import Features, SamplingTable
from slipstream.verify.rejection import rejection_choices, rejection_keys


def mixed_choices(
    choices: Tensor,  # [B, K + 1] int64: the target's own
    logits: Tensor,  # [R, V]
    rows: SampleRows,  # [R]
    row_of: Tensor,  # [B, K + 1] int64: which of the rows is a request's root (column 0) or node; padding: any
    draft: Draft,  # of these requests; `q` where its drafter told it
    table: SamplingTable,
    features: Features,
    drawn: Tensor | None = None,  # [B, K] bool: False: this node's row of `draft.q` means nothing
) -> Tensor:
    """The choices [B, K + 1] that decide. Off the accepted path they are the target's own. Looks at no value."""
    root = row_of[:, 0]  # [B]
    slots = rows.slots[root]
    p = processed(logits, rows, table, features).softmax(1)[row_of]  # [B, K + 1, V]
    keys = rejection_keys(table.streams[slots], rows.positions[root], draft.width + 1)
    found = rejection_choices(draft, p, keys, draft.q, drawn)  # [B, K + 1], -1 off the path
    asked = table.rejects[slots] & (draft.counts > 0)  # [B]
    return torch.where(asked[:, None] & (found >= 0), found, choices)
