"""The arithmetic of `fused.py`: noise, mass, and the tallies that close in on the cut of top-k and top-p.

What a token depends on is computed as in `noise.py` and `filters.py`, operation by operation. Sums are of integers, so
the order in which programs come by changes nothing.
"""

from __future__ import annotations

from typing import Any

from slipstream.kernels.jit import has_triton, jit, tl
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
_ONE_TOKEN = constant(1 << 48)  # the count's unit in a word of count and mass
WAYS = constant(16)
TALLY_WORDS = 65
"""Of a row: 16 counts, 16 masses, the same for the parts of one interval, and the length of its list."""
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
def mass_of(scores: tl.tensor) -> tl.tensor:
    return (tl.exp(scores) * _MASS).to(tl.int64)


@jit
def first_best(values: tl.tensor, ids: tl.tensor) -> tl.tensor:
    """The largest value and the lowest id that has it."""
    best = tl.max(values)
    return best, tl.min(tl.where(values == best, ids, NO_ID))


@jit
def store_best(
    best: tl.tensor, best_id: tl.tensor, kept: tl.tensor, scores: tl.tensor, ids: tl.tensor, key: tl.tensor
) -> None:
    """The best score with noise among the kept tokens of a chunk."""
    value, token = first_best(tl.where(kept, scores + gumbel_noise(key, ids), float("-inf")), ids)
    tl.store(best, value)
    tl.store(best_id, token)


@jit
def places_of(x: tl.tensor, scores: tl.tensor, largest: tl.tensor, by_k: tl.tensor) -> tl.tensor:
    """How far from the largest logit, in steps 0 to 240 that grow with the distance: never smaller for a smaller x.

    Steps are the leading bits of 1 + distance: 16 a half octave. Top-k does not know the temperature, and a low one
    would put its cut out of reach; so its distance is between logits, else between scores.
    """
    distance = tl.where(by_k, largest - x, -scores)
    return tl.minimum(((1.0 + distance).to(tl.int32, bitcast=True) >> 18) - (0x3F800000 >> 18), 240)


@jit
def add_tally(tally: tl.tensor, bins: tl.tensor, counted: tl.tensor, scores: tl.tensor) -> None:
    """Add to 16 counts and 16 masses: tokens `counted` whose bin is at most 0, 1, 2, ..."""
    word = tl.where(counted, mass_of(scores) + _ONE_TOKEN, 0)
    way = tl.arange(0, WAYS)
    sums = tl.zeros([WAYS], tl.int64)
    for j in tl.static_range(WAYS):
        sums = tl.where(way == j, tl.sum(tl.where(bins <= j, word, 0)), sums)
    some = sums > 0
    tl.atomic_add(tally + way, sums // _ONE_TOKEN, mask=some, sem="relaxed")
    tl.atomic_add(tally + WAYS + way, sums % _ONE_TOKEN, mask=some, sem="relaxed")


@jit
def _cut_in(
    tally: tl.tensor, count_before: tl.tensor, mass_before: tl.tensor, k: tl.tensor, need: tl.tensor
) -> tl.tensor:
    """Which of 16 bins holds the cut (16: none), and the count and mass before that bin."""
    way = tl.arange(0, WAYS)
    counts = tl.load(tally + way) + count_before
    masses = tl.load(tally + WAYS + way) + mass_before
    short = tl.where(k > 0, counts < k, masses.to(tl.float64) < need)  # the first few, as the sums rise
    cut = tl.sum(short.to(tl.int32))
    count = tl.maximum(tl.max(tl.where(short, counts, 0)), count_before)
    mass = tl.maximum(tl.max(tl.where(short, masses, 0)), mass_before)
    return cut, count, mass


@jit
def coarse_cut(tally: tl.tensor, k: tl.tensor, p: tl.tensor) -> tl.tensor:
    """As `_cut_in` for the survey, and the mass that top-p alone needs."""
    need = p * tl.load(tally + 2 * WAYS - 1).to(tl.float64)  # the last sum is the whole row's
    none = tl.zeros([], tl.int64)
    cut, count, mass = _cut_in(tally, none, none, k, need)
    return cut, count, mass, need


@jit
def fine_cut(tally: tl.tensor, k: tl.tensor, p: tl.tensor) -> tl.tensor:
    """The place with the cut (256: none), the count and mass before it, and the mass that top-p alone needs."""
    coarse, count, mass, need = coarse_cut(tally, k, p)
    fine = tl.zeros([], tl.int32)
    if coarse < WAYS:
        fine, count, mass = _cut_in(tally + 2 * WAYS, count, mass, k, need)
    return coarse * WAYS + fine, count, mass, need
