"""Passes over many rows of prompts as captured graphs, where these have the bits of passes that are not.

Up to a thousand rows or so the host takes longer to launch such a pass than a GPU to run it. Its products are cuBLAS',
which promises nothing. So the first captured pass of each size is compared with the same pass launched kernel by
kernel, all that both write; where a bit differs, nothing is captured any more.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from slipstream.kernels.layout import RowLayout
from slipstream.kv.cache import KVCache
from slipstream.models.batch import PassBatch
from slipstream.models.reads import Reads, ReadShape, Run

_log = logging.getLogger(__name__)

MOST_ROWS = 1024
"""Larger passes take the device longer than the host."""


class WideReads:
    """A runner's passes over many rows of prompts into one cache, captured when a size comes for the second time.

    sizes: rows of passes that prompts may share; others have as many as their prompt, and are never captured.
    """

    def __init__(self, run: Run, sizes: Sequence[int], cache: KVCache, trash_slot: int, pool: Any = None) -> None:
        self._sizes = tuple(size for size in sizes if size <= MOST_ROWS)
        self._run = run
        self._reads = Reads(run, cache, trash_slot, pool, self._sizes)
        self._seen: set[ReadShape] = set()
        self._compared: set[ReadShape] = set()
        self._differs = False

    @property
    def cache(self) -> KVCache:
        return self._reads.cache

    def run(self, batch: PassBatch, layout: RowLayout) -> Tensor | None:  # [R, V] fp32
        """The pass; None where it must be run as it is."""
        if self._differs or batch.size not in self._sizes or batch.logit_rows is None:
            return None
        shape = ReadShape.of(batch, layout.max_keys, self._sizes)
        if shape is None:
            return None
        if shape not in self._seen:
            self._seen.add(shape)
            return None
        if shape in self._compared and self._reads.has(shape):
            return self._reads.run(batch, layout)
        logits = self._compare(batch, layout)
        if logits is None:
            self._differs = True
            _log.warning(
                "a captured pass over %d rows of prompts does not have the bits of another: none is captured",
                batch.size,
            )
            return None  # and what it wrote is written again
        self._compared.add(shape)
        return logits

    def _compare(self, batch: PassBatch, layout: RowLayout) -> Tensor | None:
        """The captured pass; None: it does not write what the same one does launched as it is, or nobody can say."""
        assert batch.logit_rows is not None
        try:
            self._run(batch.input_ids, batch.positions, layout, self.cache, batch.logit_rows)
            expected = self._written(batch)
            logits = self._reads.run(batch, layout)
            found = self._written(batch)
        except torch.OutOfMemoryError:  # what is compared takes room, too
            return None
        return logits if all(torch.equal(*pair) for pair in zip(expected, found, strict=True)) else None

    def _written(self, batch: PassBatch) -> list[Tensor]:
        """What the cache has of these rows; not of those that fill up the pass, whose slot is nobody's."""
        slots = batch.slots[: batch.row_starts[-1]]
        return [plane[:, slots].view(torch.uint8) for plane in self.cache.planes]  # NaN is what it is, too
