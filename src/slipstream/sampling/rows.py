"""The rows of a pass as sampling sees them: whose row, which position is being chosen, and the draft path to it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class SampleRows:
    """R rows of logits, each choosing one token."""

    slots: Tensor  # [R] int64: the request's row in the `SamplingTable`
    positions: Tensor  # [R] int64: absolute position of the token being chosen
    generated: Tensor  # [R] int64: how many tokens the request has emitted before this one, draft path included
    path: Tensor | None = None  # [R, D] int64: draft tokens from the root to this row, -1 is padding; None: no drafts
