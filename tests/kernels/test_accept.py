"""Acceptance, commit and compaction: the twins against plain Python and the engine, the kernels against the twins."""

from __future__ import annotations

from dataclasses import replace

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
    numbered_planes,
    packed,
    rounds,
)
from slipstream.core.draft import MAX_NODES, ROOT, Draft, Tree
from slipstream.kernels.gpu.accept import PathMoves, VerdictTable, _launch_compact, accept, compact
from slipstream.kernels.gpu.rows import RECENT
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
