"""Weights kept as the codes that they once were: the same numbers to the bit, in a fifth of the bytes.

A checkpoint that was quantized and written out again in fp32 (a converted GGUF file, the default model) holds, in every
32 neighbours of a row, few different numbers: scale * code + low. A decoding step is as fast as its weights are read,
so reading codes is what makes it fast. Nothing is rounded here: a weight that its codes do not give back exactly, every
number of it, stays as it is.

Two layouts of a block of 32 weights: scale and low in fp32, then 16 bytes of codes 0 to 15 (the first 16 weights in
the low halves, the others in the high ones), as in GGUF's Q4_0 and Q4_1; or 32 bytes of codes -128 to 127, as in Q8_0.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass

from torch import Tensor

BLOCK = 32
LANES = 16
"""Numbers that compiled products take at once: a row of a weight must be a multiple of it."""
TILE = 4
"""Rows of a weight that compiled products take at once: a weight must be a multiple of it."""

QUERIES = 6 if platform.machine() == "x86_64" else 2
"""Queries of one head of keys that compiled attention takes together: the sums of more do not fit the registers."""
PANEL = 1 << 16
"""Numbers of a weight that are decoded together, if 4 rows have no more: they have to stay in a core's second cache."""
STAGE = 64
"""Bytes in which the threads of a team count what they have done of one stage of their work, zero before."""


def block_bytes(bits: int) -> int:
    """Bytes of one block."""
    return 8 + BLOCK * bits // 8


@dataclass(frozen=True, slots=True)
class Codes:
    """A weight [n, k] in codes."""

    data: Tensor  # [n, k / 32, block_bytes] uint8
    bits: int

    @property
    def n(self) -> int:
        return self.data.shape[0]

    @property
    def k(self) -> int:
        return self.data.shape[1] * BLOCK
