"""One pass through all layers of a decoder as a single compiled call that a team of threads runs together.

The records below are what the call reads: addresses and sizes, filled by `models/compiled.py`. The caller keeps every
tensor alive whose address it hands over.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numba
import numpy as np
from numba import carray, cfunc, types

from slipstream.kernels.codes import TILE
from slipstream.kernels.cpu_address import anything, inner, integers
from slipstream.kernels.cpu_codes import decode_all, encode
from slipstream.kernels.cpu_glue import add_and_norm, attend_head, silu_times, turn_and_keep, visible_keys
from slipstream.kernels.cpu_products import product, share_start
from slipstream.kernels.cpu_records import CODES, LAYER, PASS, PRODUCT

_wait = types.ExternalFunction("slipstream_team_wait", types.void())
_member = types.ExternalFunction("slipstream_team_member", types.int32())
_team = types.ExternalFunction("slipstream_team_size", types.int32())


@inner(inline="always")
def _attend(job: Any, layer: Any, member: int, team: int) -> None:
    """Attention of one layer. A member takes neighbouring (row, head) pairs, and lists a row's keys once."""
    heads, head_dim, stride = job.heads, job.head_dim, job.kv_heads * job.head_dim
    group, width = heads // job.kv_heads, (heads + 2 * job.kv_heads) * head_dim
    row_starts, prefixes, page_starts, trees = (
        integers(job.row_starts),
        integers(job.prefixes),
        integers(job.page_starts),
        integers(job.trees),
    )
    seen, scores = job.seen + member * job.longest * 8, job.scores + member * job.longest * 4
    listed, count, request = -1, 0, 0
    for unit in range(share_start(job.rows * heads, member, team), share_start(job.rows * heads, member + 1, team)):
        row, head = unit // heads, unit % heads
        if row != listed:
            while row_starts[request + 1] <= row:
                request += 1
            count = visible_keys(
                row,
                row_starts[request],
                row_starts[request + 1],
                prefixes[request],
                job.pages + page_starts[request] * 8,
                job.page_size,
                trees[request],
                job.masks,
                job.positions,
                job.slots,
                layer.window,
                seen,
            )
            listed = row
        side = head // group * head_dim * 4
        attend_head(
            job.qkv + (row * width + head * head_dim) * 4,
            layer.keys + side,
            layer.values + side,
            stride,
            head_dim,
            seen,
            count,
            layer.scaling,
            scores,
            job.attended + unit * head_dim * 4,
        )


@inner(inline="always")
def _layer(job: Any, layer: Any, delta: int, member: int, team: int) -> None:
    """One decoder layer; `delta` is what the layer before still has to add to x, and job.delta is what this one has."""
    rows, hidden, inner = job.rows, job.hidden, job.inner
    panel = job.panels + member * job.panel_size * 4
    heads_size, width = job.heads * job.head_dim, (job.heads + 2 * job.kv_heads) * job.head_dim
    add_and_norm(job.x, delta, layer.input_norm, rows, hidden, layer.input_eps, job.normed, member, team)
    _wait()
    product(layer.qkv, layer.qkv_bits, layer.qkv_bias, width, hidden, job.normed, rows, job.qkv, panel, member, team)
    _wait()
    turn_and_keep(
        job.qkv,
        rows,
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
        member,
        team,
    )
    _wait()
    _attend(job, layer, member, team)
    _wait()
    product(layer.o, layer.o_bits, layer.o_bias, hidden, heads_size, job.attended, rows, job.delta, panel, member, team)
    _wait()
    add_and_norm(job.x, job.delta, layer.post_norm, rows, hidden, layer.post_eps, job.normed, member, team)
    _wait()
    product(
        layer.gate_up,
        layer.gate_up_bits,
        layer.gate_up_bias,
        2 * inner,
        hidden,
        job.normed,
        rows,
        job.gate_up,
        panel,
        member,
        team,
    )
    _wait()
    silu_times(job.gate_up, rows, inner, job.active, member, team)
    _wait()
    product(
        layer.down, layer.down_bits, layer.down_bias, hidden, inner, job.active, rows, job.delta, panel, member, team
    )
    _wait()


def _run_pass(address: Any) -> None:
    job = carray(address, 1, dtype=PASS)[0]
    member, team = np.int64(_member()), np.int64(_team())  # one kind of number: one version of what they go to
    layers = carray(anything(job.layers), job.num_layers, dtype=LAYER)
    delta = np.int64(0)  # not a literal: those get a version of their own compiled
    for i in range(job.num_layers):
        _layer(job, layers[i], delta, member, team)
        delta = job.delta
    add_and_norm(job.x, delta, job.last_norm, job.rows, job.hidden, job.last_eps, job.normed, member, team)


def _run_product(address: Any) -> None:
    job = carray(address, 1, dtype=PRODUCT)[0]
    member, team = np.int64(_member()), np.int64(_team())
    panel = job.panels + member * TILE * job.k * 4
    product(job.weight, job.bits, job.bias, job.n, job.k, job.x, job.rows, job.out, panel, member, team)


def _run_encode(address: Any) -> None:
    job = carray(address, 1, dtype=CODES)[0]
    encode(job.weight, job.n, job.k, job.bits, job.codes, job.failed, np.int64(_member()), np.int64(_team()))


def _run_decode(address: Any) -> None:
    job = carray(address, 1, dtype=CODES)[0]
    decode_all(job.codes, job.n, job.k, job.bits, job.weight, np.int64(_member()), np.int64(_team()))


@dataclass(frozen=True, slots=True)
class Code:
    """Addresses of the compiled functions, each `void (*)(void *record)`; valid while `functions` lives."""

    run_pass: int
    run_product: int
    run_encode: int
    run_decode: int
    functions: Any


def load(folder: Path | None) -> Code:
    """Compile, or load what was compiled before in `folder`; None keeps nothing."""
    before = numba.config.CACHE_DIR
    if folder is not None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # what lies there is loaded as code
        numba.config.CACHE_DIR = str(folder)
    try:
        bodies = (_run_pass, _run_product, _run_encode, _run_decode)
        signature = types.void(types.voidptr)
        functions = [cfunc(signature, cache=folder is not None, error_model="numpy")(body) for body in bodies]
    finally:
        numba.config.CACHE_DIR = before
    run_pass, run_product, run_encode, run_decode = (function.address for function in functions)
    return Code(run_pass, run_product, run_encode, run_decode, functions)
