"""EAGLE-3 as its authors store it: `midlayer.*`, `fc` over three tapped states, an LM head over a draft vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slipstream.models.heads.checkpoint import HeadFiles, TargetShape
from slipstream.models.heads.eagle_shape import EagleShape
from slipstream.models.heads.layouts.common import Names, default_taps, eagle3_parts, given_taps

IDS = "eagle_aux_hidden_state_layer_ids"


def knows(config: Mapping[str, Any], names: Names) -> bool:
    return "draft_vocab_size" in config or "layers.0.hidden_norm.weight" in names


def shape(files: HeadFiles, names: Names, target: TargetShape) -> EagleShape:
    ids = files.config.get(IDS)
    taps = default_taps(target) if ids is None else given_taps(files.folder, IDS, ids, target)
    return EagleShape(**eagle3_parts(files, files.config, names, target), taps=taps)
