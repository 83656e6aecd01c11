"""Draft models that are stored without embedding and LM head: those of their target take the place.

For a small draft the two are most of its weights, and most of what it would have to learn. The target's modules stand
in the draft as they are, whatever they have become there (codes, packed products, row-independent ones): nothing is
copied. What is needed of the target is its vocabulary and its hidden size.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any, cast

from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from slipstream.core.errors import ModelError
from slipstream.models.support import SHARES

EMBEDDING, LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"
LENT = (EMBEDDING, LM_HEAD)
"""The tensors that a draft is stored without."""


def shares_embeddings(folder: Path) -> bool:
    """Is the model in `folder` a draft without embeddings of its own? A file that cannot be read is for others."""
    try:
        return bool(json.loads((folder / "config.json").read_bytes()).get(SHARES, False))
    except (OSError, ValueError, AttributeError):
        return False


def shape_of(target: PreTrainedModel) -> tuple[int, int]:
    """Rows and width of a model's embeddings."""
    vocab, hidden = cast(Tensor, target.get_input_embeddings().weight).shape
    return vocab, hidden


def check_fits(folder: Path, config: PreTrainedConfig, vocab: int, hidden: int) -> None:
    """Raise `ModelError` where a draft was made for embeddings of another shape."""
    wanted = (cast(int, config.vocab_size), cast(int, config.hidden_size))
    if wanted != (vocab, hidden):
        raise ModelError(
            f"{folder}: it shares its target's embeddings and was made for {EMBEDDING} {wanted} (vocab_size, "
            f"hidden_size); this target's is {(vocab, hidden)}. Use it with the target that it was trained for, or "
            "train one for this target (slipstream train draft)"
        )


def without_words(config: PreTrainedConfig) -> PreTrainedConfig:
    """The configuration to load such a draft with: a vocabulary of one, so that no memory is spent on embeddings."""
    small: Any = copy.deepcopy(config)
    small.vocab_size, small.tie_word_embeddings = 1, False
    small.bos_token_id = small.eos_token_id = small.pad_token_id = None  # they would lie outside of it
    return cast(PreTrainedConfig, small)


def lend(model: PreTrainedModel, target: PreTrainedModel) -> PreTrainedModel:
    """The draft with the target's embedding and LM head in place."""
    model.set_input_embeddings(target.get_input_embeddings())
    model.set_output_embeddings(cast(nn.Module, target.get_output_embeddings()))
    model.config.vocab_size = shape_of(target)[0]
    return model
