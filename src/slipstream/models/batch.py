"""One kind of pass: a flat, ragged batch of N tokens of B requests.

Prompt chunks, plain steps and draft trees stand side by side. A row sees its request's committed prefix and, of the
request's rows in this pass, its ancestors and itself.
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
    """The input of a pass. Rows of one request are neighbours, in order; `row_starts` has B + 1 entries."""

    input_ids: Tensor  # [N] int64
    positions: Tensor  # [N] int64: absolute position, depth in the tree counted
    slots: Tensor  # [N] int64: cache slots of the rows' K and V
    row_starts: tuple[int, ...]  # [B + 1] on the host, which determines shapes
    prefix_lengths: tuple[int, ...]  # [B] tokens of each request that are in the cache before this pass
    pages: tuple[tuple[int, ...], ...]  # [B] page ids of each request, covering prefix and rows
    is_tree: tuple[bool, ...]  # [B] whether rows form a tree and need `masks`; otherwise they are in causal order
    masks: Tensor | None  # [N] int64, bit j: this row sees the request's j-th row; None without trees
    logit_rows: Tensor | None  # [R] int64: the rows that reach the LM head; None: all of them
    wide: bool | None = None  # use products for many rows, not row-independent; None: decided by the rows

    @staticmethod
    def behind(
        tables: Sequence[PageTable], at: Sequence[int], rows: Sequence[int], ids: Tensor, device: torch.device
    ) -> PassBatch:
        """A chunk of each request: `rows` tokens from position `at` on, `ids` [N] in all. The last rows get logits."""

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
        """Rows including padding."""
        return self.input_ids.shape[0]

    @property
    def num_requests(self) -> int:
        return len(self.prefix_lengths)


def sent(values: NDArray[np.integer[Any]], device: torch.device) -> Tensor:
    """Host values on the device, without waiting for the device's queue. On a CPU no copy is made.

    A plain copy to a GPU waits until the queue is empty, so values are sent together from pinned memory.
    """
    host = torch.from_numpy(values)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


def fetched(values: Tensor) -> Tensor:
    """Start a copy to the host; synchronize with the device before reading it."""
    if not values.is_cuda:
        return values
    copy = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    copy.copy_(values, non_blocking=True)
    return copy
