"""Our attention inside transformers' architectures: registered by name, handed the pass by keyword.

transformers owns the architectures; a layer calls this function with its query, key and value, and whatever makes
its attention special (scaling, window, soft cap, sinks). An argument that we do not know raises: computing something
else than the model would be worse than refusing it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from slipstream.core.errors import UnsupportedModel
from slipstream.kernels.attention import Span, paged_attention, visible_rows
from slipstream.kv.cache import KVCache
from slipstream.models.batch import PassBatch

NAME = "slipstream"

_HARMLESS = frozenset(
    # say nothing about the result: what a layer passes on for others, or what the pass itself decides
    ("position_ids", "position_embeddings", "use_cache", "cache_position", "output_attentions", "output_hidden_states")
)


class PassContext:
    """One pass on its way through the layers: where keys lie, who sees whom. Writes K and V, commits nothing."""

    def __init__(self, batch: PassBatch, cache: KVCache) -> None:
        self.batch = batch
        self.cache = cache
        self.spans = _spans(batch, cache.page_size)
        self.layers_seen: list[int] = []

    def attend(
        self,
        layer: int,
        query: Tensor,  # [N, H, D]
        key: Tensor,  # [N, H_kv, D]
        value: Tensor,  # [N, H_kv, D_v]
        *,
        scaling: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:  # [N, H, D_v]
        self.layers_seen.append(layer)
        self.cache.write(layer, self.batch.slots, key, value)
        return paged_attention(
            query,
            self.cache.keys(layer),
            self.cache.values(layer),
            self.spans,
            scaling=scaling,
            window=window,
            softcap=softcap,
            sinks=sinks,
        )


class ProbeContext(PassContext):
    """A pass without a cache over one causal sequence, to learn the shape of each layer's keys and values."""

    def __init__(self, rows: int, device: torch.device) -> None:
        positions = torch.arange(rows, device=device)
        self.spans = [Span(0, rows, slice(0, rows), 0, positions, None)]
        self.shapes: dict[int, tuple[int, int, int]] = {}  # layer -> kv heads, key size, value size
        self.layers_seen = []

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, **how: Any) -> Tensor:
        self.layers_seen.append(layer)
        self.shapes[layer] = (key.shape[1], key.shape[2], value.shape[2])
        return paged_attention(query, key, value, self.spans, **how)


def attention(
    module: nn.Module,
    query: Tensor,  # [1, H, N, D]
    key: Tensor,  # [1, H_kv, N, D]
    value: Tensor,  # [1, H_kv, N, D_v]
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    slipstream_pass: PassContext | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """What a layer of transformers calls; the result is [1, N, H, D_v]."""
    name = type(module).__name__
    if slipstream_pass is None:
        raise UnsupportedModel(f"{name} does not hand its keyword arguments on to the attention function")
    unknown = sorted(key for key, given in others.items() if given is not None and key not in _HARMLESS)
    if unknown or dropout or attention_mask is not None:
        what = ", ".join(unknown) or ("dropout" if dropout else "attention_mask")
        raise UnsupportedModel(f"{name} asks its attention for {what}, which Slipstream does not know")
    if is_causal is False or getattr(module, "is_causal", True) is False:
        raise UnsupportedModel(f"{name} is not causal: Slipstream runs causal language models only")
    out = slipstream_pass.attend(
        cast(int, module.layer_idx),
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        scaling=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    return out[None], None


def register() -> None:
    """Make the name known to transformers. The masks are ours too, so transformers builds none."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)


def _spans(batch: PassBatch, page_size: int) -> list[Span]:
    spans = []
    for i, prefix in enumerate(batch.prefix_lengths):
        start, end = batch.row_starts[i], batch.row_starts[i + 1]
        visible = visible_rows(batch.masks[start:end], end - start) if batch.masks is not None and batch.is_tree[i] else None
        keys = _key_slots(batch.pages[i], prefix + end - start, page_size, batch.slots.device)
        spans.append(Span(start, end, keys, prefix, batch.positions[start:end], visible))
    return spans


def _key_slots(pages: Sequence[int], length: int, page_size: int, device: torch.device) -> slice | Tensor:
    used = pages[: -(-length // page_size)]
    if all(b == a + 1 for a, b in zip(used, used[1:], strict=False)):
        return slice(used[0] * page_size, used[0] * page_size + length)
    firsts = torch.tensor(used, device=device)[:, None] * page_size
    return (firsts + torch.arange(page_size, device=device)).flatten()[:length]
