"""Both verifiers in one pass: requests that asked for rejection sampling get its choices, the others the target's own.

The two say their verdict in the same form (the token chosen at each row), so what follows need not know whose is whose.
A request that asked for it is drawn for by that verifier's noise in every round, drafted or not: guesses may come from
the target's own choices further on (lookahead), so how far the text got may depend on the noise of the next place.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.core.draft import Draft
from slipstream.sampling.blocks import group_rows, rows_where
from slipstream.sampling.choose import processed
from slipstream.sampling.rows import SampleRows
from slipstream.sampling.table import Features, SamplingTable
from slipstream.verify.rejection import rejection_choices, rejection_keys

JUDGED_ROWS = 64
"""Rows of probabilities that are looked at together, at least one request's. Six copies of them exist meanwhile: what
two copies of three times as many logits take. So it is done where tokens were sampled before. Vocabularies of a few
hundred tokens have more rows, which take no room worth a plan."""


def mixed_choices(
    choices: Tensor,  # [B, K + 1] int64: the target's own
    logits: Tensor,  # [R, V]
    rows: SampleRows,  # [R]
    row_of: Tensor,  # [B, K + 1] int64: which of the rows is a request's root (column 0) or node; padding: any
    draft: Draft,  # of these requests; `q` where its drafter told it
    table: SamplingTable,
    features: Features,
    drawn: Tensor | None = None,  # [B, K] bool: False: this node's row of `draft.q` means nothing
    *,
    allowed: Tensor | None = None,  # [R, W] int32: what grammars permit, as in `choose`
) -> Tensor:
    """The choices [B, K + 1] that decide. Off the accepted path they are the target's own. Looks at no value."""
    slots = rows.slots[row_of[:, 0]]  # [B]
    asked = table.rejects[slots]  # [B]
    index = rows_where(asked)
    together = max(JUDGED_ROWS, group_rows(logits.shape[1]))
    room = max(1, together // (draft.width + 1))  # requests at a time
    for part in index.split(room) if index.shape[0] else ():
        own = Draft(draft.tokens[part], draft.parents[part], draft.counts[part], draft.is_chain, _at(draft.q, part))
        index_of = row_of[part].flatten()  # [b * (K + 1)]
        mine = _rows_at(rows, index_of)
        p = processed(logits[index_of], mine, table, features, allowed=_at(allowed, index_of)).softmax(1)
        first = mine.positions.view(own.tokens.shape[0], -1)[:, 0]  # [b]
        keys = rejection_keys(table.streams[slots[part]], first, draft.width + 1)
        found = rejection_choices(own, p.view(*keys.shape[:2], -1), keys, own.q, _at(drawn, part))  # -1 off the path
        decided = asked[part, None] & (found >= 0)  # [b, K + 1]
        choices = choices.index_copy(0, part, torch.where(decided, found, choices[part]))
    return choices


def undrafted_choices(
    choices: Tensor,  # [B] int64: the target's own, in the order of the rows
    logits: Tensor,  # [B, V]
    rows: SampleRows,  # [B]
    table: SamplingTable,
    features: Features,
    allowed: Tensor | None = None,  # [B, W] int32: what grammars permit, as in `choose`
) -> Tensor:  # [B]
    """The same where nothing was drafted: behind a prompt."""
    nothing = choices.new_zeros(choices.shape[0], 0)  # [B, 0]
    draft = Draft(nothing, nothing, torch.zeros_like(choices), True)
    row_of = torch.arange(choices.shape[0], device=choices.device)[:, None]
    return mixed_choices(choices[:, None], logits, rows, row_of, draft, table, features, allowed=allowed)[:, 0]


def _rows_at(rows: SampleRows, index: Tensor) -> SampleRows:
    return SampleRows(rows.slots[index], rows.positions[index], rows.generated[index], _at(rows.path, index))


def _at(values: Tensor | None, index: Tensor) -> Tensor | None:
    return None if values is None else values[index]
