"""What compiled code is told of a pass: addresses and sizes, in records of numpy."""

from __future__ import annotations

import numpy as np


def _record(integers: str, reals: str = "") -> np.dtype[np.void]:
    fields = [(name, np.int64) for name in integers.split()] + [(name, np.float64) for name in reals.split()]
    return np.dtype(fields)


STAGES = 9
"""Stages of a layer, each of which begins when the one before is done."""
LAYER = _record(
    # weights [n, k], the bits of their numbers, and biases [n]; 0 where there is none
    "qkv qkv_bits qkv_bias o o_bits o_bias gate_up gate_up_bits gate_up_bias down down_bits down_bias "
    "input_norm post_norm q_norm k_norm "
    "keys values "  # [slots, kv_heads, head_dim]: the layer's side of the cache
    "window",  # 0: none
    "scaling input_eps post_eps q_eps k_eps",
)
PASS = _record(
    "rows hidden heads kv_heads head_dim inner rotary num_layers layers last_norm "
    "x "  # [rows, hidden]: the embedded tokens, overwritten
    "normed "  # [rows, hidden]: scratch, and in the end the result
    "qkv attended delta gate_up active "  # scratch: the results of the steps of a layer
    "cos sin "  # [rows, rotary]
    "slots positions masks "  # [rows]; masks is 0 where no request brings a tree
    "row_starts prefixes page_starts trees pages page_size "  # by request; `pages` of all requests end to end
    "seen scores longest "  # scratch of each thread: `longest` slots, and what `cpu_glue.attend` asks for
    "panels panel_size "  # and `panel_size` numbers for decoded rows of a weight
    "stages",  # what the threads have done of each layer's stages and of the last norm: `cpu_team.STAGE` zeros each
    "last_eps",
)
PRODUCT = _record("weight bits bias n k x rows out panels panel_size stage")
CODES = _record("weight n k bits codes failed")  # `failed` [threads] int64: 1 where a part has no such codes
