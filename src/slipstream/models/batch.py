"""One kind of pass: a flat, ragged batch of N tokens of B requests.

Prompt chunks, plain steps and draft trees stand side by side. A row sees its request's committed prefix and, of the
rows that its request brings to this pass, its ancestors and itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PassBatch:
    """What the target pass reads. Rows of one request are neighbours, in order; `row_starts` has B + 1 entries."""

    input_ids: Tensor  # [N] int64
    positions: Tensor  # [N] int64: absolute position, depth in the tree counted
    slots: Tensor  # [N] int64: where this row's K and V go in the cache
    row_starts: tuple[int, ...]  # [B + 1] on the host: shapes are the host's business
    prefix_lengths: tuple[int, ...]  # [B] tokens of the request that are in the cache before this pass
    pages: tuple[tuple[int, ...], ...]  # [B] page ids of each request, covering prefix and rows
    is_tree: tuple[bool, ...]  # [B] does the request bring a tree, whose rows need `masks`? Otherwise causal order
    masks: Tensor | None  # [N] int64, bit j: this row sees the request's j-th row; None where there is no tree
    logit_rows: Tensor | None  # [R] int64: the rows that reach the LM head; None: all of them
    wide: bool | None = None  # by products for many rows, which are not row-independent; None: where there are many

    @property
    def num_rows(self) -> int:
        return self.row_starts[-1]

    @property
    def num_requests(self) -> int:
        return len(self.prefix_lengths)


def sent(values: NDArray[np.integer[Any]], device: torch.device) -> Tensor:
    """Numbers of the host on the device, without waiting for what the device is at. On a CPU they stay where they are.

    A plain copy to a GPU waits until all that is queued is done: so numbers go together, and from pinned memory.
    """
    host = torch.from_numpy(values)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


def fetched(values: Tensor) -> Tensor:
    """A copy on the host, under way: wait for the device before reading it."""
    if not values.is_cuda:
        return values
    copy = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    copy.copy_(values, non_blocking=True)
    return copy
