"""Kernels that grow and merge trees: each as its twin, and the twin as a plain search."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from interpreted import DEVICE
from interpreted import DEVICE as KERNEL_DEVICE
from slipstream.core.draft import MAX_NODES, ROOT, Draft, Tree, merge_trees
from slipstream.kernels.gpu.grow_tree import Grown, Growth, Level
from slipstream.kernels.gpu.merge_trees import HOST, Union, _launch, _twin, merge_guesses
from slipstream.kernels.gpu.rows import RECENT, LaneState
from tree_cases import trees

VOCAB = 18


LENGTHS, EMITTED, LAST = (10, 30, 55, 4), (1, 2, 3, 4), 56


def scores_of(path: tuple[int, ...], seed: int) -> Tensor:  # [VOCAB]
    """A made-up guesser: log shares behind a path. Few values, so that there are ties."""
    generator = torch.Generator().manual_seed(hash((path, seed)) % 2**31)
    return torch.randint(0, 4, (VOCAB,), generator=generator).float().log_softmax(0)


def state() -> LaneState:
    lengths, emitted = torch.tensor(LENGTHS, device=DEVICE), torch.tensor(EMITTED, device=DEVICE)
    nothing = torch.zeros(4, dtype=torch.int64, device=DEVICE)
    recent = torch.zeros((4, RECENT), dtype=torch.int64, device=DEVICE)
    return LaneState(nothing, nothing, lengths, emitted, nothing[:, None].int(), recent)


class Kernels(Growth):
    """By the kernels, for real or interpreted."""

    def grow(self, tokens: Tensor, scores: Tensor, above: Level | None) -> Level | None:
        self._step += 1
        last = self._step == self.depth
        level = None if last else Level.empty(self._lanes.shape[0] * self.width, self._step, DEVICE)
        self._launch(tokens, scores, above, level)
        return level

    def tree(self, nodes: int) -> Grown:
        out = Grown(*torch.empty((2, self.tokens.shape[0], nodes), dtype=torch.int64, device=DEVICE).unbind(0))
        self._launch_tree(nodes, out)
        return out


class Grower:
    """Grows the trees of requests with these seeds, as a drafter does, and keeps every level."""

    def __init__(
        self,
        kind: type[Growth],
        width: int,
        depth: int,
        seeds: list[int],
        deepest: int | None = None,
        *,
        kept: bool = True,
    ) -> None:
        """deepest: levels that there is room for. kept: rows have entries in a cache."""
        lanes = torch.tensor([3, 0, 2][: len(seeds)], device=DEVICE)
        each = width * ((deepest or depth) - 1)
        guests = 100 + torch.arange(max(1, 2 * each), device=DEVICE)
        if not kept:
            each, guests = 0, torch.zeros(width * depth, dtype=torch.int64, device=DEVICE)
        self.growth = kind(state(), lanes, width, depth, last_place=LAST, guests=guests, each=each)
        self.levels: list[Level] = []
        paths: list[tuple[int, ...]] = [() for _ in seeds]
        whose = list(seeds)
        level: Level | None = None
        while True:
            best = [scores_of(path, seed).topk(width) for path, seed in zip(paths, whose, strict=True)]
            tokens, scores = torch.stack([b.indices for b in best]), torch.stack([b.values for b in best])
            level = self.growth.grow(tokens.to(DEVICE), scores.to(DEVICE), level)
            if level is None:
                return
            self.levels.append(level)
            rows = level.rows.tolist()
            paths = [(*paths[row], token) for row, token in zip(rows, level.tokens.tolist(), strict=True)]
            whose = [whose[row] for row in rows]


def searched(width: int, depth: int, seed: int) -> dict[tuple[int, ...], float]:
    """All candidates by hand: path -> score."""
    beam: list[tuple[int, ...]] = [()]
    found: dict[tuple[int, ...], float] = {(): 0.0}
    for _ in range(depth):
        level = {}
        for path in beam:
            best = scores_of(path, seed).topk(width)
            for token, score in zip(best.indices.tolist(), best.values.tolist(), strict=True):
                level[(*path, token)] = float(torch.tensor(found[path]) + torch.tensor(score))
        found |= level
        beam = sorted(level, key=lambda path: -level[path])[:width]  # of equals the first
    del found[()]
    return found


def paths_of(tree: Grown, request: int) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tree.tokens[request].tolist(), tree.parents[request].tolist(), strict=True):
        assert -1 <= parent < len(paths)  # parents come first
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    assert len(set(paths)) == len(paths)  # no two siblings are alike
    return paths


SHAPES = st.tuples(st.integers(1, 4), st.integers(1, 4))


SEEDS = st.lists(st.integers(0, 10**6), min_size=1, max_size=3)


@settings(max_examples=60, deadline=None)
@given(SHAPES, SEEDS, st.integers(1, 20))
def test_the_surest_candidates_are_the_tree(shape: tuple[int, int], seeds: list[int], nodes: int) -> None:
    width, depth = shape
    growth = Grower(Growth, width, depth, seeds).growth
    nodes = min(nodes, growth.size)
    tree = growth.tree(nodes)
    assert tree.tokens.shape == tree.parents.shape == (len(seeds), nodes)
    for request, seed in enumerate(seeds):
        candidates = searched(width, depth, seed)
        have = [candidates[path] for path in paths_of(tree, request)]
        want = sorted(candidates.values(), reverse=True)[:nodes]
        torch.testing.assert_close(torch.tensor(have), torch.tensor(want))  # surest first, and none was passed over


@settings(max_examples=25, deadline=None)
@given(SHAPES, SEEDS)
@example((16, 3), [1])  # as wide as Medusa's
def test_the_kernels_match_the_twins(shape: tuple[int, int], seeds: list[int]) -> None:
    ours, twin = Grower(Kernels, *shape, seeds), Grower(Growth, *shape, seeds)
    for a, b in zip(ours.levels, twin.levels, strict=True):
        for field in fields(Level):
            assert torch.equal(getattr(a, field.name), getattr(b, field.name)), field.name
    for nodes in {1, ours.growth.size // 2 + 1, ours.growth.size}:
        for mine, theirs in zip(ours.growth.tree(nodes), twin.growth.tree(nodes), strict=True):
            assert torch.equal(mine, theirs)


@pytest.mark.parametrize("kind", [Growth, Kernels])
@settings(max_examples=8, deadline=None)
@given(SHAPES, SEEDS)
def test_trees_of_which_nothing_is_kept(kind: type[Growth], shape: tuple[int, int], seeds: list[int]) -> None:
    """The same trees, whose rows all name the same slots."""
    ours, kept = Grower(kind, *shape, seeds, kept=False), Grower(Growth, *shape, seeds)
    for a, b in zip(ours.levels, kept.levels, strict=True):
        assert not a.slots.any()
        for name in ("tokens", "rows", "lanes", "positions", "generated", "scores", "candidates"):
            assert torch.equal(getattr(a, name), getattr(b, name)), name
    for mine, theirs in zip(ours.growth.tree(ours.growth.size), kept.growth.tree(kept.growth.size), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("kind", [Growth, Kernels])
@settings(max_examples=8, deadline=None)
@given(st.integers(1, 4), st.integers(1, 10), SEEDS, st.integers(1, 40))
def test_trees_of_every_number_of_levels(
    kind: type[Growth], width: int, deepest: int, seeds: list[int], nodes: int
) -> None:
    """A level does not depend on how many follow; the first nodes of a tree are the tree of that size."""
    whole = Grower(Growth, width, deepest, seeds)
    for depth in {1, (deepest + 1) // 2, deepest}:
        grown = Grower(kind, width, depth, seeds, deepest)
        assert len(grown.levels) == depth - 1
        for a, b in zip(grown.levels, whole.levels, strict=False):
            for field in fields(Level):
                assert torch.equal(getattr(a, field.name), getattr(b, field.name)), field.name
        most = grown.growth.tree(grown.growth.size)
        for request in range(len(seeds)):
            every = paths_of(most, request)
            assert max(map(len, every)) == depth
            assert {len(path) for path in every} == set(range(1, depth + 1))
        few = grown.growth.tree(min(nodes, grown.growth.size))
        for part, all_of_it in zip(few, most, strict=True):
            assert torch.equal(part, all_of_it[:, : part.shape[1]])


def test_a_level_knows_where_its_rows_stand() -> None:
    """The first request is in lane 3, which has 4 tokens; the third shares the second's entries: there are but two."""
    first, second = Grower(Growth, 2, 3, [1, 2, 3]).levels
    assert first.lanes.tolist() == [3, 3, 0, 0, 2, 2]
    assert first.rows.tolist() == [0, 0, 1, 1, 2, 2]
    assert first.places.tolist() == [4, 4, 10, 10, 55, 55]
    assert second.places.tolist() == [5, 5, 11, 11, 56, 56]
    assert second.positions.tolist() == [7, 7, 13, 13, 58, 58]  # behind the text, its next token and two guesses
    assert second.generated.tolist() == [6, 6, 3, 3, 5, 5]
    assert first.slots.tolist() == [100, 101, 104, 105, 104, 105]
    assert second.slots.tolist() == [102, 103, 106, 107, 106, 107]
    assert second.ancestors[:, 1].tolist() == [2, 3, 6, 7, 6, 7]  # numbers of these slots in the table
    assert second.ancestors[:, 0].tolist() == [first.slots[row] - 100 for row in second.rows.tolist()]


def test_a_beam_of_one_is_a_chain() -> None:
    assert Grower(Growth, 1, 4, [5, 6]).growth.tree(4).parents.tolist() == [[-1, 0, 1, 2]] * 2


def test_more_nodes_than_candidates_are_refused() -> None:
    with pytest.raises(AssertionError, match="5 nodes of 2"):
        Grower(Growth, 2, 1, [3]).growth.tree(5)


CPU = torch.device("cpu")


@dataclass(frozen=True)
class Scene:
    """Drafts of the host, and what several device drafters guess: `wants[b]` has a bit for each that is asked for b."""

    width: int
    hosts: tuple[Tree, ...]  # [B]
    rooms: tuple[int, ...]  # [B]
    guesses: tuple[tuple[Tree, ...], ...]  # by drafter, [B]
    wants: tuple[int, ...]  # [B]
    nodes: int = MAX_NODES  # of each drafter's guesses, those that count

    def union(self, device: torch.device) -> Union:
        shape = (len(self.hosts), self.width)
        packed = Draft.pack([*self.hosts, Tree.chain([0] * self.width)], device)
        return Union(
            packed.tokens[:-1].clone(),
            packed.parents[:-1].clone(),
            packed.counts[:-1].clone(),
            torch.full(shape, 77, dtype=torch.int64, device=device),  # from the round before
            torch.tensor(self.rooms, dtype=torch.int64, device=device),
        )


@st.composite
def scenes(draw: st.DrawFn) -> Scene:
    requests = draw(st.integers(1, 3))
    width = draw(st.sampled_from((4, 16, 21)))
    hosts = [draw(trees(most=width)) for _ in range(requests)]
    rooms = tuple(draw(st.integers(len(tree), width)) for tree in hosts)
    drafters = draw(st.integers(1, 3))
    chain = draw(st.booleans())

    def guess() -> Tree:
        return Tree.chain(draw(st.lists(st.integers(0, 3), max_size=9))) if chain else draw(trees())

    guesses = tuple(tuple(guess() for _ in range(requests)) for _ in range(drafters))
    wants = tuple(draw(st.integers(0, 2**drafters - 1)) << 1 for _ in range(requests))
    return Scene(width, tuple(hosts), rooms, guesses, wants, draw(st.sampled_from((1, 3, MAX_NODES))))


def run(scene: Scene, merge: object, device: torch.device) -> Union:
    union = scene.union(device)
    wants = torch.tensor(scene.wants, dtype=torch.int64, device=device)
    for number, guesses in enumerate(scene.guesses, 1):
        tokens, parents = tensors(guesses, device)
        merge(union, tokens, parents, wants, number, scene.nodes, number == 1)  # type: ignore[operator]
    return union


def tensors(guesses: Sequence[Tree], device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Of trees that are not all as large, what is missing has no parent. Chains come as the transposed they are."""
    width = max(1, *(len(tree) for tree in guesses))
    chain = all(tree.is_chain and len(tree) == width for tree in guesses)
    tokens = torch.tensor([[*t.tokens, *[0] * (width - len(t))] for t in guesses], device=device)
    parents = torch.tensor([[*t.parents, *[-2] * (width - len(t))] for t in guesses], device=device)
    return tokens.T.contiguous().T, None if chain else parents


@settings(deadline=None, max_examples=150)
@given(scenes())
def test_the_twin_matches_the_host(scene: Scene) -> None:
    union = run(scene, _twin, CPU)
    for b, host in enumerate(scene.hosts):
        mine = [number for number in range(1, len(scene.guesses) + 1) if scene.wants[b] >> number & 1]
        theirs = [scene.guesses[number - 1][b] for number in mine]
        first = [Tree(tree.tokens[: scene.nodes], tree.parents[: scene.nodes]) for tree in theirs]
        merged = merge_trees([host, *first], scene.rooms[b])
        count = int(union.counts[b])
        assert union.tokens[b, :count].tolist() == list(merged.tree.tokens)
        assert union.parents[b, :count].tolist() == list(merged.tree.parents)
        bits = [HOST, *[1 << number for number in mine]]
        owners = [sum(bit for i, bit in enumerate(bits) if word >> i & 1) for word in merged.owners]
        assert union.owners[b].tolist() == owners + [0] * (scene.width - count)


@settings(deadline=None, max_examples=30)
@given(scenes())
def test_the_kernel_matches_the_twin(scene: Scene) -> None:
    compare(scene)


def compare(scene: Scene) -> Union:
    expected, got = run(scene, _twin, CPU), run(scene, _launch, KERNEL_DEVICE)
    real = torch.arange(scene.width) < expected.counts[:, None]
    for field in fields(Union):
        want, have = getattr(expected, field.name), getattr(got, field.name).cpu()
        if field.name in ("tokens", "parents"):  # what is behind the counts may be anything
            want, have = want[real], have[real]
        assert torch.equal(want, have), field.name
    return got


@pytest.mark.parametrize("guesses", [1, MAX_NODES])
def test_the_widest_unions(guesses: int) -> None:
    comb = Tree(tuple(range(31)), (ROOT,) * 31)
    scene = Scene(MAX_NODES, (comb,), (MAX_NODES,), ((Tree.chain(range(5, 5 + guesses)),),), (2,))
    union = compare(scene)
    assert union.counts.tolist() == [min(MAX_NODES, 30 + guesses)]
    assert union.owners[0, 5] == HOST | 2


def test_on_the_cpu_the_twin_runs() -> None:
    scene = Scene(4, (Tree((1, 2), (ROOT, 0)),), (3,), ((Tree.chain((1, 3, 4)),),), (2,))
    union = scene.union(CPU)
    merge_guesses(union, torch.tensor([[1, 3, 4]]), None, torch.tensor([2]), 1, nodes=3, first=True)
    assert (union.counts.tolist(), union.tokens[0, :3].tolist(), union.parents[0, :3].tolist()) == (
        [3],
        [1, 2, 3],
        [-1, 0, 0],
    )
    assert union.owners.tolist() == [[3, 1, 2, 0]]
