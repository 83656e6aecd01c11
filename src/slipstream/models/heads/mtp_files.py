"""Multi-token prediction modules in the target's own checkpoint: finds and reads them.

transformers drops these tensors when it loads a model, so they are read from the safetensors files. Families name them
differently; each has a layout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from slipstream.core.errors import DrafterError, ModelError, UnsupportedModel
from slipstream.models.headers import read_header, weight_files
from slipstream.models.heads.checkpoint import number

_COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")
"""Configuration keys of the number of modules."""


@dataclass(frozen=True, slots=True)
class MtpLayout:
    """How a family names the tensors of its modules, and the order in which a module joins token and hidden state."""

    name: str
    prefix: str  # {i}: the module, {n}: its layer, counted on from the target's
    shared: str  # before tensors that modules may share
    token_norm: str
    hidden_norm: str
    projection: str
    last_norm: str
    hidden_first: bool = False  # the projection reads cat(hidden, token), not cat(token, hidden)
    embedding: str | None = None  # usually a copy of the target's embedding
    lm_head: str | None = None  # … and of its LM head

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts of a module beside its decoder layer."""
        return self.token_norm, self.hidden_norm, self.projection, self.last_norm

    def before(self, module: int, layers: int) -> str:
        """The prefix of a module's decoder layer, for a target with `layers` layers."""
        return self.prefix.format(i=module, n=layers + module)

    def before_shared(self, module: int, layers: int) -> str:
        return self.shared.format(i=module, n=layers + module)


DEEPSEEK = MtpLayout(
    name="DeepSeek-V3",
    prefix="model.layers.{n}.",
    shared="model.layers.{n}.",
    token_norm="enorm",
    hidden_norm="hnorm",
    projection="eh_proj",
    last_norm="shared_head.norm",
    embedding="embed_tokens",
    lm_head="shared_head.head",
)
MIMO = MtpLayout(
    name="MiMo",
    prefix="model.mtp_layers.{i}.",
    shared="model.mtp_layers.{i}.",
    token_norm="token_layernorm",
    hidden_norm="hidden_layernorm",
    projection="input_proj",
    last_norm="final_layernorm",
    hidden_first=True,
)
QWEN3_NEXT = MtpLayout(
    name="Qwen3-Next",
    prefix="mtp.layers.{i}.",
    shared="mtp.",
    token_norm="pre_fc_norm_embedding",
    hidden_norm="pre_fc_norm_hidden",
    projection="fc",
    last_norm="norm",
)
LAYOUTS = (DEEPSEEK, MIMO, QWEN3_NEXT)

EMBEDDINGS = ("model.embed_tokens.weight",)
LM_HEADS = ("lm_head.weight", "model.embed_tokens.weight")
"""The target's own names; an LM head that is the embedding too has no tensor of its own."""


@dataclass(frozen=True, slots=True)
class MtpPlace:
    """The place of modules in a target's files."""

    layout: MtpLayout
    count: int
    layers: int  # of the target
    names: tuple[str, ...]  # of all their tensors


@dataclass(frozen=True, slots=True)
class MtpCheckpoint:
    """The modules of a checkpoint."""

    folder: Path
    layout: MtpLayout
    count: int
    layers: int  # of the target
    tensors: Mapping[str, Tensor]  # by their full names, on the CPU


def read_modules(folder: Path, config: Mapping[str, Any]) -> MtpCheckpoint:
    """The modules in the target's `folder`; raises `DrafterError` if there are none."""
    place = find_modules(folder, config)
    return MtpCheckpoint(folder, place.layout, place.count, place.layers, read_named(folder, place.names))


def find_modules(folder: Path, config: Mapping[str, Any]) -> MtpPlace:
    """Find the modules by names and headers alone."""
    layers = number(config, "num_hidden_layers", folder)
    names = {name for file in weight_files(folder) for name in read_header(file)}
    promised = next((number(config, key, folder) for key in _COUNTS if config.get(key)), None)
    for layout in LAYOUTS:
        if not (count := _count(layout, names, layers)):
            continue
        if promised is not None and promised > count:
            raise ModelError(
                f"{folder}: the configuration promises {promised} modules of multi-token prediction, but tensors of "
                f"module {count} are missing ({layout.before(count, layers)}*). Fetch the model again"
            )
        count = min(count, promised or count)
        own = [layout.before(i, layers) for i in range(count)]
        shared = [layout.shared + part for part in layout.parts] if layout.prefix != layout.shared else []
        return MtpPlace(layout, count, layers, tuple(n for n in sorted(names) if n.startswith((*own, *shared))))
    hint = "" if promised is None else f", though its configuration promises {promised} modules of it"
    raise DrafterError(
        f"{folder}: the target has no tensors of multi-token prediction in its safetensors files{hint} (looked for "
        f"{', '.join(layout.before_shared(0, layers) + layout.projection for layout in LAYOUTS)}). Use another drafter"
    )


def _count(layout: MtpLayout, names: set[str], layers: int) -> int:
    """The number of modules of this layout."""
    if f"{layout.before_shared(0, layers)}{layout.projection}.weight" not in names:
        return 0
    found = 0
    while any(name.startswith(layout.before(found, layers)) for name in names):
        found += 1
    return found


def read_named(folder: Path, names: Sequence[str]) -> dict[str, Tensor]:  # on the CPU
    """Those of these tensors that are in the safetensors files of `folder`."""
    found: dict[str, Tensor] = {}
    for file in weight_files(folder):
        here = set(read_header(file)) & set(names)
        if here:
            with safe_open(file, framework="pt") as opened:
                found.update({name: opened.get_tensor(name) for name in sorted(here)})
    return found


def own_tensor(checkpoint: MtpCheckpoint, name: str | None, targets: Sequence[str]) -> Tensor | None:
    """The modules' own embedding or LM head, called `name`; None if it is the target's, or a copy of that."""
    if name is None:
        return None
    before = [checkpoint.layout.before(i, checkpoint.layers) for i in range(checkpoint.count)]
    own = {key: checkpoint.tensors[key] for b in before if (key := f"{b}{name}.weight") in checkpoint.tensors}
    if not own:
        return None
    known = read_named(checkpoint.folder, targets)
    theirs = next((known[key] for key in targets if key in known), None)
    if theirs is not None and all(torch.equal(tensor, theirs) for tensor in own.values()):
        return None
    first, *others = own
    for other in others:
        if not torch.equal(own[other], own[first]):
            raise UnsupportedModel(f"{checkpoint.folder}: {other} differs from {first}; modules must share it")
    if theirs is not None and own[first].shape != theirs.shape:
        raise ModelError(
            f"{checkpoint.folder}: {first} {list(own[first].shape)} instead of {list(theirs.shape)}, the target's. "
            "Fetch the model again"
        )
    return own[first]
