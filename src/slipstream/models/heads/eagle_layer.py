"""One decoder layer of an EAGLE head: Llama's, but what its attention reads is made by the head.

Joined products as in the target's fused layers; on a GPU the same kernels.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slipstream.kernels.arena import Arena
from slipstream.kernels.linear import PackedLinear
from slipstream.kernels.narrow import narrow_join
from slipstream.kernels.tiled import join
from slipstream.models.attention import PassContext
from slipstream.models.fuse import FusedNorm
from slipstream.models.gpu import GpuLayer, Product
from slipstream.models.heads.eagle_shape import EagleShape
from slipstream.models.traits import AttentionTraits


class EagleLayer(nn.Module):
    """A layer behind its first norm. weights: those of the layer, on the target's device and in its dtype."""

    def __init__(
        self, index: int, shape: EagleShape, weights: Mapping[str, Tensor], arena: Arena, *, narrow: bool = False
    ) -> None:
        """narrow: its products have weights in 8 bits."""
        super().__init__()
        self.index, self.head_dim = index, shape.head_dim
        self.heads, self.kv_heads = shape.heads, shape.kv_heads
        self.traits = AttentionTraits(shape.head_dim**-0.5)
        attention = [f"self_attn.{name}_proj" for name in "qkv"]
        self.qkv = product(weights, *attention, arena=arena, narrow=narrow)
        self.o = product(weights, "self_attn.o_proj", arena=arena, narrow=narrow)
        self.gate_up = product(weights, "mlp.gate_proj", "mlp.up_proj", arena=arena, narrow=narrow)
        self.down = product(weights, "mlp.down_proj", arena=arena, narrow=narrow)
        norms = {
            name: FusedNorm(weights[f"{name}.weight"], shape.norm_eps) if f"{name}.weight" in weights else None
            for name in ("input_layernorm", "self_attn.q_norm", "self_attn.k_norm")
        }
        self.input_norm, self.q_norm, self.k_norm = norms.values()
        self.post_norm = FusedNorm(weights["post_attention_layernorm.weight"], shape.norm_eps)
        self._eps = shape.norm_eps

    def run(
        self,
        x: Tensor,  # [N, H]: goes on beside attention
        normed: Tensor,  # [N, W]: what attention reads
        context: PassContext,
        position_embeddings: tuple[Tensor, Tensor],  # each [1, N, R]
    ) -> Tensor:  # [N, H]
        heads = self.qkv(normed).view(x.shape[0], -1, self.head_dim)
        turned, value = heads.split((self.heads + self.kv_heads, self.kv_heads), dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = turned.split((self.heads, self.kv_heads), dim=1)
            turned = torch.cat((self.q_norm(query), self.k_norm(key)), dim=1)
        query, key = context.rotate(turned, position_embeddings).split((self.heads, self.kv_heads), dim=1)
        x = x + self.o(context.attend(self.index, query, key, value, self.traits).flatten(1))
        gate, up = self.gate_up(self.post_norm(x)).chunk(2, dim=-1)
        out: Tensor = x + self.down(F.silu(gate) * up)
        return out

    def refill(self, weights: Mapping[str, Tensor]) -> None:
        """Other weights in place of those that it was made with, under the same names."""
        qkv = [weights[f"self_attn.{name}_proj.weight"] for name in "qkv"]
        gate_up = [weights[f"mlp.{name}_proj.weight"] for name in ("gate", "up")]
        self.qkv.refill(torch.cat(qkv))
        self.gate_up.refill(torch.cat(gate_up))
        self.o.refill(weights["self_attn.o_proj.weight"])
        self.down.refill(weights["mlp.down_proj.weight"])
        norms = {
            "input_layernorm": self.input_norm,
            "self_attn.q_norm": self.q_norm,
            "self_attn.k_norm": self.k_norm,
            "post_attention_layernorm": self.post_norm,
        }
        for name, norm in norms.items():
            if norm is not None:
                norm.weight.copy_(weights[f"{name}.weight"])

    def on_gpu(self) -> GpuLayer:
        """The same as its kernels want it. Where there is no first norm, the kernels' is not asked for."""
        return GpuLayer(
            index=self.index,
            traits=self.traits,
            heads=self.heads,
            input_norm=(self.input_norm or self.post_norm).weight,
            post_norm=self.post_norm.weight,
            norm_eps=(self._eps, self._eps),
            q_norm=None if self.q_norm is None else self.q_norm.weight,
            k_norm=None if self.k_norm is None else self.k_norm.weight,
            head_eps=self._eps,
            qkv=Product.of(self.qkv),
            o=Product.of(self.o),
            gate_up=Product.of(self.gate_up),
            down=Product.of(self.down),
        )


def product(weights: Mapping[str, Tensor], *names: str, arena: Arena, narrow: bool = False) -> PackedLinear:
    """The products of one input by these weights, as one. narrow: in 8 bits."""
    linears = []
    for name in names:
        weight, bias = weights[f"{name}.weight"], weights.get(f"{name}.bias")
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
        linear.weight = nn.Parameter(weight, requires_grad=False)
        if bias is not None:
            linear.bias = nn.Parameter(bias, requires_grad=False)
        linears.append(linear)
    return narrow_join(*linears) if narrow else join(*linears, arena=arena)
