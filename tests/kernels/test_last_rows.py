"""The rows that a draft begins with: of long texts and of short ones; the kernel as its twin."""

from __future__ import annotations

from dataclasses import fields

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from interpreted import DEVICE
from slipstream.kernels.last_rows import LastRows, _launch, last_rows_twin
from slipstream.kernels.pack_rows import RECENT, LaneState, ring

PAGE, PAGES, TRASH = 4, 40, 999


def state(lengths: list[int]) -> LaneState:
    """Token t of lane l is 1000 l + t; its pages stand in no order. The last token is not in the cache."""
    lanes = len(lengths)
    pages = torch.randperm(lanes * PAGES, generator=torch.Generator().manual_seed(0)).view(lanes, PAGES)
    recent = [ring([1000 * lane + t for t in range(length + 1)]) for lane, length in enumerate(lengths)]
    nothing = torch.zeros(lanes, dtype=torch.int64, device=DEVICE)
    return LaneState(
        nothing, nothing, torch.tensor(lengths, device=DEVICE), 7 + torch.arange(lanes, device=DEVICE),
        pages.int().to(DEVICE), torch.tensor(recent, device=DEVICE),
    )  # fmt: skip


def both(given: LaneState, lanes: list[int], count: int, last_place: int, shift: int = 1) -> LastRows:
    which = torch.tensor(lanes, device=DEVICE)
    found = LastRows.empty(len(lanes), count, DEVICE)
    _launch(given, which, count, PAGE, TRASH, last_place, shift, found)
    twin = last_rows_twin(given, which, count, page_size=PAGE, trash_slot=TRASH, last_place=last_place, shift=shift)
    for field in fields(LastRows):
        assert torch.equal(getattr(found, field.name), getattr(twin, field.name)), field.name
    return found


def test_a_long_text_and_a_short_one() -> None:
    where = state([70, 2])
    rows = both(where, [1, 0], 4, 100)
    assert rows.tokens.tolist() == [1, 2, 3, 4, 67, 68, 69, 70]
    assert rows.ids.view(2, 4)[0, :2].tolist() == [1001, 1002]
    assert rows.ids.view(2, 4)[1].tolist() == [67, 68, 69, 70]
    assert rows.places.tolist() == [0, 1, 1, 1, 66, 67, 68, 69], "one before its token; a text has no more than it has"
    first = int(where.pages[1, 0]) * PAGE
    assert rows.seen[:2].tolist() == [first, first + 1]
    assert rows.slots[:4].tolist() == [first, first + 1, TRASH, TRASH]
    assert rows.slots[4:].tolist() == rows.seen[4:].tolist()
    assert rows.last.tolist() == [1, 7]
    assert rows.positions.tolist() == [3, 71]
    assert rows.generated.tolist() == [8, 7]


def test_entries_that_stand_where_their_tokens_do() -> None:
    where = state([70, 2])
    rows = both(where, [1, 0], 4, 100, shift=0)
    assert rows.places.tolist() == [0, 1, 2, 2, 67, 68, 69, 70]
    assert rows.ids.view(2, 4)[0, :3].tolist() == [1000, 1001, 1002]
    assert rows.ids.view(2, 4)[1].tolist() == [67, 68, 69, 70]
    first = int(where.pages[1, 0]) * PAGE
    assert rows.slots[:4].tolist() == [first, first + 1, first + 2, TRASH]
    assert rows.last.tolist() == [2, 7]


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.integers(0, PAGE * PAGES - 1), min_size=1, max_size=4),
    st.integers(1, RECENT),
    st.integers(0, PAGE * PAGES - 1),
    st.integers(0, 1),
)
def test_the_kernel_as_its_twin(lengths: list[int], count: int, last_place: int, shift: int) -> None:
    rows = both(state(lengths), list(range(len(lengths)))[::-1], count, last_place, shift)
    assert int(rows.places.max()) <= last_place
    assert int(rows.places.min()) >= 0
