"""Compiled products: what `F.linear` gives, for plain weights and for those made of codes, and a row feels nobody."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from families import same_numbers
from slipstream.kernels.arena import Arena
from slipstream.kernels.codes import Codes
from slipstream.kernels.compiled import can_compile
from slipstream.kernels.tiled import CODES_PAY, TiledLinear, join, tiler


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def quantized(n: int, k: int, bits: int, seed: int = 0) -> Tensor:
    """A weight as a converted GGUF file has it: Q4_1 or Q8_0, written out in fp32."""
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


def kept_as(bits: int) -> int | None:
    """How a weight is kept that could be in so many bits; None where nothing is compiled here."""
    return (bits if CODES_PAY else 32) if can_compile() else None


def bits(product: nn.Module) -> int | None:
    """How its weight is kept; None where nothing is compiled here."""
    if not isinstance(product, TiledLinear):
        return None
    return product.tiles.bits if isinstance(product.tiles, Codes) else 32


WEIGHTS = {32: random(96, 160), 4: quantized(96, 160, 4), 8: quantized(96, 160, 8)}


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("kept", [32, 4, 8])
def test_any_number_of_rows(kept: int, with_bias: bool) -> None:
    weight, bias = WEIGHTS[kept], random(96, seed=1) if with_bias else None
    product = join(linear(weight, bias), arena=Arena())
    assert bits(product) == kept_as(kept)
    for rows in (*range(67), 200):
        x = random(rows, 160, seed=2 + rows)
        torch.testing.assert_close(product(x), F.linear(x, weight, bias), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("kept", [32, 4, 8])
def test_a_row_is_the_same_to_the_bit_in_any_company(kept: int, threads: int) -> None:
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


@pytest.mark.parametrize("shape", [(32,), (2, 3, 32), (1, 0, 32)])
def test_any_number_of_dimensions(shape: tuple[int, ...]) -> None:
    weight, x = random(8, 32), random(*shape, seed=1)
    torch.testing.assert_close(join(linear(weight), arena=Arena())(x), F.linear(x, weight), atol=1e-5, rtol=1e-5)


def test_inputs_that_do_not_lie_in_one_piece() -> None:
    weight = random(8, 32)
    product, wide = join(linear(weight), arena=Arena()), random(5, 64, seed=2)
    for x in (wide[:, ::2], wide[:, 32:], random(32, 5).T, random(1, 32).expand(4, 32)):
        torch.testing.assert_close(product(x), F.linear(x, weight), atol=1e-5, rtol=1e-5)
