"""Guesses held to the target's distribution: the kernels as their twins."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from interpreted import DEVICE, FLOATS
from slipstream.kernels.gpu.soft_rows import Wanted, Wish, _launch_judge, _launch_totals, judge_twin_

ROWS, STEPS = 3, 2


def target(vocab: int, names: int) -> tuple[Tensor, Tensor]:
    """Logits of the target, and which of its tokens can be named."""
    made = torch.Generator().manual_seed(vocab)
    logits = 3 * torch.randn(ROWS, vocab, generator=made)
    logits[0, 5] = -torch.inf  # a token that cannot come
    return logits.to(DEVICE), torch.randperm(vocab, generator=made)[:names].sort().values.to(DEVICE)


@pytest.mark.parametrize("vocab", [64, 100, 333])
def test_totals(vocab: int) -> None:
    logits, _ = target(vocab, vocab)
    total, best = _launch_totals(logits, block=64)
    torch.testing.assert_close(total, logits.logsumexp(1))
    assert torch.equal(best, logits.argmax(1))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    "wish", [Wish(), Wish(variation=0.7), Wish(sharpen=0.25), Wish(0.3, 0.5), Wish(keyed=2), Wish(0.3, 0.5, 0.7)]
)
@pytest.mark.parametrize("names", [64, 100, 170])
def test_judging(names: int, wish: Wish, dtype: torch.dtype) -> None:
    seen, ids = target(200, names)
    best = torch.full((200,), -1, device=DEVICE)
    best[ids] = torch.arange(names, device=DEVICE)
    said = torch.tensor([2, -1, 7], device=DEVICE)  # one cannot be named
    wanted = Wanted(seen[:, ids], seen.logsumexp(1), best[seen.argmax(1)], said)
    wanted.best[1] = -1  # its best token cannot be named
    guesses = (2 * torch.randn(STEPS * ROWS, names, generator=torch.Generator().manual_seed(1))).to(DEVICE, dtype)
    guesses[3, 5] = 60.0  # so sure of another token that its odds are cut
    weight = torch.tensor([1.0, 0.5, 0.0, 2.0, 1.0, 1.0], device=DEVICE)
    mine, theirs = guesses.clone(), guesses.clone()
    found = _launch_judge(mine, wanted, weight, wish, block=64)
    twin = judge_twin_(theirs, wanted, weight, wish)
    torch.testing.assert_close(found, twin, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(mine, theirs)
    assert twin.hit.tolist()[1] == 0
    assert [chance > 0 for chance in twin.met.tolist()] == [wish.keyed > 0 and row % ROWS != 1 for row in range(6)]
