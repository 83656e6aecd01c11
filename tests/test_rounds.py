"""The rounds of a queued engine by shape: which are kept, and what happens where one cannot be captured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from slipstream import LLM, SamplingParams
from slipstream.core.draft import Tree
from slipstream.engine import rounds
from slipstream.engine.queued import QueuedEngine
from slipstream.engine.rounds import Drafts, Round, RoundShape
from slipstream.sampling.table import Features


def shape(counts: list[int], longest: int = 10) -> RoundShape:
    return RoundShape.of(counts, longest, is_tree=False, features=Features(greedy=True), version=0, keeps_logits=False)


def queued(llm: LLM) -> QueuedEngine:
    assert isinstance(llm.engine, QueuedEngine)
    return llm.engine


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
        found.load([0, 1], trees, [0, 0 if trees[1].tokens else 4], [None, None])
        found._loaded = None
    parents = found._parents[:2, :4].tolist()
    assert parents == [[-1, -1, 0, 0], [-1, 0, 1, 2]]


def test_no_round_is_made_for_more_keys_than_there_can_be() -> None:
    few = RoundShape.of([0], 600, is_tree=False, features=Features(), version=0, keeps_logits=False, most_keys=700)
    assert few.keys == 1024


def test_a_drafter_that_cannot_be_captured_drafts_without_a_graph(
    open_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = queued(open_llm(rounds="queued", drafter=None)).rounds
    found = kept.of(shape([0]))
    calls: list[Drafts] = []

    def fail(work: Any, pool: Any) -> None:
        raise RuntimeError("the host looked")

    monkeypatch.setattr(rounds, "captured", fail)
    monkeypatch.setattr(Round, "_draft", lambda self, drafts: calls.append(drafts))
    found._pool = object()
    found.draft((("model", 3),))
    found.draft((("model", 3),))
    found.draft((("model", 2),))
    assert calls == [(("model", 3),), (("model", 3),), (("model", 2),)]
    assert len(kept) == 1 + 2  # tried once for each depth
