"""Rules over the tiny tokenizer, and what they allow."""

from __future__ import annotations

from typing import Any

import torch

from conftest import VOCAB
from slipstream import StructuredOutputsParams
from slipstream.constrain.compiler import Grammars
from slipstream.constrain.matcher import Constraint, mask_words
from slipstream.core.draft import Tree

WORDS = mask_words(VOCAB)


def start(grammars: Grammars, **form: Any) -> Constraint:
    return grammars.constraint(StructuredOutputsParams(**form))


def allowed(constraint: Constraint, tree: Tree | None = None) -> list[set[int]]:
    """The tokens that may follow the root, then each node."""
    tree = tree or Tree()
    masks = torch.full((1 + len(tree), WORDS), 123, dtype=torch.int32)
    constraint.masks(tree, masks, 0)
    return [{t for t in range(VOCAB) if (int(row[t // 32]) >> (t % 32)) & 1} for row in masks]


def tokens_of(text: str) -> list[int]:
    """One token a byte, by the alphabet of the tiny tokenizer."""
    return [TABLE[byte] for byte in text.encode()]


def _table() -> list[int]:
    from tokenizers import pre_tokenizers
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    ids = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    return [ids[char] for _, char in sorted(bytes_to_unicode().items())]


TABLE = _table()
