"""Native multi-token prediction: modules that were trained with the target and lie in its own checkpoint.

A module joins a token with the hidden state before it, runs one decoder layer of the target's kind, and norms the
result, from which the target's LM head predicts the next token. The result is also the hidden state for the next guess,
by the next module or by the last one again. The decoder layer is transformers' own class for the family, with our
attention, so every family whose target runs here has its modules too.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from slipstream.core.errors import UnsupportedModel
from slipstream.kv.cache import LayerShape
from slipstream.models import attention
from slipstream.models.attention import PassContext, ProbeContext
from slipstream.models.build import pack
from slipstream.models.heads.base import HeadStates
from slipstream.models.heads.checkpoint import check_tensors, read_config
from slipstream.models.heads.mtp_files import EMBEDDINGS, LM_HEADS, MtpCheckpoint, MtpLayout, own_tensor, read_modules
from slipstream.models.runner import Runner
from slipstream.models.taps import Taps

_T = TypeVar("_T")


class MtpHead(nn.Module):
    """A `Head` of one or more modules. embedding, lm_head: the target's, or the checkpoint's own if they differ."""

    taps = Taps(normed=True)
    vocab: Tensor | None = None

    def __init__(
        self,
        modules: Sequence[MtpModule],
        rotary: nn.Module,
        embedding: nn.Module,
        lm_head: nn.Module,
        max_positions: int,
    ) -> None:
        super().__init__()
        self.parts = nn.ModuleList(modules)
        self.rotary = rotary
        self._others = (embedding, lm_head)  # in a tuple, so that they are no submodules
        table = cast(Tensor, embedding.weight)
        self.dtype, self._device, self._known_ids = table.dtype, table.device, table.shape[0]
        self.hidden_size = table.shape[1]
        self.max_positions = max_positions
        self.weights_bytes = sum(p.numel() * p.element_size() for p in self.parts.parameters())
        self.layers = self._probe()

    @staticmethod
    def open(folder: Path, target: Runner) -> MtpHead:
        """The modules in the target's own `folder`."""
        checkpoint = read_modules(folder, read_config(folder))
        model = target.model
        built = build_modules(checkpoint, type(model), model.config, target.dtype, target.device)
        embedding = own_tensor(checkpoint, checkpoint.layout.embedding, EMBEDDINGS)
        head = own_tensor(checkpoint, checkpoint.layout.lm_head, LM_HEADS)

        def placed(weight: Tensor) -> nn.Parameter:
            return nn.Parameter(weight.to(target.device, target.dtype), requires_grad=False)

        lm_head = model.get_output_embeddings()
        if head is not None:
            lm_head = nn.Linear(head.shape[1], head.shape[0], bias=False, device="meta")
            lm_head.weight = placed(head)
        if target.device.type == "cpu":
            for module in built.modules:
                pack(module)
        return MtpHead(
            built.modules,
            built.rotary,
            model.get_input_embeddings() if embedding is None else nn.Embedding.from_pretrained(placed(embedding)),
            lm_head,
            target.max_positions,
        )

    def combine(self, taps: Tensor) -> Tensor:  # [N, H]
        return taps

    def run(
        self,
        ids: Tensor,
        features: Tensor,
        context: PassContext,
        positions: Tensor,
        step: int,
        *,
        behind: Tensor | None = None,
        wanted: Tensor | None = None,
    ) -> HeadStates:
        """As `Head.run`. A module's output is normed already."""
        embedded = self._others[0](ids.clamp(0, self._known_ids - 1))  # ids of padding rows may be anything
        module = self.parts[min(step, len(self.parts) - 1)]
        with attention.running(context):
            turns = self.rotary(embedded, positions[None])
            hidden = module(embedded, features if behind is None else features[behind], positions, turns)
        hidden = cast(Tensor, hidden if wanted is None else hidden[wanted])
        return HeadStates(hidden, hidden)

    def logits(self, read: Tensor) -> Tensor:  # [R, H] -> [R, V] fp32
        return cast(Tensor, self._others[1](read)).float()

    @torch.inference_mode()
    def _probe(self) -> list[LayerShape]:
        """The cache shapes of the modules' attention."""
        context = ProbeContext(2, self._device)
        ids = torch.zeros(2, dtype=torch.int64, device=self._device)
        features = torch.zeros_like(self._others[0](ids))
        for step in range(len(self.parts)):
            self.run(ids, features, context, context.spans[0].positions, step)
        if context.layers_seen != list(range(len(self.parts))):
            raise UnsupportedModel("the attention of its multi-token prediction modules does not reach Slipstream")
        return [LayerShape(*context.shapes[i]) for i in range(len(self.parts))]


class MtpModule(nn.Module):
    """One module. config: of its decoder layer; index: the layer's place in the cache."""

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
    if types is not None:  # modules have full attention, whatever the target's layers have
        longer.layer_types = [*types, *["full_attention"] * checkpoint.count]
    kinds = getattr(config, "mlp_layer_types", None)
    if kinds:  # experts or none, as in the target's last layer
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
    """The family's decoder layer and rotary embedding, from transformers or the model's own code."""
    names = list(getattr(model_class, "_no_split_modules", None) or ())
    for base in model_class.__mro__:
        defined = vars(sys.modules[base.__module__])
        found = [defined[name] for name in names if name in defined]
        rotary = [c for name, c in defined.items() if name.endswith("RotaryEmbedding") and isinstance(c, type)]
        if found and rotary:
            return found[0], rotary[0]
    raise UnsupportedModel(f"{model_class.__name__}: its decoder layer is not to be found. Use another drafter")


def _fp32_names(model_class: type[PreTrainedModel]) -> tuple[str, ...]:
    """Substrings of names whose tensors stay in fp32."""
    lists = (getattr(model_class, key, None) for key in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"))
    return tuple(name for names in lists for name in (names or ()))


def _renamed(checkpoint: MtpCheckpoint, index: int, module: MtpModule) -> dict[str, Tensor]:
    """A module's tensors by the names of `MtpModule`. Raises `ModelError` for missing or unknown ones."""
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

    def named(tensors: Mapping[str, _T]) -> dict[str, _T]:  # by the names in the files, for error messages
        return {theirs.get(name, own + name.removeprefix("layer.")): value for name, value in tensors.items()}

    check_tensors(checkpoint.folder, named(found), named(wanted), {})
    return found


def _joined_experts(tensors: dict[str, Tensor], wanted: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Joins experts that the files keep one by one, as transformers' layers expect."""
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
