"""SpecForge, SGLang's format: EAGLE-3's tensors, and tap ids in `eagle_config` that name the layers themselves.

There id i means what layer i gives, which is the residual stream after i + 1 layers: one more than the other formats
say. EAGLE-3.1 heads come in this format too (`fc_norm`, `norm_output`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slipstream.models.heads.checkpoint import HeadFiles, TargetShape
from slipstream.models.heads.eagle_shape import EagleShape
from slipstream.models.heads.layouts import eagle3
from slipstream.models.heads.layouts.common import Names, eagle3_parts, given_taps

ARCHITECTURE = "LlamaForCausalLMEagle3"
NESTED = "eagle_config"


def knows(config: Mapping[str, Any], names: Names) -> bool:
    return ARCHITECTURE in (config.get("architectures") or ()) or NESTED in config


def shape(files: HeadFiles, names: Names, target: TargetShape) -> EagleShape:
    ids = (files.config.get(NESTED) or {}).get(eagle3.IDS)
    if ids is None:
        return eagle3.shape(files, names, target)
    taps = given_taps(files.folder, f"{NESTED}.{eagle3.IDS}", ids, target, shift=1)
    return EagleShape(**eagle3_parts(files, files.config, names, target), taps=taps)
