"""EAGLE-1 and EAGLE-2 as their authors store them: `fc` over embedding and hidden state, then Llama layers.

The first layer has no norm before it. The hidden state is the target's last one, after its final norm; the LM head is
the target's, and so is the embedding where the checkpoint has none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slipstream.models.heads.checkpoint import HeadFiles, TargetShape, number
from slipstream.models.heads.eagle_shape import EagleShape
from slipstream.models.heads.layouts.common import Names, llama_parts
from slipstream.models.taps import Taps


def knows(config: Mapping[str, Any], names: Names) -> bool:
    return True  # the oldest layout, without a mark of its own: its tensors are checked by name


def shape(files: HeadFiles, names: Names, target: TargetShape) -> EagleShape:
    parts = llama_parts(files, files.config, names, target)
    vocab = number(files.config, "vocab_size", files.folder, target.vocab)
    return EagleShape(
        **parts,
        generation=1,
        target_hidden=parts["hidden"],
        vocab=vocab,
        draft_vocab=vocab,
        taps=Taps(normed=True),
        fc_bias=bool(files.config.get("bias", "fc.bias" in names)),
    )
