"""The sampling kernels against their torch twin: filters, ties, broken rows, company."""

from __future__ import annotations

import math
from importlib import import_module

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fused_cases import Case
from interpreted import DEVICE as KERNEL_DEVICE
from slipstream.core.params import SamplingParams
from slipstream.kernels.gpu.jit import jit, tl
from slipstream.sampling import Features, SampleRows, gumbel, row_keys
from slipstream.sampling.fused import choose_fused, gumbel_noise
from slipstream.sampling.noise import hash_tokens

# The interpreter computes with numpy, which warns where a cold temperature rightly makes a score infinite.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")

EVERY_WISH = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=0.7),
    SamplingParams(top_p=0.9),
    SamplingParams(temperature=3, top_p=0.99),
    SamplingParams(top_k=200, top_p=0.95),
    SamplingParams(top_k=50),
    SamplingParams(min_p=0.02),
    SamplingParams(temperature=0.1, top_k=5, min_p=0.1),
]
ALL_FEATURES = Features(greedy=True, sampled=True, top_k=True, top_p=True, min_p=True)

any_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.1, 1.0, 1.0, 1.7, 30.0, 1e-40]),
    top_k=st.sampled_from([0, 0, 1, 3, 40, 500, 1000]),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 0.999), st.sampled_from([1e-9, 1 - 2**-53])),
    min_p=st.one_of(st.just(0.0), st.floats(0.001, 1.0)),
)


def some_logits(kind: str, rows: int, vocab_size: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocab_size, generator=generator)
    if kind == "coarse":  # ties everywhere, signed zeros among them
        return logits.mul(2).round().mul(0.5)
    if kind == "equal":
        return torch.full_like(logits, -3.25)
    if kind == "masked":
        return (logits * 4).masked_fill(torch.rand(rows, vocab_size, generator=generator) < 0.9, -math.inf)
    return logits * {"flat": 0.01, "usual": 3.0, "peaked": 40.0, "huge": 1e37}[kind]


@settings(deadline=None, max_examples=25)
@given(
    kind=st.sampled_from(["coarse", "equal", "masked", "flat", "usual", "peaked", "huge"]),
    vocab_size=st.sampled_from([1, 300, 700]),
    params=st.lists(any_params, min_size=1, max_size=2),
    seed=st.integers(0, 2**32),
    chunk=st.sampled_from([128, 512]),
)
def test_tokens_are_the_twins(kind: str, vocab_size: int, params: list[SamplingParams], seed: int, chunk: int) -> None:
    Case(some_logits(kind, len(params), vocab_size, seed % 1000), params, seed=seed).check(chunk=chunk)


def test_a_row_is_decided_alone() -> None:
    """Neither by the other rows, nor by what they ask for, nor by how it is cut into chunks."""
    case = Case(some_logits("usual", len(EVERY_WISH), 1000, 5).to(torch.bfloat16).float(), EVERY_WISH)
    together = case.check(chunk=512)
    assert together == case.fused(chunk=1024, features=ALL_FEATURES)
    assert together == [case.alone(row, chunk=512) for row in range(len(EVERY_WISH))]


def test_a_broken_row_gives_nothing_and_harms_no_other() -> None:
    params = [SamplingParams(temperature=0), SamplingParams(), SamplingParams(top_p=0.8), SamplingParams(top_k=4)]
    whole = some_logits("usual", 4, 150, 6)
    tokens = Case(whole, params).fused(chunk=64)
    hurt = whole.repeat(2, 1)
    hurt[0, 149], hurt[1, 70], hurt[2, 3] = math.nan, -math.nan, math.inf
    hurt[3] = -math.inf
    assert Case(hurt, params).check(chunk=64)[:4] == [-1] * 4
    mixed = torch.cat((hurt[:2], whole[2:]))
    assert Case(mixed, params).fused(chunk=64) == [-1, -1, *tokens[2:]]


@pytest.mark.parametrize(
    ("params", "possible"),
    [
        (SamplingParams(temperature=0), 1),
        (SamplingParams(top_k=3), 3),
        (SamplingParams(top_p=0.5), 75),
        (SamplingParams(top_p=0.5, top_k=100), 50),
        (SamplingParams(top_p=0.5, top_k=100, temperature=1e-30), 50),
        (SamplingParams(), 150),
    ],
    ids=["greedy", "top_k", "top_p", "both", "cold", "free"],
)
def test_ties_go_to_the_lowest_id(params: SamplingParams, possible: int) -> None:
    """150 equal logits in three chunks: of them the first stay possible."""
    logits = torch.zeros(6, 150)
    logits[:, ::2] = -0.0
    tokens = Case(logits, [params]).check(chunk=64)
    assert max(tokens) < possible
    assert max(tokens) > 0.5 * possible - 2  # likely with six draws, and they are always the same six


def test_missing_tokens_are_impossible() -> None:
    """A draft model's vocabulary may be smaller than the target's."""
    case = Case(some_logits("usual", len(EVERY_WISH), 290, 7), EVERY_WISH, vocab_size=333)
    case.check(chunk=256)


def test_logits_may_lie_in_any_way() -> None:
    logits = some_logits("usual", 2, 300, 8)
    case = Case(logits, [SamplingParams(top_p=0.8), SamplingParams(top_k=20)])
    table, rows = case.table(KERNEL_DEVICE), case.rows(KERNEL_DEVICE)
    wide = torch.cat((logits, torch.full((2, 13), 99.0)), dim=1).to(KERNEL_DEVICE)[:, :300]
    across = logits.T.contiguous().to(KERNEL_DEVICE).T
    for laid in (wide, across):
        assert choose_fused(laid, rows, table, ALL_FEATURES, chunk=128).tolist() == case.twin()
    same = case.logits[:1].expand(2, 300).to(KERNEL_DEVICE)
    assert choose_fused(same, rows, table, ALL_FEATURES).tolist() == Case(logits[:1].expand(2, 300), case.params).twin()
    none = SampleRows(rows.slots[:0], rows.positions[:0], rows.generated[:0])
    assert choose_fused(wide[:0], none, table, ALL_FEATURES).shape == (0,)


@jit
def _noise_kernel(low: tl.tensor, high: tl.tensor, out: tl.tensor, SIZE: tl.constexpr) -> None:
    at = tl.arange(0, SIZE)
    key = (tl.load(high).to(tl.uint32, bitcast=True).to(tl.uint64) << 32) | tl.load(low).to(tl.uint32, bitcast=True)
    tl.store(out + at, gumbel_noise(key, at))


def test_the_noise_is_the_twins() -> None:
    """As exact as fp32 allows, for the small v that win too."""
    keys = row_keys(torch.tensor([3]), torch.tensor([0]), torch.tensor([77]))
    tokens = torch.arange(2**14, dtype=torch.int32)
    noise = torch.empty(2**14, device=KERNEL_DEVICE)
    low, high = keys[0].to(KERNEL_DEVICE)
    _noise_kernel[(1,)](low, high, noise, SIZE=2**14)
    expected = gumbel(keys, tokens)[0]
    assert hash_tokens(tokens).unique().numel() == 2**14
    assert expected.max() > 8
    torch.testing.assert_close(noise.cpu(), expected, rtol=2e-6, atol=2e-6)


def test_on_the_cpu_the_twin_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter is for tests only."""
    monkeypatch.setattr(import_module("slipstream.sampling.choose"), "choose_fused", None)
    tokens = Case(torch.zeros(1, 64), [SamplingParams(top_k=2)]).twin()
    assert tokens[0] in (0, 1)
