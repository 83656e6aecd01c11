"""Which tokens of two vocabularies mean the same: the same bytes of text, or the same special token.

Tokenizers write a token's bytes in different ways: byte-level ones have a character for each byte, others a mark for
a space and `<0x0A>` for a byte. Compared by what they stand for, vocabularies share far more than compared as written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slipstream.core.spellings import byte_of, from_byte_level

ALIKE = 0.98
"""Vocabularies that share so much of each other are taken for one, but for a few tokens: ids are mapped, not text."""

_SPACE = "\u2581"


@dataclass(frozen=True, slots=True)
class Shared:
    """The tokens that two vocabularies share, and where each finds its like: -1 where there is none."""

    own_of: Tensor  # [Vt] int64: of the target's tokens
    target_of: Tensor  # [Vd] int64: of the draft's tokens
    alike: bool  # all but a few are shared

    @staticmethod
    def of(own: Any, target: Any, own_size: int, target_size: int) -> Shared:
        """Of two tokenizers; the sizes are those of the models' logits."""
        theirs = {meaning: token for token, meaning in meanings(target).items() if token < target_size}
        own_of = torch.full((target_size,), -1, dtype=torch.int64)
        target_of = torch.full((own_size,), -1, dtype=torch.int64)
        mine = {token: meaning for token, meaning in meanings(own).items() if token < own_size}
        pairs = [(token, theirs[meaning]) for token, meaning in mine.items() if meaning in theirs]
        end, targets_end = own.eos_token_id, target.eos_token_id
        if end is not None and targets_end is not None and end < own_size and targets_end < target_size:
            pairs.append((end, targets_end))  # whatever the end is called
        for token, their in sorted(pairs, reverse=True):  # of equals the lowest id counts
            own_of[their], target_of[token] = token, their
        least = ALIKE * max(len(mine), len(theirs))
        return Shared(own_of, target_of, len(pairs) >= least)

    def to(self, device: torch.device) -> Shared:
        return Shared(self.own_of.to(device), self.target_of.to(device), self.alike)


def meanings(tokenizer: Any) -> Mapping[int, bytes | str]:
    """What each token stands for: bytes of text, or the name of a special token."""
    decoder = tokenizer.backend_tokenizer.decoder
    written = "" if decoder is None else decoder.__getstate__().decode()
    byte_level = '"ByteLevel"' in written
    falls_back = '"ByteFallback"' in written
    added = tokenizer.added_tokens_decoder
    found: dict[int, bytes | str] = {}
    for text, token in tokenizer.get_vocab().items():
        if token in added:
            found[token] = added[token].content if added[token].special else added[token].content.encode()
        elif byte_level:
            found[token] = from_byte_level(text) or text.encode()  # else it is taken as it stands
        elif falls_back and (byte := byte_of(text)):
            found[token] = byte
        else:
            found[token] = text.replace(_SPACE, " ").encode()
    return found
