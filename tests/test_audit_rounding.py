"""Margins: how far the logits must be off for other tokens to be chosen, with and without limits on the sampling."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.audit.rounding import Rounding, Row
from slipstream.core.params import SamplingParams
from slipstream.sampling import SampleRows, SamplingTable, choose

GREEDY = SamplingParams(temperature=0)
WAYS = {
    "greedy": GREEDY,
    "T 1": SamplingParams(temperature=1, seed=1),
    "T 0.5": SamplingParams(temperature=0.5, seed=2),
    "top-k": SamplingParams(temperature=1, top_k=3, seed=3),
    "top-p": SamplingParams(temperature=1, top_p=0.6, seed=4),
    "min-p": SamplingParams(temperature=1.5, min_p=0.2, seed=5),
    "all": SamplingParams(temperature=0.8, top_k=9, top_p=0.8, min_p=0.05, seed=6),
    "penalties": SamplingParams(temperature=0.8, presence_penalty=2, repetition_penalty=1.5, seed=7),
    "greedy penalties": SamplingParams(temperature=0, frequency_penalty=1.5, logit_bias={3: 4.0}, min_tokens=9),
}
OUTPUT, ENDS = (1, 3, 3, 7), (2, 5)


def chosen(logits: torch.Tensor, params: SamplingParams, prompt: range) -> int:
    table = SamplingTable(1, logits.shape[0])
    table.add(0, params, seed=params.seed or 0, prompt=prompt, output=OUTPUT, end_ids=ENDS)
    slot = torch.zeros(1, dtype=torch.int64)
    rows = SampleRows(slot, slot + len(prompt) + len(OUTPUT), slot + len(OUTPUT))
    return int(choose(logits[None], rows, table, table.features([0])))


def row_of(logits: torch.Tensor, params: SamplingParams, prompt: range) -> Row:
    return Row.of(logits, params, prompt, OUTPUT, ENDS)


@pytest.mark.parametrize("way", WAYS)
@settings(deadline=None, max_examples=25, derandomize=True)
@given(seed=st.integers(0, 10**6))
def test_what_the_engine_chooses_has_no_margin(way: str, seed: int) -> None:
    logits = torch.randn(40, generator=torch.Generator().manual_seed(seed)) * 3
    params = replace(WAYS[way], seed=seed)
    assert row_of(logits, params, range(11)).margin(chosen(logits, params, range(11))) == 0


@pytest.mark.parametrize("way", WAYS)
@settings(deadline=None, max_examples=25, derandomize=True)
@given(seed=st.integers(0, 10**6))
def test_what_a_small_error_changes_lies_within_its_margin(way: str, seed: int) -> None:
    """An error of e on every logit is noticed as a margin of at most 2e, whatever limits are crossed."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(40, generator=generator) * 3
    params = replace(WAYS[way], seed=seed)
    before = chosen(logits, params, range(7))
    for error in (0.01, 0.3, 2.0):
        off = logits + (torch.rand(40, generator=generator) * 2 - 1) * error
        after = chosen(off, params, range(7))
        assert row_of(logits, params, range(7)).margin(before, after) <= 2 * error * (1 + 1e-5)


def test_the_margin_is_the_gap_where_nothing_limits() -> None:
    logits = torch.tensor([3.0, 2.5, -1.0, 0.0])
    row = Row.of(logits, GREEDY, range(0))
    assert row.margin(0, 1) == pytest.approx(0.5)
    assert row.margin(2) == pytest.approx(4.0)
    sampled = Row.of(logits, WAYS["T 0.5"], range(4))
    scores = logits.double() / 0.5 + sampled.noise
    best, other = int(scores.argmax()), int(scores.argmin())
    assert sampled.margin(best, other) == pytest.approx(0.5 * float(scores[best] - scores[other]))


def test_a_token_at_the_edge_of_the_nucleus_is_near() -> None:
    """Half and half, and a top-p of one half: which tokens are in hangs on the last bit."""
    logits = torch.tensor([0.0, -1e-6, -30.0])
    params = SamplingParams(temperature=1, top_p=0.5, seed=1)
    assert Row.of(logits, params, range(3)).margin(0, 1) < 1e-5
    assert Row.of(logits, params, range(3)).margin(2) > 10


@pytest.mark.parametrize(("dtype", "relative"), [(torch.float32, 1e-4), (torch.bfloat16, 0.3), (torch.float16, 0.04)])
def test_the_bound_is_that_of_the_precision(dtype: torch.dtype, relative: float) -> None:
    rounding = Rounding(str(dtype), torch.finfo(dtype).eps / 2, 30, 576 if dtype == torch.float32 else 1)
    assert relative / 3 < rounding.relative < relative
    assert rounding.of_row(torch.tensor([0.0, 2.0, -math.inf])) == pytest.approx(rounding.relative * math.sqrt(2))
    assert f"{rounding.relative:.1e}" in rounding.why
