"""The exact verifier follows the target's choices; drafters that ask hear all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from queueing import Letters
from slipstream import LLM, SamplingParams, SpeculationParams
from slipstream.core.draft import MAX_NODES, ROOT, Draft, Tree
from slipstream.core.verdict import Verdict, Verdicts
from slipstream.drafters.base import DraftRequest, Needs
from slipstream.verify.exact import verify_exact

CPU = torch.device("cpu")


def walk(tree: Tree, choices: list[int], at: int = ROOT) -> tuple[list[int], list[int]]:
    """Accepted nodes below `at`, and the tokens emitted from there on."""
    choice = choices[1 + at]
    for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
        if parent == at and token == choice:
            path, emitted = walk(tree, choices, node)
            return [node, *path], [choice, *emitted]
    return [], [choice]


def check(trees: list[Tree], choices: list[list[int]]) -> Verdicts:
    draft = Draft.pack(trees, CPU)
    verdicts = verify_exact(draft, torch.tensor(choices))
    assert verdicts.path.shape == draft.tokens.shape
    assert verdicts.tokens.shape == (len(trees), draft.width + 1)
    for b, tree in enumerate(trees):
        path, emitted = walk(tree, choices[b])
        assert verdicts.accepted[b] == len(path)
        assert verdicts.path[b].tolist() == path + [0] * (draft.width - len(path))
        assert verdicts.tokens[b].tolist() == emitted + [0] * (draft.width + 1 - len(emitted))
    return verdicts


@st.composite
def trees(draw: st.DrawFn, vocab: int) -> Tree:
    """Bushy or deep, up to 63 nodes, siblings distinct."""
    spread = draw(st.integers(1, MAX_NODES))
    tokens: list[int] = []
    parents: list[int] = []
    taken: set[tuple[int, int]] = set()
    for _ in range(draw(st.integers(0, MAX_NODES))):
        parent = max(ROOT, len(tokens) - draw(st.integers(1, spread)))
        token = draw(st.integers(0, vocab - 1))
        if (parent, token) not in taken:
            taken.add((parent, token))
            tokens.append(token)
            parents.append(parent)
    return Tree(tuple(tokens), tuple(parents))


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_trees_match_the_walk(data: st.DataObject) -> None:
    vocab = data.draw(st.integers(1, 3))
    batch = data.draw(st.lists(trees(vocab), min_size=1, max_size=4))
    width = max(map(len, batch))
    choices = [data.draw(st.lists(st.integers(-1, vocab - 1), min_size=width + 1, max_size=width + 1)) for _ in batch]
    for choice, tree in zip(choices, batch, strict=True):  # make one path right, or deep ones would be rare
        if len(tree):
            node = data.draw(st.integers(0, len(tree) - 1))
            while node != ROOT:
                choice[1 + tree.parents[node]] = tree.tokens[node]
                node = tree.parents[node]
    check(batch, choices)


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_chains_match_the_walk(data: st.DataObject) -> None:
    token = st.integers(0, 1)
    batch = [
        Tree.chain(tokens)
        for tokens in data.draw(st.lists(st.lists(token, max_size=MAX_NODES), min_size=1, max_size=4))
    ]
    width = max(map(len, batch))
    choices = [[*tree.tokens, *([0] * (width + 1 - len(tree)))] for tree in batch]
    for choice in choices:
        for wrong in data.draw(st.lists(st.integers(0, width), max_size=2)):
            choice[wrong] = data.draw(st.sampled_from([-1, 1 - max(choice[wrong], 0)]))
    assert Draft.pack(batch, CPU).is_chain
    check(batch, choices)


def test_the_deepest_chain_of_a_tree() -> None:
    chain = Tree.chain(range(MAX_NODES - 1))
    tree = Tree((*chain.tokens, 99), (*chain.parents, ROOT))
    verdicts = check([tree], [[*range(MAX_NODES - 1), 7, 8]])
    assert verdicts.accepted.tolist() == [MAX_NODES - 1]
    assert verdicts.tokens[0, MAX_NODES - 1] == 7


def test_padding_is_never_accepted() -> None:
    # Padding holds token 0: a target that chooses 0 everywhere must not take it.
    verdicts = check([Tree((5, 6), (-1, -1)), Tree((0,), (-1,)), Tree()], [[0, 0, 0]] * 3)
    assert verdicts.accepted.tolist() == [0, 1, 0]


def test_padding_may_hold_anything() -> None:
    draft = Draft(
        tokens=torch.tensor([[3, 4, -1], [3, 3, 3]]),
        parents=torch.tensor([[-1, -1, 77], [-5, 0, 1]]),
        counts=torch.tensor([2, 0]),
        is_chain=False,
    )
    verdicts = verify_exact(draft, torch.tensor([[4, 3, -1, 3], [3, 3, 3, 3]]))
    assert verdicts.accepted.tolist() == [1, 0]
    assert verdicts.path.tolist() == [[1, 0, 0], [0, 0, 0]]
    assert verdicts.tokens.tolist() == [[4, -1, 0, 0], [3, 0, 0, 0]]


def test_no_draft_emits_the_targets_token() -> None:
    verdicts = check([Tree(), Tree()], [[7], [-1]])
    assert verdicts.tokens.tolist() == [[7], [-1]]


def test_a_failed_choice_ends_the_path() -> None:
    tree = Tree((1, 2, 3), (-1, 0, 1))
    assert check([tree], [[1, -1, 3, 4]]).tokens.tolist() == [[1, -1, 0, 0]]
    branchy = Tree((1, 2, 3, 9), (-1, 0, 1, -1))
    assert check([branchy], [[-1, 2, 3, 4, 5]]).tokens.tolist() == [[-1, 0, 0, 0, 0]]


def test_the_verdict_does_not_write_to_its_inputs() -> None:
    draft = Draft.pack([Tree((1, 2), (-1, -1)), Tree()], CPU)
    choices = torch.tensor([[2, 5, 6], [3, 0, 0]])
    before = (draft.tokens.clone(), draft.parents.clone(), choices.clone())
    verify_exact(draft, choices)
    assert all(torch.equal(a, b) for a, b in zip(before, (draft.tokens, draft.parents, choices), strict=True))


def test_how_deep_a_tree_is() -> None:
    trees = (Tree(), Tree.chain((5, 6, 7)), Tree((1, 2, 3), (-1, -1, -1)), Tree((1, 2, 3, 4, 5), (-1, 0, -1, 1, 2)))
    assert [tree.depth for tree in trees] == [0, 3, 1, 3]


class Curious(Letters):
    """Draws trees, and notes what it is told of them."""

    name: ClassVar[str] = "curious"
    needs: ClassVar[Needs] = Needs(choices=True)

    def __init__(self) -> None:
        self.drafted: dict[str, tuple[list[int], Tree]] = {}  # by request: its text, and the tree behind it
        self.heard: list[tuple[list[int], Tree, Verdict]] = []

    def propose(self, requests: Sequence[DraftRequest], budget: Sequence[int]) -> Sequence[Tree]:
        trees = super().propose(requests, budget)
        for request, tree in zip(requests, trees, strict=True):
            self.drafted[request.id] = (list(request.tokens), tree)
        return trees

    def observe(self, verdicts: Sequence[Verdict]) -> None:
        for verdict in verdicts:
            if verdict.drafted:
                self.heard.append((*self.drafted.pop(verdict.request_id), verdict))
            else:
                assert len(verdict.choices) <= 1


class Deaf(Letters):
    """The same trees, but it asks for nothing."""

    name: ClassVar[str] = "deaf"

    def __init__(self) -> None:
        self.heard: list[Verdict] = []

    def observe(self, verdicts: Sequence[Verdict]) -> None:
        self.heard += verdicts


@pytest.mark.parametrize("rounds", ["eager", "queued"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_they_are_what_the_target_would_say_behind_each_node(
    open_llm: Callable[..., LLM], rounds: str, temperature: float
) -> None:
    drafter = Curious()
    llm = open_llm(drafter=drafter, rounds=rounds, planner="fixed")
    params = SamplingParams(
        temperature=temperature, seed=3, max_tokens=8, ignore_eos=True, logit_bias={10: 6.0, 20: 6.0, 30: 6.0}
    )
    mixed = [replace(params, speculation=SpeculationParams(enabled=i != 1)) for i in range(3)]
    llm.generate([[5, 6, 7], [8] * 5, [10, 20]], mixed)
    assert len(drafter.heard) >= 4
    once = replace(params, max_tokens=1, speculation=SpeculationParams(enabled=False))
    for text, tree, verdict in drafter.heard[:8]:
        paths: list[list[int]] = [[]]  # by row: the root, then the nodes
        for token, parent in zip(tree.tokens, tree.parents, strict=True):
            paths.append([*paths[1 + parent], token])
        want = [o.outputs[0].token_ids[0] for o in llm.generate([text + path for path in paths], once)]
        assert list(verdict.choices) == want
        at = ROOT
        for token, node in zip(verdict.tokens, (*verdict.path, ROOT), strict=True):
            assert verdict.choices[1 + at] == token
            at = node


@pytest.mark.parametrize("rounds", ["eager", "queued"])
def test_who_does_not_ask_is_told_nothing(open_llm: Callable[..., LLM], rounds: str) -> None:
    drafter = Deaf()
    llm = open_llm(drafter=drafter, rounds=rounds, planner="fixed")
    llm.generate([[5, 6, 7]], SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))
    assert any(verdict.drafted for verdict in drafter.heard)
    assert not any(verdict.choices for verdict in drafter.heard)
