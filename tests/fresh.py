"""What a cache should hold: K and V of a fresh prefill of the same tokens, and how far a cache is from that."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from slipstream.kv.cache import KVCache
from slipstream.kv.pages import PageTable
from slipstream.models.batch import PassBatch
from slipstream.models.runner import Runner


@torch.inference_mode()
def prefill(runner: Runner, tokens: Sequence[int]) -> tuple[KVCache, Tensor]:
    """A cache of one page with these tokens, and the logits of all rows [N, V]."""
    count = len(tokens)
    cache = runner.new_cache(1, count)
    places = torch.arange(count)
    batch = PassBatch(
        input_ids=torch.tensor(tokens),
        positions=places,
        slots=places,
        row_starts=(0, count),
        prefix_lengths=(0,),
        pages=((0,),),
        is_tree=(False,),
        masks=None,
        logit_rows=None,
    )
    return cache, runner.forward(batch, cache)


def cache_error(runner: Runner, cache: KVCache, table: PageTable, tokens: Sequence[int]) -> float:
    """The largest difference between a request's entries in the cache and a fresh prefill, over all layers.

    As a part of the layer's largest entry: random weights make numbers of any size.
    """
    if not tokens:
        return 0.0
    right, _ = prefill(runner, tokens)
    size = table.pool.page_size
    slots = torch.tensor([table.pages[place // size] * size + place % size for place in range(len(tokens))])
    worst = 0.0
    for layer in range(len(cache.layers)):
        for have, want in ((cache.keys(layer), right.keys(layer)), (cache.values(layer), right.values(layer))):
            worst = max(worst, float((have[slots] - want).abs().max() / want.abs().max()))
    return worst
