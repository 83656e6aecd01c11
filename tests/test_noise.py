"""The keyed noise: repeated in plain integers, and held to what good noise must be."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from slipstream.sampling.noise import gumbel, gumbel_of_hashes, hash_tokens, row_keys, stream_key, stream_keys, uniform

M64, M32 = 2**64 - 1, 2**32 - 1
GOLDEN_KEYS = [[833975872, 124247178], [-949301588, 2063607056], [1980191992, 1821987329]]
GOLDEN_NOISE = [2.657415, -1.028065, -0.463321, -1.218695, 0.163824, 1.622295, -0.11574, 2.813726, -0.020662]
G, S = 0x9E3779B97F4A7C15, 0xD1342543DE82EF95


def mix64(x: int) -> int:
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & M64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & M64
    return x ^ (x >> 31)


def key64(seed: int, sample: int, position: int) -> int:
    stream = mix64((mix64((seed + G) & M64) + sample * S) & M64)
    return mix64((stream + position * G) & M64)


def hash32(x: int) -> int:
    x = (x ^ (x >> 16)) * 0x21F0AAAD & M32
    x = (x ^ (x >> 15)) * 0x735A2D97 & M32
    return x ^ (x >> 15)


def keyed32(key: int, x: int) -> int:
    x = (x ^ (key & M32)) * 0x9E3779B1 & M32
    x = ((x ^ (x >> 16)) + (key >> 32)) * 0x85EBCA6B & M32
    x = (x ^ (x >> 15)) * 0xC2B2AE35 & M32
    return x ^ (x >> 16)


def undo_xor_shift(x: int, shift: int) -> int:
    y = x
    for _ in range(32 // shift):
        y = x ^ (y >> shift)
    return y


def undo_keyed32(key: int, x: int) -> int:
    x = undo_xor_shift(x, 16) * pow(0xC2B2AE35, -1, 2**32) & M32
    x = (undo_xor_shift(x, 15) * pow(0x85EBCA6B, -1, 2**32) - (key >> 32)) & M32
    return (undo_xor_shift(x, 16) * pow(0x9E3779B1, -1, 2**32) & M32) ^ (key & M32)


def as_signed(x: int, bits: int) -> int:
    return x - (1 << bits) if x >> (bits - 1) else x


def keys_of(seed: int = 0, sample: int = 0, positions: Tensor | None = None) -> Tensor:
    positions = torch.zeros(1, dtype=torch.int64) if positions is None else positions
    return row_keys(torch.full_like(positions, as_signed(seed, 64)), torch.full_like(positions, sample), positions)


def chi_square(observed: np.ndarray, expected: np.ndarray) -> float:
    """How many standard deviations the statistic lies above its mean."""
    freedom = len(observed) - 1
    return float((((observed - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom))


@settings(deadline=None)
@given(
    seed=st.integers(0, M64),
    sample=st.integers(0, 127),
    position=st.integers(0, 2**40),
    tokens=st.lists(st.integers(0, 2**20), min_size=1, max_size=8),
)
def test_the_noise_is_what_plain_integers_give(seed: int, sample: int, position: int, tokens: list[int]) -> None:
    keys = keys_of(seed, sample, torch.tensor([position]))
    key = key64(seed, sample, position)
    assert [x & M32 for x in keys[0].tolist()] == [key & M32, key >> 32]
    ids = torch.tensor(tokens, dtype=torch.int32)
    expected = [min((keyed32(key, hash32(t)) + 0.5) / 2**32, 1 - 2**-24) for t in tokens]
    assert uniform(keys, ids)[0].tolist() == pytest.approx(expected, rel=2e-7)
    assert gumbel(keys, ids)[0].tolist() == pytest.approx(
        [-math.log(-math.log1p(-np.float32(v))) for v in uniform(keys, ids)[0].tolist()], rel=1e-5, abs=1e-6
    )


@pytest.mark.parametrize("x", [0, 1, 2, 2**24, 2**31 - 1, 2**31, 2**31 + 1, 2**32 - 2**8, 2**32 - 2, 2**32 - 1])
def test_the_noise_is_finite_and_right_at_the_ends(x: int) -> None:
    key = key64(3, 0, 5)
    hashed = undo_keyed32(key, x)
    assert keyed32(key, hashed) == x
    noise = gumbel_of_hashes(keys_of(3, 0, torch.tensor([5])), torch.tensor([as_signed(hashed, 32)], dtype=torch.int32))
    v = min((x + 0.5) / 2**32, 1 - 2**-24)
    assert noise.item() == pytest.approx(-math.log(-math.log1p(-v)), rel=1e-5, abs=1e-6)


def test_golden_values() -> None:
    """These may never change: a seed that gave an answer must give it again."""
    positions = torch.tensor([0, 1, 17])
    assert keys_of(42, 1, positions).tolist() == GOLDEN_KEYS
    noise = gumbel(keys_of(42, 1, positions), torch.tensor([0, 1, 49151], dtype=torch.int32))
    assert noise.flatten().tolist() == pytest.approx(GOLDEN_NOISE, abs=2e-6)


def test_a_token_has_the_same_noise_in_any_company() -> None:
    keys = keys_of(9, 0, torch.arange(5))
    vocabulary = torch.arange(4099, dtype=torch.int32)
    everything = gumbel(keys, vocabulary)
    some = torch.randint(0, 4099, (5, 77), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    assert torch.equal(gumbel(keys, some), everything.gather(1, some.long()))
    assert torch.equal(gumbel(keys, vocabulary[7:1000]), everything[:, 7:1000])
    assert torch.equal(gumbel(keys[3:4], vocabulary[4000:4001]), everything[3:4, 4000:4001])
    assert torch.equal(gumbel_of_hashes(keys, hash_tokens(vocabulary)), everything)


def varied(what: str, count: int) -> Tensor:
    """`count` draws [count] that differ in one thing only."""
    steps, still = torch.arange(count), torch.zeros(count, dtype=torch.int64)
    token = torch.tensor([11], dtype=torch.int32)
    if what == "token":
        return uniform(keys_of(1), steps.to(torch.int32))[0]
    varying = {"seed": (steps, still, still), "sample": (still, steps, still), "position": (still, still, steps)}
    return uniform(row_keys(*varying[what]), token)[:, 0]


@pytest.mark.parametrize("what", ["token", "position", "seed", "sample"])
@pytest.mark.parametrize("scale", [1, 2**8, 2**16])
def test_uniform_along_every_axis(what: str, scale: int) -> None:
    """High, middle and low bits of the draws fill 256 bins evenly."""
    v = varied(what, 2**16).to(torch.float64).numpy()
    if scale > 1:
        v = v[v < 0.25] * scale % 1  # small v carry all 32 bits, and they decide who wins
    observed = np.histogram(v, bins=256, range=(0, 0.25 if scale == 1 else 1))[0]
    if scale == 1:
        assert abs(observed.sum() - 2**14) < 5 * math.sqrt(2**14 * 0.75)
    assert abs(chi_square(observed, np.full(256, observed.sum() / 256))) < 4.5


@pytest.mark.parametrize("what", ["token", "position", "seed", "sample"])
@pytest.mark.parametrize("lag", [1, 2, 3, 64])
def test_neighbours_do_not_know_of_each_other(what: str, lag: int) -> None:
    v = varied(what, 2**16).to(torch.float64).numpy()
    assert abs(np.corrcoef(v[:-lag], v[lag:])[0, 1]) < 4.5 / math.sqrt(len(v))
    pairs = np.histogram2d(v[:-lag], v[lag:], bins=16, range=((0, 1), (0, 1)))[0].flatten()
    assert abs(chi_square(pairs, np.full(256, pairs.sum() / 256))) < 4.5


def test_rows_of_a_large_grid_are_independent() -> None:
    """No pair of 64 positions has correlated noise over the same 4096 tokens."""
    noise = uniform(keys_of(5, 0, torch.arange(64)), torch.arange(4096, dtype=torch.int32))
    correlation = np.corrcoef(noise.to(torch.float64).numpy()) - np.eye(64)
    assert np.abs(correlation).max() < 5.5 / math.sqrt(4096)


def test_the_largest_score_is_drawn_from_the_softmax() -> None:
    p = np.array([0.5, 0.25, 0.125, 0.0625, 0.05, 0.0124, 0.0001])
    log_p = torch.tensor(np.log(p), dtype=torch.float32)
    draws = 200_000
    noise = gumbel(keys_of(77, 0, torch.arange(draws)), torch.tensor([0, 3, 17, 999, 5000, 1, 2], dtype=torch.int32))
    observed = np.bincount((log_p + noise).argmax(dim=1).numpy(), minlength=len(p))
    assert abs(chi_square(observed, p / p.sum() * draws)) < 4


@given(st.integers(0, (1 << 64) - 1), st.integers(0, 1 << 20))
def test_the_key_of_one_request_is_that_of_many(seed: int, sample: int) -> None:
    signed = seed - (1 << 64) if seed >> 63 else seed
    assert stream_key(seed, sample) == int(stream_keys(torch.tensor(signed), torch.tensor(sample)))
