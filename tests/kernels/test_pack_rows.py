"""The rows of a pass: the twin against a walk over plain data, the kernel against the twin."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from interpreted import DEVICE as KERNEL_DEVICE
from lane_rounds import CPU, Lane, Round, compare_packing, packed, rounds
from slipstream.core.draft import MAX_NODES, ROOT, Tree
from slipstream.kernels.pack_rows import PassRows, pack_rows


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
