"""Compaction: the twin against plain assignment, the kernel against the twin."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from interpreted import DEVICE as KERNEL_DEVICE
from lane_rounds import CPU, Round, accepted, compare_compaction, numbered_planes, rounds
from slipstream.kernels.compact import _launch, compact


def moved(planes: Tensor, src: list[int], dst: list[int]) -> Tensor:
    """All are read before any is written."""
    held = [planes[:, slot].clone() for slot in src]
    after = planes.clone()
    for slot, entry in zip(dst, held, strict=True):
        after[:, slot] = entry
    return after


@settings(deadline=None, max_examples=50)
@given(rounds(is_tree=True))
def test_the_twin_matches_plain_assignment(round_: Round) -> None:
    moves = accepted(round_).moves
    assert moves is not None
    planes = numbered_planes(round_.trash_slot + 1, torch.float32, 1, 3)
    expected = moved(planes, moves.src.flatten().tolist(), moves.dst.flatten().tolist())
    compact(planes, moves.src, moves.dst)
    assert torch.equal(planes, expected)


@settings(deadline=None, max_examples=25)
@given(
    round_=rounds(is_tree=True, max_requests=3),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    shape=st.sampled_from([(1, 3), (2, 4), (3, 64)]),
)
def test_the_kernel_matches_the_twin(round_: Round, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    compare_compaction(round_, KERNEL_DEVICE, dtype, *shape)


@pytest.mark.parametrize("device", {CPU, KERNEL_DEVICE})
def test_moves_that_overlap_read_before_they_write(device: torch.device) -> None:
    src, dst = [[3, 5, 7, 9], [20, 23, 20, 20]], [[2, 3, 5, 7], [20, 21, 20, 20]]
    planes = numbered_planes(24, torch.float32, 2, 5)
    expected = moved(planes, [*src[0], *src[1]], [*dst[0], *dst[1]])
    ours = planes.to(device)
    compact(ours, torch.tensor(src, device=device), torch.tensor(dst, device=device))
    assert torch.equal(ours.cpu(), expected)


def test_an_entry_larger_than_a_piece() -> None:
    width = 60
    src = torch.arange(10, 10 + width)[None] * 2
    dst = torch.arange(20, 20 + width)[None]
    planes = numbered_planes(200, torch.bfloat16, 3, 100)
    expected = moved(planes, src[0].tolist(), dst[0].tolist())
    ours = planes.to(KERNEL_DEVICE)
    _launch(ours, src.to(KERNEL_DEVICE), dst.to(KERNEL_DEVICE))
    assert torch.equal(ours.cpu(), expected)


def test_layers_that_lie_apart_are_moved_where_they_lie() -> None:
    whole = numbered_planes(12, torch.float32, 2, 4, layers=6)
    expected = whole.clone()
    expected[1::2, 3] = whole[1::2, 8]
    ours = whole.to(KERNEL_DEVICE)
    _launch(ours[1::2], torch.tensor([[8]], device=KERNEL_DEVICE), torch.tensor([[3]], device=KERNEL_DEVICE))
    assert torch.equal(ours.cpu(), expected)


def test_nothing_to_move() -> None:
    planes = numbered_planes(8, torch.float32, 1, 2)
    before = planes.clone()
    none = torch.zeros((2, 0), dtype=torch.int64)
    compact(planes, none, none)
    _launch(planes, none, none)
    assert torch.equal(planes, before)
