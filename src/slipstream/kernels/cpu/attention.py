"""Attention over a cache in pages, compiled: blocks of keys by groups of queries, in vectors of 16 numbers.

Each key's score comes from the same steps wherever it stands, and values are added up in the order of the text, so that
a row's bits depend only on what it sees. Queries are taken together because loading keys and values dominates the time.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba.extending import intrinsic

from slipstream.kernels.cpu.interface import CROWD, LANES, QUERIES
from slipstream.kernels.cpu.llvm import (
    F32,
    I64,
    MASKS,
    STRIP,
    SUM,
    VECTOR,
    Vectors,
    body,
    floats,
    inner,
    integers,
    number,
    zeros,
)
from slipstream.kernels.cpu.norms import INFINITE, ORDER_MAY_CHANGE, ZERO, exp

KEYS = 4
"""Keys that are scored at once."""
KEPT = 64
"""Keys that all queries of a crowd read in turn: 16 KB of 64 numbers each, so that they stay in a core's caches."""
MIXED = 4 * LANES if MASKS else 2 * LANES
"""Numbers of a value that are added up at once."""


def score_keys(queries: int) -> Any:
    """A function for compiled code: (queries, key0 to key3, size, scores, ld), addresses and sizes, all int64.

    scores[q, i] = query q [size] times key i. The queries are contiguous; `ld` numbers lie between their scores.
    """

    def emit(
        v: Vectors, query: Any, key0: Any, key1: Any, key2: Any, key3: Any, size: Any, scores: Any, ld: Any
    ) -> None:
        b = v.b
        asked = [b.add(query, b.mul(size, number(4 * q))) for q in range(queries)]

        def score(load_some: Any, _: Any) -> None:
            def along(step: Any, *sums: Any) -> list[Any]:
                grown, at = list(sums), b.mul(step, number(4 * LANES))
                lanes = v.first_lanes(b.sub(size, b.mul(step, number(LANES))))
                keys = [v.strips(load_some(b.add(key, at), lanes)) for key in (key0, key1, key2, key3)]
                values = [v.strips(load_some(b.add(address, at), lanes)) for address in asked]
                for part in range(LANES // STRIP):
                    for q in range(queries):
                        for i in range(KEYS):
                            grown[q * KEYS + i] = v.fma(values[q][part], keys[i][part], grown[q * KEYS + i])
                return grown

            steps = b.udiv(b.add(size, number(LANES - 1)), number(LANES))
            sums = v.repeat(steps, [zeros(SUM)] * (KEYS * queries), along)
            for q in range(queries):
                v.store(v.totals(sums[q * KEYS : (q + 1) * KEYS]), b.add(scores, b.mul(ld, number(4 * q))))

        v.either(b.icmp_unsigned("==", b.urem(size, number(LANES)), number(0)), score)

    @intrinsic
    def scored(
        typing: Any, query: Any, key0: Any, key1: Any, key2: Any, key3: Any, size: Any, scores: Any, ld: Any
    ) -> Any:
        return body(8, emit)

    return scored


@intrinsic
def largest_of(typing: Any, scores: Any, vectors: Any, out: Any) -> Any:
    """Write the largest score of `vectors` vectors to `out`, ignoring NaN."""

    def emit(v: Vectors, scores: Any, vectors: Any, out: Any) -> None:
        def one(turn: Any, largest: Any) -> list[Any]:
            return [v.larger(largest, v.load(v.b.add(scores, v.b.mul(turn, number(4 * LANES)))))]

        (largest,) = v.repeat(vectors, [ir.Constant(VECTOR, [float("-inf")] * LANES)], one)
        v.store(v.largest(largest), out)

    return body(3, emit)


def mix_values(queries: int) -> Any:
    """A function for compiled code: (values, stride, seen, count, weights, ld, size, out, ld_out), all int64.

    out[q] [size, at most `MIXED`] += the sum over j < count of weights[q, j] times the value of slot seen[j]; count >
    0. `stride` bytes lie between the values of two slots, `ld` and `ld_out` bytes between two rows.
    """

    def emit(
        v: Vectors, values: Any, stride: Any, seen: Any, count: Any, weights: Any, ld: Any, size: Any, out: Any,
        ld_out: Any,
    ) -> None:  # fmt: skip
        b = v.b
        parts = range(MIXED // LANES)
        lanes = [v.first_lanes(b.sub(size, number(LANES * part))) for part in parts]
        rows = [b.add(weights, b.mul(ld, number(q))) for q in range(queries)]
        places = [
            b.add(b.add(out, b.mul(ld_out, number(q))), number(4 * LANES * p)) for q in range(queries) for p in parts
        ]

        def mix(load_some: Any, store_some: Any) -> None:
            def one(turn: Any, *sums: Any) -> list[Any]:
                slot = v.load(b.add(seen, b.mul(turn, number(8))), I64)
                at = b.add(values, b.mul(slot, stride))
                found = [load_some(b.add(at, number(4 * LANES * part)), lanes[part]) for part in parts]
                grown = []
                for q in range(queries):
                    weight = v.spread(v.load(b.add(rows[q], b.mul(turn, number(4))), F32))
                    grown += [v.fma(weight, found[part], sums[q * len(parts) + part]) for part in parts]
                return grown

            starts = [load_some(place, lanes[i % len(parts)]) for i, place in enumerate(places)]
            for i, total in enumerate(v.repeat(count, starts, one)):
                store_some(total, places[i], lanes[i % len(parts)])

        v.either(b.icmp_unsigned(">=", size, number(MIXED)), mix)

    @intrinsic
    def mixed(
        typing: Any, values: Any, stride: Any, seen: Any, count: Any, weights: Any, ld: Any, size: Any, out: Any,
        ld_out: Any,
    ) -> Any:  # fmt: skip
        return body(9, emit)

    return mixed


@inner()
def list_keys(
    start: int, end: int, sees: int, prefix: int, oldest: int, pages: int, page_size: int, positions: int, slots: int,
    seen: int,
) -> int:  # fmt: skip
    """Write the cache slots that a row may look at to `seen`, in the order of the text; return their number.

    start, end: the rows of its request that it may look at; sees: a bit for each of them, 0 for all;
    prefix: its tokens in the cache before the pass; pages: its page ids; oldest: the lowest position that it sees.
    Slots that are not seen are left out, so the sums are those of plain decoding.
    """
    page, slot, position, out = integers(pages), integers(slots), integers(positions), integers(seen)
    count = 0
    at = max(oldest, 0)
    while at < prefix:
        base = page[at // page_size] * page_size - at // page_size * page_size
        last = min((at // page_size + 1) * page_size, prefix)
        for i in range(at, last):
            out[count] = base + i
            count += 1
        at = last
    for other in range(start, end):
        if position[other] >= oldest and (sees == 0 or (sees >> (other - start)) & 1 == 1):
            out[count] = slot[other]
            count += 1
    return count


_score1, _score2, _mix1, _mix2 = score_keys(1), score_keys(2), mix_values(1), mix_values(2)
if QUERIES > 2:
    _score3, _score4, _score6, _mix3, _mix4, _mix6 = (kind(n) for kind in (score_keys, mix_values) for n in (3, 4, 6))
else:  # unused
    _score3 = _score4 = _score6 = _score2
    _mix3 = _mix4 = _mix6 = _mix2


@inner()
def _together(left: int) -> int:
    """The number of queries to take together, of those that are left."""
    some = min(left, QUERIES)
    return 3 if some == 5 else some


@inner()
def _score(
    queries: int, query: int, keys: int, stride: int, seen: int, count: int, size: int, scores: int, ld: int
) -> None:
    """scores[q, j] = query q times the j-th key of `seen`, for up to `QUERIES` queries."""
    slot = integers(seen)
    last = count - 1  # repeated at the end: the scores that it writes there are overwritten
    for j in range(0, count, KEYS):
        a, b = keys + slot[j] * stride, keys + slot[min(j + 1, last)] * stride
        c, d = keys + slot[min(j + 2, last)] * stride, keys + slot[min(j + 3, last)] * stride
        out = scores + j * 4
        if queries == 1:
            _score1(query, a, b, c, d, size, out, ld)
        elif queries == 2:
            _score2(query, a, b, c, d, size, out, ld)
        elif queries == 3:
            _score3(query, a, b, c, d, size, out, ld)
        elif queries == 4:
            _score4(query, a, b, c, d, size, out, ld)
        else:
            _score6(query, a, b, c, d, size, out, ld)


@inner()
def _mix(
    queries: int, values: int, stride: int, seen: int, first: int, last: int, scores: int, ld: int, size: int, out: int,
    ld_out: int,
) -> None:  # fmt: skip
    """out[q] += the sum of scores[q, j] times the j-th value of `seen`, for first <= j < last."""
    count = last - first
    if count <= 0:
        return
    slots, weights = seen + first * 8, scores + first * 4
    for start in range(0, size, MIXED):
        v, o, left = values + start * 4, out + start * 4, size - start
        if queries == 1:
            _mix1(v, stride, slots, count, weights, ld, left, o, ld_out)
        elif queries == 2:
            _mix2(v, stride, slots, count, weights, ld, left, o, ld_out)
        elif queries == 3:
            _mix3(v, stride, slots, count, weights, ld, left, o, ld_out)
        elif queries == 4:
            _mix4(v, stride, slots, count, weights, ld, left, o, ld_out)
        else:
            _mix6(v, stride, slots, count, weights, ld, left, o, ld_out)


@inner(fastmath=ORDER_MAY_CHANGE)
def _soften(scores: int, count: int, scaling: float) -> Any:
    """e^(scaling * (score - largest)) in place; returns the sum. Needs room for `count` + 32 numbers."""
    score = floats(scores)
    padded = -(-count // LANES) * LANES
    for j in range(count, padded):
        score[j] = -INFINITE
    largest_of(scores, padded // LANES, scores + padded * 4)
    factor, largest = np.float32(scaling), score[padded]
    for start in range(0, padded, LANES):  # always 16 at a time, as in `norms.silu_times`
        some = floats(scores + start * 4)
        for i in range(LANES):
            some[i] = exp((some[i] - largest) * factor)
    mass = ZERO
    for j in range(count):
        mass += score[j]
    return mass


@inner()
def _score_all(
    first: int, units: int, rows: int, heads: int, asked: int, keys: int, stride: int, seen: int, count: int, size: int,
    scores: int, ld: int,
) -> None:  # fmt: skip
    """The scores of `units` queries from the `first` on, block by block of keys."""
    for begin in range(0, count, KEPT):
        unit = 0
        while unit < units:
            queries = _together(units - unit)
            sees = count - (rows - 1 - (first + unit + queries - 1) // heads)
            some = min(begin + KEPT, sees) - begin
            if some > 0:
                to = scores + (unit * ld + begin) * 4
                _score(queries, asked + unit * size * 4, keys, stride, seen + begin * 8, some, size, to, ld)
            unit += queries


@inner()
def _mix_all(
    first: int, units: int, rows: int, heads: int, values: int, stride: int, seen: int, count: int, size: int,
    scores: int, ld: int, mixed: int,
) -> None:  # fmt: skip
    """mixed[unit] += its scores times the values that it sees, block by block: first those that its group shares."""
    for begin in range(0, count, KEPT):
        unit = 0
        while unit < units:
            queries = _together(units - unit)
            shares = count - (rows - 1 - (first + unit) // heads)  # the keys that the first of these queries sees
            weights, to = scores + unit * ld * 4, mixed + unit * size * 4
            _mix(queries, values, stride, seen, begin, min(begin + KEPT, shares), weights, ld * 4, size, to, size * 4)
            if begin + KEPT >= shares:
                for q in range(queries):
                    sees = count - (rows - 1 - (first + unit + q) // heads)
                    own, its = weights + q * ld * 4, to + q * size * 4
                    start, end = max(begin, shares), min(begin + KEPT, sees)
                    _mix(np.int64(1), values, stride, seen, start, end, own, ld * 4, size, its, size * 4)
            unit += queries


@inner(fastmath=ORDER_MAY_CHANGE)
def attend(
    rows: int, heads: int, head_dim: int, query: int, width: int, keys: int, values: int, stride: int, seen: int,
    count: int, scaling: float, scores: int, ld: int, out: int, ld_out: int,
) -> None:  # fmt: skip
    """Attention of `heads` heads that share their keys, for `rows` rows of one request. Each row sees one key more.

    seen: slots, of which the last row sees `count`; keys and values: of the heads, `stride` numbers from slot to slot.
    query: the first row's first head, `width` numbers before that of the next row; out and ld_out: likewise.
    scores: scratch, `CROWD` rows of `ld` numbers (at least `count` + 32), then `CROWD` rows of 2 * head_dim numbers.
    """
    asked = scores + CROWD * ld * 4
    mixed = asked + CROWD * head_dim * 4
    first, every = 0, rows * heads
    while first < every:
        units = min(every - first, CROWD)
        for unit in range(units):
            at = floats(query + ((first + unit) // heads * width + (first + unit) % heads * head_dim) * 4)
            copy, result = floats(asked + unit * head_dim * 4), floats(mixed + unit * head_dim * 4)
            for i in range(head_dim):
                copy[i], result[i] = at[i], ZERO
        _score_all(first, units, rows, heads, asked, keys, stride * 4, seen, count, head_dim, scores, ld)
        masses = floats(asked)  # the copies of the queries are not needed any more
        for unit in range(units):
            masses[unit] = _soften(scores + unit * ld * 4, count - (rows - 1 - (first + unit) // heads), scaling)
        _mix_all(first, units, rows, heads, values, stride * 4, seen, count, head_dim, scores, ld, mixed)
        for unit in range(units):
            at_row, at_head = (first + unit) // heads, (first + unit) % heads
            result, final = (
                floats(mixed + unit * head_dim * 4),
                floats(out + (at_row * ld_out + at_head * head_dim) * 4),
            )
            for i in range(head_dim):
                final[i] = result[i] / masses[unit]
        first += units
