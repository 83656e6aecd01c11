"""The rows of a pass as sampling sees them, and in which blocks they are worked on.

Every row is computed alone: how rows are grouped changes the speed and never a result.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK_ELEMENTS = 2**18
"""About 1 MB of fp32: a chain of elementwise steps over this much stays in a core's own cache."""

_GROUP_ROWS = 64
"""Most rows that one request brings to a pass: rows that could share their noise come together."""


@dataclass(frozen=True, slots=True)
class SampleRows:
    """R rows of logits, each choosing one token."""

    slots: Tensor  # [R] int64: the request's row in the `SamplingTable`
    positions: Tensor  # [R] int64: absolute position of the token being chosen
    generated: Tensor  # [R] int64: tokens that the request has emitted before this one, draft path included
    path: Tensor | None = None  # [R, D] int64: draft tokens from the root to this row, -1 is padding; None: no drafts


def group_rows(width: int) -> int:
    """Rows of `width` to work on together: those of one request, and of tiny vocabularies all that fit a cache."""
    return max(_GROUP_ROWS, BLOCK_ELEMENTS // max(1, width))


def row_blocks(rows: int, width: int, device: torch.device) -> Iterator[slice]:
    """Slices that cover `rows` rows of `width`: cache-sized on the CPU, one slice elsewhere."""
    step = max(1, BLOCK_ELEMENTS // max(1, width)) if device.type == "cpu" else max(1, rows)
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def rows_where(wanted: Tensor) -> Tensor:
    """Indices [r] of the rows that want some work: on the CPU those where `wanted` [R] holds; elsewhere all.

    Counting them would make the host wait for an accelerator: there the caller works on all rows and keeps the wanted
    results (`put_rows`).
    """
    if wanted.device.type == "cpu":
        return wanted.nonzero()[:, 0]
    return torch.arange(wanted.shape[0], device=wanted.device)


def row_groups(wanted: Tensor, width: int) -> Iterator[Tensor]:
    """As `rows_where`, in groups on the CPU: bounds the scratch of steps that need several times the logits."""
    index = rows_where(wanted)
    step = group_rows(width) if index.device.type == "cpu" else max(1, index.shape[0])
    for start in range(0, index.shape[0], step):
        yield index[start : start + step]


def take_rows(source: Tensor, index: Tensor) -> Tensor:
    """`source[index]` for an index of rising rows, without a copy where it names every row."""
    return source if index.shape[0] == source.shape[0] else source[index]


def put_rows(target: Tensor, index: Tensor, wanted: Tensor, values: Tensor) -> None:
    """Write `values` [r] into `target` [R] at `index`, where `wanted` [R] holds."""
    target.index_copy_(0, index, torch.where(take_rows(wanted, index), values, take_rows(target, index)))
