"""Our attention inside transformers' architectures: registered by name, with the pass in a context variable.

transformers owns the architectures. A layer calls `attention` with its query, key and value, and what makes its
attention special (scaling, window, soft cap, sinks); unknown arguments raise, because ignoring one would compute
another model. Windows are read from the mask that transformers would have made, because not every layer with a window
says so in its arguments (Qwen2-MoE). The pass is no argument, because not every layer passes unknown arguments on
(StableLM).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from slipstream.core.errors import UnsupportedModel
from slipstream.kernels.attention import Rotary, Span, paged_attention, visible_rows
from slipstream.kv.cache import KVCache
from slipstream.models.batch import PassBatch
from slipstream.models.taps import Taps

NAME = "slipstream"

_HARMLESS = frozenset(
    # no effect on the result: passed on by layers for others, or decided by the pass
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
"""Rows of a prompt in one span of attention."""
_running: ContextVar[PassContext] = ContextVar("slipstream_pass")

_NEAR = 1_000_000
"""The most keys for which a mask's rule is checked one by one."""


@dataclass(frozen=True, slots=True)
class AttentionTraits:
    """The parameters of a layer's attention, the same in every pass."""

    scaling: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None  # [H]


@dataclass(frozen=True, slots=True)
class MaskRule:
    """Stands in for transformers' mask: holds the rule by which the mask would be made."""

    window: int | None
    may_look: Callable[[Any, Any, Any, Any], Any]  # batch, head, query position, key position -> bool

    def check(self, name: str) -> None:
        """Raise `UnsupportedModel` unless the rule is causal order within the window, also far beyond the window."""
        far = 3 * (self.window or 8192)
        zero = torch.zeros((), dtype=torch.int64)
        for at in (0, far // 2, far):
            query = torch.tensor(at)
            key = torch.arange(far + 2) if far < _NEAR else self._ends(at, far)  # [L]
            wanted = key <= query if self.window is None else (key <= query) & (key > query - self.window)
            try:
                same = torch.equal(torch.as_tensor(self.may_look(zero, zero, query, key)).expand(key.shape), wanted)
            except (IndexError, RuntimeError, TypeError):  # the rule reads something about the tokens
                same = False
            if not same:
                raise UnsupportedModel(
                    f"{name} uses an attention mask that is neither causal order nor a sliding window. Run it with "
                    "transformers instead"
                )

    def _ends(self, *places: int) -> Tensor:
        """Keys around these places and around the starts of their windows: all keys of a long window take gigabytes."""
        ends = [0, *places, *(place - (self.window or 0) for place in places)]
        return torch.cat([torch.arange(max(0, end - _NEAR // 8), max(0, end) + 2) for end in ends])

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """A model that computes with its mask (Bloom) does not use our attention alone."""
        raise UnsupportedModel("it uses its attention mask outside of transformers' attention interface")

    def __getattr__(self, name: str) -> Any:
        return self.__torch_function__(name, ())


class PassContext:
    """A pass under way: where keys lie and which rows see which. Writes K and V, commits nothing."""

    taps: Taps = Taps()  # the hidden states that are kept in the cache's features
    _rotary: Rotary | None = None  # the same for all layers of a pass

    def __init__(self, batch: PassBatch, cache: KVCache) -> None:
        self.batch = batch
        self.cache = cache

    @property
    def slots(self) -> Tensor:
        """Cache slots of the rows."""  # [N]
        return self.batch.slots

    def keep(self, depth: int, hidden: Tensor) -> None:
        """Keep the residual stream [N, D] after `depth` layers in the cache's features, if the taps include it."""
        if depth in self.taps.layers:
            self._keep(self.taps.layers.index(depth), hidden)

    def keep_normed(self, hidden: Tensor) -> None:
        """Keep the hidden states [N, D] after the last norm, if the taps include them."""
        if self.taps.normed:
            self._keep(len(self.taps.layers), hidden)

    def _keep(self, place: int, hidden: Tensor) -> None:
        features, width = self.cache.features, hidden.shape[1]
        assert features is not None
        columns = features[:, place * width : (place + 1) * width]
        columns.index_copy_(0, self.slots, hidden.to(features.dtype))

    @cached_property
    def spans(self) -> list[Span]:
        """Made on first use: a compiled pass finds its keys itself."""
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
        """Rotary embedding of [N, H, D] by the model's cos and sin [1, N, R]; a head's part beyond R stays as it is."""
        cos, sin = position_embeddings
        if self._rotary is None or self._rotary.given is not cos:
            self._rotary = Rotary.of(cos, sin)
        return self._rotary.turn(heads)

    def saw_mask(self, rule: MaskRule, name: str) -> None:
        """Called with each layer's mask rule. Rules are the same in all passes, so only a probe checks them."""


class ProbeContext(PassContext):
    """A pass over one causal sequence without a cache, which records each layer's shapes and attention traits."""

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
    """The attention function that transformers' layers call; returns [1, N, H, D_v]."""
    name = type(module).__name__
    unknown = sorted(key for key, given in others.items() if given is not None and key not in _HARMLESS)
    if unknown or dropout or isinstance(attention_mask, Tensor):
        what = ", ".join(unknown) or ("dropout" if dropout else "attention_mask")
        raise UnsupportedModel(f"{name} passes {what} to its attention, which Slipstream does not support")
    if is_causal is False or getattr(module, "is_causal", True) is False:
        raise UnsupportedModel(f"{name} is not causal: Slipstream runs causal language models only")
    current, window = running_pass(), sliding_window
    if attention_mask is not None:  # it overrides the argument, as in transformers' own attention
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
    """Run the layers of a model for this pass inside the `with` block."""
    token = _running.set(context)
    try:
        yield
    finally:
        _running.reset(token)


def running_pass() -> PassContext:
    """The pass of the calling layer."""
    try:
        return _running.get()
    except LookupError:
        raise RuntimeError("a model with Slipstream's attention was called by itself: use Runner.forward") from None


def register() -> None:
    """Register the attention with transformers, with rules in place of masks."""
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
    """The spans of a pass; a long prompt in parts, each with those before it as its prefix.

    The rows of a part see no keys behind it; one span for all rows would compute those and mask half of the scores.
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
