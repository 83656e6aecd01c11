"""The kernel that forbids by bits, against bools written plainly: every token, broken logits, rows with gaps."""

from __future__ import annotations

import math

import pytest
import torch

from interpreted import DEVICE
from mask_bits import as_bits
from slipstream.kernels.gpu.forbid_bits import _launch, forbid_bits_, forbid_bits_twin_


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 300, 4097])
@pytest.mark.parametrize("apply", [_launch, forbid_bits_twin_, forbid_bits_])
def test_only_allowed_tokens_are_left(vocab_size: int, apply: object) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(3, vocab_size, generator=generator).to(DEVICE)
    allowed = (torch.rand(3, vocab_size, generator=generator) < 0.5).to(DEVICE)
    wanted = torch.where(allowed, logits, -math.inf)
    apply(logits, as_bits(allowed))  # type: ignore[operator]
    assert torch.equal(logits, wanted)


@pytest.mark.parametrize("apply", [_launch, forbid_bits_twin_])
def test_a_broken_logit_stays_broken(apply: object) -> None:
    logits = torch.tensor([[0.0, math.nan, math.inf, -math.inf]], device=DEVICE)
    apply(logits, torch.zeros(1, 1, dtype=torch.int32, device=DEVICE))  # type: ignore[operator]
    assert logits[0].isnan().tolist() == [False, True, True, False]


def test_rows_of_a_wider_tensor_are_found() -> None:
    whole = torch.zeros(2, 80, device=DEVICE)
    _launch(whole[:, :40], torch.zeros(2, 2, dtype=torch.int32, device=DEVICE))
    assert (whole[:, :40] == -math.inf).all()
    assert (whole[:, 40:] == 0).all()
