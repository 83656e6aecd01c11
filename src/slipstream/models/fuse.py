"""Fused decoder layers, swapped in at load for the layers whose shape we know.

Joined QKV and gate-up products, one rotary step for queries and keys together, no bookkeeping between the parts.
Module names do not prove what a layer computes (Granite scales its residuals, SmolLM3 has layers without rotary
embedding), so a swap stays only where `parity.py` finds the same logits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slipstream.kernels.linear import PackedLinear, join, packs
from slipstream.models.attention import running_pass
from slipstream.models.release import release
from slipstream.models.traits import AttentionTraits

_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
_MLP = {"gate_proj", "up_proj", "down_proj"}


class FusedLayer(nn.Module):
    """A decoder layer of Llama's shape (Mistral and Qwen2 share it; Qwen3 norms queries and keys as well).

    traits: what the layer that it replaces was seen to ask of its attention.
    """

    def __init__(self, layer: nn.Module, traits: AttentionTraits) -> None:
        super().__init__()
        attention, mlp = _child(layer, "self_attn"), _child(layer, "mlp")
        self.layer_idx = cast(int, attention.layer_idx)
        self.head_dim = cast(int, attention.head_dim)
        self.traits = traits
        q, k, v = (cast(nn.Linear, _child(attention, name)) for name in ("q_proj", "k_proj", "v_proj"))
        self.heads, self.kv_heads = q.out_features // self.head_dim, k.out_features // self.head_dim
        self.qkv = join(q, k, v)
        self.o = _packed(_child(attention, "o_proj"))
        self.gate_up = join(cast(nn.Linear, _child(mlp, "gate_proj")), cast(nn.Linear, _child(mlp, "up_proj")))
        self.down = _packed(_child(mlp, "down_proj"))
        self.input_norm = _norm(layer, "input_layernorm")
        self.post_norm = _norm(layer, "post_attention_layernorm")
        self.q_norm = _norm(attention, "q_norm") if hasattr(attention, "q_norm") else None
        self.k_norm = _norm(attention, "k_norm") if hasattr(attention, "k_norm") else None

    def forward(
        self,
        hidden: Tensor,  # [1, N, D]
        *,
        position_embeddings: tuple[Tensor, Tensor],
        **_: Any,
    ) -> Tensor:
        x = hidden[0]
        rows = x.shape[0]
        heads = self.qkv(self.input_norm(x)).view(rows, -1, self.head_dim)
        value = heads[:, self.heads + self.kv_heads :]
        if self.q_norm is not None and self.k_norm is not None:
            query, key = heads[:, : self.heads], heads[:, self.heads : self.heads + self.kv_heads]
            rotated = _rotate(torch.cat((self.q_norm(query), self.k_norm(key)), dim=1), *position_embeddings)
        else:
            rotated = _rotate(heads[:, : self.heads + self.kv_heads], *position_embeddings)
        attended = running_pass().attend(
            self.layer_idx,
            rotated[:, : self.heads],
            rotated[:, self.heads :],
            value,
            self.traits,
        )
        x = x + self.o(attended.reshape(rows, -1))
        gate, up = self.gate_up(self.post_norm(x)).chunk(2, dim=-1)
        out: Tensor = x + self.down(F.silu(gate) * up)
        return out[None]


class FusedNorm(nn.Module):
    """RMS norm in one call, in fp32 inside as the models have it."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight = weight.detach().clone()  # a few bytes of the mapped checkpoint would keep a large page of it
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float32:
            return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)
        return self.weight * F.rms_norm(x.float(), (x.shape[-1],), None, self.eps).to(x.dtype)


def fuse(model: nn.Module, traits: Mapping[int, AttentionTraits]) -> int:
    """Swap fused layers in for those whose shape is known; returns how many. The old layers' weights are let go."""
    swapped = 0
    for parent in list(model.modules()):
        if not isinstance(parent, nn.ModuleList):
            continue
        for i, layer in enumerate(parent):
            if _known(layer):
                parent[i] = FusedLayer(layer, traits[cast(int, _child(layer, "self_attn").layer_idx)])
                swapped += 1
                release(linear.weight for linear in layer.modules() if isinstance(linear, nn.Linear))
    return swapped


def pack(model: nn.Module) -> int:
    """Swap every remaining `nn.Linear` that gains by packing; returns how many."""
    swapped = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and packs(child.weight):
                setattr(parent, name, _packed(child))
                swapped += 1
                release([child.weight])
    return swapped


def _known(layer: nn.Module) -> bool:
    if {name for name, _ in layer.named_children()} != _LAYER:
        return False
    attention, mlp = _child(layer, "self_attn"), _child(layer, "mlp")
    activation = getattr(mlp, "act_fn", None)
    return (
        {name for name, child in attention.named_children()} in (_ATTENTION, _ATTENTION | {"q_norm", "k_norm"})
        and {name for name, child in mlp.named_children()} - {"act_fn"} == _MLP
        and all(type(_child(attention, name)) is nn.Linear for name in _ATTENTION)
        and all(type(_child(mlp, name)) is nn.Linear for name in _MLP)
        and "silu" in type(activation).__name__.lower()
        and hasattr(attention, "layer_idx")
        and all(_is_norm(norm) for norm in (*layer.children(), *attention.children()) if hasattr(norm, "eps"))
        and all(_is_norm(_child(layer, name)) for name in ("input_layernorm", "post_attention_layernorm"))
    )


def _is_norm(module: nn.Module) -> bool:
    return hasattr(module, "variance_epsilon") and hasattr(module, "weight")


def _norm(parent: nn.Module, name: str) -> FusedNorm:
    norm = _child(parent, name)
    return FusedNorm(cast(Tensor, norm.weight), float(cast(float, norm.variance_epsilon)))


def _packed(linear: nn.Module) -> PackedLinear:
    linear = cast(nn.Linear, linear)
    return PackedLinear(linear.weight, linear.bias)


def _child(module: nn.Module, name: str) -> nn.Module:
    return cast(nn.Module, getattr(module, name))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of [N, H, D] by cos and sin [1, N, R]; R < D leaves the rest of a head alone."""
    size = cos.shape[-1]
    cos, sin = cos[0, :, None], sin[0, :, None]
    if size < x.shape[-1]:
        return torch.cat((_rotate_all(x[..., :size], cos, sin), x[..., size:]), dim=-1)
    return _rotate_all(x, cos, sin)


def _rotate_all(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return torch.addcmul(x * cos, turned, sin)
