"""One kind of pass: a flat, ragged batch of N tokens of B requests.

Prompt chunks, plain steps and draft trees stand side by side. A row sees its request's committed prefix and, of the
rows that its request brings to this pass, its ancestors and itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipstream.kv.pages import PageTable


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

    @staticmethod
    def behind(
        tables: Sequence[PageTable], at: Sequence[int], rows: Sequence[int], ids: Tensor, device: torch.device
    ) -> PassBatch:
        """So many tokens of each request from position `at` on, `ids` [N] in all; the last rows reach the LM head."""

        def tensor(values: Sequence[int]) -> Tensor:
            return sent(np.array(values, dtype=np.int64), device)

        starts = [0, *accumulate(rows)]
        return PassBatch(
            input_ids=ids,
            positions=tensor([p for a, n in zip(at, rows, strict=True) for p in range(a, a + n)]),
            slots=tensor([s for t, a, n in zip(tables, at, rows, strict=True) for s in t.slots(a, n)]),
            row_starts=tuple(starts),
            prefix_lengths=tuple(at),
            pages=tuple(table.pages for table in tables),
            is_tree=(False,) * len(tables),
            masks=None,
            logit_rows=tensor([end - 1 for end in starts[1:]]),
        )

    @property
    def num_rows(self) -> int:
        return self.row_starts[-1]

    @property
    def size(self) -> int:
        """Rows, with those that fill up the pass."""
        return self.input_ids.shape[0]

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
