"""The inner loops of attention over a cache in pages, in vectors of 16 numbers: one head of one row at a time.

Each key's score comes from the same steps wherever it stands, and values are added up in the order of the text, so a
row's bits depend on what it sees and on nothing else.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.extending import intrinsic

from slipstream.kernels.codes import LANES
from slipstream.kernels.cpu_vectors import F32, I64, MASKS, VECTOR, Vectors, body, number, zeros

KEYS = 4
"""Keys that are scored at once."""
MIXED = 4 * LANES if MASKS else 2 * LANES
"""Numbers of a value that are added up at once."""


@intrinsic
def score_keys(typing: Any, query: Any, key0: Any, key1: Any, key2: Any, key3: Any, size: Any, scores: Any) -> Any:
    """scores[i] = query [size] times key i, for 4 keys at their addresses."""

    def emit(v: Vectors, query: Any, key0: Any, key1: Any, key2: Any, key3: Any, size: Any, scores: Any) -> None:
        b = v.b

        def score(load_some: Any, _: Any) -> None:
            def along(step: Any, *sums: Any) -> list[Any]:
                at = b.mul(step, number(4 * LANES))
                lanes = v.first_lanes(b.sub(size, b.mul(step, number(LANES))))
                value = load_some(b.add(query, at), lanes)
                keys = [load_some(b.add(key, at), lanes) for key in (key0, key1, key2, key3)]
                return [v.fma(value, key, total) for key, total in zip(keys, sums, strict=True)]

            steps = b.udiv(b.add(size, number(LANES - 1)), number(LANES))
            v.store(v.totals(v.repeat(steps, [zeros()] * KEYS, along)), scores)

        v.either(b.icmp_unsigned("==", b.urem(size, number(LANES)), number(0)), score)

    return body(7, emit)


@intrinsic
def largest_of(typing: Any, scores: Any, vectors: Any, out: Any) -> Any:
    """Write the largest of so many vectors of scores to `out`; NaN among them does not count."""

    def emit(v: Vectors, scores: Any, vectors: Any, out: Any) -> None:
        def one(turn: Any, largest: Any) -> list[Any]:
            return [v.larger(largest, v.load(v.b.add(scores, v.b.mul(turn, number(4 * LANES)))))]

        (largest,) = v.repeat(vectors, [ir.Constant(VECTOR, [float("-inf")] * LANES)], one)
        v.store(v.largest(largest), out)

    return body(3, emit)


@intrinsic
def mix_values(typing: Any, values: Any, stride: Any, seen: Any, count: Any, weights: Any, size: Any, out: Any) -> Any:
    """out [size, at most `MIXED`] = the sum over j below count of weights[j] times the value of slot seen[j].

    `stride` bytes lie between the values of two slots.
    """

    def emit(v: Vectors, values: Any, stride: Any, seen: Any, count: Any, weights: Any, size: Any, out: Any) -> None:
        b = v.b
        parts = range(MIXED // LANES)
        lanes = [v.first_lanes(b.sub(size, number(LANES * part))) for part in parts]

        def mix(load_some: Any, store_some: Any) -> None:
            def one(turn: Any, *sums: Any) -> list[Any]:
                slot = v.load(b.add(seen, b.mul(turn, number(8))), I64)
                at = b.add(values, b.mul(slot, stride))
                weight = v.spread(v.load(b.add(weights, b.mul(turn, number(4))), F32))
                found = [load_some(b.add(at, number(4 * LANES * part)), lanes[part]) for part in parts]
                return [v.fma(weight, value, total) for value, total in zip(found, sums, strict=True)]

            sums = v.repeat(count, [zeros()] * len(parts), one)
            for part in parts:
                store_some(sums[part], b.add(out, number(4 * LANES * part)), lanes[part])

        v.either(b.icmp_unsigned(">=", size, number(MIXED)), mix)

    return body(7, emit)
