"""A pass on a GPU: its layout lies on the device, and attention reads it there."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from slipstream.kernels.layout import RowLayout
from slipstream.kernels.paged import attend, prepare
from slipstream.kernels.paged_wide import attend_wide, prepare_wide
from slipstream.kv.cache import KVCache
from slipstream.models.attention import PassContext
from slipstream.models.batch import PassBatch, sent
from slipstream.models.traits import AttentionTraits


class DevicePass(PassContext):
    """A pass whose layout lies on the device."""

    def __init__(self, layout: RowLayout, cache: KVCache, *, wide: bool = False) -> None:
        """wide: many rows of prompts, faster by products and tiles that are not row-independent."""
        self.layout = layout
        self.cache = cache
        self.wide = wide and layout.ancestors is None

    @property
    def slots(self) -> Tensor:
        return self.layout.slots

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, traits: AttentionTraits) -> Tensor:
        self.cache.write(layer, self.layout.slots, key, value)
        return self.attend_written(layer, query.contiguous(), traits)

    def attend_written(self, layer: int, query: Tensor, traits: AttentionTraits, *, overlap: bool = False) -> Tensor:
        """The attention of rows whose K and V are in the cache already."""
        where = (query, self.cache.keys(layer), self.cache.values(layer), self.layout)
        how: dict[str, Any] = {
            "scaling": traits.scaling,
            "window": traits.window,
            "softcap": traits.softcap,
            "sinks": traits.sinks,
        }
        if self.wide:
            return attend_wide(*where, **how)
        return attend(*where, **how, overlap=overlap)

    def prepare(self, heads: int) -> None:
        """What the attention of every layer reads."""
        (prepare_wide if self.wide else prepare)(self.layout, heads, self.cache.keys(0))


def layout_of(batch: PassBatch, page_size: int) -> RowLayout:
    """The layout of a pass that was packed on the host."""
    device, requests = batch.slots.device, batch.num_requests
    starts, prefixes = np.array(batch.row_starts), np.array(batch.prefix_lengths)
    counts = np.diff(starts)
    table = np.zeros((requests, max(map(len, batch.pages))), dtype=np.int32)  # [B, P]
    for line, pages in zip(table, batch.pages, strict=True):
        line[: len(pages)] = pages
    narrow = sent(np.concatenate((starts, table.ravel()), dtype=np.int32), device)
    # a row's place among its request's keys is its position, unless a check puts a prompt elsewhere in the context; in
    # a chain it goes by the row, and in a tree by the depth, which the device knows
    rows = batch.slots.shape[0]
    nobodys = np.arange(starts[-1], rows)  # those that fill up the pass
    first_rows = np.concatenate((np.repeat(starts[:-1], counts), nobodys))
    before = np.concatenate((np.repeat(prefixes, counts), 0 * nobodys))
    is_tree = batch.masks is not None
    known = before if is_tree else before + np.arange(rows) - first_rows
    wide = sent(np.concatenate((known, first_rows, prefixes), dtype=np.int64), device)
    places, firsts, lengths = wide.split((rows, rows, requests))
    if is_tree:
        places = places + batch.positions - batch.positions[firsts]
    return RowLayout(
        positions=places,
        slots=batch.slots,
        starts=narrow[: requests + 1],
        lanes=torch.arange(requests, device=device),
        lengths=lengths,
        pages=narrow[requests + 1 :].view(table.shape),
        ancestors=_ancestors(batch) if is_tree else None,
        page_size=page_size,
        max_keys=int((prefixes + counts).max()),
    )


def _ancestors(batch: PassBatch) -> Tensor:  # [N, depth] int32
    """The rows above each row, from mask words; rows of a chain have all rows before them."""
    assert batch.masks is not None
    words = batch.masks.cpu().numpy()
    starts, counts = np.array(batch.row_starts[:-1]), np.diff(batch.row_starts)
    first = np.repeat(starts, counts)  # [N]
    own = np.arange(batch.num_rows) - first  # [N]: a row's place among its request's
    of_tree = np.repeat(batch.is_tree, counts)[:, None]
    column = np.arange(counts.max())
    above = column <= own[:, None]  # [N, M]
    above[:, :64] &= ~of_tree | ((words[:, None] >> column[:64]) & 1 == 1)
    deepest = above.sum(1).max()
    order = np.argsort(~above, axis=1, kind="stable")[:, :deepest]  # those above first, as they stand
    rows = np.where(np.take_along_axis(above, order, 1), first[:, None] + order, -1)
    return sent(rows.astype(np.int32), batch.slots.device)
