"""All layers of a small model in one launch, for passes over few rows.

A layer of a small model is little work: what takes the time is that each of its kernels waits for the one before. Here
every program owns one tile of one product through all layers. It has the next layer's weight close by long before its
rows come, takes them, and hands its result to the programs behind it, as runners hand on a baton. Attention has
programs of its own. There is no barrier: a place that is not written yet holds a mark (`baton.py`), and whoever needs
it looks until the mark is gone. So one word is both the news and the number, and every place is written once a pass.

The sums are those of the kernels that serve larger passes (`row_linear.py`, `paged.py`, `add_norm.py`), in the same
order: a row has the same bits here and there.

All programs must run at once. The launch is a cooperative one, which fails where they would not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slipstream.kernels.jit import jit, multiprocessors, shared_bytes, tl, triton
from slipstream.kernels.layout import RowLayout
from slipstream.kernels.paged import SPLIT_KEYS, block_keys_of, block_q_of
from slipstream.kernels.relay_runners import attention_runner, gate_runner, linear_runner, qkv_runner
from slipstream.kernels.row_linear import KINDS, splits_of
from slipstream.kernels.softmax import LOG2_E

MOST_ROWS = 2
"""Of a pass. A program works on all of them, so with more it is no longer waiting that takes the time."""

MOST_KEY_RUNS = 16
"""Of a context's keys."""

_TILE, _COLUMNS = 64, 16
_WARPS = 4
_LEAST = 32 * _WARPS  # numbers that are looked at together: with fewer, two threads would look at the same one
_STAGES = 5
_RESERVED = 1024  # bytes of shared memory that the system takes for each program


@jit(sizes=["M", "T", "B", "P", "first", "last"], pointers=["positions_ptr", "places_ptr", "slots_ptr", "pages_ptr"])
def _relay_kernel(
    table_ptr: tl.tensor,  # [L, 8] int64: where a layer's norms, weights, keys and values lie
    x_ptr: tl.tensor,  # [M, D]
    x_out_ptr: tl.tensor,  # [M, D]: all but the last product added
    qkv_ptr: tl.tensor,  # [L, splits, M, WIDTH] int32: bits, or the mark; and so on
    attended_ptr: tl.tensor,  # [L, M, H * DIM] int16
    o_ptr: tl.tensor,  # [L, splits, M, D] int32
    act_ptr: tl.tensor,  # [L, M, INNER] int16
    down_ptr: tl.tensor,  # [L, splits, M, D] int32
    part_ptr: tl.tensor,  # [L, key splits, M, H, DIM] int32
    part_max_ptr: tl.tensor,  # [L, key splits, M, H] int32
    part_sum_ptr: tl.tensor,
    tiles_ptr: tl.tensor,  # [T, 4] int32
    starts_ptr: tl.tensor,  # [B + 1] int32
    positions_ptr: tl.tensor,  # [M] int64: what rows are turned by
    places_ptr: tl.tensor,  # [M] int64: among their request's keys
    slots_ptr: tl.tensor,  # [M] int64
    pages_ptr: tl.tensor,  # [S, P] int32
    cos_ptr: tl.tensor,  # [positions, R]
    sin_ptr: tl.tensor,
    M: tl.tensor,
    T: tl.tensor,
    B: tl.tensor,
    P: tl.tensor,
    scale: tl.tensor,
    input_eps: tl.tensor,
    post_eps: tl.tensor,
    first: tl.tensor,  # layers from here on are run; those before have been
    last: tl.tensor,
    only: tl.tensor,  # the stage that is run; -1: all
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    H: tl.constexpr,
    H_KV: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    R: tl.constexpr,
    INNER: tl.constexpr,
    ROWS: tl.constexpr,  # at least M, a power of 2
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
    QKV_SPLITS: tl.constexpr,
    O_SPLITS: tl.constexpr,
    DOWN_SPLITS: tl.constexpr,
    QKV_RUN: tl.constexpr,  # a run filled up to a power of 2
    O_K1: tl.constexpr,  # a run in two pieces, the second filled up
    O_K2: tl.constexpr,
    GATE_K1: tl.constexpr,
    GATE_K2: tl.constexpr,
    DOWN_K1: tl.constexpr,
    DOWN_K2: tl.constexpr,
    KEY_RUNS: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    SPLIT: tl.constexpr,
    KIND: tl.constexpr,
    INDEX: tl.constexpr,
    STAGES: tl.constexpr,
    STAGED: tl.constexpr,
) -> None:
    WIDTH: tl.constexpr = (H + 2 * H_KV) * DIM
    QKV: tl.constexpr = (WIDTH + TILE - 1) // TILE * QKV_SPLITS
    O: tl.constexpr = (D + TILE - 1) // TILE * O_SPLITS  # noqa: E741
    DOWN: tl.constexpr = (D + TILE - 1) // TILE * DOWN_SPLITS
    GATE: tl.constexpr = (2 * INNER + TILE - 1) // TILE
    program = tl.program_id(0)
    if program < GATE:
        if (only < 0) | (only == 3):
            gate_runner(
                program, table_ptr, x_ptr, x_out_ptr, attended_ptr, o_ptr, act_ptr, down_ptr, M, post_eps, first, last,
                D, H * DIM, INNER, ROWS, TILE, COLUMNS, GATE_K1, GATE_K2, O_SPLITS, DOWN_SPLITS, KIND,
            )  # fmt: skip
    elif program < GATE + DOWN:
        if (only < 0) | (only == 4):
            linear_runner(
                program - GATE, table_ptr, act_ptr, o_ptr, down_ptr, O_SPLITS * M * D, M, first, last,
                5, D, INNER, ROWS, TILE, COLUMNS, DOWN_SPLITS, DOWN_K1, DOWN_K2, KIND,
            )  # fmt: skip
    elif program < GATE + DOWN + QKV:
        if (only < 0) | (only == 0):
            qkv_runner(
                program - GATE - DOWN, table_ptr, x_ptr, qkv_ptr, o_ptr, act_ptr, down_ptr, M, input_eps, first, last,
                D, BLOCK_D, WIDTH, INNER, ROWS, TILE, COLUMNS, QKV_SPLITS, QKV_RUN, O_SPLITS, DOWN_SPLITS, KIND,
            )  # fmt: skip
    elif program < GATE + DOWN + QKV + O:
        if (only < 0) | (only == 2):
            linear_runner(
                program - GATE - DOWN - QKV, table_ptr, attended_ptr, qkv_ptr, o_ptr, QKV_SPLITS * M * WIDTH, M, first,
                last, 2, D, H * DIM, ROWS, TILE, COLUMNS, O_SPLITS, O_K1, O_K2, KIND,
            )  # fmt: skip
    else:
        if (only < 0) | (only == 1):
            attention_runner(
                program - GATE - DOWN - QKV - O, table_ptr, qkv_ptr, attended_ptr, down_ptr, part_ptr, part_max_ptr,
                part_sum_ptr, tiles_ptr, starts_ptr, positions_ptr, places_ptr, slots_ptr, pages_ptr, cos_ptr, sin_ptr,
                M, T, B, P, scale, first, last,
                D, H, H_KV, DIM, BLOCK_DIM, R, ROWS, QKV_SPLITS, DOWN_SPLITS, KEY_RUNS, PAGE, BLOCK_Q, TILE_ROWS,
                BLOCK_KEYS, SPLIT, KIND, INDEX, STAGES, STAGED,
            )  # fmt: skip


@dataclass(frozen=True, slots=True)
class RelayShape:
    """What all layers of a model have in common."""

    width: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int

    @property
    def joined(self) -> int:
        """Queries, keys and values of a row."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def products(self) -> tuple[tuple[int, int, int], ...]:
        """Columns, summed numbers and runs of each: queries with keys and values, output, gate, down."""
        query = self.heads * self.head_dim
        return (
            (self.joined, self.width, splits_of(self.joined, self.width)),
            (self.width, query, splits_of(self.width, query)),
            (2 * self.inner, self.width, 1),
            (self.width, self.inner, splits_of(self.width, self.inner)),
        )

    def programs(self, tiles: int, key_runs: int) -> int:
        products = sum(triton.cdiv(n, _TILE) * splits for n, _, splits in self.products)
        return int(products) + tiles * self.kv_heads * key_runs

    @property
    def tile_rows(self) -> int:
        """Rows of a tile of attention."""
        group = self.heads // self.kv_heads
        return block_q_of(group) // group

    @property
    def qkv_run(self) -> int:
        """A run of the first product, filled up to a power of 2."""
        return max(_LEAST, int(triton.next_power_of_2(self.width // self.products[0][2])))

    @property
    def shared_bytes(self) -> int:
        """What the largest tile and its rows need, or attention's keys and values, in 16-bit numbers; at the most."""
        runs = [self.qkv_run, *(sum(_pieces(k // splits)) for _, k, splits in self.products[1:])]
        blocks = 4 * block_keys_of(self.head_dim, 2) * triton.next_power_of_2(self.head_dim) * 2
        return max(2 * (_TILE + _COLUMNS) * max(runs), int(blocks) + 8192)

    def fits(self, device: torch.device) -> bool:
        """Can its programs all run at once, two on a multiprocessor, with one tile of attention?"""
        return (
            all(k // splits > _LEAST for _, k, splits in self.products)
            and self.inner % 2 == 0  # two of its numbers share a word
            and 2 * self.head_dim >= _LEAST
            and 2 * (self.shared_bytes + _RESERVED) <= shared_bytes(device) + _RESERVED
            and self.programs(1, 1) <= 2 * multiprocessors(device)
        )


def _pieces(k: int) -> tuple[int, int]:
    """K as two powers of 2, of which the second is filled up."""
    first = 1 << (k.bit_length() - 1)
    if first == k:
        first //= 2
    return first, max(_LEAST, int(triton.next_power_of_2(k - first)))


def key_runs_of(max_keys: int) -> int:
    """Programs among which a context is divided: few different numbers, since each is compiled for."""
    needed = triton.cdiv(max_keys, SPLIT_KEYS)
    return int(needed) if needed == 1 else max(4, int(triton.next_power_of_2(needed)))


def takes(shape: RelayShape, rows: int, layout: RowLayout) -> bool:
    """Is a pass small enough, for a model that fits? Trees go elsewhere."""
    if rows > MOST_ROWS or layout.ancestors is not None:
        return False
    key_runs, tiles = key_runs_of(layout.max_keys), layout.tile_count(shape.tile_rows)
    return key_runs <= MOST_KEY_RUNS and shape.programs(tiles, key_runs) <= 2 * multiprocessors(layout.positions.device)


def relay(
    shape: RelayShape,
    table: Tensor,  # [L, 8] int64: addresses of input norm, qkv, output, post norm, gate-up, down, keys, values
    x: Tensor,  # [M, D]
    positions: Tensor,  # [M] int64: what rows are turned by
    layout: RowLayout,
    cos: Tensor,  # [positions, R]
    sin: Tensor,
    *,
    scaling: float,
    norm_eps: tuple[float, float],
    slots: int,  # of the cache
    staged: bool = False,
) -> tuple[Tensor, Tensor]:
    """Rows [M, D] after all layers but for the last product's runs [splits, M, D], which are still to be added.

    staged: a launch for each stage of each layer, where programs do not run side by side.
    """
    rows, layers = x.shape[0], table.shape[0]
    tiles, key_runs = layout.table(shape.tile_rows).tiles, key_runs_of(layout.max_keys)
    splits = [product[2] for product in shape.products]
    per_head = shape.heads * (key_runs if key_runs > 1 else 0)
    sizes = (
        splits[0] * shape.joined,
        shape.heads * shape.head_dim // 2,  # two of these, and of the activation, in a word
        splits[1] * shape.width,
        shape.inner // 2,
        splits[3] * shape.width,
        per_head * shape.head_dim,
        per_head,
        per_head,
    )
    marked = torch.full((layers * rows * sum(sizes),), -1, dtype=torch.int32, device=x.device)
    qkv, attended, o, act, down, part, part_max, part_sum = marked.split([layers * rows * size for size in sizes])
    x_out = torch.empty_like(x)
    constants = constants_of(
        shape, rows, key_runs, rotary=cos.shape[1], page=layout.page_size, slots=slots, dtype=x.dtype, staged=staged
    )

    def launch(first: int, last: int, only: int) -> None:
        _relay_kernel[(shape.programs(tiles.shape[0], key_runs),)](
            table, x, x_out, qkv, attended.view(torch.int16), o, act.view(torch.int16), down, part, part_max, part_sum,
            tiles, layout.starts, positions, layout.positions, layout.slots, layout.pages, cos, sin,
            rows, tiles.shape[0], layout.lanes.shape[0], layout.pages.shape[1], scaling * LOG2_E, *norm_eps,
            first, last, only, **constants, num_warps=_WARPS, launch_cooperative_grid=not staged,
        )  # fmt: skip

    if staged:
        for layer in range(layers):
            for stage in range(5):
                launch(layer, layer + 1, stage)
    else:
        launch(0, layers, -1)
    delta = down.view(torch.float32).view(layers, splits[3], rows, shape.width)[-1]
    return x_out, delta


def constants_of(
    shape: RelayShape, rows: int, key_runs: int, *, rotary: int, page: int, slots: int, dtype: torch.dtype, staged: bool
) -> dict[str, Any]:
    """What the kernel is compiled for."""
    dim = shape.head_dim
    qkv, o, gate, down = [(splits, _pieces(k // splits)) for _, k, splits in shape.products]
    return {
        "D": shape.width,
        "BLOCK_D": triton.next_power_of_2(shape.width),
        "H": shape.heads,
        "H_KV": shape.kv_heads,
        "DIM": dim,
        "BLOCK_DIM": max(16, triton.next_power_of_2(dim)),
        "R": rotary,
        "INNER": shape.inner,
        "ROWS": triton.next_power_of_2(rows),
        "TILE": _TILE,
        "COLUMNS": _COLUMNS,
        "QKV_SPLITS": qkv[0],
        "O_SPLITS": o[0],
        "DOWN_SPLITS": down[0],
        "QKV_RUN": shape.qkv_run,
        "O_K1": o[1][0],
        "O_K2": o[1][1],
        "GATE_K1": gate[1][0],
        "GATE_K2": gate[1][1],
        "DOWN_K1": down[1][0],
        "DOWN_K2": down[1][1],
        "KEY_RUNS": key_runs,
        "PAGE": page,
        "BLOCK_Q": block_q_of(shape.heads // shape.kv_heads),
        "TILE_ROWS": shape.tile_rows,
        "BLOCK_KEYS": block_keys_of(dim, dtype.itemsize),
        "SPLIT": SPLIT_KEYS,
        "KIND": KINDS[dtype],
        "INDEX": tl.int32 if slots * shape.kv_heads * dim < 2**31 else tl.int64,
        "STAGES": _STAGES,
        "STAGED": staged,
    }
