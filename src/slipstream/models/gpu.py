"""The fused trunk on a GPU: eight row-independent kernels a layer, which a CUDA graph can capture.

One kernel stands between two products: it sums the runs of a split product, adds the residual and norms it. Nothing
else touches the residual, so a layer returns its last product unsummed, and the next layer adds it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from slipstream.kernels.gpu.layout import RowLayout
from slipstream.kernels.gpu.norms import add_norm
from slipstream.kernels.gpu.paged import attend, prepare
from slipstream.kernels.gpu.paged_wide import attend_wide, prepare_wide
from slipstream.kernels.gpu.rotary_write import rotary_write
from slipstream.kernels.gpu.row_linear import row_linear, silu_mul, sizes_agree, splits_of
from slipstream.kernels.linear import PackedLinear, widened
from slipstream.kv.cache import KVCache
from slipstream.models.attention import AttentionTraits, PassContext, running_pass
from slipstream.models.batch import PassBatch, sent
from slipstream.models.fused import FusedLayer, FusedTrunk

WIDE_ROWS = 256
"""Prompts with more rows are bound by arithmetic: they have passes of their own with other products. Prompts with fewer
rows are faster as captured passes."""

SHARED_ROWS = 512
"""Rows of shorter prompts in a shared pass: passes up to this size are captured at start (`graphs.py`)."""

WIDE_SIZES = range(384, 2048 + 1, 128)
"""Sizes of passes that wide prompts may share: passes are padded to the next size. In smaller ones cuBLAS sums in
another order."""


class DevicePass(PassContext):
    """A pass whose layout lies on the device, where attention reads it."""

    def __init__(self, layout: RowLayout, cache: KVCache, *, wide: bool = False) -> None:
        """wide: for many rows of prompts, by products and tiles that are faster and not row-independent."""
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
        """Attention of rows whose K and V are already in the cache."""
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
        """Make the tables that the attention of all layers reads."""
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
    # a row's place among its request's keys is its position, unless the parity check moves a prompt within the context;
    # in a chain it follows from the row, in a tree from the depth, which the device knows
    rows = batch.slots.shape[0]
    padding = np.arange(starts[-1], rows)  # padding
    first_rows = np.concatenate((np.repeat(starts[:-1], counts), padding))
    before = np.concatenate((np.repeat(prefixes, counts), 0 * padding))
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
    """The ancestors of each row, from mask words; in a chain, all rows before it."""
    assert batch.masks is not None
    words = batch.masks.cpu().numpy()
    starts, counts = np.array(batch.row_starts[:-1]), np.diff(batch.row_starts)
    first = np.repeat(starts, counts)  # [N]
    own = np.arange(batch.num_rows) - first  # [N]: a row's place among its request's rows
    of_tree = np.repeat(batch.is_tree, counts)[:, None]
    column = np.arange(counts.max())
    above = column <= own[:, None]  # [N, M]
    above[:, :64] &= ~of_tree | ((words[:, None] >> column[:64]) & 1 == 1)
    deepest = above.sum(1).max()
    order = np.argsort(~above, axis=1, kind="stable")[:, :deepest]  # ancestors first, in order
    rows = np.where(np.take_along_axis(above, order, 1), first[:, None] + order, -1)
    return sent(rows.astype(np.int32), batch.slots.device)


class RowLinear(nn.Module):
    """`nn.Linear` by row-independent products; `out_dtype` of the LM head is fp32."""

    def __init__(self, linear: nn.Linear, out_dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias  # still parameters: a draft may share them
        self.out_dtype = out_dtype

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        out = row_linear(flat, self.weight, self.bias, out_dtype=self.out_dtype, overlap=True)
        return out.view(*x.shape[:-1], self.weight.shape[0])


@dataclass(frozen=True, slots=True)
class GpuLayer:
    """The weights of a fused layer in the form that the kernels take."""

    index: int
    traits: AttentionTraits
    heads: int
    input_norm: Tensor
    post_norm: Tensor
    norm_eps: tuple[float, float]
    q_norm: Tensor | None
    k_norm: Tensor | None
    head_eps: float
    qkv: Product
    o: Product
    gate_up: Product
    down: Product

    @staticmethod
    def of(layer: FusedLayer) -> GpuLayer:
        return GpuLayer(
            index=layer.layer_idx,
            traits=layer.traits,
            heads=layer.heads,
            input_norm=layer.input_norm.weight,
            post_norm=layer.post_norm.weight,
            norm_eps=(float(layer.input_norm.eps), float(layer.post_norm.eps)),
            q_norm=None if layer.q_norm is None else layer.q_norm.weight,
            k_norm=None if layer.k_norm is None else layer.k_norm.weight,
            head_eps=0.0 if layer.q_norm is None else float(layer.q_norm.eps),
            qkv=Product.of(layer.qkv),
            o=Product.of(layer.o),
            gate_up=Product.of(layer.gate_up),
            down=Product.of(layer.down),
        )

    @property
    def products(self) -> tuple[Product, ...]:
        return self.qkv, self.o, self.gate_up, self.down

    def run(
        self,
        x: Tensor,
        delta: Tensor | None,
        current: DevicePass,
        positions: Tensor,
        cos: Tensor,
        sin: Tensor,
        overlap: bool,
    ) -> Tensor:  # [splits, N, D] fp32, still to be added to x
        normed = add_norm(x, delta, self.input_norm, self.norm_eps[0], overlap=overlap)
        current.keep(self.index, x)
        return self.run_normed(normed, x, current, positions, cos, sin, overlap)

    def run_normed(
        self,
        normed: Tensor,  # [N, D]; wider for the first layer of a draft head
        x: Tensor,
        current: DevicePass,
        positions: Tensor,
        cos: Tensor,
        sin: Tensor,
        overlap: bool,
    ) -> Tensor:  # [splits, N, D] fp32, still to be added to x
        """The layer after its first norm."""
        layout, cache = current.layout, current.cache
        query = rotary_write(
            self.qkv.runs(normed, overlap),
            cos,
            sin,
            positions,
            layout.slots,
            self.q_norm,
            self.k_norm,
            cache.keys(self.index),
            cache.values(self.index),
            self.heads,
            self.head_eps,
            overlap=overlap,
        )
        attended = current.attend_written(self.index, query, self.traits, overlap=overlap)
        delta = self.o.runs(attended.flatten(1), overlap)
        normed = add_norm(x, delta, self.post_norm, self.norm_eps[1], overlap=overlap)
        return self.down.runs(self.gate_up.gated(normed, overlap), overlap)


@dataclass(frozen=True, slots=True)
class Product:
    """A weight in the form that the kernels take, and the number of runs of its product."""

    weight: Tensor
    bias: Tensor | None
    splits: int
    scale: Tensor | None = None  # of the rows of an 8-bit weight

    @staticmethod
    def of(linear: PackedLinear) -> Product:
        return Product(linear.weight, linear.bias, splits_of(*linear.weight.shape), linear.scale)

    def runs(self, x: Tensor, overlap: bool) -> Tensor:  # [splits, N, out]
        """The product, not yet summed over its runs. For prompts by cuBLAS, which is faster for many rows."""
        if not overlap and x.dtype != torch.float32:
            return self._wide(x)[None]
        return row_linear(
            x, self.weight, self.bias, scale=self.scale, splits=self.splits, partial=True, overlap=overlap
        )

    def gated(self, x: Tensor, overlap: bool) -> Tensor:  # [N, out / 2]
        if not overlap and x.dtype != torch.float32:
            return silu_mul(self._wide(x))
        return row_linear(x, self.weight, self.bias, scale=self.scale, gated=True, overlap=overlap)

    def _wide(self, x: Tensor) -> Tensor:
        return F.linear(x, widened(self.weight, self.scale, x.dtype), self.bias)


class GpuTrunk(nn.Module):
    """Replaces a `FusedTrunk` on a GPU."""

    def __init__(self, trunk: FusedTrunk, max_positions: int) -> None:
        super().__init__()
        self.embed_tokens = trunk.embed_tokens
        self.norm = trunk.norm
        self._norm_eps = float(trunk.norm.eps)
        self._layers = [GpuLayer.of(cast(FusedLayer, layer)) for layer in trunk.layers]
        self._heads = self._layers[0].heads
        weight = cast(Tensor, self.embed_tokens.weight)
        cos, sin = trunk.rotary_emb(weight[:1, None], torch.arange(max_positions, device=weight.device)[None])
        self.cos, self.sin = cos[0].contiguous(), sin[0].contiguous()  # [positions, R]

    def forward(self, input_ids: Tensor, position_ids: Tensor, **_: Any) -> BaseModelOutputWithPast:  # both [1, N]
        current = cast(DevicePass, running_pass())
        overlap = not current.wide  # a prompt's kernels are long, so overlapping launches gains little
        current.prepare(self._heads)
        x = self.embed_tokens(input_ids[0])
        delta: Tensor | None = None
        for layer in self._layers:
            delta = layer.run(x, delta, current, position_ids[0], self.cos, self.sin, overlap)
        hidden = add_norm(x, delta, self.norm.weight, self._norm_eps, overlap=overlap)
        current.keep(len(self._layers), x)
        current.keep_normed(hidden)
        return BaseModelOutputWithPast(last_hidden_state=cast(torch.FloatTensor, hidden[None]))

    def get_input_embeddings(self) -> nn.Module:
        return self.embed_tokens

    @property
    def layers(self) -> Sequence[GpuLayer]:
        return self._layers

    @property
    def shares_wide(self) -> bool:
        """Whether prompts may share wide passes: tested on this chip for all sizes of such passes."""
        weights = [product.weight for layer in self._layers for product in layer.products]
        return weights[0].dtype == torch.float32 or sizes_agree(weights, WIDE_SIZES)
