"""Products with fixed weights: `F.linear`'s result for every form, and a row's bits do not depend on other rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from families import same_numbers
from slipstream.kernels.cpu.arena import Arena
from slipstream.kernels.cpu.compiled import can_compile
from slipstream.kernels.cpu.interface import Codes
from slipstream.kernels.cpu.tiled import CODES_PAY, TiledLinear, join, tiler
from slipstream.kernels.linear import FP8, NarrowLinear, PackedLinear, narrow_join, narrowed, packs, widened

SHAPES = [(1, 7), (7, 13), (129, 65), (960, 576)]


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def quantized(n: int, k: int, bits: int, seed: int = 0) -> Tensor:
    """A weight as in a converted GGUF file: Q4_1 or Q8_0, written out in fp32."""
    blocks = random(n * k // 32, 32, seed=seed)
    if bits == 4:
        low = blocks.amin(1, keepdim=True).half().float()
        scale = ((blocks.amax(1, keepdim=True) - low) / 15).half().float()
        return (((blocks - low) / scale).round().clamp(0, 15) * scale + low).view(n, k)
    scale = (blocks.abs().amax(1, keepdim=True) / 127).half().float()
    return ((blocks / scale).round().clamp(-127, 127) * scale).view(n, k)


def linear(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    made.weight.data = weight
    if bias is not None:
        made.bias.data = bias
    return made


def tiled(weight: Tensor, bias: Tensor | None = None) -> PackedLinear:
    return join(linear(weight, bias), arena=Arena())


def kept_as(bits: int) -> int | None:
    """The bits of a weight that codes of `bits` bits reproduce; None if nothing is compiled here."""
    return (bits if CODES_PAY else 32) if can_compile() else None


def bits(product: nn.Module) -> int | None:
    """The bits of a product's weight; None if nothing is compiled here."""
    if not isinstance(product, TiledLinear):
        return None
    return product.tiles.bits if isinstance(product.tiles, Codes) else 32


def wanted(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out = x.double() @ weight.double().T
    return (out if bias is None else out + bias.double()).to(x.dtype)


WEIGHTS = {32: random(96, 160), 4: quantized(96, 160, 4), 8: quantized(96, 160, 8)}
FORMS = pytest.mark.parametrize("form", [PackedLinear, tiled])
Form = Callable[..., PackedLinear]


# --- both forms


@FORMS
@pytest.mark.parametrize("shape", [(32,), (1, 32), (2, 3, 32), (1, 0, 32), (2, 1, 4, 32)])
def test_any_number_of_dimensions(form: Form, shape: tuple[int, ...]) -> None:
    weight, x = random(8, 32), random(*shape, seed=1)
    out = form(weight)(x)
    assert out.shape == (*shape[:-1], 8)
    torch.testing.assert_close(out, wanted(x, weight, None), atol=1e-5, rtol=1e-5)


@FORMS
def test_inputs_that_are_not_contiguous(form: Form) -> None:
    weight, bias = random(8, 32), random(8, seed=1)
    product, wide = form(weight, bias), random(5, 64, seed=2)
    for x in (wide[:, ::2], wide[:, 32:], random(32, 5).T, random(6, 32)[::3], random(1, 32).expand(4, 32)):
        torch.testing.assert_close(product(x), wanted(x, weight, bias), atol=1e-5, rtol=1e-5)


@FORMS
def test_weights_that_are_not_contiguous(form: Form) -> None:
    x = random(3, 32, seed=1)
    for weight in (random(32, 8).T, random(8, 64)[:, ::2], random(16, 32)[::2]):
        torch.testing.assert_close(form(weight)(x), wanted(x, weight, None), atol=1e-5, rtol=1e-5)


# --- packed


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
@pytest.mark.parametrize(("outs", "ins"), [(7, 13), (576, 1536)])
def test_a_rows_bits_do_not_depend_on_others(outs: int, ins: int, threads: int) -> None:
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


# --- compiled: plain weights, and weights made of codes


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("kept", [32, 4, 8])
def test_tiled_any_number_of_rows(kept: int, with_bias: bool) -> None:
    weight, bias = WEIGHTS[kept], random(96, seed=1) if with_bias else None
    product = join(linear(weight, bias), arena=Arena())
    assert bits(product) == kept_as(kept)
    for rows in (*range(67), 200):
        x = random(rows, 160, seed=2 + rows)
        torch.testing.assert_close(product(x), F.linear(x, weight, bias), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("kept", [32, 4, 8])
def test_tiled_a_rows_bits_do_not_depend_on_others(kept: int, threads: int) -> None:
    product = join(linear(WEIGHTS[kept]), arena=Arena())
    x, before = random(200, 160, seed=1), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        alone = torch.cat([product(row[None]) for row in x])
        for rows in (*range(1, 65), 97, 200):
            assert same_numbers(product(x[:rows]), alone[:rows]), rows
            assert same_numbers(product(x[200 - rows :]), alone[200 - rows :]), rows
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("kept", [4, 8])
def test_codes_give_every_number_back(kept: int) -> None:
    code = tiler(WEIGHTS[kept])
    assert (code is not None) == can_compile()
    if code is not None:
        codes = code.encode([WEIGHTS[kept]], Arena())
        assert codes is not None
        assert codes.bits == kept
        for rows in (1, 160):
            picked = [code.linear(part, codes, None) for part in torch.eye(160).split(rows)]
            assert torch.equal(torch.cat(picked).T, WEIGHTS[kept])


@pytest.mark.parametrize("kept", [32, 4, 8])
def test_long_rows_and_many(kept: int) -> None:
    """Panels of decoded codes are as long as the weight's rows, for every thread and whatever came before."""
    for n, k in ((8, 32), (12, 2048), (4100, 64)):
        weight = random(n, k) if kept == 32 else quantized(n, k, kept)
        product = join(linear(weight), arena=Arena())
        for rows in (1, 5, 8, 9, 64, 65):
            x = random(rows, k, seed=rows)
            torch.testing.assert_close(product(x), F.linear(x, weight), atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("kept", [4, 8])
@pytest.mark.parametrize("spoil", [1e-6, float("nan"), float("inf")])
def test_one_number_that_no_code_gives_keeps_the_weight_plain(kept: int, spoil: float) -> None:
    weight = WEIGHTS[kept].clone()
    weight[57, 93] += spoil * abs(weight[57, 93]) if spoil < 1 else spoil
    product = join(linear(weight), arena=Arena())
    assert bits(product) == (32 if can_compile() else None)
    x = random(3, 160, seed=1)
    torch.testing.assert_close(product(x), F.linear(x, weight), atol=1e-4, rtol=1e-5, equal_nan=True)


def test_weights_of_one_number_and_of_zeros_have_codes() -> None:
    for weight in (torch.zeros(8, 32), torch.full((8, 32), 0.3), torch.full((8, 32), -2.5)):
        product, x = join(linear(weight), arena=Arena()), random(5, 32)
        assert bits(product) == kept_as(4)
        torch.testing.assert_close(product(x), F.linear(x, weight), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("biases", [(False, False, False), (True, True, True), (True, False, True)])
@pytest.mark.parametrize("width", [13, 64])
def test_joined_products_are_the_products_side_by_side(biases: tuple[bool, ...], width: int) -> None:
    torch.manual_seed(0)
    linears = [nn.Linear(width, outs, bias=bias) for outs, bias in zip((8, 4, 12), biases, strict=True)]
    joined = join(*linears, arena=Arena())
    assert (joined.bias is not None) == any(biases)
    assert (joined.in_features, joined.out_features) == (width, 24)
    assert bits(joined) == (32 if can_compile() and width == 64 else None)
    for rows in (1, 2, 17, 100):
        x = random(rows, width, seed=rows)
        out = torch.cat([linear(x) for linear in linears], dim=-1).detach()
        torch.testing.assert_close(joined(x), out, atol=1e-5, rtol=1e-5)
    assert not joined(torch.zeros(1, width)).requires_grad


def test_weights_in_one_arena_do_not_touch_each_other() -> None:
    arena = Arena()
    weights = [random(8, 16, seed=1), quantized(8, 32, 4), random(4, 48, seed=2), random(8, 16, seed=3)]
    products = [join(linear(weight.clone()), arena=arena) for weight in weights]
    for weight, product in zip(weights, products, strict=True):
        x = random(2, weight.shape[1], seed=4)
        torch.testing.assert_close(product(x), F.linear(x, weight), atol=1e-5, rtol=1e-5)


# --- 8 bits


def test_codes_are_near_the_weight_whatever_its_rows_have() -> None:
    """Each row has its own scale: small ones are as exact as large ones; zeros stay zeros."""
    weight = torch.randn(5, 256) * torch.tensor([1e-6, 1e-2, 1.0, 300.0, 0.0])[:, None]
    codes, scale = narrowed(weight)
    assert (codes.dtype, scale.dtype) == (FP8, torch.float32)
    found = widened(codes, scale, torch.float32)
    off = (found - weight).norm(dim=1) / weight.norm(dim=1).clamp_min(1e-30)
    assert off.max() < 0.04
    assert torch.equal(found[4], weight[4])
    torch.testing.assert_close(found.abs().amax(1), weight.abs().amax(1))  # the largest of a row is a code by itself


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_numbers_are_rounded_once(dtype: torch.dtype) -> None:
    codes, scale = narrowed(torch.randn(9, 64) * 0.02)
    wide = widened(codes, scale, dtype)
    assert wide.dtype == dtype
    assert torch.equal(wide, (codes.float() * scale[:, None]).to(dtype))
    assert codes.dtype == FP8, "the codes stay"


def test_a_product_by_eight_bits() -> None:
    linears = [nn.Linear(64, 24, bias=False), nn.Linear(64, 40)]
    both, x = narrow_join(*linears), torch.randn(7, 64)
    want = torch.cat([linear(x) for linear in linears], dim=1)
    got = both(x)
    assert got.shape == want.shape
    assert (got - want).norm() / want.norm() < 0.05
    assert torch.equal(both.bias[:24], torch.zeros(24))  # type: ignore[index]


def test_refilled_in_the_same_memory() -> None:
    linear, other = NarrowLinear(torch.randn(8, 16)), torch.randn(8, 16)
    places = linear.weight.data_ptr(), linear.scale.data_ptr()
    linear.refill(other)
    assert places == (linear.weight.data_ptr(), linear.scale.data_ptr())
    codes, scale = narrowed(other)
    assert torch.equal(widened(linear.weight, linear.scale, torch.float32), widened(codes, scale, torch.float32))
