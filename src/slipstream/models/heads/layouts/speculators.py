"""speculators, vLLM's format: EAGLE-3 with its Llama part in `transformer_layer_config`.

Its tap ids count layers that have been passed, as ours do. Readers disagree on what holds where `norm_before_residual`
is not written; the library's own default is not to.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slipstream.core.errors import ModelError, UnsupportedModel
from slipstream.models.heads.checkpoint import HeadFiles, TargetShape
from slipstream.models.heads.eagle_shape import EagleShape
from slipstream.models.heads.layouts.common import Names, default_taps, eagle3_parts, given_taps
from slipstream.models.heads.layouts.eagle3 import IDS

KIND = "speculators_model_type"
LAYER = "transformer_layer_config"


def knows(config: Mapping[str, Any], names: Names) -> bool:
    return KIND in config


def shape(files: HeadFiles, names: Names, target: TargetShape) -> EagleShape:
    kind, layer = files.config[KIND], files.config.get(LAYER)
    if kind != "eagle3":
        raise UnsupportedModel(f"{files.folder}: {KIND}={kind!r}; of this format 'eagle3' can be run. Use another head")
    if not isinstance(layer, dict):
        raise ModelError(f"{files.folder / 'config.json'}: {LAYER} is missing. Fetch the file again")
    ids = files.config.get(IDS)
    taps = default_taps(target) if ids is None else given_taps(files.folder, IDS, ids, target)
    return EagleShape(**eagle3_parts(files, layer, names, target), taps=taps)
