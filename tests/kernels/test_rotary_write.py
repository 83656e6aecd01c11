"""From the joined product to attention: the kernel against its twin, and the twin against the plain steps."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from interpreted import DEVICE, FLOATS
from slipstream.kernels.gpu.rotary_write import _launch, rotary_write, rotary_write_twin

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CLOSE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3.2e-2}
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
        close = CLOSE[self.keys.dtype]
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
def test_the_kernel_matches_the_twin(dtype: torch.dtype, norms: bool, heads: int, kv_heads: int) -> None:
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
