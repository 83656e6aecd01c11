"""Passes over short prompts as captured graphs.

A pass is some three hundred launches, and the host takes longer to make them than a GPU to run them. So rows are copied
into static tensors, filled up to one of a few sizes, and the pass is captured once for each. The kernels are those of
decoding passes: a row comes out the same, captured or not, and whatever it is filled up with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slipstream.kernels.layout import RowLayout
from slipstream.kv.cache import KVCache
from slipstream.models.batch import PassBatch
from slipstream.models.graphs import captured

READ_ROWS = (16, 32, 64, 128, 256, 512)
_REQUESTS = (16, 64)
_KEYS = (2048, 8192, 32768, 131072)
"""Few sizes: a place that nobody takes costs little, and a size that comes for the first time a tenth of a second."""
_MOST = 32
"""Captured passes that are kept; those that were not used for longest are let go."""

Run = Callable[[Tensor, Tensor, RowLayout, KVCache, Tensor], Tensor]
"""Ids, positions, layout, cache and the rows that reach the LM head: their logits."""


@dataclass(frozen=True, slots=True)
class ReadShape:
    rows: int
    requests: int
    keys: int

    @staticmethod
    def of(batch: PassBatch, keys: int, rows_of: Sequence[int] = READ_ROWS) -> ReadShape | None:
        """None: larger than all sizes."""
        found = [
            next((size for size in sizes if size >= wanted), None)
            for wanted, sizes in ((batch.size, rows_of), (batch.num_requests, _REQUESTS), (keys, _KEYS))
        ]
        rows, requests, most = found
        return None if rows is None or requests is None or most is None else ReadShape(rows, requests, most)


class _Read:
    """One size's static tensors, and the pass over them."""

    def __init__(self, shape: ReadShape, run: Run, cache: KVCache, trash_slot: int) -> None:
        device = cache.device
        rows, requests = shape.rows, shape.requests
        self.ids, self.positions, self.places = torch.zeros((3, rows), dtype=torch.int64, device=device).unbind(0)
        self.slots = torch.full((rows,), trash_slot, dtype=torch.int64, device=device)
        self.starts = torch.zeros(requests + 1, dtype=torch.int32, device=device)
        self.lengths, self.logit_rows = torch.zeros((2, requests), dtype=torch.int64, device=device).unbind(0)
        self.pages = torch.zeros((requests, -(-shape.keys // cache.page_size)), dtype=torch.int32, device=device)
        self.logits: Tensor | None = None
        self.replay: Callable[[], None] | None = None
        self._lanes = torch.arange(requests, device=device)
        self._keys, self._run, self._cache, self._trash_slot = shape.keys, run, cache, trash_slot

    def load(self, batch: PassBatch, layout: RowLayout) -> None:
        rows, requests = batch.size, batch.num_requests
        pairs: Sequence[tuple[Tensor, Tensor]] = (
            (self.ids, batch.input_ids),
            (self.positions, batch.positions),
            (self.places, layout.positions),
            (self.slots, layout.slots),
            (self.lengths, layout.lengths),
        )
        for static, values in pairs:
            static[: values.shape[0]].copy_(values)
        self.slots[rows:] = self._trash_slot
        self.starts[: requests + 1].copy_(layout.starts)
        self.starts[requests + 1 :] = batch.row_starts[-1]  # requests that bring no rows
        columns = min(self.pages.shape[1], layout.pages.shape[1])  # a request may have more pages than the pass reads
        self.pages[:requests, :columns].copy_(layout.pages[:, :columns])
        assert batch.logit_rows is not None
        self.logit_rows[: batch.logit_rows.shape[0]].copy_(batch.logit_rows)

    def work(self) -> None:
        layout = RowLayout(
            positions=self.places,
            slots=self.slots,
            starts=self.starts,
            lanes=self._lanes,
            lengths=self.lengths,
            pages=self.pages,
            ancestors=None,
            page_size=self._cache.page_size,
            max_keys=self._keys,
        )
        self.logits = self._run(self.ids, self.positions, layout, self._cache, self.logit_rows)


class Reads:
    """A runner's passes over short prompts into one cache, captured when a size comes for the first time.

    trash_slot: a place of the cache that is nobody's. pool: memory shared with other graphs; None: nothing is captured.
    rows: that passes are filled up to.
    """

    def __init__(
        self, run: Run, cache: KVCache, trash_slot: int, pool: Any = None, rows: Sequence[int] = READ_ROWS
    ) -> None:
        self.cache = cache
        self._rows = rows
        self._run = run
        self._trash_slot = trash_slot
        self._pool = pool
        self._reads: dict[ReadShape, _Read] = {}

    def run(self, batch: PassBatch, layout: RowLayout) -> Tensor | None:  # [R, V] fp32
        """The pass; None where it has no such size, and must be run as it is."""
        shape = ReadShape.of(batch, layout.max_keys, self._rows)
        if shape is None or batch.logit_rows is None:
            return None
        read = self._reads.pop(shape, None) or self._make(shape)
        self._reads[shape] = read  # the last is the one used last
        read.load(batch, layout)
        (read.replay or read.work)()
        assert read.logits is not None
        return read.logits[: batch.logit_rows.shape[0]].clone()  # the next pass overwrites them

    def has(self, shape: ReadShape) -> bool:
        return shape in self._reads

    def _make(self, shape: ReadShape) -> _Read:
        read = _Read(shape, self._run, self.cache, self._trash_slot)
        if self._pool is not None:
            try:
                read.replay = captured(read.work, self._pool)
            except Exception:  # a model that looks at values on the host, or no memory left for a graph
                self._pool = None
        while len(self._reads) >= _MOST:
            del self._reads[next(iter(self._reads))]
        return read
