"""Trees grown by confidence: the same as by a plain search, parents first, surest first."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from slipstream.drafters.base import DeviceTree
from slipstream.drafters.beam import Beam
from slipstream.sampling.rank import Ranked

VOCAB = 7


def scores_of(path: tuple[int, ...], seed: int) -> Tensor:  # [VOCAB]
    """A made-up guesser: log shares behind a path. Few values, so that there are ties."""
    generator = torch.Generator().manual_seed(hash((path, seed)) % 2**31)
    return torch.randint(0, 4, (VOCAB,), generator=generator).float().log_softmax(0)


def offers(paths: list[tuple[int, ...]], width: int, seed: int) -> Ranked:
    best = [scores_of(path, seed).topk(width) for path in paths]
    return Ranked(torch.stack([b.indices for b in best]), torch.stack([b.values for b in best]))


def grown(width: int, depth: int, nodes: int, seeds: list[int]) -> DeviceTree:
    """As a drafter grows them: all requests together."""
    beam = Beam(width)
    paths: list[list[tuple[int, ...]]] = [[()] for _ in seeds]
    for level in range(depth):
        parts = [offers(own, width, seed) for own, seed in zip(paths, seeds, strict=True)]
        offered = Ranked(torch.cat([part.tokens for part in parts]), torch.cat([part.scores for part in parts]))
        rows = beam.grow(offered, deeper=level + 1 < depth)
        if rows is not None:
            paths = [
                [(*own[parent], token) for token, parent in zip(tokens, parents, strict=True)]
                for own, tokens, parents in zip(paths, rows.tokens.tolist(), rows.parents.tolist(), strict=True)
            ]
    return beam.tree(nodes)


def searched(width: int, depth: int, seed: int) -> dict[tuple[int, ...], float]:
    """All candidates by hand: path -> score."""
    beam: list[tuple[int, ...]] = [()]
    found: dict[tuple[int, ...], float] = {(): 0.0}
    for _ in range(depth):
        level = {}
        for path in beam:
            best = scores_of(path, seed).topk(width)
            for token, score in zip(best.indices.tolist(), best.values.tolist(), strict=True):
                level[(*path, token)] = found[path] + score
        found |= level
        values = torch.tensor(list(level.values()))
        keys = list(level)
        beam = keys if len(keys) == width else [keys[i] for i in values.topk(width).indices.tolist()]
    del found[()]
    return found


def paths_of(tree: DeviceTree, request: int) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tree.tokens[request].tolist(), tree.parents[request].tolist(), strict=True):
        assert -1 <= parent < len(paths)  # parents come first
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    assert len(set(paths)) == len(paths)  # no two siblings are alike
    return paths


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 4), st.integers(1, 4), st.integers(1, 20), st.lists(st.integers(0, 10**6), min_size=1, max_size=3)
)
def test_the_surest_candidates_are_the_tree(width: int, depth: int, nodes: int, seeds: list[int]) -> None:
    tree = grown(width, depth, nodes, seeds)
    assert tree.tokens.shape == tree.parents.shape == (len(seeds), nodes)
    for request, seed in enumerate(seeds):
        candidates = searched(width, depth, seed)
        real = min(nodes, len(candidates))
        paths = paths_of(tree, request)
        have = [candidates[path] for path in paths[:real]]
        want = sorted(candidates.values(), reverse=True)[:real]
        torch.testing.assert_close(torch.tensor(have), torch.tensor(want))  # surest first, and none was passed over


def test_a_beam_of_one_is_a_chain() -> None:
    tree = grown(1, 4, 4, [5, 6])
    assert tree.parents.tolist() == [[-1, 0, 1, 2]] * 2


def test_missing_nodes_are_filled_up() -> None:
    tree = grown(2, 1, 5, [3])
    assert tree.parents[0, 2:].tolist() == [1, 2, 3]
    assert tree.tokens[0, 2:].tolist() == [0, 0, 0]
