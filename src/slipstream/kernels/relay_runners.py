"""What the programs of a relay do: see `relay.py`. Each has one tile of a product, or of attention, in all layers."""

from __future__ import annotations

from slipstream.kernels.add_norm import norm_scale, normed, plus, squares
from slipstream.kernels.baton import await_word, give, look, missing, take_pairs, take_part, take_two
from slipstream.kernels.jit import jit, tl
from slipstream.kernels.paged_keys import read_pages, touch_pages
from slipstream.kernels.rotary_write import turn
from slipstream.kernels.silu_mul import gated
from slipstream.kernels.softmax import divided, join


@jit
def _address(table_ptr: tl.tensor, layer: tl.tensor, FIELD: tl.constexpr, KIND: tl.constexpr) -> tl.tensor:
    """A weight of a layer, or its part of the cache."""
    address = tl.load(table_ptr + layer * 8 + FIELD)
    return tl.multiple_of(address.to(tl.pointer_type(KIND)), 16)


@jit
def _columns(
    part: tl.tensor, ROWS: tl.constexpr, K: tl.constexpr, COLUMNS: tl.constexpr, KIND: tl.constexpr
) -> tl.tensor:
    """Rows [ROWS, K] in fp32 as a product's tile [K, COLUMNS], each as often as it fits."""
    # rounded last: a reshape right before a product makes Triton lay it out wrongly
    each = tl.broadcast_to(part[:, None, :], (ROWS, COLUMNS // ROWS, K))
    return tl.trans(tl.reshape(each, (COLUMNS, K)).to(KIND))


@jit
def _product_of(
    w1: tl.tensor,  # [N, K1]
    w2: tl.tensor,  # [N, K2]
    x1: tl.tensor,  # [ROWS, K1]
    x2: tl.tensor,
    ROWS: tl.constexpr,
    K1: tl.constexpr,
    K2: tl.constexpr,
    COLUMNS: tl.constexpr,
    KIND: tl.constexpr,
) -> tl.tensor:  # [N, COLUMNS]
    acc = tl.dot(w1, _columns(x1, ROWS, K1, COLUMNS, KIND))
    return tl.dot(w2, _columns(x2, ROWS, K2, COLUMNS, KIND), acc)


@jit
def _give_runs(
    out_ptr: tl.tensor,  # [SPLITS, M, N] of a layer
    acc: tl.tensor,  # [TILE, COLUMNS]
    split: tl.tensor,
    n: tl.tensor,  # [TILE]
    M: tl.tensor,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    column = tl.arange(0, COLUMNS)
    row = column // (COLUMNS // ROWS)
    kept = (column % (COLUMNS // ROWS) == 0) & (row < M)
    place = out_ptr + (split * M + row[None, :]) * N + n[:, None]
    give(place, acc, kept[None, :] & (n < N)[:, None])


@jit
def qkv_runner(
    program: tl.tensor, table_ptr: tl.tensor, x_ptr: tl.tensor, qkv_ptr: tl.tensor, o_ptr: tl.tensor,
    act_ptr: tl.tensor, down_ptr: tl.tensor, M: tl.tensor, eps: tl.tensor, first: tl.tensor, last: tl.tensor,
    D: tl.constexpr, BLOCK_D: tl.constexpr, WIDTH: tl.constexpr, INNER: tl.constexpr, ROWS: tl.constexpr,
    TILE: tl.constexpr, COLUMNS: tl.constexpr, SPLITS: tl.constexpr, BLOCK_RUN: tl.constexpr,
    O_SPLITS: tl.constexpr, DOWN_SPLITS: tl.constexpr, KIND: tl.constexpr,
) -> None:  # fmt: skip
    """Norm, then a tile of the joined product of queries, keys and values."""
    TILES: tl.constexpr = (WIDTH + TILE - 1) // TILE
    RUN: tl.constexpr = D // SPLITS
    split = program // TILES
    n = program % TILES * TILE + tl.arange(0, TILE)
    start = split * RUN
    row = tl.arange(0, ROWS)[:, None]
    at = tl.arange(0, BLOCK_D)[None, :]
    real = (row < M) & (at < D)
    place = row * D + at
    x = tl.load(x_ptr + place, mask=real, other=0.0).to(tl.float32)
    # this program's own run of each row, once more: it goes into the product
    k = tl.arange(0, BLOCK_RUN)
    own_real = (row < M) & (k < RUN)[None, :]
    own_place = row * D + start + k[None, :]
    own = tl.load(x_ptr + own_place, mask=own_real, other=0.0).to(tl.float32)
    lines = tl.where(n < WIDTH, n, 0)[:, None] * D + start + k[None, :]
    for layer in range(last):
        scales = _address(table_ptr, layer, 0, KIND)
        scales = tl.load(scales + start + k, mask=k < RUN, other=0.0).to(tl.float32)
        w = tl.load(_address(table_ptr, layer, 1, KIND) + lines, mask=(k < RUN)[None, :], other=0.0)
        if layer > 0:
            before = layer - 1
            await_word(act_ptr + before * M * INNER)
            delta = o_ptr + before * O_SPLITS * M * D
            a, b = take_two(delta + place, delta + own_place, real, own_real, M * D, O_SPLITS)
            x, own = plus(x, a, KIND), plus(own, b, KIND)
            delta = down_ptr + before * DOWN_SPLITS * M * D
            a, b = take_two(delta + place, delta + own_place, real, own_real, M * D, DOWN_SPLITS)
            x, own = plus(x, a, KIND), plus(own, b, KIND)
        if layer >= first:
            scale = norm_scale(squares(x, 1), D, eps)[:, None]
            row_in = normed(own, scale, scales[None, :], KIND).to(tl.float32)
            acc = tl.dot(w, _columns(row_in, ROWS, BLOCK_RUN, COLUMNS, KIND))
            _give_runs(qkv_ptr + layer * SPLITS * M * WIDTH, acc, split, n, M, WIDTH, ROWS, COLUMNS)


@jit
def attention_runner(
    program: tl.tensor, table_ptr: tl.tensor, qkv_ptr: tl.tensor, attended_ptr: tl.tensor, down_ptr: tl.tensor,
    part_ptr: tl.tensor, part_max_ptr: tl.tensor, part_sum_ptr: tl.tensor, tiles_ptr: tl.tensor,
    starts_ptr: tl.tensor, positions_ptr: tl.tensor, places_ptr: tl.tensor, slots_ptr: tl.tensor, pages_ptr: tl.tensor,
    cos_ptr: tl.tensor, sin_ptr: tl.tensor, M: tl.tensor, T: tl.tensor, B: tl.tensor, P: tl.tensor, scale: tl.tensor,
    first: tl.tensor, last: tl.tensor,
    D: tl.constexpr, H: tl.constexpr, H_KV: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, R: tl.constexpr,
    ROWS: tl.constexpr, QKV_SPLITS: tl.constexpr, DOWN_SPLITS: tl.constexpr, KEY_RUNS: tl.constexpr,
    PAGE: tl.constexpr, BLOCK_Q: tl.constexpr, TILE_ROWS: tl.constexpr, BLOCK_KEYS: tl.constexpr, SPLIT: tl.constexpr,
    KIND: tl.constexpr, INDEX: tl.constexpr, STAGES: tl.constexpr, STAGED: tl.constexpr,
) -> None:  # fmt: skip
    """Turn queries and keys, write keys and values to the cache, and attend: a tile of rows, a head of keys."""
    GROUP: tl.constexpr = H // H_KV
    WIDTH: tl.constexpr = (H + 2 * H_KV) * DIM
    tile = program % T
    kv_head = program // T % H_KV
    split = program // (T * H_KV)
    lane = tl.load(tiles_ptr + tile * 4)
    row_start = tl.load(tiles_ptr + tile * 4 + 1)
    row_end = tl.load(tiles_ptr + tile * 4 + 2)
    all_keys = tl.load(tiles_ptr + tile * 4 + 3)
    # no more than there are programs for: the last of them is waited for, and must exist
    used = tl.maximum(1, tl.minimum((all_keys + SPLIT - 1) // SPLIT, KEY_RUNS))
    begin = split * SPLIT
    end_key = tl.minimum(all_keys, begin + SPLIT)
    active = (lane >= 0) & (split < used)
    lane = tl.maximum(lane, 0)
    at = tl.arange(0, BLOCK_DIM)
    d_real = at < DIM
    mate = tl.where(at < R // 2, at + R // 2, tl.where(at < R, at - R // 2, at))
    # the queries of this tile
    q_range = tl.arange(0, BLOCK_Q)
    q_row = row_start + q_range // GROUP
    q_head = kv_head * GROUP + q_range % GROUP
    q_real = active & (q_range < TILE_ROWS * GROUP) & (q_row < row_end)
    q_mask = q_real[:, None] & d_real[None, :]
    position = tl.load(places_ptr + q_row, mask=q_real, other=-1).to(tl.int32)
    q_line = q_row * WIDTH + q_head * DIM
    q_turn = tl.load(positions_ptr + q_row, mask=q_real, other=0)[:, None] * R + at[None, :]
    q_turned = q_real[:, None] & (at < R)[None, :]
    q_cos = tl.load(cos_ptr + q_turn, mask=q_turned, other=1.0).to(tl.float32)
    q_sin = tl.load(sin_ptr + q_turn, mask=q_turned, other=0.0).to(tl.float32)
    # this head's keys and values of all rows: whoever reads them has written them, and all write the same
    kv_range = tl.arange(0, 2 * ROWS)
    kv_row = kv_range % ROWS
    is_value = kv_range >= ROWS
    kv_real = active & (kv_row < M)
    kv_mask = kv_real[:, None] & d_real[None, :]
    kv_line = kv_row * WIDTH + (H + kv_head + tl.where(is_value, H_KV, 0)) * DIM
    kv_turn = tl.load(positions_ptr + kv_row, mask=kv_real, other=0)[:, None] * R + at[None, :]
    kv_turned = (kv_real & (is_value == 0))[:, None] & (at < R)[None, :]
    kv_cos = tl.load(cos_ptr + kv_turn, mask=kv_turned, other=1.0).to(tl.float32)
    kv_sin = tl.load(sin_ptr + kv_turn, mask=kv_turned, other=0.0).to(tl.float32)
    slot = tl.load(slots_ptr + kv_row, mask=kv_real, other=0)[:, None] * (H_KV * DIM) + at[None, :]
    pages = pages_ptr + lane.to(tl.int64) * P
    rows_used = tl.load(starts_ptr + B)
    for layer in range(first, last):
        keys = _address(table_ptr, layer, 6, KIND) + kv_head * DIM
        values = _address(table_ptr, layer, 7, KIND) + kv_head * DIM
        out = attended_ptr + layer * M * H * DIM
        if (tile == 0) & (split == 0):
            for nobody in range(rows_used, M):  # their attention is nothing, and someone is waiting for it
                line = (nobody * H + kv_head * GROUP + q_range)[:, None] * DIM + at[None, :]
                nothing = tl.zeros((BLOCK_Q, BLOCK_DIM), KIND)
                give(out + line, nothing, (q_range < GROUP)[:, None] & d_real[None, :])
        if active:
            if not STAGED:
                touch_pages(keys, values, pages, begin, end_key, H_KV, DIM, PAGE, BLOCK_KEYS, INDEX)
            if layer > 0:
                await_word(down_ptr + (layer - 1) * DOWN_SPLITS * M * D)
            qkv = qkv_ptr + layer * QKV_SPLITS * M * WIDTH
            key, key_mate, query, query_mate = take_pairs(
                qkv + kv_line[:, None], qkv + q_line[:, None], at, mate, kv_mask, q_mask, M * WIDTH, QKV_SPLITS
            )
            x, y = key.to(KIND).to(tl.float32), key_mate.to(KIND).to(tl.float32)
            x = tl.where(is_value[:, None], x, turn(x, y, kv_cos, kv_sin, at, R, KIND)).to(KIND)
            tl.store(keys + slot, x, mask=kv_mask & (is_value == 0)[:, None])
            tl.store(values + slot, x, mask=kv_mask & is_value[:, None])
            x, y = query.to(KIND).to(tl.float32), query_mate.to(KIND).to(tl.float32)
            q = turn(x, y, q_cos, q_sin, at, R, KIND).to(KIND)
            tl.debug_barrier()  # the keys and values are in the cache
            top = tl.full((BLOCK_Q,), -float("inf"), tl.float32)
            total = tl.zeros((BLOCK_Q,), tl.float32)
            acc = tl.zeros((BLOCK_Q, BLOCK_DIM), tl.float32)
            top, total, acc = read_pages(
                q, keys + at[None, :], values + at[None, :], pages, position, begin, end_key, end_key, d_real, top,
                total, acc, scale, 0.0, 0, H_KV, DIM, BLOCK_DIM, PAGE, BLOCK_KEYS, False, False, "tf32", INDEX, STAGES,
            )  # fmt: skip
            if KEY_RUNS > 1:
                if split < used - 1:
                    part = ((layer * KEY_RUNS + split) * M + q_row) * H + q_head
                    give(part_ptr + part[:, None] * DIM + at[None, :], acc, q_mask)
                    give(part_sum_ptr + part, total, q_real)
                    give(part_max_ptr + part, top, q_real)
                else:  # the last one adds all of them up, in order
                    own_top, own_total, own_acc = top, total, acc
                    top = tl.full((BLOCK_Q,), -float("inf"), tl.float32)
                    total = tl.zeros((BLOCK_Q,), tl.float32)
                    acc = tl.zeros((BLOCK_Q, BLOCK_DIM), tl.float32)
                    for s in range(used - 1):
                        part = ((layer * KEY_RUNS + s) * M + q_row) * H + q_head
                        next_top, next_total, next_acc = take_part(
                            part_max_ptr + part, part_sum_ptr + part, part_ptr + part[:, None] * DIM + at[None, :],
                            q_real, q_mask, BLOCK_DIM,
                        )  # fmt: skip
                        top, total, acc = join(top, total, acc, next_top, next_total, next_acc)
                    top, total, acc = join(top, total, acc, own_top, own_total, own_acc)
            if split == used - 1:
                place = (q_row * H + q_head)[:, None] * DIM + at[None, :]
                give(out + place, divided(acc, total).to(KIND), q_mask)


@jit
def linear_runner(
    program: tl.tensor, table_ptr: tl.tensor, x_ptr: tl.tensor, before_ptr: tl.tensor, out_ptr: tl.tensor,
    before_stride: tl.tensor, M: tl.tensor, first: tl.tensor, last: tl.tensor,
    FIELD: tl.constexpr, N: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    COLUMNS: tl.constexpr, SPLITS: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr, KIND: tl.constexpr,
) -> None:  # fmt: skip
    """A tile of a product whose input comes rounded: of attention, or of the activation."""
    TILES: tl.constexpr = (N + TILE - 1) // TILE
    RUN: tl.constexpr = K // SPLITS
    split = program // TILES
    n = program % TILES * TILE + tl.arange(0, TILE)
    start = split * RUN
    lines = tl.where(n < N, n, 0)[:, None] * K + start
    row = tl.arange(0, ROWS)[:, None]
    line = row * K + start
    k1, k2 = tl.arange(0, K1)[None, :], K1 + tl.arange(0, K2)[None, :]
    for layer in range(first, last):
        weight = _address(table_ptr, layer, FIELD, KIND) + lines
        w1, w2 = tl.load(weight + k1), tl.load(weight + k2, mask=k2 < RUN, other=0.0)
        await_word(before_ptr + layer * before_stride)
        x = x_ptr + layer * M * K + line
        a, b = look(x + k1, row < M, True), look(x + k2, (row < M) & (k2 < RUN), True)
        while missing(a) + missing(b) > 0:
            a, b = look(x + k1, row < M, True), look(x + k2, (row < M) & (k2 < RUN), True)
        x1, x2 = a.to(KIND, bitcast=True).to(tl.float32), b.to(KIND, bitcast=True).to(tl.float32)
        acc = _product_of(w1, w2, x1, x2, ROWS, K1, K2, COLUMNS, KIND)
        _give_runs(out_ptr + layer * SPLITS * M * N, acc, split, n, M, N, ROWS, COLUMNS)


@jit
def gate_runner(
    tile: tl.tensor, table_ptr: tl.tensor, x_ptr: tl.tensor, x_out_ptr: tl.tensor, attended_ptr: tl.tensor,
    o_ptr: tl.tensor, act_ptr: tl.tensor, down_ptr: tl.tensor, M: tl.tensor, eps: tl.tensor, first: tl.tensor,
    last: tl.tensor,
    D: tl.constexpr, QUERIES: tl.constexpr, INNER: tl.constexpr, ROWS: tl.constexpr,
    TILE: tl.constexpr, COLUMNS: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr, O_SPLITS: tl.constexpr,
    DOWN_SPLITS: tl.constexpr, KIND: tl.constexpr,
) -> None:  # fmt: skip
    """Norm, then half a tile of the gate and the same half of what it gates, by turns."""
    HALF: tl.constexpr = TILE // 2
    both = tl.arange(0, TILE)
    n = tile * HALF + both // 2
    lines = (tl.where(n < INNER, n, 0) + both % 2 * INNER)[:, None] * D
    k1, k2 = tl.arange(0, K1), K1 + tl.arange(0, K2)
    row = tl.arange(0, ROWS)[:, None]
    place1, place2 = row * D + k1[None, :], row * D + k2[None, :]
    real1, real2 = (row < M) & (k1 < D)[None, :], (row < M) & (k2 < D)[None, :]
    x1 = tl.load(x_ptr + place1, mask=real1, other=0.0).to(tl.float32)
    x2 = tl.load(x_ptr + place2, mask=real2, other=0.0).to(tl.float32)
    column = tl.arange(0, COLUMNS)
    out_row = column // (COLUMNS // ROWS)
    out_n = tile * HALF + tl.arange(0, HALF)
    kept = ((column % (COLUMNS // ROWS) == 0) & (out_row < M))[None, :] & (out_n < INNER)[:, None]
    out_place = out_row[None, :] * INNER + out_n[:, None]
    for layer in range(last):
        scales = _address(table_ptr, layer, 3, KIND)
        scales1 = tl.load(scales + k1).to(tl.float32)
        scales2 = tl.load(scales + k2, mask=k2 < D, other=0.0).to(tl.float32)
        weight = _address(table_ptr, layer, 4, KIND) + lines
        w1, w2 = tl.load(weight + k1[None, :]), tl.load(weight + k2[None, :], mask=(k2 < D)[None, :], other=0.0)
        if layer > 0:
            delta = down_ptr + (layer - 1) * DOWN_SPLITS * M * D
            a, b = take_two(delta + place1, delta + place2, real1, real2, M * D, DOWN_SPLITS)
            x1, x2 = plus(x1, a, KIND), plus(x2, b, KIND)
        await_word(attended_ptr + layer * M * QUERIES)
        delta = o_ptr + layer * O_SPLITS * M * D
        a, b = take_two(delta + place1, delta + place2, real1, real2, M * D, O_SPLITS)
        x1, x2 = plus(x1, a, KIND), plus(x2, b, KIND)
        if layer >= first:
            scale = norm_scale(squares(x1, 1) + squares(x2, 1), D, eps)[:, None]
            in1 = normed(x1, scale, scales1[None, :], KIND).to(tl.float32)
            in2 = normed(x2, scale, scales2[None, :], KIND).to(tl.float32)
            acc = _product_of(w1, w2, in1, in2, ROWS, K1, K2, COLUMNS, KIND).to(KIND).to(tl.float32)
            gate, up = tl.split(tl.permute(tl.reshape(acc, (HALF, 2, COLUMNS)), (0, 2, 1)))
            give(act_ptr + layer * M * INNER + out_place, gated(gate, up, KIND).to(KIND), kept)
    if tile == 0:
        tl.store(x_out_ptr + place1, x1.to(KIND), mask=real1)
        tl.store(x_out_ptr + place2, x2.to(KIND), mask=real2)
