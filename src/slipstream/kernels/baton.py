"""How the programs of a relay hand on numbers: see `relay.py`.

A place that is not written yet holds a mark, all bits set: of all that are not a number, one that chips do not compute,
and that is replaced by another where it comes all the same. Whoever needs the place looks until the mark is gone. The
numbers are handed on as bits, in integers of their size.

Strictly, PTX wants both sides of such a handover to be strong, and Triton stores weakly. What that leaves open is that
a compiler might put a store off until after a loop that waits; so a barrier follows each (`give`).
"""

from __future__ import annotations

from slipstream.kernels.jit import jit, tl


@jit
def missing(bits: tl.tensor) -> tl.tensor:
    """Is a mark left among these?"""
    return tl.max((bits == -1).to(tl.int32), None)


@jit
def await_word(pointer: tl.tensor) -> None:
    """Look at one word until it is written: what is wanted comes a stage later, and many are looking."""
    word = tl.load(pointer, volatile=True)
    while word == -1:
        word = tl.load(pointer, volatile=True)


@jit
def give(pointers: tl.tensor, value: tl.tensor, mask: tl.tensor) -> None:
    """Hand on numbers, as bits; one that looks like the mark becomes the usual not-a-number."""
    BITS: tl.constexpr = pointers.dtype.element_ty
    bits = value.to(BITS, bitcast=True)
    canonical = tl.full(bits.shape, 0x7FFF if tl.int16 == BITS else 0x7FFFFFFF, BITS)
    tl.store(pointers, tl.where(bits == -1, canonical, bits), mask=mask)
    tl.debug_barrier()


@jit
def look(pointers: tl.tensor, mask: tl.tensor, THERE: tl.constexpr) -> tl.tensor:
    """A run of a product as it is now; zeros where there is none.

    Each thread looks for itself. So there must be a number for every thread: of two that look at the same one, only one
    would be asked what it saw.
    """
    return tl.load(pointers, mask=mask & THERE, other=0, volatile=True)


@jit
def _runs(
    pointers: tl.tensor, mask: tl.tensor, stride: tl.tensor, SPLITS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """The runs of a product, four at most (`row_linear.splits_of`), as they are now; zeros where there are fewer."""
    tl.static_assert(SPLITS <= 4)
    return (
        look(pointers, mask, True),
        look(pointers + stride, mask, SPLITS > 1),
        look(pointers + 2 * stride, mask, SPLITS > 2),
        look(pointers + 3 * stride, mask, SPLITS > 3),
    )


@jit
def _lacking(a: tl.tensor, b: tl.tensor, c: tl.tensor, d: tl.tensor) -> tl.tensor:
    """Is a mark left in one of these runs?"""
    return tl.max(((a == -1) | (b == -1) | (c == -1) | (d == -1)).to(tl.int32), None)


@jit
def _summed(a: tl.tensor, b: tl.tensor, c: tl.tensor, d: tl.tensor, SPLITS: tl.constexpr) -> tl.tensor:
    """In fp32, in order."""
    total = a.to(tl.float32, bitcast=True)
    if SPLITS > 1:
        total += b.to(tl.float32, bitcast=True)
    if SPLITS > 2:
        total += c.to(tl.float32, bitcast=True)
    if SPLITS > 3:
        total += d.to(tl.float32, bitcast=True)
    return total


@jit
def take_two(
    pointers: tl.tensor, others: tl.tensor, mask: tl.tensor, other_mask: tl.tensor, stride: tl.tensor,
    SPLITS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """Two pieces of one, when both are there."""
    a, b, c, d = _runs(pointers, mask, stride, SPLITS)
    e, f, g, h = _runs(others, other_mask, stride, SPLITS)
    while _lacking(a, b, c, d) + _lacking(e, f, g, h) > 0:
        a, b, c, d = _runs(pointers, mask, stride, SPLITS)
        e, f, g, h = _runs(others, other_mask, stride, SPLITS)
    return _summed(a, b, c, d, SPLITS), _summed(e, f, g, h, SPLITS)


@jit
def take_pairs(
    some: tl.tensor, others: tl.tensor, at: tl.tensor, mate: tl.tensor, some_mask: tl.tensor, others_mask: tl.tensor,
    stride: tl.tensor, SPLITS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Lines of numbers and those that they are turned with, of two kinds of lines, when all are there."""
    a, b, c, d = _runs(some + at[None, :], some_mask, stride, SPLITS)
    e, f, g, h = _runs(some + mate[None, :], some_mask, stride, SPLITS)
    i, j, k, l = _runs(others + at[None, :], others_mask, stride, SPLITS)  # noqa: E741
    m, n, o, p = _runs(others + mate[None, :], others_mask, stride, SPLITS)
    while _lacking(a, b, c, d) + _lacking(e, f, g, h) + _lacking(i, j, k, l) + _lacking(m, n, o, p) > 0:
        a, b, c, d = _runs(some + at[None, :], some_mask, stride, SPLITS)
        e, f, g, h = _runs(some + mate[None, :], some_mask, stride, SPLITS)
        i, j, k, l = _runs(others + at[None, :], others_mask, stride, SPLITS)  # noqa: E741
        m, n, o, p = _runs(others + mate[None, :], others_mask, stride, SPLITS)
    return (
        _summed(a, b, c, d, SPLITS),
        _summed(e, f, g, h, SPLITS),
        _summed(i, j, k, l, SPLITS),
        _summed(m, n, o, p, SPLITS),
    )


@jit
def take_part(
    tops: tl.tensor, totals: tl.tensor, sums: tl.tensor, real: tl.tensor, mask: tl.tensor, COPIES: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The softmax over another program's keys, when it is there."""
    several = tl.zeros((COPIES,), tl.int32)[None, :]  # one thread, one look: see `look`
    tops, totals, real = tops[:, None] + several, totals[:, None] + several, real[:, None] & (several == 0)
    a, b, c = look(tops, real, True), look(totals, real, True), look(sums, mask, True)
    while missing(a) + missing(b) + missing(c) > 0:
        a, b, c = look(tops, real, True), look(totals, real, True), look(sums, mask, True)
    top, total = tl.max(a.to(tl.float32, bitcast=True), 1), tl.max(b.to(tl.float32, bitcast=True), 1)
    return top, total, c.to(tl.float32, bitcast=True)
