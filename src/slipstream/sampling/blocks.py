"""Which rows to work on at once, so that a CPU stays within its cache and an accelerator never waits for the host.

Every row is computed alone, so how rows are grouped changes the speed and never a result.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

BLOCK_ELEMENTS = 2**18
"""About 1 MB of fp32: a chain of elementwise steps over this much stays in a core's own cache."""

_GROUP_ROWS = 64
"""As many rows as one request brings to a pass: rows that could share their noise come together."""


def group_rows(width: int) -> int:
    """Rows of `width` that are worked on together: one request's, and of tiny vocabularies as many as a cache holds."""
    return max(_GROUP_ROWS, BLOCK_ELEMENTS // max(1, width))


def row_blocks(rows: int, width: int, device: torch.device) -> Iterator[slice]:
    """Slices that cover `rows` rows of `width`: cache-sized on the CPU, one slice elsewhere."""
    step = max(1, BLOCK_ELEMENTS // max(1, width)) if device.type == "cpu" else max(1, rows)
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def rows_where(wanted: Tensor) -> Tensor:
    """Indices [r] of the rows that want some work: on the CPU only those where `wanted` [R] holds; elsewhere all.

    Counting them would make the host wait for an accelerator, so there the caller does all rows and keeps what it
    wants (`put_rows`).
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
