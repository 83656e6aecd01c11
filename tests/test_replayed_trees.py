"""Trees of which a recording knows only what stood, against trees that were written down whole at every place."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from simulator.recording import Offer, Trace, unpacked
from simulator.replayed import Walk

RESULTS = Path(__file__).parent.parent / "docs" / "results"
HEAD = "eagle3"
LEVELS, LARGEST = 10, 63

Ranks = Callable[[int], Sequence[int]]
"""By place, which nodes of a tree there are right."""


def rounds(ranks: Ranks, length: int, nodes: int) -> list[tuple[int, int]]:
    """Of an answer that is checked with trees of so many nodes: where each round began, and how deep it was right."""
    found, place = [], 1
    while place < length:
        right = sum(node < nodes for node in ranks(place)[:LEVELS])
        found.append((place, right))
        place += 1 + right
    return found


def tokens_a_round(answers: Sequence[tuple[Ranks, int]], nodes: int) -> float:
    found = [right for ranks, length in answers for _, right in rounds(ranks, length, nodes)]
    return 1 + sum(found) / len(found)


def known(trace: Trace) -> Ranks:
    at = {offer.position: offer.path for offer in trace.offers[HEAD]}
    return lambda place: at.get(place, ())


def recorded(trace: Trace, seed: int) -> Ranks:
    """As a run with the largest trees is recorded."""
    whole = known(trace)
    offers = [Offer(place, LARGEST, tuple(whole(place))) for place, _ in rounds(whole, trace.output_tokens, LARGEST)]
    walk = Walk(replace(trace, offers={HEAD: tuple(offers)}), {}, random.Random(seed))
    return lambda place: walk.ranks(HEAD, place)


@pytest.mark.parametrize("file", ["offers-2026-11-17-T0.json.gz", "offers-2026-11-17-T1.json.gz"])
def test_smaller_trees_bring_what_they_did_where_all_of_them_are_known(file: str) -> None:
    with gzip.open(RESULTS / file, "rt", encoding="utf-8") as opened:
        tasks = json.load(opened)["tasks"]
    traces = [unpacked(answer) for answers in tasks.values() for answer in answers]
    traces = [trace for trace in traces if trace.offers.get(HEAD)]
    assert len(traces) > 50
    wholes = [(known(trace), trace.output_tokens) for trace in traces]
    walks = [(recorded(trace, seed), trace.output_tokens) for seed, trace in enumerate(traces)]
    for nodes in (3, 7, 15, 31, LARGEST):
        assert tokens_a_round(walks, nodes) == pytest.approx(tokens_a_round(wholes, nodes), rel=0.03), nodes
