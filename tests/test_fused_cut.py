"""The cut of the sampling kernels where it is hard to find: lists too long to be held, programs with many blocks."""

from __future__ import annotations

import math
from importlib import import_module

import pytest
import torch

from fused_cases import Case
from slipstream.core.params import SamplingParams

# The interpreter computes with numpy, which warns where a cold temperature rightly makes a score infinite.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")

CUTS = [
    SamplingParams(top_p=0.95),
    SamplingParams(temperature=50, top_p=0.7),
    SamplingParams(temperature=0.01, top_p=0.9),
    SamplingParams(top_k=300),
    SamplingParams(top_k=500, top_p=0.6),
    SamplingParams(temperature=1.5, top_k=5000, top_p=0.999, min_p=0.001),
]


@pytest.fixture
def kernels() -> object:
    return import_module("slipstream.sampling.fused")


@pytest.mark.parametrize("kind", ["ties", "equal", "outlier"])
def test_a_list_may_be_longer_than_what_is_held(monkeypatch: pytest.MonkeyPatch, kernels: object, kind: str) -> None:
    logits = torch.randn(len(CUTS), 600, generator=torch.Generator().manual_seed(3))
    if kind == "ties":
        logits = logits.mul(4).round().mul(0.25)
    if kind == "equal":
        logits = torch.full_like(logits, 7.5)
    if kind == "outlier":  # nothing is known of how the rest lies
        logits[:, 400] = -1e30
        logits[:, 401] = -math.inf
    case = Case(logits, CUTS)
    expected = case.check(chunk=512)
    monkeypatch.setattr(kernels, "HELD", 128)
    assert case.check(chunk=512) == expected


def test_programs_with_several_blocks_sum_up_the_same(monkeypatch: pytest.MonkeyPatch, kernels: object) -> None:
    """2,900 tokens: two programs of four blocks of 512, the last of them not full."""
    logits = torch.randn(2, 2900, generator=torch.Generator().manual_seed(4)) * 2
    logits[0, :2000] = -math.inf
    case = Case(logits, [SamplingParams(top_p=0.95), SamplingParams(top_k=300)])
    expected = case.check(chunk=512)
    monkeypatch.setattr(kernels, "MANY_TOKENS", 0)
    assert case.check(chunk=512) == expected


@pytest.mark.parametrize("top_p", [1e-9, 0.3, 0.5, 0.999999])
def test_a_whole_row_at_the_largest_mass_is_summed_exactly(top_p: float) -> None:
    """Equal tokens have the largest mass there is, so the sums are the largest: the kept ones are the first of them."""
    size = 3000
    tokens = Case(torch.zeros(8, size), [SamplingParams(top_p=top_p)]).check()
    assert max(tokens) < max(1, math.ceil(top_p * size))


def test_the_cut_is_found_on_either_side_of_zero() -> None:
    """Around zero an interval has the most floats, and both signs."""
    logits = torch.linspace(-1, 1, 901).repeat(4, 1) * torch.tensor([1e-3, 1.0, 1e-30, 8.0])[:, None]
    Case(logits, [SamplingParams(top_p=0.5), SamplingParams(top_k=450)]).check(chunk=256)
    Case(logits.flip(0), [SamplingParams(top_k=451, top_p=0.9), SamplingParams(top_p=0.6)]).check(chunk=256)
