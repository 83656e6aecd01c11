"""Integers that stand for numbers: in the same order, and the same number again."""

from __future__ import annotations

import torch

from interpreted import DEVICE
from slipstream.kernels.jit import jit, tl
from slipstream.kernels.sortable import NOTHING, sortable, unsorted


@jit
def _both_ways(x_ptr: tl.tensor, key_ptr: tl.tensor, again_ptr: tl.tensor, N: tl.constexpr) -> None:
    at = tl.arange(0, N)
    key = sortable(tl.load(x_ptr + at))
    tl.store(key_ptr + at, key)
    tl.store(again_ptr + at, unsorted(key))


def test_keys_are_in_the_order_of_their_numbers() -> None:
    edges = [torch.inf, -torch.inf, 0.0, -0.0, 1e-45, -1e-45, 3.4e38, -3.4e38, -1e38, 1.0, -1.0]
    x = torch.cat((torch.tensor(edges), torch.randn(64 - len(edges)))).to(DEVICE)
    key, again = torch.empty(64, dtype=torch.int32, device=DEVICE), torch.empty_like(x)
    _both_ways[(1,)](x, key, again, N=64)
    assert torch.equal(again, x)
    assert torch.equal(key[:, None] < key, x[:, None] < x)
    assert torch.equal(key[:, None] == key, x[:, None] == x)  # both zeros are one
    assert int(key[1]) == int(getattr(NOTHING, "value", NOTHING))
