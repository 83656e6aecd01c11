"""The small kernels of a round on a GPU: the same comparisons as by the interpreter, and inside a captured graph."""

from __future__ import annotations

from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lane_rounds import (
    Round,
    accepted,
    assert_same,
    compare_acceptance,
    compare_compaction,
    compare_packing,
    numbered_planes,
    packed,
    random_round,
    rounds,
)
from slipstream.kernels.gpu.accept import PathMoves, VerdictTable, accept, compact
from slipstream.kernels.gpu.rows import PassRows, pack_rows

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


@settings(deadline=None, max_examples=200)
@given(st.booleans().flatmap(lambda is_tree: rounds(is_tree=is_tree, max_requests=64)))
def test_packing_matches_the_twin(round_: Round) -> None:
    compare_packing(round_, CUDA)


@settings(deadline=None, max_examples=200)
@given(st.booleans().flatmap(lambda is_tree: rounds(is_tree=is_tree, max_requests=64)))
def test_acceptance_matches_the_twin(round_: Round) -> None:
    compare_acceptance(round_, CUDA)


@settings(deadline=None, max_examples=100)
@given(
    round_=rounds(is_tree=True, max_requests=16),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    shape=st.sampled_from([(1, 3), (2, 4), (3, 64), (8, 128)]),
)
def test_compaction_matches_the_twin(round_: Round, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    compare_compaction(round_, CUDA, dtype, *shape)


@pytest.mark.parametrize("is_tree", [False, True])
def test_a_captured_round_is_replayed_with_other_contents(is_tree: bool) -> None:
    """Three launches in one graph: nothing of the first round's values may be baked in."""
    first, *others = (random_round(Random(seed), 4, 15, is_tree=is_tree, distinct=True) for seed in range(200))
    alike = [r for r in others if _shape(r) == _shape(first)]
    assert len(alike) > 2
    state, lanes, draft = first.state(CUDA), first.lane_of(CUDA), first.draft(CUDA)
    # the largest pass of them all: the rest of its rows is padding
    most = max(sum(r.brings(b) for b in range(4)) for r in alike)
    rows = PassRows.empty(4, 15, most, tree=is_tree, device=CUDA)
    chosen = torch.zeros(most, dtype=torch.int64, device=CUDA)
    told = VerdictTable.empty(4, 15, CUDA)
    moves = PathMoves.empty(4, 15, CUDA) if is_tree else None
    planes = numbered_planes(first.trash_slot + 1, torch.bfloat16, 2, 64)
    cache = planes.to(CUDA)

    def run() -> None:
        pack_rows(state, lanes, draft, rows, page_size=first.page_size, trash_slot=first.trash_slot)
        accept(chosen, draft, rows, state, told, moves)
        if moves is not None:
            compact(cache, moves.src, moves.dst)

    lanes.fill_(first.trash)  # warm up, and capture, on padding alone
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for round_ in alike:
        fresh = round_.state(CUDA)
        for name in ("last", "previous", "length", "generated", "pages", "recent"):
            getattr(state, name).copy_(getattr(fresh, name))
        lanes.copy_(round_.lane_of(CUDA))
        theirs = round_.draft(CUDA)
        draft.tokens.copy_(theirs.tokens)
        draft.parents.copy_(theirs.parents)
        draft.counts.copy_(theirs.counts)
        used = sum(round_.brings(b) for b in range(4))
        chosen[:used] = round_.chosen(CUDA)[:used]
        cache.copy_(planes)
        graph.replay()
        expected, laid = accepted(round_), packed(round_)
        assert_same([rows.ids[:used], rows.slots[:used]], [laid.ids[:used], laid.slots[:used]])
        assert set(rows.lanes[used:].tolist()) <= {round_.trash}
        assert_same([told.table], [expected.told.table])
        for name in ("last", "previous", "length", "generated", "recent"):
            assert_same([getattr(state, name)[:-1]], [getattr(expected.state, name)[:-1]])
        if moves is not None:
            assert expected.moves is not None
            after = planes.clone()
            compact(after, expected.moves.src, expected.moves.dst)
            assert_same([cache], [after])


def _shape(round_: Round) -> tuple[int, int, int]:
    return len(round_.lanes), round_.page_size, round_.num_pages
