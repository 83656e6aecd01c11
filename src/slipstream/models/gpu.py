"""The fused trunk on a GPU: eight row-independent kernels a layer, which a CUDA graph can capture.

Between two products stands one kernel: the runs of a split product are summed, the residual added and normed in it. The
residual itself is only ever touched there, so a layer hands its last product on unsummed, and the next layer adds it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from slipstream.kernels.add_norm import add_norm
from slipstream.kernels.linear import PackedLinear
from slipstream.kernels.narrow import widened
from slipstream.kernels.rotary_write import rotary_write
from slipstream.kernels.row_linear import row_linear, splits_of
from slipstream.kernels.silu_mul import silu_mul
from slipstream.kernels.trust import sizes_agree
from slipstream.models.attention import running_pass
from slipstream.models.device_pass import DevicePass
from slipstream.models.fuse import FusedLayer, FusedTrunk
from slipstream.models.traits import AttentionTraits

WIDE_ROWS = 256
"""A prompt with more rows than these computes more than it reads, and is worth other products, in a pass of its own.
Fewer are launched faster than they could be computed otherwise, as a captured pass."""

SHARED_ROWS = 512
"""Rows of shorter prompts that share a pass: passes up to this size are captured at start (`models/reads.py`)."""

WIDE_SIZES = range(384, 2048 + 1, 128)
"""Rows of passes that wide prompts may share: they are filled up to the next of these. In smaller ones cuBLAS adds up
otherwise."""


class RowLinear(nn.Module):
    """`nn.Linear` by row-independent products; the logits come out in fp32."""

    def __init__(self, linear: nn.Linear, out_dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.weight = linear.weight.detach()
        self.bias = None if linear.bias is None else linear.bias.detach()
        self.out_dtype = out_dtype

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        out = row_linear(flat, self.weight, self.bias, out_dtype=self.out_dtype, overlap=True)
        return out.view(*x.shape[:-1], self.weight.shape[0])


@dataclass(frozen=True, slots=True)
class GpuLayer:
    """A fused layer as its kernels want it."""

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
        normed: Tensor,  # [N, D], or more where a head's layer reads more
        x: Tensor,
        current: DevicePass,
        positions: Tensor,
        cos: Tensor,
        sin: Tensor,
        overlap: bool,
    ) -> Tensor:  # [splits, N, D] fp32, still to be added to x
        """The layer behind its first norm."""
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
    """A weight as the kernels want it, and in how many runs its product is computed."""

    weight: Tensor
    bias: Tensor | None
    splits: int
    scale: Tensor | None = None  # of the rows of a weight in 8 bits

    @staticmethod
    def of(linear: PackedLinear) -> Product:
        return Product(linear.weight, linear.bias, splits_of(*linear.weight.shape), linear.scale)

    def runs(self, x: Tensor, overlap: bool) -> Tensor:  # [splits, N, out]
        """The product, still to be summed over its runs. A prompt's is cuBLAS', which computes faster than we."""
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
    """Takes the place of a `FusedTrunk` on a GPU."""

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
        overlap = not current.wide  # a prompt's kernels are long: there is little to hide
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
        """May prompts share wide passes? Tried out on this chip, for all sizes that such passes have."""
        weights = [product.weight for layer in self._layers for product in layer.products]
        return weights[0].dtype == torch.float32 or sizes_agree(weights, WIDE_SIZES)


def install(model: nn.Module, max_positions: int) -> int:
    """Put the GPU's trunk and row-independent products in place; returns how many trunks were swapped."""
    swapped = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, FusedTrunk):
                setattr(parent, name, GpuTrunk(child, max_positions))
                swapped += 1
            elif type(child) is nn.Linear and name == "lm_head":
                setattr(parent, name, RowLinear(child, torch.float32))
    return swapped
