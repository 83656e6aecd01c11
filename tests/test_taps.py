"""Taps: which hidden states somebody wants, and which columns of the cache's features are whose."""

from __future__ import annotations

import pytest
import torch

from slipstream.core.errors import DrafterError
from slipstream.models.taps import Taps, TapView


def test_the_union_has_every_state_once() -> None:
    union = Taps.union([Taps((4, 1)), Taps((1,), normed=True), Taps()])
    assert union == Taps((1, 4), normed=True)
    assert union.width(8) == 24
    assert union
    assert not Taps.union([])


def test_a_view_finds_its_own_columns_in_its_own_order() -> None:
    union = Taps((1, 2, 4), normed=True)
    plane = torch.tensor([[10, 11, 20, 21, 40, 41, 90, 91], [0] * 8])  # two numbers a state
    slots = torch.tensor([1, 0])
    assert TapView.of(Taps((4, 1)), union, plane).at(slots)[1].tolist() == [40, 41, 10, 11]
    assert TapView.of(Taps((), normed=True), union, plane).at(slots)[1].tolist() == [90, 91]
    whole = TapView.of(union, union, plane)
    assert whole.columns == (slice(0, 8),)
    assert torch.equal(whole.at(slots), plane[slots])


def test_a_layer_that_the_target_does_not_have_is_refused() -> None:
    Taps((0, 4)).check(4)
    with pytest.raises(DrafterError, match="after layer 5 are wanted, but the target has 4 layers"):
        Taps((0, 5)).check(4)
