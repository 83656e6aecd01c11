"""Hidden states out of transformers' own decoders, for models whose layers were not swapped as a whole.

A fused trunk keeps them itself. Here hooks do: before the first layer, behind each layer, behind the last norm.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from slipstream.core.errors import UnsupportedModel
from slipstream.models.attention import running_pass


def hook(model: PreTrainedModel, num_layers: int) -> None:
    """From now on passes of this model keep what their taps ask for."""
    trunk, layers = decoder_layers(model, num_layers)
    for depth, layer in enumerate(layers):
        if not depth:
            layer.register_forward_pre_hook(_before, with_kwargs=True)
        layer.register_forward_hook(_Behind(depth + 1))
    trunk.register_forward_hook(_normed)


def decoder_layers(model: PreTrainedModel, num_layers: int) -> tuple[nn.Module, nn.ModuleList]:
    """The module that holds the decoder's layers (its output is normed), and the layers."""
    found = [
        (trunk, part)
        for trunk in model.modules()
        for part in trunk.children()
        if isinstance(part, nn.ModuleList) and _holds_layers(part, num_layers)
    ]
    if len(found) != 1:
        raise UnsupportedModel(
            f"{type(model).__name__}: its {num_layers} decoder layers are not one list, so hidden states cannot be "
            "read from it; use a drafter that needs none (ngram, suffix, model)"
        )
    return found[0]


def _holds_layers(part: nn.ModuleList, num_layers: int) -> bool:
    """Are these the decoder's layers? Each of them, and nothing else in a list, has the attention of its index."""
    return len(part) == num_layers and all(
        any(getattr(inner, "layer_idx", None) == depth for inner in layer.modules()) for depth, layer in enumerate(part)
    )


class _Behind:
    """What a layer gives is the residual stream behind it."""

    def __init__(self, depth: int) -> None:
        self.depth = depth

    def __call__(self, layer: nn.Module, given: Any, out: Any) -> None:
        hidden: Tensor = out[0] if isinstance(out, tuple) else out  # [1, N, D]
        running_pass().keep(self.depth, hidden[0])


def _before(layer: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
    hidden: Tensor = given[0] if given else named["hidden_states"]  # [1, N, D]
    running_pass().keep(0, hidden[0])


def _normed(trunk: nn.Module, given: Any, out: Any) -> None:
    running_pass().keep_normed(out[0][0])  # the first of a trunk's outputs is its last hidden state
