"""The exact verifier: a node stands while it equals the token that the target itself chooses there.

The choice is a function of logits and key alone, so the emitted tokens are those of plain decoding: this file only
finds the path. No value is read on the host, so that a graph can hold it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.core.draft import Draft
from slipstream.core.verdict import Verdicts


def verify_exact(draft: Draft, choices: Tensor) -> Verdicts:
    """Follow the target's choices through the draft.

    choices [B, K + 1] int64: column 0 is the target's token after the last committed one, column 1 + i its token after
    node i. A choice of -1 (the model gave nothing usable) accepts nothing below it and is emitted as it is.
    """
    width = draft.width
    if width == 0:
        none = choices.new_zeros(choices.shape[0])  # [B]
        return Verdicts(draft.tokens, none, choices[:, :1])
    node = torch.arange(width, device=choices.device)  # [K]
    real = node < draft.counts[:, None]  # [B, K]
    parent_row = torch.where(real, draft.parents + 1, 0)  # [B, K]: row 0 is the root, row 1 + i is node i
    chosen = choices.gather(1, parent_row)  # [B, K]
    right = real & (draft.tokens == chosen) & (chosen >= 0)  # [B, K]
    if draft.is_chain:
        accepted = right.long().cumprod(1).sum(1)  # [B]
        path = node.expand_as(right)
        last_row = accepted
    else:
        accepted, path, last_row = _follow(right, parent_row)
    kept = node < accepted[:, None]  # [B, K]
    path = torch.where(kept, path, 0)
    tokens = torch.zeros_like(choices)  # [B, K + 1]
    tokens[:, :width] = torch.where(kept, draft.tokens.gather(1, path), 0)
    tokens.scatter_(1, accepted[:, None], choices.gather(1, last_row[:, None]))
    return Verdicts(path, accepted, tokens)


def _follow(right: Tensor, parent_row: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Accepted [B], path [B, K] (arbitrary behind `accepted`) and last row [B] of the deepest path that is all right.

    Pointer doubling: after step s, `stands` has looked at 2^s ancestors, so 6 steps do for 64 rows. The jumps are kept
    and lift the deepest node to each of its ancestors.
    """
    batch, width = right.shape
    root = right.new_zeros((batch, 1), dtype=torch.int64)
    jump = torch.cat([root, parent_row], 1)  # [B, K + 1]
    stands = torch.cat([root == 0, right], 1)  # [B, K + 1]
    row = torch.arange(width + 1, device=right.device)
    depth = (row > 0).long().expand_as(jump)  # [B, K + 1]
    jumps = []
    for _ in range(width.bit_length()):  # 2^steps > K, the deepest a tree can be
        jumps.append(jump)
        stands = stands & stands.gather(1, jump)
        depth = depth + depth.gather(1, jump)
        jump = jump.gather(1, jump)
    # Deepest first, then lowest row: a score that no two rows share, above 0 for all but the root.
    last_row = torch.where(stands, depth * (width + 1) - row, -1).argmax(1)  # [B]
    accepted = depth.gather(1, last_row[:, None])  # [B, 1]
    up = (accepted - row[1:]).clamp_min(0)  # [B, K]: generations from the last node to the one at depth 1 + j
    ancestor = last_row[:, None].expand(batch, width)
    for step, jump in enumerate(jumps):
        ancestor = torch.where((up >> step) & 1 == 1, jump.gather(1, ancestor), ancestor)
    return accepted[:, 0], (ancestor - 1).clamp_min(0), last_row
