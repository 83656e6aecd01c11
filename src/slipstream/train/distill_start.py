"""A distilled draft before its first step: a shape that fits the target, and weights that it has from the target."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from slipstream.core.errors import ConfigError
from slipstream.models.load import EMBEDDING, LM_HEAD
from slipstream.train.distill_module import DraftModule, DraftShape
from slipstream.train.distill_options import NOTHING, DraftOptions
from slipstream.train.layers import rope_of
from slipstream.train.recipe import TargetShape
from slipstream.train.teacher import Teacher

_MODEST = 0.3
"""Size of the last states against the target's: first guesses are mostly wrong, and should not be sure."""


def draft_shape(options: DraftOptions, target: TargetShape) -> DraftShape:
    """A draft that fits this target."""
    config: Any = target.config
    wide = target.hidden
    hidden = options.hidden or wide
    if hidden > wide:
        raise ConfigError(f"option hidden={hidden}: must be at most the target's hidden size, {wide}")
    dim = options.head_dim or int(getattr(config, "head_dim", None) or wide // config.num_attention_heads)
    target_heads = int(config.num_attention_heads)
    target_kv = int(getattr(config, "num_key_value_heads", None) or target_heads)
    if hidden == wide:
        heads, kv_heads = options.heads or target_heads, options.kv_heads or target_kv
    else:
        heads = options.heads or max(hidden // dim, 1)
        group = max(target_heads // target_kv, 1)
        kv_heads = options.kv_heads or (heads // group if heads % group == 0 else heads)
    if heads % kv_heads:
        raise ConfigError(f"option kv_heads={kv_heads}: must divide heads={heads}")
    inner = options.inner or _inner(config, hidden, wide)
    return DraftShape(
        hidden=hidden,
        target_hidden=wide,
        inner=inner,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=dim,
        num_layers=options.layers,
        norm_eps=float(getattr(config, "rms_norm_eps", None) or 1e-6),
        vocab=target.vocab_size,
        positions=int(getattr(config, "max_position_embeddings", None) or 2048),
        rope=rope_of(config),
    )


def _inner(config: Any, hidden: int, wide: int) -> int:
    """As wide an MLP as the target has, for its size; in whole vectors."""
    theirs = int(getattr(config, "intermediate_size", None) or 4 * wide)
    return theirs if hidden == wide else -(-theirs * hidden // wide // 64) * 64


@torch.no_grad()
def begin(module: DraftModule, options: DraftOptions, teacher: Teacher) -> list[int]:
    """Weights to begin with; returns the target's layers that they are of, none where they are of something else.

    The target's first layers read what the draft's do, and leave what its LM head makes some sense of; late ones are
    lost without those before them. A wider MLP starts as the target's: what is new writes nothing yet. A narrower
    draft starts from the directions in which embeddings differ most.
    """
    shape = module.shape
    made = torch.Generator().manual_seed(torch.initial_seed() % (1 << 63))
    for name, weight in module.named_parameters():
        if weight.dim() == 2:
            fresh = torch.randn(weight.shape, generator=made) * weight.shape[1] ** -0.5
            weight.copy_(fresh * (0.5 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0))
    if shape.is_reduced:
        words = teacher.embedding.float()
        basis = torch.linalg.eigh(words.T @ words).eigenvectors[:, -shape.hidden :]  # [H, h]
        module.inward.weight.copy_(basis.T)
        module.outward.weight.copy_(basis)
    last = _last_norm(teacher)
    if last is not None:
        size = last.pow(2).mean().sqrt()
        module.norm.weight.copy_(_MODEST * (size if shape.is_reduced else last))
    if options.starts_as_draft:
        ours = module.state_dict()
        _copy(ours, _stored(options.start_folder, ours))
        return []
    check_start(options, teacher)
    wanted = options.start_layers or list(range(min(shape.num_layers, teacher.num_layers)))
    if options.start == NOTHING or not _fit(module, teacher, wanted):
        if options.start_layers:
            raise ConfigError(
                f"option start={options.start!r}: the target's layers have other tensors than the draft's (hidden, "
                "heads, kv_heads, head_dim must be its own, inner at least, and its layers a Llama's); use start=none"
            )
        return []
    for layer, number in zip(module.layers, wanted, strict=True):
        _copy(layer.state_dict(), teacher.layer(number).state_dict())
    return wanted


def _stored(folder: Path, ours: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The draft in `folder`, as it was exported, to begin as. Its MLPs may be narrower."""
    try:
        stored = load_file(folder / "model.safetensors")
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"option start={str(folder)!r}: holds no draft's model.safetensors ({error})") from error
    theirs = {
        name.removeprefix("model."): tensor for name, tensor in stored.items() if name not in (EMBEDDING, LM_HEAD)
    }
    if not _fits(theirs, ours):
        raise ConfigError(
            f"option start={str(folder)!r}: its tensors are not those of this draft; layers, hidden, heads, kv_heads "
            "and head_dim must be its own, inner at least, and both as wide as the target"
        )
    return theirs


def check_start(options: DraftOptions, target: TargetShape) -> None:
    """Raise where a draft cannot begin with this: before there is data, which may take hours to make."""
    if options.starts_as_draft:
        with torch.device("meta"):
            ours = DraftModule(draft_shape(options, target), nn.Identity()).state_dict()
        _stored(options.start_folder, ours)
    wanted = options.start_layers
    if not wanted:
        return
    if len(wanted) != options.layers:
        raise ConfigError(
            f"option start={options.start!r}: must name as many layers as the draft has, {options.layers}"
        )
    if max(wanted) >= target.num_layers:
        raise ConfigError(f"option start={options.start!r}: the target has {target.num_layers} layers, counted from 0")


def _fit(module: DraftModule, teacher: Teacher, wanted: list[int]) -> bool:
    """Have these layers of the target the draft's tensors, by name and size? Of an MLP the draft's may be wider."""
    ours = module.layers[0].state_dict()
    return len(wanted) == len(module.layers) and all(_fits(teacher.layer(n).state_dict(), ours) for n in wanted)


def _fits(theirs: Mapping[str, Tensor], ours: Mapping[str, Tensor]) -> bool:
    return theirs.keys() == ours.keys() and all(
        theirs[name].dim() == own.dim()
        and all(small <= large for small, large in zip(theirs[name].shape, own.shape, strict=True))
        and (".mlp." in f".{name}" or theirs[name].shape == own.shape)
        for name, own in ours.items()
    )


def _copy(ours: Mapping[str, Tensor], source: Mapping[str, Tensor]) -> None:
    """The source's weights. Where an MLP is wider, it reads as it did, and what is new is not yet said."""
    for name, theirs in source.items():
        own = ours[name]
        if name.endswith("down_proj.weight"):
            own[:, theirs.shape[1] :] = 0
        own[tuple(slice(size) for size in theirs.shape)] = theirs.float()


def _last_norm(teacher: Teacher) -> Tensor | None:  # [H] fp32
    norm = getattr(teacher.trunk, "norm", None)
    weight = getattr(norm, "weight", None) if isinstance(norm, nn.Module) else None
    return weight.detach().float() if isinstance(weight, Tensor) and weight.shape == (teacher.hidden,) else None
