"""An EAGLE-3 head before its first step: a shape that fits the target, and weights that know what is known."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slipstream.core.errors import ConfigError
from slipstream.models.heads.checkpoint import TargetShape
from slipstream.models.heads.eagle_files import EagleShape, default_taps
from slipstream.models.taps import Taps
from slipstream.train.batch import Rows
from slipstream.train.draft_vocab import DraftVocab
from slipstream.train.eagle3_module import Eagle3Module
from slipstream.train.eagle3_options import Eagle3Options
from slipstream.train.layers import rope_of
from slipstream.train.recipe import TargetShape as Shape
from slipstream.train.teacher import Teacher

_MODEST = 0.3
"""Size of the first states against the target's."""


def head_shape(options: Eagle3Options, target: Shape, draft_vocab: int) -> EagleShape:
    """A head that fits this target."""
    config: Any = target.config
    heads = options.heads or int(config.num_attention_heads)
    kv_heads = options.kv_heads or heads
    if target.hidden % heads:
        raise ConfigError(f"option heads={heads}: must divide the hidden size of the target, {target.hidden}")
    if heads % kv_heads:
        raise ConfigError(f"option kv_heads={kv_heads}: must divide heads={heads}")
    dim = options.head_dim or int(getattr(config, "head_dim", None) or target.hidden // config.num_attention_heads)
    positions = int(getattr(config, "max_position_embeddings", None) or 2048)
    layers = tuple(int(part) for part in options.layers)
    taps = (
        Taps(layers)
        if layers
        else default_taps(TargetShape(target.hidden, target.vocab_size, target.num_layers, positions))
    )
    taps.check(target.num_layers)
    return EagleShape(
        generation=3,
        hidden=target.hidden,
        target_hidden=target.hidden,
        inner=options.inner or 5 * target.hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=dim,
        num_layers=1,
        norm_eps=float(getattr(config, "rms_norm_eps", None) or 1e-6),
        vocab=target.vocab_size,
        draft_vocab=draft_vocab,
        taps=taps,
        max_positions=positions,
        trained_positions=positions,
        rope=rope_of(config),
        fc_norm=options.fc_norm,
        norm_before_residual=options.norm_before_residual,
        norm_output=options.norm_output,
    )


@torch.no_grad()
def begin(module: Eagle3Module, vocab: DraftVocab, teacher: Teacher, counts: Tensor) -> None:
    """Fresh weights that need not first learn what is known: how large the target's states are, and what tokens are.

    A short text of frequent tokens shows the sizes. Each tap comes through `fc` with the same weight, and the late one
    as it is; the last norm gives states as large as the target's in every place but for modesty: to
    begin with, guesses are mostly wrong, and should not be sure. The LM head is the target's.
    """
    made = torch.Generator().manual_seed(torch.initial_seed() % (1 << 63))
    likely = counts.cpu().double() + 1e-3
    ids = torch.multinomial(likely, 128, replacement=True, generator=made)[None].to(teacher.device)
    positions = torch.arange(128, device=teacher.device)[None]
    shown = teacher.look(
        Rows(ids, positions, torch.zeros_like(ids), torch.ones_like(ids, dtype=torch.bool)), module.shape.taps
    )
    for name, weight in module.named_parameters():
        if weight.dim() == 2:
            fresh = torch.randn(weight.shape, generator=made) * weight.shape[1] ** -0.5
            weight.copy_(fresh * (0.5 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0))
    width = module.shape.target_hidden
    parts = shown.taps[0].float().unflatten(1, (-1, width))  # [T, taps, H]
    sizes = parts.pow(2).mean(2).sqrt().median(0).values.clamp_min(1e-6)  # [taps]: the first token's can be huge
    blocks = module.fc.weight.unflatten(1, (-1, width))  # [H, taps, H]
    blocks[:, -1] += torch.eye(width, device=blocks.device)
    if not module.shape.fc_norm:
        blocks /= sizes[None, :, None]
    feature = module.combine(shown.taps[0])[1:]
    feature = feature / feature.pow(2).mean(1, keepdim=True).sqrt().clamp_min(1e-6)
    wanted, found = (x.float().pow(2).mean(0).sqrt() for x in (shown.normed[0, 1:], feature))  # [H] each
    ratio = wanted / found.clamp_min(1e-6)
    middle = float(ratio.median())
    module.norm.weight.copy_(_MODEST * ratio.clamp(0.2 * middle, 5 * middle))
    module.lm_head.weight.copy_(teacher.lm_head[vocab.ids.to(teacher.device)])
