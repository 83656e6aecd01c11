"""Our attention inside transformers' architectures: registered by name, told of the pass by a context variable.

transformers owns the architectures; a layer calls this function with its query, key and value, and whatever makes
its attention special (scaling, window, soft cap, sinks). An argument that we do not know raises: computing something
else than the model would be worse than refusing it. Windows are read from the mask that transformers would have made,
because not every layer that has one says so in its arguments (Qwen2-MoE). And the pass itself is no argument, because
not every layer hands on the arguments that it does not know (StableLM).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cached_property
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from slipstream.core.errors import UnsupportedModel
from slipstream.kernels.attention import Span, paged_attention, visible_rows
from slipstream.kernels.rotary import Rotary
from slipstream.kv.cache import KVCache
from slipstream.models.batch import PassBatch
from slipstream.models.taps import Taps
from slipstream.models.traits import AttentionTraits, MaskRule

NAME = "slipstream"

_HARMLESS = frozenset(
    # say nothing about the result: what a layer passes on for others, or what the pass itself decides
    (
        "position_ids",
        "position_embeddings",
        "use_cache",
        "cache_position",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
    )
)
_PART = 256
"""Rows of a prompt whose attention is computed together."""
_running: ContextVar[PassContext] = ContextVar("slipstream_pass")


class PassContext:
    """One pass on its way through the layers: where keys lie, who sees whom. Writes K and V, commits nothing."""

    taps: Taps = Taps()  # the hidden states that are kept in the cache's features
    _rotary: Rotary | None = None  # the same for all layers of a pass

    def __init__(self, batch: PassBatch, cache: KVCache) -> None:
        self.batch = batch
        self.cache = cache

    @property
    def slots(self) -> Tensor:
        """Where the rows go in the cache."""  # [N]
        return self.batch.slots

    def keep(self, depth: int, hidden: Tensor) -> None:
        """The residual stream [N, D] after so many layers: goes to the cache where somebody wants it."""
        if depth in self.taps.layers:
            self._keep(self.taps.layers.index(depth), hidden)

    def keep_normed(self, hidden: Tensor) -> None:
        """The same behind the last norm."""
        if self.taps.normed:
            self._keep(len(self.taps.layers), hidden)

    def _keep(self, place: int, hidden: Tensor) -> None:
        features, width = self.cache.features, hidden.shape[1]
        assert features is not None
        columns = features[:, place * width : (place + 1) * width]
        columns.index_copy_(0, self.slots, hidden.to(features.dtype))

    @cached_property
    def spans(self) -> list[Span]:
        """Made when first asked for: a compiled pass finds its keys itself."""
        return _spans(self.batch, self.cache.page_size)

    def attend(
        self,
        layer: int,
        query: Tensor,  # [N, H, D]
        key: Tensor,  # [N, H_kv, D]
        value: Tensor,  # [N, H_kv, D_v]
        traits: AttentionTraits,
    ) -> Tensor:  # [N, H, D_v]
        self.cache.write(layer, self.batch.slots, key, value)
        return _attend(query, self.cache.keys(layer), self.cache.values(layer), self.spans, traits)

    def rotate(self, heads: Tensor, position_embeddings: tuple[Tensor, Tensor]) -> Tensor:
        """Rotary embedding of [N, H, D] by the model's cos and sin [1, N, R]; R < D leaves the rest of a head alone."""
        cos, sin = position_embeddings
        if self._rotary is None or self._rotary.given is not cos:
            self._rotary = Rotary.of(cos, sin)
        return self._rotary.turn(heads)

    def saw_mask(self, rule: MaskRule, name: str) -> None:
        """Called with each layer's mask rule; rules do not change from pass to pass, so only a probe looks at them."""


class ProbeContext(PassContext):
    """A pass without a cache over one causal sequence, to learn what each layer keeps and asks for."""

    def __init__(self, rows: int, device: torch.device) -> None:
        positions = torch.arange(rows, device=device)
        self.spans = [Span(0, rows, slice(0, rows), 0, positions, None)]
        self.layers_seen: list[int] = []
        self.shapes: dict[int, tuple[int, int, int]] = {}  # layer -> kv heads, key size, value size
        self.traits: dict[int, AttentionTraits] = {}  # by layer

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, traits: AttentionTraits) -> Tensor:
        self.layers_seen.append(layer)
        self.shapes[layer] = (key.shape[1], key.shape[2], value.shape[2])
        self.traits[layer] = traits
        return _attend(query, key, value, self.spans, traits)

    def saw_mask(self, rule: MaskRule, name: str) -> None:
        rule.check(name)


def attention(
    module: nn.Module,
    query: Tensor,  # [1, H, N, D]
    key: Tensor,  # [1, H_kv, N, D]
    value: Tensor,  # [1, H_kv, N, D_v]
    attention_mask: MaskRule | Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """What a layer of transformers calls; the result is [1, N, H, D_v]."""
    name = type(module).__name__
    unknown = sorted(key for key, given in others.items() if given is not None and key not in _HARMLESS)
    if unknown or dropout or isinstance(attention_mask, Tensor):
        what = ", ".join(unknown) or ("dropout" if dropout else "attention_mask")
        raise UnsupportedModel(f"{name} asks its attention for {what}, which Slipstream does not know")
    if is_causal is False or getattr(module, "is_causal", True) is False:
        raise UnsupportedModel(f"{name} is not causal: Slipstream runs causal language models only")
    current, window = running_pass(), sliding_window
    if attention_mask is not None:  # the mask has the last word, as in transformers' own attention
        current.saw_mask(attention_mask, name)
        window = attention_mask.window
    out = current.attend(
        cast(int, module.layer_idx),
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        AttentionTraits(query.shape[-1] ** -0.5 if scaling is None else float(scaling), window, softcap, s_aux),
    )
    return out[None], None


@contextmanager
def running(context: PassContext) -> Iterator[None]:
    """Inside, the layers of a model work on this pass."""
    token = _running.set(context)
    try:
        yield
    finally:
        _running.reset(token)


def running_pass() -> PassContext:
    """The pass that the calling layer works on."""
    try:
        return _running.get()
    except LookupError:
        raise RuntimeError("a model with Slipstream's attention was called by itself: use Runner.forward") from None


def register() -> None:
    """Make the name known to transformers, with rules in place of masks."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, _mask_rule)


def _mask_rule(*, mask_function: Callable[..., Any], local_size: int | None = None, **_: Any) -> MaskRule:
    return MaskRule(local_size, mask_function)


def _attend(query: Tensor, keys: Tensor, values: Tensor, spans: Sequence[Span], traits: AttentionTraits) -> Tensor:
    return paged_attention(
        query,
        keys,
        values,
        spans,
        scaling=traits.scaling,
        window=traits.window,
        softcap=traits.softcap,
        sinks=traits.sinks,
    )


def _spans(batch: PassBatch, page_size: int) -> list[Span]:
    """The requests of a pass; a long prompt in parts, each with those before it as its prefix.

    Rows of a part look at no key behind it, where one span would compute all of them and mask half.
    """
    spans = []
    for i, prefix in enumerate(batch.prefix_lengths):
        start, end = batch.row_starts[i], batch.row_starts[i + 1]
        masks = batch.masks[start:end] if batch.masks is not None and batch.is_tree[i] else None
        visible = None if masks is None else visible_rows(masks, end - start)
        slots = _key_slots(batch.pages[i], prefix + end - start, page_size, batch.slots.device)
        for first in range(start, end, _PART if visible is None else end - start):
            last = end if visible is not None else min(first + _PART, end)
            length = prefix + last - start
            keys = slice(slots.start, slots.start + length) if isinstance(slots, slice) else slots[:length]
            spans.append(Span(first, last, keys, prefix + first - start, batch.positions[first:last], visible))
    return spans


def _key_slots(pages: Sequence[int], length: int, page_size: int, device: torch.device) -> slice | Tensor:
    used = pages[: -(-length // page_size)]
    if all(b == a + 1 for a, b in pairwise(used)):
        return slice(used[0] * page_size, used[0] * page_size + length)
    firsts = torch.tensor(used, device=device)[:, None] * page_size
    return (firsts + torch.arange(page_size, device=device)).flatten()[:length]
