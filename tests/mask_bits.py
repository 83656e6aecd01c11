"""Masks of bools as masks of bits, written plainly."""

from __future__ import annotations

import torch
from torch import Tensor


def as_bits(allowed: Tensor) -> Tensor:
    """[R, W] int32 of bools [R, V]: bit t % 32 of word t // 32 is token t's; what is behind the last token is 0."""
    rows = []
    for row in allowed.tolist():
        words = [0] * -(-len(row) // 32)
        for token, may in enumerate(row):
            words[token // 32] |= int(may) << (token % 32)
        rows.append([word - (1 << 32) if word >> 31 else word for word in words])
    return torch.tensor(rows, dtype=torch.int32).to(allowed.device)
