"""What a head's first layer reads: the kernel against its twin, and the twin against plain words."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from interpreted import DEVICE
from slipstream.kernels.join_feature import _launch, join_feature, join_feature_twin

CLOSE = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 3.2e-2}
EPS = 1e-5


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("width", [7, 64, 100])
@pytest.mark.parametrize(("norms", "normed_beside"), [(False, False), (True, False), (True, True)])
def test_the_kernel_matches_the_twin(dtype: torch.dtype, width: int, norms: bool, normed_beside: bool) -> None:
    table, feature = numbers(9, width, dtype=dtype), numbers(5, width, dtype=dtype, seed=1)
    ids = torch.tensor([0, 8, 3, -1, 40], device=DEVICE)
    weights = (numbers(width, dtype=dtype, seed=2), numbers(width, dtype=dtype, seed=3)) if norms else None
    before = feature.clone()
    behind = torch.tensor([4, 0, 0, 2, 1], device=DEVICE) if normed_beside or not norms else None
    ours = _launch(ids, table, feature, weights, EPS, behind, normed_beside, False)
    twin = join_feature_twin(ids, table, feature, weights, EPS, behind=behind, normed_beside=normed_beside)
    for have, want in zip(ours, twin, strict=True):
        assert have.dtype == dtype
        torch.testing.assert_close(have, want, rtol=CLOSE[dtype], atol=CLOSE[dtype])
    assert torch.equal(feature, before)
    assert ours.beside.data_ptr() != feature.data_ptr()  # the layer adds to it


def test_the_twin_is_what_its_words_say() -> None:
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


def test_no_rows_are_no_launch() -> None:
    table = numbers(9, 8)
    empty = _launch(torch.empty(0, dtype=torch.int64, device=DEVICE), table, table[:0], None, EPS, None, False, False)
    assert empty.read.shape == (0, 16)
