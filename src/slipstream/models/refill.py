"""Other weights for a model that is open: a draft in training is measured in an engine that stays.

A loaded model's weights lie joined, packed, in codes, or where captured graphs read them. On a GPU they are overwritten
where they are; on a CPU a product may lie elsewhere afterwards, and the compiled pass is told.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.kernels.linear import PackedLinear
from slipstream.models.compiled import CompiledTrunk
from slipstream.models.fuse import FusedLayer, FusedTrunk
from slipstream.models.gpu import GpuLayer, GpuTrunk

_LAYERS = "model.layers."


@torch.no_grad()
def refill(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Put these in place. tensors: by the names that the checkpoint of a Llama has; a layer's all or none."""
    weight = next(model.parameters())
    given = {name: tensor.to(weight.device, weight.dtype) for name, tensor in tensors.items()}
    trunks = [module for module in model.modules() if isinstance(module, (FusedTrunk, GpuTrunk))]
    for trunk in trunks:
        layers: Any = trunk.layers
        for i, layer in enumerate(layers):
            part = _below(given, f"{_LAYERS}{i}.")
            if part:
                _refill_layer(layer, part)
        if isinstance(trunk, FusedTrunk) and trunk.compiled is not None:
            trunk.compiled = CompiledTrunk.of(layers, trunk.norm)
    for name, tensor in given.items():
        if not trunks or not name.startswith(_LAYERS):
            _put(model.get_submodule(name.removesuffix(".weight")), tensor)


def _refill_layer(layer: FusedLayer | GpuLayer, weights: Mapping[str, Tensor]) -> None:
    attention = [weights[f"self_attn.{name}_proj.weight"] for name in "qkv"]
    gated = [weights[f"mlp.{name}_proj.weight"] for name in ("gate", "up")]
    _put(layer.qkv, torch.cat(attention))
    _put(layer.o, weights["self_attn.o_proj.weight"])
    _put(layer.gate_up, torch.cat(gated))
    _put(layer.down, weights["mlp.down_proj.weight"])
    norms = ((layer.input_norm, "input_layernorm"), (layer.post_norm, "post_attention_layernorm"))
    for norm, name in norms:
        (norm if isinstance(norm, Tensor) else norm.weight).copy_(weights[f"{name}.weight"])


def _put(module: Any, weight: Tensor) -> None:
    """A product, a norm or an embedding."""
    if isinstance(module, PackedLinear):
        module.refill(weight)
    else:
        module.weight.copy_(weight)


def _below(weights: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}
