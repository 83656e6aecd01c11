"""Fused decoders, swapped in at load for the layers whose shape we know.

Joined QKV and gate-up products, one rotary step for queries and keys together, no bookkeeping between the parts or
between the layers.
Module names do not prove what a layer computes (Granite scales its residuals, SmolLM3 has layers without rotary
embedding), so a swap stays only where `parity.py` finds the same logits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from slipstream.kernels.arena import Arena
from slipstream.kernels.compiled import compiled, keep_in, make_apart, needs_compiling
from slipstream.kernels.linear import packs
from slipstream.kernels.tiled import TiledLinear, join, tiler
from slipstream.models.attention import PassContext, running_pass
from slipstream.models.compiled import CompiledTrunk
from slipstream.models.paths import Progress, cache_folder
from slipstream.models.release import release
from slipstream.models.traits import AttentionTraits

_TRUNK = {"embed_tokens", "layers", "norm", "rotary_emb"}
_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
_MLP = {"gate_proj", "up_proj", "down_proj"}


class FusedLayer(nn.Module):
    """A decoder layer of Llama's shape (Mistral and Qwen2 share it; Qwen3 norms queries and keys as well).

    traits: what the layer that it replaces was seen to ask of its attention.
    """

    def __init__(self, layer: nn.Module, traits: AttentionTraits, arena: Arena) -> None:
        super().__init__()
        attention, mlp = _child(layer, "self_attn"), _child(layer, "mlp")
        self.layer_idx = cast(int, attention.layer_idx)
        self.head_dim = cast(int, attention.head_dim)
        self.traits = traits
        q, k, v = (cast(nn.Linear, _child(attention, name)) for name in ("q_proj", "k_proj", "v_proj"))
        self.heads, self.kv_heads = q.out_features // self.head_dim, k.out_features // self.head_dim
        self.qkv = join(q, k, v, arena=arena)
        self.o = join(cast(nn.Linear, _child(attention, "o_proj")), arena=arena)
        gate, up = (cast(nn.Linear, _child(mlp, name)) for name in ("gate_proj", "up_proj"))
        self.gate_up = join(gate, up, arena=arena)
        self.down = join(cast(nn.Linear, _child(mlp, "down_proj")), arena=arena)
        self.input_norm = _norm(layer, "input_layernorm")
        self.post_norm = _norm(layer, "post_attention_layernorm")
        self.q_norm = _norm(attention, "q_norm") if hasattr(attention, "q_norm") else None
        self.k_norm = _norm(attention, "k_norm") if hasattr(attention, "k_norm") else None
        # asked for once: finding a part and calling it as a module costs more than a small product on a CPU
        self._parts = [
            part.forward for part in (self.input_norm, self.qkv, self.o, self.post_norm, self.gate_up, self.down)
        ]

    def forward(self, hidden: Tensor, *, position_embeddings: tuple[Tensor, Tensor], **_: Any) -> Tensor:
        """As transformers calls a layer: hidden is [1, N, D]."""
        return self.run(hidden[0], running_pass(), position_embeddings)[None]

    def run(self, x: Tensor, current: PassContext, position_embeddings: tuple[Tensor, Tensor]) -> Tensor:  # [N, D]
        input_norm, qkv, o, post_norm, gate_up, down = self._parts
        heads = qkv(input_norm(x)).view(x.shape[0], -1, self.head_dim)
        turned, value = heads.split((self.heads + self.kv_heads, self.kv_heads), dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = turned.split((self.heads, self.kv_heads), dim=1)
            turned = torch.cat((self.q_norm(query), self.k_norm(key)), dim=1)
        query, key = current.rotate(turned, position_embeddings).split((self.heads, self.kv_heads), dim=1)
        x = x + o(current.attend(self.layer_idx, query, key, value, self.traits).flatten(1))
        gate, up = gate_up(post_norm(x)).chunk(2, dim=-1)
        return x + down(F.silu(gate) * up)


class FusedTrunk(nn.Module):
    """Embedding, fused layers and last norm of a decoder, without what transformers does between them for others."""

    def __init__(self, trunk: nn.Module) -> None:
        super().__init__()
        self.embed_tokens = _child(trunk, "embed_tokens")
        self.rotary_emb = _child(trunk, "rotary_emb")
        self.layers = cast(nn.ModuleList, _child(trunk, "layers"))
        self.norm = _norm(trunk, "norm")
        fused = [cast(FusedLayer, layer) for layer in self.layers]
        self._runs = [layer.run for layer in fused]
        self.compiled = CompiledTrunk.of(fused, self.norm)

    def forward(self, input_ids: Tensor, position_ids: Tensor, **_: Any) -> BaseModelOutputWithPast:  # both [1, N]
        current = running_pass()
        x = self.embed_tokens(input_ids[0])
        position_embeddings = self.rotary_emb(x, position_ids)
        if self.compiled is not None and self.compiled.serves(current):
            x = self.compiled.run(x, current, position_embeddings)
        else:
            for depth, run in enumerate(self._runs):
                current.keep(depth, x)
                x = run(x, current, position_embeddings)
            current.keep(len(self._runs), x)
            x = self.norm(x)
            current.keep_normed(x)
        return BaseModelOutputWithPast(last_hidden_state=x[None])

    def get_input_embeddings(self) -> nn.Module:
        return self.embed_tokens


class FusedNorm(nn.Module):
    """RMS norm in few steps, in fp32 inside as the models have it."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight = weight.detach().clone()  # a few bytes of the mapped checkpoint would keep a large page of it
        self.eps = torch.tensor(eps, dtype=torch.float32, device=weight.device)

    def forward(self, x: Tensor) -> Tensor:
        wide = x if x.dtype == torch.float32 else x.float()
        norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        scaled = wide * torch.addcmul(self.eps, norm, norm, value=1 / x.shape[-1]).rsqrt_()
        return (scaled if wide is x else scaled.to(x.dtype)) * self.weight


def runs_compiled(model: nn.Module) -> bool:
    """Is it a model that the compiled passes are made for?"""
    weight = next(model.parameters())
    return weight.device.type == "cpu" and weight.dtype == torch.float32


def prepare(progress: Progress | None = None) -> None:
    """Load the compiled code, or make it: the first start on a machine spends some 10 s on that. Before any swap."""
    keep_in(cache_folder() / "compiled")
    if progress and needs_compiling():
        progress("compiling for this CPU (once): 10 seconds to a minute")
    make_apart()
    compiled()


def fuse(model: nn.Module, traits: Mapping[int, AttentionTraits]) -> int:
    """Swap fused layers in for those whose shape is known; returns how many. The old layers' weights are let go."""
    if runs_compiled(model):
        prepare()
    swapped, arena = 0, Arena()
    for parent in list(model.modules()):
        if not isinstance(parent, nn.ModuleList):
            continue
        for i, layer in enumerate(parent):
            if _known(layer):
                parent[i] = FusedLayer(layer, traits[cast(int, _child(layer, "self_attn").layer_idx)], arena)
                swapped += 1
                release(linear.weight for linear in layer.modules() if isinstance(linear, nn.Linear))
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if _is_trunk(child):
                setattr(parent, name, FusedTrunk(child))
    return swapped


def pack(model: nn.Module) -> int:
    """Swap every remaining `nn.Linear` that gains by packing; returns how many."""
    if runs_compiled(model):
        prepare()
    swapped, arena = 0, Arena()
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and (packs(child.weight) or tiler(child.weight) is not None):
                old, product = child.weight.detach(), join(child, arena=arena)
                setattr(parent, name, product)
                swapped += 1
                if isinstance(product, TiledLinear) and isinstance(product.tiles, Tensor):
                    _share(model, old, product.tiles)
                release([old])
    return swapped


def _share(model: nn.Module, old: Tensor, new: Tensor) -> None:
    """An LM head that is the embedding too stays one tensor."""
    for module in model.modules():
        if isinstance(module, nn.Embedding) and module.weight.data_ptr() == old.data_ptr():
            module.weight = nn.Parameter(new, requires_grad=False)


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


def _is_trunk(module: nn.Module) -> bool:
    return (
        {name for name, _ in module.named_children()} == _TRUNK
        and isinstance(module.layers, nn.ModuleList)
        and all(isinstance(layer, FusedLayer) for layer in module.layers)
        and _is_norm(_child(module, "norm"))
        and not isinstance(module, FusedTrunk)
    )


def _is_norm(module: nn.Module) -> bool:
    return hasattr(module, "variance_epsilon") and hasattr(module, "weight")


def _norm(parent: nn.Module, name: str) -> FusedNorm:
    norm = _child(parent, name)
    return FusedNorm(cast(Tensor, norm.weight), float(cast(float, norm.variance_epsilon)))


def _child(module: nn.Module, name: str) -> nn.Module:
    return cast(nn.Module, getattr(module, name))
