"""Attention over a paged cache: a row sees its request's committed prefix and its ancestors.

This is the torch form: it runs on the CPU, and every faster form is tested against it. Work that all layers of a pass
share (keys and masks) is done once, in `Span`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

_MANY_ROWS = 64
"""With more rows torch's blocked kernel is faster; with fewer, three small products are (measured on CPUs)."""


@dataclass(slots=True)
class Span:
    """The rows of one request in a pass, and the cache slots of their keys."""

    start: int
    end: int
    keys: slice | Tensor  # cache slots of the prefix, then of the rows themselves; a slice if they are contiguous
    prefix: int
    positions: Tensor  # [M] int64
    visible: Tensor | None  # [M, G] bool: the request's own rows that a row sees; None: causal order
    places: Tensor | None = None  # [G] positions of those own rows, if they are not the pass's M rows
    _bias: dict[int | None, Tensor | None] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        return self.end - self.start

    def bias(self, window: int | None) -> Tensor | None:
        """[M, L] float32, 0 where a row may look and -inf elsewhere; None if every row sees every key."""
        if window not in self._bias:
            self._bias[window] = self._make_bias(window)
        return self._bias[window]

    def _make_bias(self, window: int | None) -> Tensor | None:
        if self.rows == 1 and (window is None or self.prefix < window):
            return None
        device = self.positions.device
        own = self.visible
        if own is None:
            own = torch.ones(self.rows, self.rows, dtype=torch.bool, device=device).tril_()
        seen = torch.cat((torch.ones(self.rows, self.prefix, dtype=torch.bool, device=device), own), dim=1)  # [M, L]
        if window is not None:
            own_places = self.positions if self.places is None else self.places
            key_positions = torch.cat((torch.arange(self.prefix, device=device), own_places))  # [L]
            seen &= key_positions > self.positions[:, None] - window
        return torch.zeros(seen.shape, device=device).masked_fill_(~seen, float("-inf"))


def visible_rows(words: Tensor, rows: int) -> Tensor:
    """Mask words [M] int64 as a boolean matrix [M, M]: bit j of a row's word says that it sees row j."""
    return (words[:, None] >> torch.arange(rows, device=words.device)) & 1 == 1


def paged_attention(
    query: Tensor,  # [N, H, D]
    keys: Tensor,  # [S, H_kv, D]: one layer of the cache, the pass's own rows written
    values: Tensor,  # [S, H_kv, D_v]
    spans: Sequence[Span],
    *,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,  # [H]: a logit that takes probability and adds no value
) -> Tensor:  # [N, H, D_v]
    """One layer's attention for all rows of a pass. Does not modify the cache."""
    parts = []
    for span in spans:
        q = query if len(spans) == 1 else query[span.start : span.end]
        k, v, bias = keys[span.keys], values[span.keys], span.bias(window)
        if span.rows > _MANY_ROWS and softcap is None and sinks is None:
            parts.append(_attend_many(q, k, v, bias, scaling))
        else:
            parts.append(_attend(q, k, v, bias, scaling, softcap, sinks))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scaling: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    rows, heads, dim = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    # the heads of a group become further rows of one product: [H_kv, group * M, D] x [H_kv, D, L]
    grouped = q.view(rows, kv_heads, group, dim).permute(1, 2, 0, 3).reshape(kv_heads, group * rows, dim)
    scores = torch.bmm(grouped, k.permute(1, 2, 0))
    scores = scores.mul_(scaling) if scores.dtype == torch.float32 else scores.float().mul_(scaling)
    if softcap is not None:
        scores = torch.tanh(scores / softcap).mul_(softcap)
    if bias is not None:
        scores.view(kv_heads, group, rows, -1).add_(bias)
    if sinks is not None:
        sink = sinks.float().view(kv_heads, group, 1, 1).expand(-1, -1, rows, 1).reshape(kv_heads, group * rows, 1)
        scores = torch.cat((scores, sink), dim=-1)
    weights = torch.softmax(scores, dim=-1)
    if sinks is not None:
        weights = weights[..., :-1]
    if weights.dtype != v.dtype:
        weights = weights.to(v.dtype)
    out = torch.bmm(weights, v.permute(1, 0, 2))  # [H_kv, group * M, D_v]
    return out.view(kv_heads, group, rows, -1).permute(2, 0, 1, 3).reshape(rows, heads, -1)


def _attend_many(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scaling: float) -> Tensor:
    rows, heads, dim = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    out = F.scaled_dot_product_attention(
        q.view(rows, kv_heads, group, dim).permute(1, 2, 0, 3),
        k.permute(1, 0, 2)[:, None].expand(-1, group, -1, -1),
        v.permute(1, 0, 2)[:, None].expand(-1, group, -1, -1),
        attn_mask=None if bias is None else bias.to(q.dtype),
        scale=scaling,
    )  # [H_kv, group, M, D_v]
    return out.permute(2, 0, 1, 3).reshape(rows, heads, -1)


@dataclass(frozen=True, slots=True)
class Rotary:
    """cos and sin of a pass, laid out so that rotating a head is one roll and two products."""

    given: Tensor  # the cos that this was made from
    cos: Tensor  # [N, 1, R]
    sin: Tensor  # [N, 1, R], the first half negative: x * cos + roll(x) * sin is the rotation

    @staticmethod
    def of(cos: Tensor, sin: Tensor) -> Rotary:
        """From a model's cos and sin [1, N, R], whose halves are equal."""
        low, high = sin[0, :, None].chunk(2, dim=-1)
        return Rotary(cos, cos[0, :, None], torch.cat((-low, high), dim=-1))

    def turn(self, heads: Tensor) -> Tensor:
        """Rotate [N, H, D]; the part of a head beyond R stays as it is."""
        size = self.cos.shape[-1]
        if size < heads.shape[-1]:
            return torch.cat((self.turn(heads[..., :size]), heads[..., size:]), dim=-1)
        return torch.addcmul(heads * self.cos, heads.roll(size // 2, -1), self.sin)
