"""Packed products give what `F.linear` gives, for every number of rows, and a row does not feel the others."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.kernels.linear import PackedLinear, packs

SHAPES = [(1, 1), (1, 7), (5, 1), (7, 13), (33, 17), (64, 64), (129, 65), (960, 576)]


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def wanted(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out = x.double() @ weight.double().T
    return (out if bias is None else out + bias.double()).to(x.dtype)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("outs", "ins"), SHAPES)
def test_any_number_of_rows(outs: int, ins: int, with_bias: bool) -> None:
    weight, bias = random(outs, ins), random(outs, seed=1) if with_bias else None
    product = PackedLinear(weight.clone(), bias)
    for rows in (*range(0, 131, 1 if outs < 100 else 13), 512):
        x = random(rows, ins, seed=2 + rows)
        out = product(x)
        torch.testing.assert_close(out, wanted(x, weight, bias), atol=2e-6 * ins, rtol=1e-5)
        torch.testing.assert_close(out, F.linear(x, weight, bias), atol=2e-6 * ins, rtol=1e-5)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("outs", "ins"), [(7, 13), (129, 65), (960, 576), (576, 1536)])
def test_a_row_is_the_same_to_the_bit_in_any_company(outs: int, ins: int, threads: int) -> None:
    product = PackedLinear(random(outs, ins))
    assert product.packed or not torch.backends.mkl.is_available()
    # a plain product promises no more than its rounding
    same = torch.equal if product.packed else partial(torch.allclose, atol=2e-6 * ins, rtol=1e-5)
    x = random(64, ins, seed=1)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        alone = torch.cat([product(row[None]) for row in x])
        for rows in range(1, 65):
            assert same(product(x[:rows]), alone[:rows]), rows
            assert same(product(x[64 - rows :]), alone[64 - rows :]), rows
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("shape", [(13,), (1, 13), (2, 3, 13), (1, 0, 13), (2, 1, 4, 13)])
def test_any_number_of_dimensions(shape: tuple[int, ...]) -> None:
    weight, x = random(7, 13), random(*shape, seed=1)
    out = PackedLinear(weight)(x)
    assert out.shape == (*shape[:-1], 7)
    torch.testing.assert_close(out, wanted(x, weight, None), atol=1e-5, rtol=1e-5)


def test_inputs_that_do_not_lie_in_one_piece() -> None:
    weight, bias = random(7, 13), random(7, seed=1)
    product = PackedLinear(weight, bias)
    wide, tall = random(5, 26, seed=2), random(13, 5, seed=3)
    for x in (wide[:, ::2], wide[:, 13:], tall.T, random(6, 13)[::3], random(1, 13).expand(4, 13)):
        torch.testing.assert_close(product(x), wanted(x, weight, bias), atol=1e-5, rtol=1e-5)


def test_weights_that_do_not_lie_in_one_piece() -> None:
    x = random(3, 13, seed=1)
    for weight in (random(13, 7).T, random(7, 26)[:, ::2], random(14, 13)[::2]):
        torch.testing.assert_close(PackedLinear(weight)(x), wanted(x, weight, None), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_types_stay_as_they_are(dtype: torch.dtype) -> None:
    weight, bias, x = random(7, 13, dtype=dtype), random(7, seed=1, dtype=dtype), random(5, 13, seed=2, dtype=dtype)
    product = PackedLinear(weight, bias)
    assert not packs(weight)
    assert not product.packed
    out = product(x)
    assert out.dtype == dtype
    assert torch.equal(out, F.linear(x, weight, bias))


def test_a_packed_product_keeps_nothing_of_the_weight() -> None:
    weight, bias = random(7, 13), random(7, seed=1)
    x = random(3, 13, seed=2)
    product = PackedLinear(weight, bias)
    before = product(x)
    if product.packed:
        weight.zero_()
    bias.zero_()
    assert torch.equal(product(x), before)
    assert not list(product.parameters())
