"""The inner loops of attention over a cache in pages, in vectors of 16 numbers: some queries of one head of keys.

Each key's score comes from the same steps wherever it stands, and values are added up in the order of the text, so a
row's bits depend on what it sees and on nothing else. Queries are taken together because keys and values come from far.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.extending import intrinsic

from slipstream.kernels.codes import LANES
from slipstream.kernels.cpu_vectors import F32, I64, MASKS, STRIP, SUM, VECTOR, Vectors, body, number, zeros

KEYS = 4
"""Keys that are scored at once."""
MIXED = 4 * LANES if MASKS else 2 * LANES
"""Numbers of a value that are added up at once."""


def score_keys(queries: int) -> Any:
    """A function for compiled code: (queries, key0 to key3, size, scores, ld), addresses and sizes, all int64.

    scores[q, i] = query q [size] times key i; the queries lie one behind the other, `ld` numbers between their scores.
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
    """Write the largest of so many vectors of scores to `out`; NaN among them does not count."""

    def emit(v: Vectors, scores: Any, vectors: Any, out: Any) -> None:
        def one(turn: Any, largest: Any) -> list[Any]:
            return [v.larger(largest, v.load(v.b.add(scores, v.b.mul(turn, number(4 * LANES)))))]

        (largest,) = v.repeat(vectors, [ir.Constant(VECTOR, [float("-inf")] * LANES)], one)
        v.store(v.largest(largest), out)

    return body(3, emit)


def mix_values(queries: int) -> Any:
    """A function for compiled code: (values, stride, seen, count, weights, ld, size, out, ld_out), all int64.

    out[q] [size, at most `MIXED`] += the sum over j below count, which is not 0, of weights[q, j] times the value of
    slot seen[j]. `stride` bytes lie between the values of two slots, `ld` and `ld_out` bytes between two rows.
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
