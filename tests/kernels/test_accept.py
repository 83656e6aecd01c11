"""Kernels that accept drafts and lay out rows: each as its twin, and the twin as a plain walk."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from interpreted import DEVICE as KERNEL_DEVICE
from lane_rounds import (
    CPU,
    Lane,
    Outcome,
    Round,
    accepted,
    compare_acceptance,
    compare_compaction,
    compare_packing,
    numbered_planes,
    packed,
    rounds,
)
from slipstream.core.draft import MAX_NODES, ROOT, Draft, Tree
from slipstream.kernels.gpu.accept import PathMoves, VerdictTable, _launch_compact, accept, compact
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
from slipstream.kv.cache import compaction
from slipstream.verify.exact import verify_exact


def walk(tree: Tree, choices: tuple[int, ...]) -> list[int]:
    """The accepted nodes."""
    path: list[int] = []
    at = ROOT
    while True:
        fitting = [
            node
            for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True))
            if parent == at and token == choices[1 + at]
        ]
        if not fitting:
            return path
        at = fitting[0]
        path.append(at)


def check(round_: Round) -> Outcome:
    outcome = accepted(round_)
    told, moves, state = outcome.told, outcome.moves, outcome.state
    lanes = dict(enumerate(round_.lanes))
    for b, (tree, choices) in enumerate(zip(round_.trees, round_.choices, strict=True)):
        path = walk(tree, choices)
        own = choices[1 + path[-1]] if path else choices[0]
        tokens = [*(tree.tokens[node] for node in path), own]
        is_padding = round_.requests[b] == round_.trash
        if is_padding or (own == -1 and len(tree)):
            path, tokens = [], []
        if tokens and own != -1:
            before = round_.lanes[round_.requests[b]]
            recent = list(before.recent)
            for at, token in enumerate(tokens, before.length + 1):
                recent[at % RECENT] = token
            lanes[round_.requests[b]] = replace(
                before,
                last=own,
                previous=tokens[-2] if path else before.last,
                length=before.length + len(tokens),
                generated=before.generated + len(tokens),
                recent=tuple(recent),
            )
        assert told.emitted[b] == len(tokens)
        assert told.accepted[b] == len(path)
        assert told.tokens[b].tolist() == tokens + [-1] * (round_.width + 1 - len(tokens))
        assert told.path[b].tolist() == path + [0] * (round_.width - len(path))
        if moves is not None:
            src, dst = moves.src[b].tolist(), moves.dst[b].tolist()
            assert src[: len(path)] == [round_.slot(b, 1 + node) for node in path]
            assert dst[: len(path)] == [round_.slot(b, 1 + rank) for rank in range(len(path))]
            assert src[len(path) :] == dst[len(path) :]
            assert all(0 <= slot <= round_.trash_slot for slot in src)
    for lane, expected in lanes.items():
        assert state.last[lane] == expected.last
        assert state.previous[lane] == expected.previous
        assert state.length[lane] == expected.length
        assert state.generated[lane] == expected.generated
        assert tuple(state.pages[lane].tolist()) == expected.pages
        assert tuple(state.recent[lane].tolist()) == expected.recent
    return outcome


@settings(deadline=None, max_examples=100)
@given(st.booleans().flatmap(lambda is_tree: rounds(is_tree=is_tree)))
def test_the_twin_matches_the_walk(round_: Round) -> None:
    check(round_)


@settings(deadline=None, max_examples=40)
@given(st.booleans().flatmap(lambda is_tree: rounds(is_tree=is_tree)))
def test_the_kernel_matches_the_twin(round_: Round) -> None:
    compare_acceptance(round_, KERNEL_DEVICE)


@settings(deadline=None, max_examples=100)
@given(st.booleans().flatmap(lambda is_tree: rounds(is_tree=is_tree, distinct=True)))
def test_the_twin_matches_the_engines_round(round_: Round) -> None:
    real = [b for b, lane in enumerate(round_.requests) if lane != round_.trash]
    if not real:
        return
    outcome = accepted(round_)
    draft = Draft.pack([round_.trees[b] for b in real], CPU)
    choices = torch.zeros((len(real), draft.width + 1), dtype=torch.int64)
    slots = torch.zeros_like(choices)
    for i, b in enumerate(real):
        n = 1 + len(round_.trees[b])
        choices[i, :n] = torch.tensor(round_.choices[b])
        slots[i, :n] = torch.tensor([round_.slot(b, row) for row in range(n)])
    verdicts = verify_exact(draft, choices)
    for b, verdict in zip(real, verdicts.told([str(b) for b in real], draft.counts), strict=True):
        emitted = int(outcome.told.emitted[b])
        assert tuple(outcome.told.tokens[b, :emitted].tolist()) == verdict.tokens
        assert outcome.told.accepted[b] == verdict.accepted
        assert tuple(outcome.told.path[b, : verdict.accepted].tolist()) == verdict.path
    if outcome.moves is not None:
        theirs = compaction(slots, verdicts.path, verdicts.accepted)
        for i, b in enumerate(real):
            if outcome.told.emitted[b]:  # the engine moves before it knows that a round does not count
                width = draft.width
                assert outcome.moves.src[b, :width].tolist() == theirs.src.view(len(real), width)[i].tolist()
                assert outcome.moves.dst[b, :width].tolist() == theirs.dst.view(len(real), width)[i].tolist()


def one(tree: Tree, choices: tuple[int, ...], *, is_tree: bool, width: int | None = None) -> Round:
    lane = Lane(7, 8, 5, 3, tuple(range(40)))
    rows = 2 + len(tree)
    return Round((lane,), (0,), (tree,), (choices,), len(tree) if width is None else width, rows, is_tree, 2, 40)


@pytest.mark.parametrize("is_tree", [False, True])
def test_the_deepest_chain(is_tree: bool) -> None:
    round_ = one(Tree.chain(range(MAX_NODES)), tuple(range(MAX_NODES + 1)), is_tree=is_tree)
    assert check(round_).told.emitted.tolist() == [MAX_NODES + 1]
    compare_acceptance(round_, KERNEL_DEVICE)


def test_of_equal_children_the_first_is_taken() -> None:
    round_ = one(Tree((4, 4, 9), (ROOT, ROOT, 1)), (4, 5, 9, 6), is_tree=True)
    outcome = check(round_)
    assert outcome.told.tokens.tolist() == [[4, 5, -1, -1]]
    assert outcome.told.path.tolist() == [[0, 0, 0]]
    compare_acceptance(round_, KERNEL_DEVICE)


@pytest.mark.parametrize("is_tree", [False, True])
def test_an_unusable_token_undoes_a_round_with_a_draft(is_tree: bool) -> None:
    round_ = one(Tree.chain((4, 5)), (4, -1, 6), is_tree=is_tree)
    outcome = check(round_)
    assert outcome.told.table.tolist() == [[0, 0, -1, -1, -1, 0, 0]]
    assert [outcome.state.previous[0].item(), outcome.state.last[0].item()] == [8, 7]
    assert outcome.state.length[0] == 5
    compare_acceptance(round_, KERNEL_DEVICE)


@pytest.mark.parametrize("is_tree", [False, True])
def test_an_unusable_token_is_told_where_nothing_was_drafted(is_tree: bool) -> None:
    round_ = one(Tree(), (-1,), is_tree=is_tree, width=2)
    outcome = check(round_)
    assert outcome.told.table.tolist() == [[1, 0, -1, -1, -1, 0, 0]]
    assert [outcome.state.previous[0].item(), outcome.state.last[0].item()] == [8, 7]
    assert outcome.state.length[0] == 5
    compare_acceptance(round_, KERNEL_DEVICE)


@pytest.mark.parametrize("is_tree", [False, True])
def test_the_token_before_the_last_is_kept(is_tree: bool) -> None:
    """One token: what was last. More: the last of the guesses that were right."""
    for choices, previous, last in (((9, 0, 0), 7, 9), ((4, 9, 0), 4, 9), ((4, 5, 9), 5, 9)):
        round_ = one(Tree.chain((4, 5)), choices, is_tree=is_tree)
        state = check(round_).state
        assert [state.previous[0].item(), state.last[0].item()] == [previous, last]
        compare_acceptance(round_, KERNEL_DEVICE)


def test_an_unusable_token_beside_the_path_does_not_matter() -> None:
    outcome = check(one(Tree((4, 5), (ROOT, ROOT)), (5, -1, 6), is_tree=True))
    assert outcome.told.table.tolist() == [[2, 1, 5, 6, -1, 1, 0]]


def test_on_the_cpu_the_twin_runs_and_moves_go_with_trees() -> None:
    round_ = one(Tree((4, 5), (ROOT, ROOT)), (5, 0, 6), is_tree=True)
    told, moves = VerdictTable.empty(1, 2, CPU), PathMoves.empty(1, 2, CPU)
    state, rows = round_.state(CPU), packed(round_)
    with pytest.raises(AssertionError):
        accept(round_.chosen(CPU), round_.draft(CPU), rows, state, told, None)
    accept(round_.chosen(CPU), round_.draft(CPU), rows, state, told, moves)
    assert told.width == 2
    assert told.tokens.tolist() == [[5, 6, -1]]
    assert (moves.src.tolist(), moves.dst.tolist()) == ([[7, 5]], [[6, 5]])


def moved(planes: Tensor, src: list[int], dst: list[int]) -> Tensor:
    """All are read before any is written."""
    held = [planes[:, slot].clone() for slot in src]
    after = planes.clone()
    for slot, entry in zip(dst, held, strict=True):
        after[:, slot] = entry
    return after


@settings(deadline=None, max_examples=50)
@given(rounds(is_tree=True))
def test_compaction_matches_plain_assignment(round_: Round) -> None:
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
def test_the_kernel_of_compaction_matches_the_twin(round_: Round, dtype: torch.dtype, shape: tuple[int, int]) -> None:
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
    _launch_compact(ours, src.to(KERNEL_DEVICE), dst.to(KERNEL_DEVICE))
    assert torch.equal(ours.cpu(), expected)


def test_layers_that_lie_apart_are_moved_where_they_lie() -> None:
    whole = numbered_planes(12, torch.float32, 2, 4, layers=6)
    expected = whole.clone()
    expected[1::2, 3] = whole[1::2, 8]
    ours = whole.to(KERNEL_DEVICE)
    _launch_compact(ours[1::2], torch.tensor([[8]], device=KERNEL_DEVICE), torch.tensor([[3]], device=KERNEL_DEVICE))
    assert torch.equal(ours.cpu(), expected)


def test_nothing_to_move() -> None:
    planes = numbered_planes(8, torch.float32, 1, 2)
    before = planes.clone()
    none = torch.zeros((2, 0), dtype=torch.int64)
    compact(planes, none, none)
    _launch_compact(planes, none, none)
    assert torch.equal(planes, before)


def check_rows(round_: Round) -> PassRows:
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
def test_the_twin_of_rows_matches_the_walk(round_: Round) -> None:
    check_rows(round_)


@settings(deadline=None, max_examples=40)
@given(st.booleans().flatmap(lambda is_tree: rounds(is_tree=is_tree)))
def test_the_kernel_of_rows_matches_its_twin(round_: Round) -> None:
    compare_packing(round_, KERNEL_DEVICE)


def one_lane(*trees: Tree, is_tree: bool, rows: int, width: int) -> Round:
    lanes = tuple(Lane(7, 8, 5, 3, tuple(range(i * 40, i * 40 + 40))) for i in range(len(trees)))
    choices = tuple((0,) * (1 + len(tree)) for tree in trees)
    own = tuple(range(len(trees)))
    return Round(lanes, own, trees, choices, width, rows, is_tree, 2, 40 * len(trees))


def test_slots_follow_the_rows_and_positions_the_depth() -> None:
    tree = Tree((10, 11, 12, 13), (ROOT, ROOT, 1, ROOT))
    out = check_rows(one_lane(tree, is_tree=True, rows=6, width=4))
    assert out.positions.tolist() == [5, 6, 6, 7, 6, 0]
    assert out.slots.tolist() == [5, 6, 7, 8, 9, 80]
    assert out.ancestors is not None
    assert out.ancestors[3].tolist() == [0, 2, 3, -1, -1]


def test_the_deepest_chain_of_a_tree() -> None:
    deep = one_lane(Tree.chain(range(MAX_NODES)), Tree(), is_tree=True, rows=MAX_NODES + 2, width=MAX_NODES)
    out = check_rows(deep)
    assert out.ancestors is not None
    assert out.ancestors[MAX_NODES].tolist() == list(range(MAX_NODES + 1))
    compare_packing(deep, KERNEL_DEVICE)


def test_many_requests_and_many_padding_rows() -> None:
    trees = [Tree.chain(range(i % 4)) for i in range(64)]
    many = one_lane(*trees, is_tree=False, rows=300, width=3)
    assert check_rows(many).starts[-1] == 64 + 16 * 6
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
