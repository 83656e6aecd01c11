"""Kernels of norms and of rotary embedding with the cache write: each as its twin."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from interpreted import DEVICE, FLOATS
from slipstream.kernels.gpu.norms import (
    _launch_add_norm,
    _launch_join_feature,
    add_norm,
    add_norm_at,
    add_norm_twin,
    join_feature,
    join_feature_twin,
)
from slipstream.kernels.gpu.rotary_write import _launch, rotary_write, rotary_write_twin

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
    out = _launch_add_norm(ours, delta, weight, EPS, False)
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
    together = _launch_add_norm(x.clone(), delta, weight, EPS, False)
    for row in range(6):
        alone = _launch_add_norm(x[row : row + 1].clone(), delta[:, row : row + 1].contiguous(), weight, EPS, False)
        assert torch.equal(alone[0], together[row])


@pytest.mark.parametrize("dtype", DTYPES)
def test_some_rows_are_as_among_all(dtype: torch.dtype) -> None:
    x, weight, delta = numbers(6, 100, dtype=dtype), numbers(100, dtype=dtype, seed=1), numbers(3, 6, 100, seed=2)
    rows, sums, whole = torch.tensor([4, 0, 4], device=DEVICE), numbers(3, 100, dtype=dtype), x.clone()
    kept = x.clone()
    normed = _launch_add_norm(x, delta, weight, EPS, False, rows, sums)
    assert torch.equal(normed, _launch_add_norm(whole, delta, weight, EPS, False)[rows])
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
    _launch_add_norm(x, delta, one, EPS, False)
    assert x.tolist() == [[3.0] * 3] * 2  # the first was lost in the second


def test_on_the_cpu_the_twin_runs_and_is_the_norm() -> None:
    x, delta, weight = torch.randn(4, 24), torch.randn(2, 4, 24), torch.randn(24)
    want = torch.nn.functional.rms_norm(x + delta.sum(0), (24,), weight, EPS)
    residual = x + delta.sum(0)
    torch.testing.assert_close(add_norm(x, delta, weight, EPS), want)
    torch.testing.assert_close(x, residual)
    torch.testing.assert_close(add_norm(x, None, weight, EPS), want)


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("width", [7, 64, 100])
@pytest.mark.parametrize(("norms", "normed_beside"), [(False, False), (True, False), (True, True)])
def test_the_input_of_a_head_as_its_twin(dtype: torch.dtype, width: int, norms: bool, normed_beside: bool) -> None:
    table, feature = numbers(9, width, dtype=dtype), numbers(5, width, dtype=dtype, seed=1)
    ids = torch.tensor([0, 8, 3, -1, 40], device=DEVICE)
    weights = (numbers(width, dtype=dtype, seed=2), numbers(width, dtype=dtype, seed=3)) if norms else None
    before = feature.clone()
    behind = torch.tensor([4, 0, 0, 2, 1], device=DEVICE) if normed_beside or not norms else None
    ours = _launch_join_feature(ids, table, feature, weights, EPS, behind, normed_beside, False)
    twin = join_feature_twin(ids, table, feature, weights, EPS, behind=behind, normed_beside=normed_beside)
    for have, want in zip(ours, twin, strict=True):
        assert have.dtype == dtype
        torch.testing.assert_close(have, want, rtol=CLOSE[dtype], atol=CLOSE[dtype])
    assert torch.equal(feature, before)
    assert ours.beside.data_ptr() != feature.data_ptr()  # the layer adds to it


def test_the_input_of_a_head_is_token_and_feature() -> None:
    table, feature, one, two = torch.randn(9, 24), torch.randn(3, 24), torch.randn(24), torch.randn(24)
    ids = torch.tensor([4, 0, 8])
    token = torch.nn.functional.rms_norm(table[ids], (24,), one, EPS)
    normed = torch.nn.functional.rms_norm(feature, (24,), two, EPS)
    found = join_feature(ids, table, feature, (one, two), EPS)
    torch.testing.assert_close(found.read, torch.cat((token, normed), 1))
    assert torch.equal(found.beside, feature)
    torch.testing.assert_close(join_feature(ids, table, feature, (one, two), EPS, normed_beside=True).beside, normed)
    assert torch.equal(join_feature(ids, table, feature, None, EPS).read, torch.cat((table[ids], feature), 1))
    behind = torch.tensor([2, 2, 0])
    assert torch.equal(join_feature(ids, table, feature, None, EPS, behind=behind).beside, feature[behind])


def test_no_rows_of_a_head_are_no_launch() -> None:
    table = numbers(9, 8)
    ids = torch.empty(0, dtype=torch.int64, device=DEVICE)
    empty = _launch_join_feature(ids, table, table[:0], None, EPS, None, False, False)
    assert empty.read.shape == (0, 16)


ROTARY_CLOSE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3.2e-2}


SLOTS, POSITIONS, EPS = 12, 20, 1e-6


class Scene:
    """Rows of a joined product, and a cache whose other slots must stay untouched."""

    def __init__(
        self, dtype: torch.dtype, *, rows: int = 3, heads: int = 4, kv_heads: int = 2, dim: int = 8,
        turned: int | None = None, splits: int = 1, norms: bool = False,
    ) -> None:  # fmt: skip
        generator = torch.Generator().manual_seed(rows + dim)

        def numbers(*shape: int, kind: torch.dtype = dtype) -> Tensor:
            return torch.randn(shape, generator=generator).to(kind).to(DEVICE)

        size = dim if turned is None else turned
        self.heads, self.kv_heads, self.dim = heads, kv_heads, dim
        self.qkv = numbers(splits, rows, (heads + 2 * kv_heads) * dim, kind=torch.float32)
        angles = torch.rand(POSITIONS, size // 2, generator=generator).repeat(1, 2).to(DEVICE) * 6
        self.cos, self.sin = angles.cos().to(dtype), angles.sin().to(dtype)
        self.positions = torch.randint(0, POSITIONS, (rows,), generator=generator).to(DEVICE)
        self.slots = torch.randperm(SLOTS, generator=generator)[:rows].to(DEVICE)
        self.norms = (numbers(dim), numbers(dim)) if norms else (None, None)
        self.keys, self.values = numbers(SLOTS, kv_heads, dim), numbers(SLOTS, kv_heads, dim)

    def run(self, kernel: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values."""
        keys, values = self.keys.clone(), self.values.clone()
        rows = (self.qkv, self.cos, self.sin, self.positions, self.slots)
        given = (*rows, *self.norms, keys, values, self.heads, EPS)
        turn: Any = partial(_launch, overlap=False) if kernel else rotary_write_twin
        return turn(*given), keys, values

    def check(self) -> None:
        (query, keys, values), (want_query, want_keys, want_values) = self.run(True), self.run(False)
        close = ROTARY_CLOSE[self.keys.dtype]
        torch.testing.assert_close(query, want_query, rtol=close, atol=close)
        torch.testing.assert_close(keys, want_keys, rtol=close, atol=close)
        torch.testing.assert_close(values, want_values, rtol=close, atol=close)
        if values.dtype in FLOATS:
            assert torch.equal(values, want_values)  # summed and rounded, nothing else
        others = [slot for slot in range(SLOTS) if slot not in self.slots.tolist()]
        assert torch.equal(keys[others], self.keys[others])
        assert torch.equal(values[others], self.values[others])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (9, 3), (1, 1)])
def test_the_kernel_of_rotary_matches_its_twin(dtype: torch.dtype, norms: bool, heads: int, kv_heads: int) -> None:
    Scene(dtype, heads=heads, kv_heads=kv_heads, norms=norms).check()


@pytest.mark.parametrize("dim", [64, 80, 96, 128])
@pytest.mark.parametrize("splits", [1, 3])
def test_head_sizes_and_runs(dim: int, splits: int) -> None:
    Scene(torch.float32, dim=dim, splits=splits, norms=True).check()


@pytest.mark.parametrize("turned", [2, 4, 20])
@pytest.mark.parametrize("norms", [False, True])
def test_a_part_of_a_head_may_be_turned(turned: int, norms: bool) -> None:
    scene = Scene(torch.float32, dim=20, turned=turned, norms=norms)
    scene.check()
    if not norms and turned < 20:
        query, _, _ = scene.run(True)
        straight = scene.qkv[0].view(3, -1, 20)[:, : scene.heads, turned:]
        assert torch.equal(query[..., turned:], straight)


def test_a_row_comes_out_the_same_alone() -> None:
    scene = Scene(torch.bfloat16, rows=5, splits=2, norms=True)
    query, keys, values = scene.run(True)
    for row in range(5):
        alone = Scene(torch.bfloat16, rows=5, splits=2, norms=True)
        alone.qkv = scene.qkv[:, row : row + 1].contiguous()
        alone.positions, alone.slots = scene.positions[row : row + 1], scene.slots[row : row + 1]
        own_query, own_keys, own_values = alone.run(True)
        assert torch.equal(own_query[0], query[row])
        slot = int(scene.slots[row])
        assert torch.equal(own_keys[slot], keys[slot])
        assert torch.equal(own_values[slot], values[slot])


def test_on_the_cpu_the_twin_runs_and_turns_as_the_models_do() -> None:
    """Two numbers of a head, half a head apart, are turned by one angle; values are left alone."""
    angles = torch.tensor([[0.3, 1.1], [0.7, 2.0]]).repeat(1, 2)
    qkv = torch.randn(1, 2, 3 * 4)
    keys, values = torch.zeros(4, 1, 4), torch.zeros(4, 1, 4)
    at, slots = torch.tensor([1, 0]), torch.tensor([3, 1])
    query = rotary_write(qkv, angles.cos(), angles.sin(), at, slots, None, None, keys, values, 1)
    for row in range(2):
        q, k, v = qkv[0, row].view(3, 4)
        for head, turned in ((q, query[row, 0]), (k, keys[slots[row], 0])):
            for pair in range(2):
                here = torch.complex(head[pair], head[pair + 2]) * torch.exp(1j * angles[at[row], pair])
                assert turned[pair].item() == pytest.approx(here.real.item(), abs=1e-6)
                assert turned[pair + 2].item() == pytest.approx(here.imag.item(), abs=1e-6)
        assert torch.equal(values[slots[row], 0], v)
