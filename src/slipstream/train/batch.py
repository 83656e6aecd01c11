"""What a training pass is made of: rows of tokens, and what the target thought of them.

Sequences are laid end to end in rows of one length, so that shapes do not change and little is padding.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property

import torch
from torch import Tensor

NO_SEQUENCE = -1


@dataclass(frozen=True)
class Rows:
    """Token sequences, several to a row."""

    ids: Tensor  # [B, T] int64
    positions: Tensor  # [B, T] int64: within the sequence, from 0; padding stands at 0
    segments: Tensor  # [B, T] int64: which sequence of its row a token belongs to; NO_SEQUENCE: padding
    answers: Tensor  # [B, T] bool: the target chose this token; False: a prompt's token, or padding
    places: Tensor | None = None  # [B, T] int64: of each token in the data; -1: padding. None: they are of no data

    def to(self, device: torch.device) -> Rows:
        """On a GPU without waiting for it: what comes from the host goes through pinned memory."""
        given = {f.name: getattr(self, f.name) for f in fields(Rows)}
        pinned = device.type == "cuda" and self.ids.device.type == "cpu"
        moved = {
            name: (tensor.pin_memory() if pinned else tensor).to(device, non_blocking=True)
            for name, tensor in given.items()
            if tensor is not None
        }
        return replace(self, **moved)

    @property
    def real(self) -> Tensor:  # [B, T] bool
        return self.segments != NO_SEQUENCE

    def same(self, ahead: int) -> Tensor:  # [B, T] bool
        """Is the token so many places further on still of the same sequence?"""
        later = torch.full_like(self.segments, NO_SEQUENCE)
        if ahead < self.segments.shape[1]:
            later[:, : self.segments.shape[1] - ahead] = self.segments[:, ahead:]
        return self.real & (later == self.segments)

    @cached_property
    def sees(self) -> Tensor:  # [B, T, T] bool
        """Causal attention within each sequence: may the row (second) see the column (third)? Padding sees itself."""
        size = self.ids.shape[1]
        causal = torch.ones(size, size, dtype=torch.bool, device=self.ids.device).tril()
        same = self.segments[:, :, None] == self.segments[:, None, :]
        return causal & same


@dataclass(frozen=True)
class Batch:
    """Rows, and the target's hidden states at them. Nothing here needs a gradient."""

    rows: Rows
    taps: Tensor  # [B, T, F]: what the recipe's taps ask for, side by side, in the teacher's dtype
    normed: Tensor  # [B, T, H]: behind the last norm; `Teacher.logits` makes logits of it
