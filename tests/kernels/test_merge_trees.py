"""Merged trees on the device: the twin against the merge on the host, the kernel against the twin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from interpreted import DEVICE as KERNEL_DEVICE
from slipstream.core.draft import MAX_NODES, ROOT, Draft, Tree, merge_trees
from slipstream.kernels.gpu.merge_trees import HOST, Union, _launch, _twin, merge_guesses
from tree_cases import trees

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
