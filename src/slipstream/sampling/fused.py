"""The rule of sampling as GPU kernels: `choose` after `adjust.py`, in at most five launches.

The torch form sorts, and asks the host whether it sorted enough. Here nothing is sorted and the host is not asked, so
a captured graph can hold it. Each row is cut into chunks, a program each:

    peaks    the largest logit of each chunk, and with top-k or top-p its smallest
    survey   rows with top-k or top-p: the count or the mass of tokens within 16 distances of the largest logit
    refine   the same for 16 parts of the one interval that holds the cut
    draw     tokens before the part with the cut are surely kept, and the chunk's best of them is found, noise added;
             tokens in that part, few as a rule, are listed. Without top-k and top-p all are sure
    settle   one program a row: searches the list for the cut, and takes the best of all that is kept

Greedy rows need peaks and settle; draw comes with sampled rows, survey and refine with top-k and top-p. Sums are
of integers, so the order of the programs changes nothing, nor do the other rows. Arithmetic that a token depends on is
that of `filters.py` and `noise.py`, operation by operation.

For one row the five are so short that their starts count: each may start while the one before ends, and then waits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slipstream.kernels.gpu.jit import has_triton, jit, on_gpu, tl, triton
from slipstream.sampling.filters import MASS_OF_LIKELIEST
from slipstream.sampling.noise import GOLDEN, HASH32, KEYED32, LARGEST_BELOW_ONE, MIX64
from slipstream.sampling.rows import SampleRows
from slipstream.sampling.table import Features, SamplingTable

CHUNK = 2048
"""Tokens of a program, and half of it where all rows together have few. Survey and refine then take that half, too;
else twice as many: a program sums up in its threads first, and joining their sums takes a while."""

MANY_TOKENS = 1 << 20
"""With at least these, programs of any size fill the GPU."""

HELD = 4096
"""Listed tokens that `settle` holds while it searches; lists that are longer it reads again and again."""


def constant(value: Any) -> Any:
    """A global that kernels may read."""
    return tl.constexpr(value) if has_triton else value


def _unsigned(words: tuple[int, ...], bits: int) -> list[Any]:
    return [constant(word % (1 << bits)) for word in words]


_G, _M0, _M1 = _unsigned((GOLDEN, *MIX64), 64)
_H0, _H1, _K0, _K1, _K2 = _unsigned((*HASH32, *KEYED32), 32)
_BELOW_ONE = constant(LARGEST_BELOW_ONE)
_MASS = constant(MASS_OF_LIKELIEST)
PIECE = constant(1 << 18)
"""Mass is summed in two halves: those of 32 tokens add up in fp32 without rounding, twice as fast as in 64 bits."""
WAYS = constant(16)
TALLY_WORDS = 34
"""Of a row: the sums up to each of 16 intervals, up to each of 16 parts of one, the length of its list, its steps."""
TALLY = constant(TALLY_WORDS)
NO_ID = constant(2**31 - 1)


# --- noise ---------------------------------------------------------------------------------------------------------


@jit
def _mix64(x: tl.tensor) -> tl.tensor:
    x = (x ^ (x >> 30)) * _M0
    x = (x ^ (x >> 27)) * _M1
    return x ^ (x >> 31)


@jit
def row_key(row: tl.tensor, slot: tl.tensor, positions: tl.tensor, streams: tl.tensor) -> tl.tensor:
    """The row's key, 64 bits unsigned."""
    stream = tl.load(streams + slot).to(tl.uint64, bitcast=True)
    position = tl.load(positions + row).to(tl.uint64, bitcast=True)
    return _mix64(stream + position * _G)


@jit
def gumbel_noise(key: tl.tensor, ids: tl.tensor) -> tl.tensor:
    """Noise of tokens `ids` int32: `noise.gumbel`."""
    x = ids.to(tl.uint32, bitcast=True)
    x = (x ^ (x >> 16)) * _H0
    x = (x ^ (x >> 15)) * _H1
    x = x ^ (x >> 15)
    x = (x ^ key.to(tl.uint32)) * _K0
    x = ((x ^ (x >> 16)) + (key >> 32).to(tl.uint32)) * _K1
    x = (x ^ (x >> 15)) * _K2
    x = x ^ (x >> 16)
    minus_v = x.to(tl.int32, bitcast=True).to(tl.float32) * (-(2.0**-32)) - 2.0**-33
    minus_v = tl.maximum(minus_v - tl.ceil(minus_v), -_BELOW_ONE)
    # log1p: what 1 - v lost by rounding is put right by the quotient
    u = 1.0 + minus_v
    is_one = u == 1.0
    log1p = tl.where(is_one, minus_v, tl.log(u) * tl.div_rn(minus_v, tl.where(is_one, -1.0, u - 1.0)))
    return -tl.log(-log1p)


# --- pieces ----------------------------------------------------------------------------------------------------------


@jit
def is_finite(largest: tl.tensor) -> tl.tensor:
    return (largest > float("-inf")) & (largest < float("inf"))


@jit
def scores_of(x: tl.tensor, largest: tl.tensor, t: tl.tensor) -> tl.tensor:
    """`Tempering.scores`; the usual temperature is spared the division."""
    scores = x - largest
    if t != 1:
        scores = tl.div_rn(scores, t)
    return scores


@jit
def mass_of(scores: tl.tensor) -> tl.tensor:
    """In fp32: whole numbers up to 2^36."""
    return tl.floor(tl.exp(scores) * _MASS)


@jit
def first_best(values: tl.tensor, ids: tl.tensor) -> tl.tensor:
    """The largest value and the lowest id that has it."""
    best = tl.max(values)
    return best, tl.min(tl.where(values == best, ids, NO_ID))


# --- the cut --------------------------------------------------------------------------------------------------------


@jit
def steps_of(largest: tl.tensor, lowest: tl.tensor, t: tl.tensor, p: tl.tensor, vocab_size: tl.tensor) -> tl.tensor:
    """How many places of `places_of` a distance of 1 has, so that 256 of them reach as far as top-p may have to.

    That is at most to the row's last token; and tokens further than log(V / (1 - p)) together have less than 1 - p.
    The result changes no token: it decides the length of the list that `settle` searches.
    """
    beyond = tl.log(tl.zeros([], tl.float32) + vocab_size) - tl.log(tl.maximum((1.0 - p).to(tl.float32), 1e-30))
    reach = tl.minimum(tl.div_rn(largest - lowest, t), tl.minimum(beyond, 26.0))  # further off a mass is below 1
    return 256.0 / tl.maximum(reach, 1e-6)


@jit
def keep_steps(tally: tl.tensor, steps: tl.tensor) -> None:
    """Store the steps for later kernels: computed again they might round differently, and a token change its place."""
    tl.store(tally + 2 * WAYS + 1, steps.to(tl.int32, bitcast=True).to(tl.int64))


@jit
def kept_steps(tally: tl.tensor) -> tl.tensor:
    return tl.load(tally + 2 * WAYS + 1).to(tl.int32).to(tl.float32, bitcast=True)


@jit
def places_of(x: tl.tensor, scores: tl.tensor, largest: tl.tensor, steps: tl.tensor, by_k: tl.tensor) -> tl.tensor:
    """How far from the largest logit, 0 to 256, fractions included: never smaller for a smaller x.

    Top-p counts in even steps. Top-k does not know the temperature, and a low one would put its cut out of reach; nor
    does it know how far off the last token is. So its distance is between logits, and steps grow with it: they are the
    leading bits of 1 + distance, 32 an octave.
    """
    if by_k:
        places = (((1.0 + (largest - x)).to(tl.int32, bitcast=True) >> 18) - (0x3F800000 >> 18)).to(tl.float32)
    else:
        places = -scores * steps
    return tl.minimum(places, 255.0)


@jit
def _up_to(bins: tl.tensor, worth: tl.tensor, FIRST: tl.constexpr, STEP: tl.constexpr) -> tl.tensor:
    """[N, 2, ..., 2]: the worth where the bin is at most FIRST, FIRST + STEP, ...: joined, a thread has all its own."""
    return (
        worth * tl.clamp(FIRST + 1 - bins, 0.0, 1.0)  # one instruction, and no mask to keep
        if STEP == WAYS
        else tl.join(_up_to(bins, worth, FIRST, 2 * STEP), _up_to(bins, worth, FIRST + STEP, 2 * STEP))
    )


@jit
def sums_up_to(bins: tl.tensor, worth: tl.tensor) -> tl.tensor:
    """[128, 16] fp32: the worth of tokens whose bin is at most 0, 1, 2, ..., as far as each of 128 threads has them."""
    SIZE: tl.constexpr = bins.shape[0]
    joined = tl.reshape(_up_to(bins, worth, 0, 1), [SIZE // 512, 128, 4, WAYS])
    return tl.sum(tl.sum(joined, 2), 0)


@jit
def add_tally(tally: tl.tensor, high: tl.tensor, low: tl.tensor) -> None:
    """Add to 16 sums the [128, 16] that threads have summed up of the upper and the lower halves."""
    sums = tl.sum(high.to(tl.int64) * PIECE + low.to(tl.int64), 0)
    tl.atomic_add(tally + tl.arange(0, WAYS), sums, mask=sums > 0, sem="relaxed")


@jit
def _cut_in(tally: tl.tensor, before: tl.tensor, need: tl.tensor) -> tl.tensor:
    """Which of 16 bins holds the cut (16: none), and the sum before that bin."""
    sums = tl.load(tally + tl.arange(0, WAYS))
    short = sums.to(tl.float64) < need  # the first few, as the sums rise
    return tl.sum(short.to(tl.int32)), tl.maximum(tl.max(tl.where(short, sums, 0)), before)


@jit
def coarse_cut(tally: tl.tensor, k: tl.tensor, p: tl.tensor) -> tl.tensor:
    """As `_cut_in` for the survey, and what is needed: k tokens, or without top-k a part of the mass."""
    total = tl.load(tally + WAYS - 1)  # the last sum is the whole row's
    need = tl.where(k > 0, k.to(tl.float64), p * total.to(tl.float64))
    cut, before = _cut_in(tally, tl.zeros([], tl.int64), need)
    return cut, before, need


@jit
def fine_cut(tally: tl.tensor, k: tl.tensor, p: tl.tensor) -> tl.tensor:
    """The place with the cut (256: none), the sum before it, and what is needed."""
    coarse, before, need = coarse_cut(tally, k, p)
    fine = tl.zeros([], tl.int32)
    if coarse < WAYS:
        fine, before = _cut_in(tally + WAYS, before, need)
    return coarse * WAYS + fine, before, need


# --- the list of tokens near the cut -------------------------------------------------------------------------------
#
# The list has no order, so the cut is found by halving: first the logit at the cut, then, where only some of the tokens
# with that very logit are kept, the id of the last of them. An interval of 2^n floats takes n steps, or fewer where a
# single token is left before. The first block of the list stays in registers, and is the whole list as a rule; the
# others are read in every step.


@jit
def _load_listed(
    logits: tl.tensor, listed: tl.tensor, start: tl.tensor, count: tl.tensor, largest: tl.tensor, t: tl.tensor,
    LIST: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """A block of the list: ids (-1 beyond the end), scores, mass, and order keys int32, larger for a larger logit."""
    at = start + tl.arange(0, LIST)
    ids = tl.load(listed + at, mask=at < count, other=-1)
    x = tl.load(logits + ids, mask=at < count, other=float("-inf"))
    scores = scores_of(x, largest, t)
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)  # -0 is the same as 0
    return ids, scores, mass_of(scores).to(tl.int64), bits ^ ((bits >> 31) & 0x7FFFFFFF)


@jit
def _is_kept(order: tl.tensor, ids: tl.tensor, cut: tl.tensor, last: tl.tensor) -> tl.tensor:
    """Before the cut: larger than its logit, or equal to it with an id up to `last`. Nothing beyond the list's end."""
    return (ids >= 0) & ((order > cut) | ((order == cut) & (ids <= last)))


@jit
def _worth(
    ids: tl.tensor, mass: tl.tensor, order: tl.tensor, cut: tl.tensor, last: tl.tensor, BY_MASS: tl.constexpr
) -> tl.tensor:
    """The mass of tokens that a cut keeps, or 1 each; 0 for others."""
    return tl.where(_is_kept(order, ids, cut, last), mass if BY_MASS else 1, 0).to(tl.int64)


@jit
def _sum_from(
    logits: tl.tensor, listed: tl.tensor, count: tl.tensor, largest: tl.tensor, t: tl.tensor,
    order: tl.tensor, worth: tl.tensor,
    lowest: tl.tensor, cut: tl.tensor, last: tl.tensor, BY_MASS: tl.constexpr, LIST: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The `_worth` of all listed tokens that have at least the order key `lowest`. order, worth: of the first block."""
    total = tl.where(order >= lowest, worth, 0)
    start = tl.full([], LIST, tl.int32)
    while start < count:
        more, _, masses, orders = _load_listed(logits, listed, start, count, largest, t, LIST)
        total += tl.where(orders >= lowest, _worth(more, masses, orders, cut, last, BY_MASS), 0)
        start += LIST
    return tl.sum(total)


@jit
def _last_id(
    logits: tl.tensor, listed: tl.tensor, count: tl.tensor, vocab_size: tl.tensor,
    largest: tl.tensor, t: tl.tensor, ids: tl.tensor, order: tl.tensor,
    cut: tl.tensor, keep: tl.tensor, LIST: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The id of the `keep`-th token, by id, of those whose order key is `cut`."""
    low, high = tl.full([], -1, tl.int32), tl.zeros([], tl.int32) + vocab_size  # too low, high enough
    while high - low > 1:
        middle = (low + high) // 2
        total = ((ids >= 0) & (order == cut) & (ids <= middle)).to(tl.int32)
        start = tl.full([], LIST, tl.int32)
        while start < count:
            more, _, _, orders = _load_listed(logits, listed, start, count, largest, t, LIST)
            total += ((more >= 0) & (orders == cut) & (more <= middle)).to(tl.int32)
            start += LIST
        enough = tl.sum(total) >= keep
        low, high = tl.where(enough, low, middle), tl.where(enough, middle, high)
    return high


@jit
def _find_cut(
    logits: tl.tensor, listed: tl.tensor, count: tl.tensor, vocab_size: tl.tensor, largest: tl.tensor, t: tl.tensor,
    ids: tl.tensor, mass: tl.tensor, order: tl.tensor,
    low: tl.tensor, high: tl.tensor, least: tl.tensor, cut: tl.tensor, last: tl.tensor,
    base: tl.tensor, whole: tl.tensor, need: tl.tensor, BY_MASS: tl.constexpr, LIST: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Where `base` and the first kept tokens of the list together reach `need`: order key and last id.

    Holds with all from order key `low` on, whose sum is `whole`, not with those from `high` on. `low` is not before
    the cut so far; no token counts less than `least`.
    """
    worth = _worth(ids, mass, order, cut, last, BY_MASS)
    beyond, within = tl.zeros([], tl.int64), whole  # the sums from `high` on, and from `low` on
    while (high - low > 1) & (within - beyond >= 2 * least):  # below that, one token is left
        middle = (low + high) >> 1
        total = _sum_from(
            logits, listed, count, largest, t, order, worth, middle.to(tl.int32), cut, last, BY_MASS, LIST
        )
        enough = (base + total).to(tl.float64) >= need
        low, high = tl.where(enough, middle, low), tl.where(enough, high, middle)
        within, beyond = tl.where(enough, total, within), tl.where(enough, beyond, total)
    own = tl.where(low == cut, last, vocab_size)
    if within - beyond >= 2 * least:  # some with the same logit, so with the same mass
        start, end, one = low.to(tl.int32), high.to(tl.int32), _worth(ids, mass, order, cut, last, False)
        equals = _sum_from(logits, listed, count, largest, t, order, one, start, cut, last, False, LIST)
        equals -= _sum_from(logits, listed, count, largest, t, order, one, end, cut, last, False, LIST)
        each, before = (within - beyond) // equals, base + beyond
        keep = ((need - before.to(tl.float64)) / each.to(tl.float64)).to(tl.int64)
        keep = tl.maximum(keep - 1, 1)
        for _ in tl.static_range(3):  # the quotient is off by less
            keep += ((before + keep * each).to(tl.float64) < need).to(tl.int64)
        if keep < equals:
            own = _last_id(logits, listed, count, vocab_size, largest, t, ids, order, start, keep, LIST)
    return low.to(tl.int32), own


@jit
def settle_listed(
    logits: tl.tensor, vocab_size: tl.tensor, tally: tl.tensor, listed: tl.tensor, count: tl.tensor,
    largest: tl.tensor, t: tl.tensor, k: tl.tensor, p: tl.tensor, min_p: tl.tensor, key: tl.tensor,
    LIST: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The best score with noise among the listed tokens that are kept, and its id."""
    ids, scores, mass, order = _load_listed(logits, listed, 0, count, largest, t, LIST)
    low, high = tl.where(ids >= 0, order, 2**31 - 1), order  # beyond the end, the key of -inf
    all_mass, least = mass, tl.where(ids >= 0, mass, 1 << 40)
    start = tl.full([], LIST, tl.int32)
    while start < count:
        more, _, masses, orders = _load_listed(logits, listed, start, count, largest, t, LIST)
        low, high = tl.minimum(low, tl.where(more >= 0, orders, 2**31 - 1)), tl.maximum(high, orders)
        all_mass, least = all_mass + masses, tl.minimum(least, tl.where(more >= 0, masses, 1 << 40))
        start += LIST
    lowest, highest = tl.min(low).to(tl.int64), tl.max(high).to(tl.int64) + 1
    cut, last = tl.full([], -(2**31), tl.int32), tl.zeros([], tl.int32) + vocab_size  # nothing cut off
    _place, sure, need = fine_cut(tally, k, p)
    if k > 0:
        base = tl.where(p < 1, 0, sure)  # with both, all that top-k may keep is listed
        wanted = tl.minimum(k, base + count).to(tl.float64)
        one = tl.full([], 1, tl.int64)
        cut, last = _find_cut(
            logits, listed, count, vocab_size, largest, t, ids, mass, order,
            lowest, highest, one, cut, last, base, count.to(tl.int64), wanted, False, LIST,
        )  # fmt: skip
    if p < 1:
        base, whole = sure, tl.sum(all_mass)
        if k > 0:
            base, lowest = tl.zeros([], tl.int64), cut.to(tl.int64)
            worth = _worth(ids, mass, order, cut, last, True)
            whole = _sum_from(logits, listed, count, largest, t, order, worth, cut, cut, last, True, LIST)
            need = p * whole.to(tl.float64)
        cut, last = _find_cut(
            logits, listed, count, vocab_size, largest, t, ids, mass, order,
            lowest, highest, tl.min(least), cut, last, base, whole, need, True, LIST,
        )  # fmt: skip
    kept = (scores >= min_p) & _is_kept(order, ids, cut, last)
    best, token = first_best(tl.where(kept, scores + gumbel_noise(key, ids), float("-inf")), ids)
    start = tl.full([], LIST, tl.int32)
    while start < count:
        more, scores, _, orders = _load_listed(logits, listed, start, count, largest, t, LIST)
        kept = (scores >= min_p) & _is_kept(orders, more, cut, last)
        value, own = first_best(tl.where(kept, scores + gumbel_noise(key, more), float("-inf")), more)
        better = (value > best) | ((value == best) & (own < token))
        best, token = tl.where(better, value, best), tl.where(better, own, token)
        start += LIST
    return best, token


# --- over chunks: grid (R, chunks) ----------------------------------------------------------------------------------


@jit
def _ready(OVERLAP: tl.constexpr) -> None:
    """Let the next kernel start, and wait for the one before. Logits and wishes are older than all of them."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@jit
def _load_chunk(
    logits: tl.tensor, stride: tl.tensor, vocab_size: tl.tensor, row: tl.tensor, chunk: tl.tensor, CHUNK: tl.constexpr
) -> tl.tensor:
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row.to(tl.int64) * stride + ids, mask=ids < vocab_size, other=float("-inf"))
    return ids, x


@jit
def _peaks(
    logits: tl.tensor, stride: tl.tensor, vocab_size: tl.tensor,
    peaks: tl.tensor, lows: tl.tensor, peak_ids: tl.tensor, tally: tl.tensor,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, FILTERED: tl.constexpr, OVERLAP: tl.constexpr,
) -> None:  # fmt: skip
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    row, chunk = tl.program_id(0), tl.program_id(1)
    ids, x = _load_chunk(logits, stride, vocab_size, row, chunk, CHUNK)
    value, token = first_best(tl.where(x == x, x, float("inf")), ids)  # NaN breaks a row as +inf does
    tl.store(peaks + row * CHUNKS + chunk, value)
    tl.store(peak_ids + row * CHUNKS + chunk, token)
    if FILTERED:
        tl.store(lows + row * CHUNKS + chunk, tl.min(tl.where(x > float("-inf"), x, float("inf"))))
        if chunk == 0:
            at = tl.arange(0, 64)
            tl.store(tally + row * TALLY + at, tl.zeros([64], tl.int64), mask=at < TALLY)


@jit
def _largest(peaks: tl.tensor, row: tl.tensor, chunks: tl.tensor, CHUNKS: tl.constexpr) -> tl.tensor:
    at = tl.arange(0, CHUNKS)
    return tl.max(tl.load(peaks + row * CHUNKS + at, mask=at < chunks, other=float("-inf")))


@jit
def _lowest(lows: tl.tensor, row: tl.tensor, chunks: tl.tensor, CHUNKS: tl.constexpr) -> tl.tensor:
    at = tl.arange(0, CHUNKS)
    return tl.min(tl.load(lows + row * CHUNKS + at, mask=at < chunks, other=float("inf")))


@jit(sizes=["chunks"], pointers=["slots", "positions"])
def _count(
    logits: tl.tensor, stride: tl.tensor, vocab_size: tl.tensor,
    peaks: tl.tensor, lows: tl.tensor, peak_ids: tl.tensor, best: tl.tensor, best_ids: tl.tensor,
    tally: tl.tensor, listed: tl.tensor, chunks: tl.tensor,
    slots: tl.tensor, temperature: tl.tensor, top_k: tl.tensor, top_p: tl.tensor, log_min_p: tl.tensor,
    positions: tl.tensor, streams: tl.tensor,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, CHUNKS: tl.constexpr, FILTERED: tl.constexpr, OVERLAP: tl.constexpr,
    REFINE: tl.constexpr,
) -> None:  # fmt: skip
    """Survey or refine, on a part of a row; grid (R, parts)."""
    row, part = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + row)
    t, k, p = tl.load(temperature + slot), tl.load(top_k + slot), tl.load(top_p + slot)
    _, x = _load_chunk(logits, stride, vocab_size, row, part * BLOCKS, BLOCK)
    _ready(OVERLAP)
    largest = _largest(peaks, row, chunks, CHUNKS)
    if (t > 0) & is_finite(largest) & ((k > 0) | (p < 1)):
        tally += row * TALLY
        if REFINE:  # up to a part means: that part, those before it, and all before the interval
            coarse, _before, _need = coarse_cut(tally, k, p)
            steps, first, parts = kept_steps(tally), (coarse * WAYS).to(tl.float32), 1.0
            tally += WAYS
        else:
            steps, first, parts = steps_of(largest, _lowest(lows, row, chunks, CHUNKS), t, p, vocab_size), 0.0, 1 / WAYS
            if part == 0:
                keep_steps(tally, steps)
        high, low = tl.zeros([128, WAYS], tl.float32), tl.zeros([128, WAYS], tl.float32)
        for block in tl.range(BLOCKS):
            _, following = _load_chunk(
                logits, stride, tl.where(block + 1 < BLOCKS, vocab_size, 0), row, part * BLOCKS + block + 1, BLOCK
            )
            scores = scores_of(x, largest, t)
            bins = tl.floor((places_of(x, scores, largest, steps, k > 0) - first) * parts)
            worth = (x > float("-inf")).to(tl.float32)
            if k == 0:
                worth = mass_of(scores)
            upper = tl.floor(worth * (1 / PIECE))
            high += sums_up_to(bins, upper)
            low += sums_up_to(bins, worth - upper * PIECE)
            x = following
        add_tally(tally, high, low)


@jit(sizes=["chunks"], pointers=["slots", "positions"])
def _draw(
    logits: tl.tensor, stride: tl.tensor, vocab_size: tl.tensor,
    peaks: tl.tensor, lows: tl.tensor, peak_ids: tl.tensor, best: tl.tensor, best_ids: tl.tensor,
    tally: tl.tensor, listed: tl.tensor, chunks: tl.tensor,
    slots: tl.tensor, temperature: tl.tensor, top_k: tl.tensor, top_p: tl.tensor, log_min_p: tl.tensor,
    positions: tl.tensor, streams: tl.tensor,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, FILTERED: tl.constexpr, OVERLAP: tl.constexpr,
) -> None:  # fmt: skip
    row, chunk = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + row)
    t, min_p, key = tl.load(temperature + slot), tl.load(log_min_p + slot), row_key(row, slot, positions, streams)
    ids, x = _load_chunk(logits, stride, vocab_size, row, chunk, CHUNK)
    _ready(OVERLAP)
    largest = _largest(peaks, row, chunks, CHUNKS)
    if (t > 0) & is_finite(largest):
        scores = scores_of(x, largest, t)
        sure = (x > float("-inf")) & (scores >= min_p)
        if FILTERED:  # filters that features did not announce are left out: a padding row may have any slot
            k, p = tl.load(top_k + slot), tl.load(top_p + slot)
            if (k > 0) | (p < 1):
                tally += row * TALLY
                places = tl.floor(places_of(x, scores, largest, kept_steps(tally), k > 0)).to(tl.int32)
                cut, _, _ = fine_cut(tally, k, p)
                both = (k > 0) & (p < 1)  # what top-p needs is known when top-k has cut: until then nothing is sure
                sure = sure & (places < cut) & (both == 0)
                unsure = (x > float("-inf")) & ((places == cut) | (both & (places < cut)))
                found = tl.sum(unsure.to(tl.int32))
                if found > 0:
                    start = tl.atomic_add(tally + 2 * WAYS, found.to(tl.int64), sem="relaxed")
                    line = start + tl.cumsum(unsure.to(tl.int32), 0) - 1
                    tl.store(listed + row.to(tl.int64) * vocab_size + line, ids, mask=unsure)
        value, token = tl.full([], float("-inf"), tl.float32), tl.full([], NO_ID, tl.int32)
        if tl.max(sure.to(tl.int32)) > 0:  # in few chunks, where the cut is close to the largest logit
            value, token = first_best(tl.where(sure, scores + gumbel_noise(key, ids), float("-inf")), ids)
        tl.store(best + row * CHUNKS + chunk, value)
        tl.store(best_ids + row * CHUNKS + chunk, token)


@jit(sizes=["chunks"], pointers=["slots", "positions"])
def _settle(
    logits: tl.tensor, stride: tl.tensor, vocab_size: tl.tensor,
    peaks: tl.tensor, lows: tl.tensor, peak_ids: tl.tensor, best: tl.tensor, best_ids: tl.tensor,
    tally: tl.tensor, listed: tl.tensor, chunks: tl.tensor,
    slots: tl.tensor, temperature: tl.tensor, top_k: tl.tensor, top_p: tl.tensor, log_min_p: tl.tensor,
    positions: tl.tensor, streams: tl.tensor, tokens: tl.tensor,
    LIST: tl.constexpr, CHUNKS: tl.constexpr, FILTERED: tl.constexpr, OVERLAP: tl.constexpr, SAMPLED: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    at = tl.arange(0, CHUNKS)
    here, is_chunk = row * CHUNKS + at, at < chunks
    ids = tl.load(peak_ids + here, mask=is_chunk, other=NO_ID)
    largest, token = first_best(tl.load(peaks + here, mask=is_chunk, other=float("-inf")), ids)
    if SAMPLED:
        slot = tl.load(slots + row)
        t, k, p = tl.load(temperature + slot), tl.load(top_k + slot), tl.load(top_p + slot)
        if (t > 0) & is_finite(largest):
            ids = tl.load(best_ids + here, mask=is_chunk, other=NO_ID)
            value, token = first_best(tl.load(best + here, mask=is_chunk, other=float("-inf")), ids)
            if FILTERED:
                tally += row * TALLY
                count = tl.load(tally + 2 * WAYS).to(tl.int32)
                if count > 0:  # never for a row without top-k and top-p
                    logits += row.to(tl.int64) * stride
                    listed += row.to(tl.int64) * vocab_size
                    min_p, key = tl.load(log_min_p + slot), row_key(row, slot, positions, streams)
                    other, own = settle_listed(
                        logits, vocab_size, tally, listed, count, largest, t, k, p, min_p, key, LIST
                    )
                    token = tl.where((other > value) | ((other == value) & (own < token)), own, token)
    tl.store(tokens + row, tl.where(is_finite(largest), token, -1).to(tl.int64))


# --- the host's side --------------------------------------------------------------------------------------------------


def choose_fused(
    logits: Tensor, rows: SampleRows, table: SamplingTable, features: Features, *, chunk: int = CHUNK
) -> Tensor:
    """Tokens [R] int64 that the rows of `logits` [R, V] fp32 choose; -1 for a row that can choose nothing.

    V may be smaller than the table's vocabulary: the missing tokens are impossible. features: those of the rows, or
    more. chunk: a power of two up to 2048; it changes the speed, never a token. The host does not wait.
    """
    count, vocab_size = logits.shape
    tokens = torch.empty(count, dtype=torch.int64, device=logits.device)
    if count == 0:
        return tokens
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    filtered = features.sampled and (features.top_k or features.top_p)
    few = count * vocab_size < MANY_TOKENS
    chunk = chunk // 2 if few else chunk
    chunks = triton.cdiv(vocab_size, chunk)
    width = triton.next_power_of_2(max(256, chunks))  # the same for most vocabularies: less to compile
    values = logits.new_empty(3, count, width)  # by chunk: peak, smallest logit, best score
    ids = torch.empty(2, count, width, dtype=torch.int32, device=logits.device)  # by chunk: peak, best score
    tally = torch.empty(count, TALLY_WORDS, dtype=torch.int64, device=logits.device)
    listed = torch.empty(count, vocab_size if filtered else 0, dtype=torch.int32, device=logits.device)
    line = (logits, logits.stride(0), vocab_size)
    scratch = (values[0], values[1], ids[0], values[2], ids[1], tally, listed, chunks)
    slots, positions = rows.slots.contiguous(), rows.positions.contiguous()
    wish = (slots, table.temperature, table.top_k, table.top_p, table.log_min_p, positions, table.streams)
    overlap = on_gpu(logits)
    how = {"CHUNKS": width, "FILTERED": filtered, "OVERLAP": overlap}

    _peaks[(count, chunks)](*line, *scratch[:3], tally, CHUNK=chunk, **how, num_warps=4)
    if filtered:
        block, blocks = min(1024, max(512, chunk)), 1 if few else 4
        for refine in (False, True):
            _count[(count, triton.cdiv(vocab_size, block * blocks))](
                *line, *scratch, *wish, BLOCK=block, BLOCKS=blocks, **how, REFINE=refine, num_warps=4,
                launch_pdl=overlap,
            )  # fmt: skip
    if features.sampled:
        _draw[(count, chunks)](*line, *scratch, *wish, CHUNK=chunk, **how, num_warps=4, launch_pdl=overlap)
    _settle[(count,)](
        *line, *scratch, *wish, tokens, LIST=HELD, **how, SAMPLED=features.sampled,
        num_warps=16 if filtered else 8, launch_pdl=overlap,
    )  # fmt: skip
    return tokens
