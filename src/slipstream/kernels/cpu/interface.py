"""What compiled code and its callers agree on: tile sizes, weights in codes, and the records that describe a pass.

A checkpoint that was quantized and written out in fp32 again (a converted GGUF file, the default model) has few
different numbers in each block of 32 neighbours of a row: scale * code + low. A decoding step is as fast as its weights
are read, so such weights are kept as codes, in a fifth of the bytes. Nothing is rounded: a weight that its codes do not
reproduce exactly stays in fp32.

A block of 32 weights in codes is the scale and low in fp32, then either 16 bytes of codes 0 to 15 (the first 16 weights
in the low halves, the others in the high halves, as in GGUF's Q4_0 and Q4_1) or 32 bytes of codes -128 to 127 (Q8_0).
"""

from __future__ import annotations

import platform
from dataclasses import dataclass

import numpy as np
from torch import Tensor

BLOCK = 32
LANES = 16
"""Numbers in a vector of compiled products: a weight's rows must be a multiple of it."""
TILE = 4
"""Weight rows in a tile of compiled products: the number of rows must be a multiple of it."""

QUERIES = 6 if platform.machine() == "x86_64" else 2
"""Queries of one key head that compiled attention takes together: the sums of more do not fit the registers."""
CROWD = 8 * QUERIES
"""Queries for which compiled attention keeps scores: they read a block of keys while the core's cache has it."""
PANEL = 1 << 16
"""Numbers of a weight that are decoded together, unless 4 rows have more: they must stay in a core's second cache."""
STAGE = 64
"""Bytes of the counters by which threads share one stage; zero before the stage."""


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


def _record(integers: str, reals: str = "") -> np.dtype[np.void]:
    fields = [(name, np.int64) for name in integers.split()] + [(name, np.float64) for name in reals.split()]
    return np.dtype(fields)


STAGES = 9
"""Stages of a layer. Each begins when the one before is done."""
LAYER = _record(
    # weights [n, k], their bits a number, and biases [n]; address 0: none
    "qkv qkv_bits qkv_bias o o_bits o_bias gate_up gate_up_bits gate_up_bias down down_bits down_bias "
    "input_norm post_norm q_norm k_norm "
    "keys values "  # [slots, kv_heads, head_dim]: the layer's part of the cache
    "window",  # 0: none
    "scaling input_eps post_eps q_eps k_eps",
)
PASS = _record(
    "rows hidden heads kv_heads head_dim inner rotary num_layers layers last_norm "
    "x "  # [rows, hidden]: the embedded tokens, overwritten
    "normed "  # [rows, hidden]: scratch, then the result
    "qkv attended delta gate_up active "  # scratch: results of the stages
    "cos sin "  # [rows, rotary]
    "slots positions masks "  # [rows]; masks is 0 if no request has a tree
    "row_starts prefixes page_starts trees pages page_size "  # by request; `pages` of all requests end to end
    "seen scores longest "  # scratch of each thread: `longest` slots, and the scores of `attention.attend`
    "panels panel_size "  # scratch of each thread: `panel_size` numbers for decoded rows
    "stages",  # counters of all layers' stages and of the last norm, `STAGE` zeros each
    "last_eps",
)
PRODUCT = _record("weight bits bias n k x rows out panels panel_size stage")
ENCODE = _record("weight n k bits codes failed")  # `failed` [threads] int64: 1 if a part has no codes
