"""The residual and the norm: the kernel against its twin, and the twin against the modules that it stands for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from interpreted import DEVICE, FLOATS
from slipstream.kernels.add_norm import _launch, add_norm, add_norm_at, add_norm_twin

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CLOSE = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 3.2e-2}  # of 16 bits the last may differ
EPS = 1e-5


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 7, 64, 100, 576])
@pytest.mark.parametrize("splits", [0, 1, 3])
def test_the_kernel_matches_the_twin(dtype: torch.dtype, width: int, splits: int) -> None:
    x, weight = numbers(5, width, dtype=dtype), numbers(width, dtype=dtype, seed=1)
    delta = numbers(splits, 5, width, seed=2) if splits else None
    ours, twin = x.clone(), x.clone()
    out = _launch(ours, delta, weight, EPS, False)
    expected = add_norm_twin(twin, delta, weight, EPS)
    if dtype in FLOATS:
        assert torch.equal(ours, twin)  # the residual: the same runs in the same order, rounded at the same places
    torch.testing.assert_close(ours, twin, rtol=CLOSE[dtype], atol=CLOSE[dtype])
    assert out.dtype == dtype
    torch.testing.assert_close(out, expected, rtol=CLOSE[dtype], atol=CLOSE[dtype])
    assert torch.equal(ours, x) == (delta is None)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_is_normed_alone(dtype: torch.dtype) -> None:
    x, weight, delta = numbers(6, 100, dtype=dtype), numbers(100, dtype=dtype, seed=1), numbers(3, 6, 100, seed=2)
    together = _launch(x.clone(), delta, weight, EPS, False)
    for row in range(6):
        alone = _launch(x[row : row + 1].clone(), delta[:, row : row + 1].contiguous(), weight, EPS, False)
        assert torch.equal(alone[0], together[row])


@pytest.mark.parametrize("dtype", DTYPES)
def test_some_rows_are_as_among_all(dtype: torch.dtype) -> None:
    x, weight, delta = numbers(6, 100, dtype=dtype), numbers(100, dtype=dtype, seed=1), numbers(3, 6, 100, seed=2)
    rows, sums, whole = torch.tensor([4, 0, 4], device=DEVICE), numbers(3, 100, dtype=dtype), x.clone()
    kept = x.clone()
    normed = _launch(x, delta, weight, EPS, False, rows, sums)
    assert torch.equal(normed, _launch(whole, delta, weight, EPS, False)[rows])
    assert torch.equal(sums, whole[rows])
    twin = add_norm_at(x, delta, rows, weight, EPS)
    if dtype in FLOATS:
        assert torch.equal(twin.sums, sums)
    torch.testing.assert_close(twin.normed, normed, rtol=CLOSE[dtype], atol=CLOSE[dtype])
    assert torch.equal(x, kept)


def test_the_twin_leaves_the_runs_alone() -> None:
    delta = numbers(3, 2, 5)
    kept = delta.clone()
    add_norm_twin(numbers(2, 5), delta, numbers(5), EPS)
    assert torch.equal(delta, kept)


def test_runs_are_added_in_order() -> None:
    """Large runs that cancel: another order would leave another rest."""
    delta = torch.tensor([1.0, 1e8, -1e8, 3.0], device=DEVICE)[:, None, None].expand(4, 2, 3).contiguous()
    x, one = torch.zeros(2, 3, device=DEVICE), torch.ones(3, device=DEVICE)
    _launch(x, delta, one, EPS, False)
    assert x.tolist() == [[3.0] * 3] * 2  # the first was lost in the second


def test_on_the_cpu_the_twin_runs_and_is_the_norm() -> None:
    x, delta, weight = torch.randn(4, 24), torch.randn(2, 4, 24), torch.randn(24)
    want = torch.nn.functional.rms_norm(x + delta.sum(0), (24,), weight, EPS)
    residual = x + delta.sum(0)
    torch.testing.assert_close(add_norm(x, delta, weight, EPS), want)
    torch.testing.assert_close(x, residual)
    torch.testing.assert_close(add_norm(x, None, weight, EPS), want)
