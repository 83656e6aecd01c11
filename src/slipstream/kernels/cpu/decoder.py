"""One pass through all layers of a decoder as a single compiled call, run by a team of threads.

`models/fused.py` fills the records (`interface.py`) with addresses and sizes, and keeps the tensors alive.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numba
import numpy as np
from numba import carray, cfunc, types

from slipstream.kernels.cpu.attention import attend, list_keys
from slipstream.kernels.cpu.encode import encode
from slipstream.kernels.cpu.interface import CROWD, ENCODE, LANES, LAYER, PASS, PRODUCT, STAGE, STAGES
from slipstream.kernels.cpu.llvm import anything, inner, integers
from slipstream.kernels.cpu.norms import add_and_norm, silu_times, turn_and_keep
from slipstream.kernels.cpu.products import product
from slipstream.kernels.cpu.team import piece_of, shared

_member = types.ExternalFunction("slipstream_team_member", types.int32())
_team = types.ExternalFunction("slipstream_team_size", types.int32())

_ROWS = 16
"""The most rows of a prompt in one piece of attention: they share the list of their keys."""
_LEAST = 32
"""The smallest piece, in heads to rotate or vectors of numbers: smaller ones cost more than they bring."""


@inner()
def _attend(first: int, last: int, job: Any, layer: Any, member: int, size: int, heads: int) -> None:
    """Attention of one layer, pieces `first` to `last`: `heads` query heads of one key head, `size` rows each."""
    head_dim, stride = job.head_dim, job.kv_heads * job.head_dim
    group, width = job.heads // job.kv_heads, (job.heads + 2 * job.kv_heads) * head_dim
    row_starts, prefixes, trees = integers(job.row_starts), integers(job.prefixes), integers(job.trees)
    page_starts, position = integers(job.page_starts), integers(job.positions)
    seen = job.seen + member * job.longest * 8
    scores = job.scores + member * CROWD * (job.longest + 2 * head_dim) * 4
    blocks = (job.rows + size - 1) // size
    for piece in range(first, last):
        head = piece // blocks * heads
        row = (blocks - 1 - piece % blocks) * size  # rows that see most keys first
        block_end = min(row + size, job.rows)
        request = 0
        while row < block_end:
            while row_starts[request + 1] <= row:
                request += 1
            start, end = row_starts[request], min(row_starts[request + 1], block_end)
            oldest = position[row] - layer.window + 1 if layer.window > 0 else 0
            sees = 0
            if trees[request] != 0:
                sees = integers(job.masks)[row]
            if sees != 0 or (layer.window > 0 and position[end - 1] >= layer.window):
                end = row + 1  # the next row sees other keys
            count = list_keys(
                start,
                row_starts[request + 1] if sees != 0 else end,
                sees,
                prefixes[request],
                oldest,
                job.pages + page_starts[request] * 8,
                job.page_size,
                job.positions,
                job.slots,
                seen,
            )
            attend(
                end - row,
                heads,
                head_dim,
                job.qkv + (row * width + head * head_dim) * 4,
                width,
                layer.keys + head // group * head_dim * 4,
                layer.values + head // group * head_dim * 4,
                stride,
                seen,
                count,
                layer.scaling,
                scores,
                job.longest,
                job.attended + (row * job.heads + head) * head_dim * 4,
                job.heads * head_dim,
            )
            row = end


_norm_all, _turn_all, _silu_all, _attend_all = (
    shared(work) for work in (add_and_norm, turn_and_keep, silu_times, _attend)
)


@inner()
def _layer(job: Any, layer: Any, delta: int, stages: int, member: int, team: int) -> None:
    """One decoder layer. delta: the previous layer's output, still to be added to x; this layer's goes to job.delta."""
    rows, hidden, inner = job.rows, job.hidden, job.inner
    panel = job.panels + member * job.panel_size * 4
    heads_size, width = job.heads * job.head_dim, (job.heads + 2 * job.kv_heads) * job.head_dim
    one, some_rows = np.int64(1), piece_of(rows, np.int64(1), team)
    _norm_all(stages, rows, some_rows, job.x, delta, layer.input_norm, hidden, layer.input_eps, job.normed)
    product(
        stages + STAGE, team, layer.qkv, layer.qkv_bits, layer.qkv_bias, width, hidden, job.normed, rows, job.qkv, panel
    )
    units = rows * (job.heads + 2 * job.kv_heads)
    _turn_all(
        stages + 2 * STAGE,
        units,
        piece_of(units, np.int64(_LEAST), team),
        job.qkv,
        job.heads,
        job.kv_heads,
        job.head_dim,
        layer.q_norm,
        layer.q_eps,
        layer.k_norm,
        layer.k_eps,
        job.cos,
        job.sin,
        job.rotary,
        job.slots,
        layer.keys,
        layer.values,
    )
    heads = job.heads // job.kv_heads
    if rows * job.kv_heads < team:
        heads = one
    groups = job.heads // heads
    size = min(piece_of(rows * groups, one, team), _ROWS)
    pieces = (rows + size - 1) // size * groups
    _attend_all(stages + 3 * STAGE, pieces, one, job, layer, member, size, heads)
    product(
        stages + 4 * STAGE,
        team,
        layer.o,
        layer.o_bits,
        layer.o_bias,
        hidden,
        heads_size,
        job.attended,
        rows,
        job.delta,
        panel,
    )
    _norm_all(
        stages + 5 * STAGE, rows, some_rows, job.x, job.delta, layer.post_norm, hidden, layer.post_eps, job.normed
    )
    product(
        stages + 6 * STAGE,
        team,
        layer.gate_up,
        layer.gate_up_bits,
        layer.gate_up_bias,
        2 * inner,
        hidden,
        job.normed,
        rows,
        job.gate_up,
        panel,
    )
    units = rows * (inner // LANES)
    _silu_all(stages + 7 * STAGE, units, piece_of(units, np.int64(_LEAST), team), job.gate_up, inner, job.active)
    product(
        stages + 8 * STAGE,
        team,
        layer.down,
        layer.down_bits,
        layer.down_bias,
        hidden,
        inner,
        job.active,
        rows,
        job.delta,
        panel,
    )


def _run_pass(address: Any) -> None:
    job = carray(address, 1, dtype=PASS)[0]
    member, team = np.int64(_member()), np.int64(_team())  # one integer type, so that callees are compiled once
    layers = carray(anything(job.layers), job.num_layers, dtype=LAYER)
    delta = np.int64(0)  # not a literal, for which callees would be compiled again
    for i in range(job.num_layers):
        _layer(job, layers[i], delta, job.stages + i * STAGES * STAGE, member, team)
        delta = job.delta
    last, size = job.stages + job.num_layers * STAGES * STAGE, piece_of(job.rows, np.int64(1), team)
    _norm_all(last, job.rows, size, job.x, delta, job.last_norm, job.hidden, job.last_eps, job.normed)


def _run_product(address: Any) -> None:
    job = carray(address, 1, dtype=PRODUCT)[0]
    panel = job.panels + np.int64(_member()) * job.panel_size * 4
    team = np.int64(_team())
    product(job.stage, team, job.weight, job.bits, job.bias, job.n, job.k, job.x, job.rows, job.out, panel)


def _run_encode(address: Any) -> None:
    job = carray(address, 1, dtype=ENCODE)[0]
    encode(job.weight, job.n, job.k, job.bits, job.codes, job.failed, np.int64(_member()), np.int64(_team()))


@dataclass(frozen=True, slots=True)
class Code:
    """Addresses of the compiled functions, each `void (*)(void *record)`; valid while `functions` lives."""

    run_pass: int
    run_product: int
    run_encode: int
    functions: Any


def load(folder: Path | None) -> Code:
    """Compile, or load what was compiled before from `folder`; None keeps nothing."""
    before = numba.config.CACHE_DIR
    if folder is not None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # the files are loaded as code
        numba.config.CACHE_DIR = str(folder)
    try:
        bodies = (_run_pass, _run_product, _run_encode)
        signature = types.void(types.voidptr)
        functions = [cfunc(signature, cache=folder is not None, error_model="numpy")(body) for body in bodies]
    finally:
        numba.config.CACHE_DIR = before
    run_pass, run_product, run_encode = (function.address for function in functions)
    return Code(run_pass, run_product, run_encode, functions)
