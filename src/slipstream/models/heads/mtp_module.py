"""A module of multi-token prediction, made from the target's configuration and the tensors of its checkpoint.

The decoder layer is transformers' own class for the family, so that every family whose target runs here has its modules
too. Its attention is ours, as in the target.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from slipstream.core.errors import UnsupportedModel
from slipstream.models import attention
from slipstream.models.heads.checkpoint import check_tensors
from slipstream.models.heads.mtp_files import MtpCheckpoint, MtpLayout

T = TypeVar("T")


class MtpModule(nn.Module):
    """One module. `config` says what its decoder layer is; the layer's place in the cache is `index`."""

    def __init__(
        self, layout: MtpLayout, layer_class: type[nn.Module], config: Any, index: int, layer_idx: int
    ) -> None:
        super().__init__()
        self.layer = layer_class(config, layer_idx)
        for part in self.layer.modules():
            if hasattr(part, "layer_idx"):
                part.layer_idx = index  # type: ignore[assignment]
        norm_class: Any = type(self.layer.input_layernorm)
        hidden = int(config.hidden_size)
        self.token_norm = norm_class(hidden, eps=config.rms_norm_eps)
        self.hidden_norm = norm_class(hidden, eps=config.rms_norm_eps)
        self.projection = nn.Linear(2 * hidden, hidden, bias=False)
        self.last_norm = norm_class(hidden, eps=config.rms_norm_eps)
        self._hidden_first = layout.hidden_first

    def forward(self, embedded: Tensor, features: Tensor, positions: Tensor, turns: Any) -> Tensor:  # [N, H]
        """embedded [N, H], features [N, H]; turns: the rotary embedding of the rows' positions [N]."""
        both = [self.token_norm(embedded), self.hidden_norm(features)]
        x = self.projection(torch.cat(both[::-1] if self._hidden_first else both, dim=-1))
        out = self.layer(
            x[None], position_embeddings=turns, attention_mask=None, position_ids=positions[None], use_cache=False
        )
        return cast(Tensor, self.last_norm((out[0] if isinstance(out, tuple) else out)[0]))


@dataclass(frozen=True, slots=True)
class BuiltModules:
    """Modules with their weights, and the rotary embedding that they share."""

    modules: list[MtpModule]
    rotary: nn.Module


def build_modules(
    checkpoint: MtpCheckpoint,
    model_class: type[PreTrainedModel],
    config: PreTrainedConfig,
    dtype: torch.dtype,
    device: torch.device,
) -> BuiltModules:
    """The modules of a checkpoint, for a model of this class and configuration."""
    layer_class, rotary_class = _classes(model_class)
    longer: Any = copy.deepcopy(config)
    longer._attn_implementation = attention.NAME
    types = getattr(config, "layer_types", None)
    if types is not None:  # a module looks over the whole text, whatever the target's layers do
        longer.layer_types = [*types, *["full_attention"] * checkpoint.count]
    kinds = getattr(config, "mlp_layer_types", None)
    if kinds:  # experts or none: as the target's last layer
        longer.mlp_layer_types = [*kinds, *[kinds[-1]] * checkpoint.count]
    modules = []
    for i in range(checkpoint.count):
        with torch.device("meta"):
            module = MtpModule(checkpoint.layout, layer_class, longer, i, checkpoint.layers + i)
        kept = _fp32_names(model_class)
        weights = _renamed(checkpoint, i, module)
        module.load_state_dict(
            {
                name: tensor.to(device, torch.float32 if any(k in name for k in kept) else dtype)
                for name, tensor in weights.items()
            },
            assign=True,
        )
        modules.append(module.eval().requires_grad_(False))
    return BuiltModules(modules, rotary_class(config=longer).to(device))


def _classes(model_class: type[PreTrainedModel]) -> tuple[type[nn.Module], Any]:
    """The family's decoder layer and rotary embedding, as transformers or the model's own code defines them."""
    names = list(getattr(model_class, "_no_split_modules", None) or ())
    for base in model_class.__mro__:
        defined = vars(sys.modules[base.__module__])
        found = [defined[name] for name in names if name in defined]
        rotary = [c for name, c in defined.items() if name.endswith("RotaryEmbedding") and isinstance(c, type)]
        if found and rotary:
            return found[0], rotary[0]
    raise UnsupportedModel(f"{model_class.__name__}: its decoder layer is not to be found. Use another drafter")


def _fp32_names(model_class: type[PreTrainedModel]) -> tuple[str, ...]:
    """Parts of names whose tensors stay in fp32 in every dtype."""
    lists = (getattr(model_class, key, None) for key in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"))
    return tuple(name for names in lists for name in (names or ()))


def _renamed(checkpoint: MtpCheckpoint, index: int, module: MtpModule) -> dict[str, Tensor]:
    """A module's tensors by the names of `MtpModule`. Raises `ModelError` where they are not what it has."""
    layout = checkpoint.layout
    own, shared = layout.before(index, checkpoint.layers), layout.before_shared(index, checkpoint.layers)
    theirs = {
        "token_norm.weight": f"{shared}{layout.token_norm}.weight",
        "hidden_norm.weight": f"{shared}{layout.hidden_norm}.weight",
        "projection.weight": f"{shared}{layout.projection}.weight",
        "last_norm.weight": f"{shared}{layout.last_norm}.weight",
    }
    ours = {name: mine for mine, name in theirs.items()}
    beside = {f"{own}{name}.weight" for name in (layout.embedding, layout.lm_head)}
    found = {
        ours.get(name, "layer." + name.removeprefix(own)): tensor
        for name, tensor in checkpoint.tensors.items()
        if name not in beside and (name in ours or name.startswith(own))
    }
    wanted = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    found = _joined_experts(found, wanted)

    def named(tensors: Mapping[str, T]) -> dict[str, T]:  # as the files have it, for people to find
        return {theirs.get(name, own + name.removeprefix("layer.")): value for name, value in tensors.items()}

    check_tensors(checkpoint.folder, named(found), named(wanted), {})
    return found


def _joined_experts(tensors: dict[str, Tensor], wanted: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Experts that the files keep one by one, as transformers' layers have them: all in one tensor."""
    joined = dict(tensors)
    for name, shape in wanted.items():
        parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(name.rpartition(".")[2])
        if ".experts." not in name or parts is None or name in tensors:
            continue
        start = name.rpartition(".")[0]
        names = [[f"{start}.{expert}.{part}.weight" for part in parts] for expert in range(shape[0])]
        if all(one in tensors for row in names for one in row):
            joined[name] = torch.stack([torch.cat([joined.pop(one) for one in row]) for row in names])
    return joined
