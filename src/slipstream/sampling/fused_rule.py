"""The arithmetic of `fused.py`: noise, mass, and the tallies that close in on the cut of top-k and top-p.

What a token depends on is computed as in `noise.py` and `filters.py`, operation by operation. Sums are of integers, so
the order in which programs come by changes nothing.
"""

from __future__ import annotations

from typing import Any

from slipstream.kernels.gpu.jit import has_triton, jit, tl
from slipstream.sampling.filters import MASS_OF_LIKELIEST
from slipstream.sampling.noise import GOLDEN, HASH32, KEYED32, LARGEST_BELOW_ONE, MIX64


def constant(value: Any) -> Any:
    """What kernels may read of a module; without Triton nobody does."""
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
    Whatever comes out, tokens are the same: it decides how long the list is that `settle` searches.
    """
    beyond = tl.log(tl.zeros([], tl.float32) + vocab_size) - tl.log(tl.maximum((1.0 - p).to(tl.float32), 1e-30))
    reach = tl.minimum(tl.div_rn(largest - lowest, t), tl.minimum(beyond, 26.0))  # further off a mass is below 1
    return 256.0 / tl.maximum(reach, 1e-6)


@jit
def keep_steps(tally: tl.tensor, steps: tl.tensor) -> None:
    """For the kernels behind: computed once more they might be rounded otherwise, and a token change its place."""
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
