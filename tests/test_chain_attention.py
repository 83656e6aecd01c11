"""Attention in training-time test is a softmax over the text and the chain, values and gradients alike."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from slipstream.train.chain_attention import Sequences, attend_chain
from training_rows import random_rows

LENGTHS = ([5, 1, 7], [2, 9])
WIDTH, HEADS, DIM = 16, 3, 4


def by_definition(
    q: Tensor, k: Tensor, v: Tensor, chain_k: Tensor, chain_v: Tensor, segments: Tensor, offset: Tensor, row: int
) -> Tensor:  # [h, D]
    """One row: text keys of its sequence up to `steps` places before it, then the chain's."""
    steps = len(chain_k)
    seen = [j for j in range(row - steps + 1) if segments[j] == segments[row] and offset[row] >= steps]
    keys = torch.cat((k[seen], chain_k[:, row]))  # [s, h, D]
    values = torch.cat((v[seen], chain_v[:, row]))
    shares = (torch.einsum("hd,shd->hs", q[row], keys) * DIM**-0.5).softmax(-1)
    return torch.einsum("hs,shd->hd", shares, values)


@pytest.mark.parametrize("steps", [0, 1, 3, 8, 9])
def test_values_and_gradients_are_those_of_one_softmax(steps: int) -> None:
    rows = random_rows(LENGTHS, WIDTH, 50)
    count = rows.ids.numel()
    sequences = Sequences.of(rows)
    numbers = (rows.segments + 10 * torch.arange(len(LENGTHS))[:, None]).flatten()
    made = torch.Generator().manual_seed(steps)
    shapes = [(count, HEADS, DIM)] * 3 + [(steps, count, HEADS, DIM)] * 2
    given = [torch.randn(shape, generator=made, requires_grad=True) for shape in shapes]
    valid = [i for i in range(count) if rows.real.flatten()[i] and (steps == 0 or sequences.offset[i] >= steps - 1)]
    assert valid
    push = torch.randn(count, HEADS, DIM, generator=made)

    q, k, v, chain_k, chain_v = given
    out = attend_chain(q, k, v, chain_k, chain_v, sequences)
    assert out.isfinite().all()
    ours = torch.autograd.grad((out[valid] * push[valid]).sum(), given, allow_unused=True)
    wanted = torch.stack([by_definition(q, k, v, chain_k, chain_v, numbers, sequences.offset, i) for i in valid])
    theirs = torch.autograd.grad((wanted * push[valid]).sum(), given, allow_unused=True)
    torch.testing.assert_close(out[valid], wanted)
    for mine, other, like in zip(ours, theirs, given, strict=True):
        zero = torch.zeros_like(like)
        torch.testing.assert_close(
            zero if mine is None else mine, zero if other is None else other, rtol=1e-4, atol=1e-5
        )


def test_sequences_stand_in_rows_of_their_own() -> None:
    rows = random_rows(LENGTHS, WIDTH, 50)
    sequences = Sequences.of(rows)
    assert sequences.source.shape == (5, 9)
    ids = rows.ids.flatten()
    apart = torch.where(sequences.filled, ids[sequences.source], -1)
    lengths = [length for row in LENGTHS for length in row]
    assert sequences.filled.sum(1).tolist() == lengths
    assert apart[4, :9].tolist() == rows.ids[1, 2:11].tolist()
    back = sequences.together(sequences.apart(ids[:, None, None]), 0, -1)[:, 0, 0]
    real = rows.real.flatten()
    assert torch.equal(back[real], ids[real])
