"""The rounds of a queued engine by shape: which are kept, and what happens where one cannot be captured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from slipstream import LLM, SamplingParams
from slipstream.core.draft import Tree
from slipstream.drafters.base import DeviceDrafter, DraftRound
from slipstream.drafters.model import ModelDrafter
from slipstream.engine import draft_loops, rounds
from slipstream.engine.draft_loops import DraftFailed, DraftLoops, DraftSize, LoopShape
from slipstream.engine.queued import QueuedBackend
from slipstream.engine.rounds import Round, RoundShape
from slipstream.sampling.table import Features


def shape(counts: list[int], longest: int = 10) -> RoundShape:
    return RoundShape.of(counts, longest, is_tree=False, features=Features(greedy=True), version=0, keeps_logits=False)


def queued(llm: LLM) -> QueuedBackend:
    assert isinstance(llm.engine.backend, QueuedBackend)
    return llm.engine.backend


@pytest.mark.parametrize("counts", [[0], [5], [0, 63], [25] * 9, [1] * 300])
def test_a_shape_holds_its_requests(counts: list[int]) -> None:
    found = shape(counts)
    assert found.requests >= len(counts)
    assert found.width >= max(counts)
    assert len(counts) + sum(counts) <= found.rows <= 2 * (len(counts) + sum(counts))


def test_longer_contexts_have_few_shapes() -> None:
    found = {shape([0], longest).keys for longest in range(1, 32_000, 7)}
    assert all(s.keys >= 32_000 for s in [shape([0], 31_999)])
    assert len(found) <= 4


def test_the_rounds_used_last_are_kept(open_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "_MOST", 3)
    kept = queued(open_llm(rounds="queued", drafter=None)).rounds
    first = kept.of(shape([0]))
    for size in range(2, 6):
        kept.of(shape([0] * size))
        assert kept.of(shape([0])) is first
    assert len(kept._rounds) <= 4
    assert len(kept) == 4  # made: the buckets of 1, 2, 4 and 8 requests


def test_what_cannot_be_captured_runs_as_it_stands(
    open_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    expected = open_llm(drafter=None).generate("hello", params)[0].outputs[0].token_ids
    said: list[str] = []
    llm = open_llm(rounds="queued", drafter=None, on_progress=said.append)

    def fail(self: Round, pool: Any) -> None:
        raise RuntimeError("no graph today")

    monkeypatch.setattr(Round, "capture", fail)
    queued(llm).rounds._graphs = True
    output = llm.generate("hello", params)[0].outputs[0]
    assert output.error is None
    assert output.token_ids == expected
    assert [text for text in said if "no graph today" in text] == [said[-1]]


def test_nobody_inherits_anothers_tree(open_llm: Callable[..., LLM]) -> None:
    """Who has no tree in a round of trees may be guessed for on the device: a chain, whoever stood there before."""
    bushy = shape([4, 4])._replace(is_tree=True)
    found = queued(open_llm(rounds="queued", drafter=None)).rounds.of(bushy)
    tree = Tree((5, 6, 7, 8), (-1, -1, 0, 0))
    for trees in ((tree, tree), (tree, tree), (tree, tree), (tree, Tree())):  # through every staging copy
        found.load([0, 1], trees, [(), ()])
        found._loaded = None
    parents = found._parents[:2, :4].tolist()
    assert parents == [[-1, -1, 0, 0], [-1, 0, 1, 2]]


def test_no_round_is_made_for_more_keys_than_there_can_be() -> None:
    few = RoundShape.of([0], 600, is_tree=False, features=Features(), version=0, keeps_logits=False, most_keys=700)
    assert few.keys == 1024


class Counting(ModelDrafter):
    """Guesses how often it was asked, as deep as it is asked to."""

    def __init__(self) -> None:
        self.depths: list[int] = []

    def draft(self, round: DraftRound) -> torch.Tensor:
        self.depths.append(round.depth)
        return torch.full((round.lanes.shape[0], round.depth), len(self.depths))


def loops(drafter: DeviceDrafter, llm: LLM, *, pool: Any = None) -> tuple[DraftLoops, list[None]]:
    noted: list[None] = []
    state = queued(llm).lanes.state
    return DraftLoops(state, {"model": drafter}, pool, lambda: noted.append(None)), noted


def test_a_loop_serves_all_rounds_of_as_many_requests(open_llm: Callable[..., LLM]) -> None:
    """However many rows their passes have: only those who are guessed for get the guesses."""
    llm = open_llm(rounds="queued", drafter=None)
    drafter = Counting()
    found, noted = loops(drafter, llm)
    machine = queued(llm).rounds._machine
    for counts, width in (([3, 3], 16), ([3, 9], 16), ([3, 20], 63)):
        run = Round(shape(counts), machine, ["model"], found)
        assert run.shape.width == width
        run.load([0, 1], [Tree(), Tree((7, 8, 9), (-1, 0, 1))], [(("model", 3),), ()])
        run.draft((DraftSize("model", 3),))
        assert run._tokens[:2, :4].tolist() == [[len(drafter.depths)] * 3 + [0], [7, 8, 9, 0]]
    assert drafter.depths == [3, 3, 3]
    assert len(noted) == 1
    run.draft((DraftSize("model", 2),))
    assert len(noted) == 2


def test_a_drafter_that_cannot_be_captured_drafts_without_a_graph_and_says_so_once(
    open_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tries: list[None] = []

    def fail(work: Any, pool: Any) -> None:
        tries.append(None)
        raise RuntimeError("the host looked")

    monkeypatch.setattr(draft_loops, "captured", fail)
    drafter = Counting()
    llm = open_llm(rounds="queued", drafter=None)
    backend, said = queued(llm), list[str]()
    counts = llm.engine.counters.unrecorded
    found = DraftLoops(backend.lanes.state, {"model": drafter}, object(), lambda: None, 0, counts, said.append)
    lanes = torch.zeros(1, dtype=torch.int64)
    for depth in (3, 3, 2):
        loop = found.of(LoopShape(1, 512, Features(), 0, (DraftSize("model", depth),)))
        loop.run(lanes)
        assert loop.guesses[0].shape == (1, depth)
    assert drafter.depths == [3, 3, 2]
    assert len(tries) == 2  # once for each depth
    assert said == ["drafts of model are not recorded as a graph, so they take longer (RuntimeError: the host looked)"]
    assert [record.message for record in caplog.records] == said
    assert llm.snapshot().unrecorded == {"model": 2}


def test_loops_over_tensors_that_are_gone_are_let_go(open_llm: Callable[..., LLM]) -> None:
    found, noted = loops(Counting(), open_llm(rounds="queued", drafter=None))
    for version in (0, 1, 2, 2, 0):
        found.of(LoopShape(1, 512, Features(), version, (DraftSize("model", 1),)))
    assert len(noted) == 3
    assert [one.version for one in found._loops] == [2, 0], "0 is over tensors that stay"


def test_a_drafter_that_raises_is_named(open_llm: Callable[..., LLM]) -> None:
    class Broken(Counting):
        def draft(self, round: DraftRound) -> torch.Tensor:
            raise ValueError("no")

    found, _ = loops(Broken(), open_llm(rounds="queued", drafter=None))
    with pytest.raises(DraftFailed, match="model"):
        found.of(LoopShape(1, 512, Features(), 0, (DraftSize("model", 1),))).run(torch.zeros(1, dtype=torch.int64))
