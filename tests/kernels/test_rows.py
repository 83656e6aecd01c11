"""Rows of a pass and the last rows of a drafter: the twins against plain Python, the kernels against the twins."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from interpreted import DEVICE as KERNEL_DEVICE
from lane_rounds import CPU, Lane, Round, compare_packing, packed, rounds
from slipstream.core.draft import MAX_NODES, ROOT, Tree
from slipstream.kernels.gpu.rows import (
    RECENT,
    LaneState,
    LastRows,
    PassRows,
    _launch_last,
    last_rows_twin,
    pack_rows,
    ring,
)


def check(round_: Round) -> PassRows:
    """Row by row, as the docstring of `PassRows` says."""
    out = packed(round_)
    starts = [0]
    row = 0
    for b, tree in enumerate(round_.trees):
        for i in range(round_.brings(b)):
            lane = round_.lanes[round_.requests[b]]
            above = [i]
            while above[0]:
                above.insert(0, tree.parents[above[0] - 1] + 1)
            depth = len(above) - 1
            assert out.ids[row] == (tree.tokens[i - 1] if i else lane.last)
            assert out.positions[row] == lane.length + depth
            assert out.slots[row] == round_.slot(b, i)
            assert out.lanes[row] == round_.requests[b]
            assert out.generated[row] == lane.generated + depth
            assert out.requests[row] == b
            if out.ancestors is not None:
                names = [starts[-1] + a for a in above]
                assert out.ancestors[row].tolist() == names + [-1] * (round_.width - depth)
            row += 1
        starts.append(row)
    assert out.starts.tolist() == starts
    for padding in range(row, round_.rows):
        assert out.ids[padding] == out.positions[padding] == out.generated[padding] == 0
        assert out.slots[padding] == round_.trash_slot
        assert out.lanes[padding] == round_.trash
        assert out.requests[padding] == -1
        assert out.ancestors is None or set(out.ancestors[padding].tolist()) == {-1}
    return out


@settings(deadline=None, max_examples=100)
@given(st.booleans().flatmap(lambda is_tree: rounds(is_tree=is_tree)))
def test_the_twin_matches_the_walk(round_: Round) -> None:
    check(round_)


@settings(deadline=None, max_examples=40)
@given(st.booleans().flatmap(lambda is_tree: rounds(is_tree=is_tree)))
def test_the_kernel_matches_the_twin(round_: Round) -> None:
    compare_packing(round_, KERNEL_DEVICE)


def one_lane(*trees: Tree, is_tree: bool, rows: int, width: int) -> Round:
    lanes = tuple(Lane(7, 8, 5, 3, tuple(range(i * 40, i * 40 + 40))) for i in range(len(trees)))
    choices = tuple((0,) * (1 + len(tree)) for tree in trees)
    own = tuple(range(len(trees)))
    return Round(lanes, own, trees, choices, width, rows, is_tree, 2, 40 * len(trees))


def test_slots_follow_the_rows_and_positions_the_depth() -> None:
    tree = Tree((10, 11, 12, 13), (ROOT, ROOT, 1, ROOT))
    out = check(one_lane(tree, is_tree=True, rows=6, width=4))
    assert out.positions.tolist() == [5, 6, 6, 7, 6, 0]
    assert out.slots.tolist() == [5, 6, 7, 8, 9, 80]
    assert out.ancestors is not None
    assert out.ancestors[3].tolist() == [0, 2, 3, -1, -1]


def test_the_deepest_chain_of_a_tree() -> None:
    deep = one_lane(Tree.chain(range(MAX_NODES)), Tree(), is_tree=True, rows=MAX_NODES + 2, width=MAX_NODES)
    out = check(deep)
    assert out.ancestors is not None
    assert out.ancestors[MAX_NODES].tolist() == list(range(MAX_NODES + 1))
    compare_packing(deep, KERNEL_DEVICE)


def test_many_requests_and_many_padding_rows() -> None:
    trees = [Tree.chain(range(i % 4)) for i in range(64)]
    many = one_lane(*trees, is_tree=False, rows=300, width=3)
    assert check(many).starts[-1] == 64 + 16 * 6
    compare_packing(many, KERNEL_DEVICE)


def test_a_branching_draft_asks_for_ancestors() -> None:
    round_ = one_lane(Tree((1, 2), (ROOT, ROOT)), is_tree=True, rows=3, width=2)
    chains_only = PassRows.empty(1, 2, 3, tree=False, device=CPU)
    with pytest.raises(AssertionError):
        pack_rows(round_.state(CPU), torch.tensor([0]), round_.draft(CPU), chains_only, page_size=2, trash_slot=80)


def test_on_the_cpu_the_twin_runs() -> None:
    round_ = one_lane(Tree((1, 2), (ROOT, ROOT)), is_tree=True, rows=3, width=2)
    out = PassRows.empty(1, 2, 3, tree=True, device=CPU)
    pack_rows(round_.state(CPU), torch.tensor([0]), round_.draft(CPU), out, page_size=2, trash_slot=80)
    assert out.ids.tolist() == [7, 1, 2]


PAGE, PAGES, TRASH = 4, 40, 999


def state(lengths: list[int]) -> LaneState:
    """Token t of lane l is 1000 l + t; its pages stand in no order. The last token is not in the cache."""
    lanes = len(lengths)
    pages = torch.randperm(lanes * PAGES, generator=torch.Generator().manual_seed(0)).view(lanes, PAGES)
    recent = [ring([1000 * lane + t for t in range(length + 1)]) for lane, length in enumerate(lengths)]
    nothing = torch.zeros(lanes, dtype=torch.int64, device=KERNEL_DEVICE)
    return LaneState(
        nothing, nothing, torch.tensor(lengths, device=KERNEL_DEVICE), 7 + torch.arange(lanes, device=KERNEL_DEVICE),
        pages.int().to(KERNEL_DEVICE), torch.tensor(recent, device=KERNEL_DEVICE),
    )  # fmt: skip


def both(given: LaneState, lanes: list[int], count: int, last_place: int, shift: int = 1) -> LastRows:
    which = torch.tensor(lanes, device=KERNEL_DEVICE)
    found = LastRows.empty(len(lanes), count, KERNEL_DEVICE)
    _launch_last(given, which, count, PAGE, TRASH, last_place, shift, found)
    twin = last_rows_twin(given, which, count, page_size=PAGE, trash_slot=TRASH, last_place=last_place, shift=shift)
    for field in fields(LastRows):
        assert torch.equal(getattr(found, field.name), getattr(twin, field.name)), field.name
    return found


def test_last_rows_a_long_text_and_a_short_one() -> None:
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


def test_last_rows_entries_that_stand_where_their_tokens_do() -> None:
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
def test_last_rows_the_kernel_as_its_twin(lengths: list[int], count: int, last_place: int, shift: int) -> None:
    rows = both(state(lengths), list(range(len(lengths)))[::-1], count, last_place, shift)
    assert int(rows.places.max()) <= last_place
    assert int(rows.places.min()) >= 0
