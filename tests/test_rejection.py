"""The rejection verifier: its tokens have the target's distribution (by chi-square), and mistakes in it are noticed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rejection_scenes import (
    REQUESTS,
    SETTINGS,
    SHAPES,
    START,
    TREE,
    Node,
    Pair,
    Proposal,
    Proposer,
    V,
    answers,
    chi_square,
    p_value,
    pair,
    planned,
    rows_of,
)
from slipstream.core.draft import ROOT, Draft, Tree
from slipstream.core.verdict import Verdicts
from slipstream.sampling.noise import stream_keys
from slipstream.verify import rejection
from slipstream.verify.exact import verify_exact
from slipstream.verify.rejection import rejection_choices, rejection_keys, verify_rejection

CPU = torch.device("cpu")


class Counting(TorchDispatchMode):
    """How many operations of torch are called."""

    steps: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.steps += 1
        return func(*args, **(kwargs or {}))


LEAST = 1e-3  # p-value of a test that passes; seeds are fixed, so it always does or never
FOUND = 1e-6  # p-value of a mistake that is noticed


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("setting", SETTINGS)
def test_the_distribution_is_the_targets(setting: str, shape: str) -> None:
    models = pair(SETTINGS[setting])
    assert p_value(models, answers(models, SHAPES[shape])) > LEAST


def test_a_drafter_that_is_sure_and_wrong_does_not_bend_the_tail() -> None:
    """Its second child is drawn from a tail of 1e-13: the tail's own proportions count, not its size."""
    models = pair(SETTINGS["T 1"], likeness=0.3)
    sure = models.q.log()
    sure[torch.arange(V), sure.argmax(1)] += 30
    models = Pair(models.p, sure.softmax(1))
    assert p_value(models, answers(models, TREE)) > LEAST


def generous(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rejection, "_passes", lambda u, chance, odds: u * odds < chance * 1.1)


def from_p_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rejection, "_residual", lambda p, q: p.clone())


def with_replacement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rejection, "_mass", lambda weights: torch.ones(weights.shape[0], dtype=torch.float64))


def the_drafters_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rejection, "stream_keys", lambda streams, samples: streams)


@pytest.mark.parametrize(
    ("mistake", "shape"),
    [
        (generous, "chain"),
        (generous, "tree"),
        (generous, "merged, copied first"),
        (from_p_again, "chain"),
        (from_p_again, "tree"),
        (from_p_again, "merged, drawn first"),
        (with_replacement, "tree"),
        (with_replacement, "merged, by turns"),
        (the_drafters_noise, "chain"),
        (the_drafters_noise, "tree"),
    ],
)
@pytest.mark.parametrize("setting", ["T 1", "T 0.6, top-k 5, top-p 0.95"])
def test_mistakes_are_noticed(
    monkeypatch: pytest.MonkeyPatch, mistake: Callable[[pytest.MonkeyPatch], None], shape: str, setting: str
) -> None:
    mistake(monkeypatch)
    models = pair(SETTINGS[setting])
    assert p_value(models, answers(models, SHAPES[shape], requests=REQUESTS // 2)) < FOUND


def test_a_drafter_that_drops_what_it_drew_is_noticed() -> None:
    """Why a tree that is pruned by confidence has q = 1: with the q of its draws it is not exact."""

    def dropping(told: bool) -> Proposer:
        def propose(pair: Pair, last: Tensor, streams: Tensor, positions: Tensor) -> Proposal:
            proposal = planned([Node(ROOT, 0)])(pair, last, streams, positions)
            assert proposal.q is not None
            sure = proposal.q.gather(2, proposal.draft.tokens[:, :, None])[:, 0, 0] > 0.2
            draft = Draft(proposal.draft.tokens, proposal.draft.parents, proposal.draft.counts * sure, True)
            return Proposal(draft, proposal.q if told else None, None)

        return propose

    models = pair(SETTINGS["T 1"])
    assert p_value(models, answers(models, dropping(told=True))) < FOUND
    assert p_value(models, answers(models, dropping(told=False))) > LEAST


@pytest.mark.parametrize("setting", SETTINGS)
def test_one_drawn_token_is_accepted_as_often_as_the_two_overlap(setting: str) -> None:
    models = pair(SETTINGS[setting], likeness=0.4)
    last = torch.arange(V).repeat(4000)
    streams = stream_keys(torch.arange(len(last)), torch.zeros_like(last))
    none = torch.zeros_like(last)
    proposal = planned([Node(ROOT, 0)])(models, last, streams, none)
    draft = proposal.draft
    verdicts = verify_rejection(draft, rows_of(models, last, draft), rejection_keys(streams, none, 2), proposal.q)
    overlap = torch.minimum(models.p, models.q).sum(1)  # [V]
    accepted = verdicts.accepted.double().view(-1, V).mean(0)
    deviation = (overlap * (1 - overlap) / 4000).sqrt()
    assert ((accepted - overlap).abs() < 4 * deviation + 1e-6).all()
    assert 0.2 < overlap.mean() < 0.9


@dataclass(frozen=True)
class Scene:
    """A few requests with random trees, drawn and not."""

    trees: list[Tree]
    p: Tensor  # [B, K + 1, V]
    q: Tensor  # [B, K, V]
    drawn: Tensor  # [B, K]
    keys: Tensor  # [B, K + 1, 2]

    @property
    def draft(self) -> Draft:
        return Draft.pack(self.trees, CPU)

    def verdicts(self) -> Verdicts:
        return verify_rejection(self.draft, self.p, self.keys, self.q, self.drawn)


def scene(seed: int, requests: int, *, chains: bool = False, vocab: int = V, width: int = 14) -> Scene:
    """Whether q is what they were drawn from does not matter here."""
    generator = torch.Generator().manual_seed(seed)

    def below(limit: int) -> int:
        return int(torch.randint(limit, (1,), generator=generator))

    trees = []
    for b in range(requests):
        nodes: dict[tuple[int, int], None] = {}
        for i in range(width if b == 0 else below(width + 1)):
            parent = i - 1 if chains else below(len(nodes) + 1) - 1
            nodes[(parent, below(vocab))] = None
        trees.append(Tree(tuple(t for _, t in nodes), tuple(p for p, _ in nodes)))
    width = max(map(len, trees))
    p, q = torch.randn(2, requests, width + 1, vocab, generator=generator).mul(2).softmax(3)
    streams = torch.randint(2**62, (requests,), generator=generator)
    drawn = torch.rand(requests, width, generator=generator) < 0.6
    keys = rejection_keys(streams, torch.arange(requests) * 7, width + 1)
    return Scene(trees, p, q[:, 1:].contiguous(), drawn, keys)


@pytest.mark.parametrize("chains", [True, False])
@pytest.mark.parametrize("told", [True, False])
def test_a_greedy_target_gets_the_exact_verifiers_tokens(chains: bool, told: bool) -> None:
    some = scene(3, 300, chains=chains, vocab=3)
    best = some.p.argmax(2)  # [B, K + 1]
    p = torch.nn.functional.one_hot(best, 3).float()
    verdicts = verify_rejection(some.draft, p, some.keys, *((some.q, some.drawn) if told else ()))
    expected = verify_exact(some.draft, best)
    assert torch.equal(verdicts.tokens, expected.tokens)
    assert torch.equal(verdicts.path, expected.path)
    assert torch.equal(verdicts.accepted, expected.accepted)
    assert expected.accepted.max() >= 3


@pytest.mark.parametrize("vocab", [V, 5003])
@pytest.mark.parametrize("chains", [True, False])
def test_company_changes_nothing(chains: bool, vocab: int) -> None:
    some = scene(5, 12, chains=chains, vocab=vocab)
    together = some.verdicts()
    for b, tree in enumerate(some.trees):
        width = len(tree)
        alone = verify_rejection(
            Draft.pack([tree], CPU),
            some.p[b : b + 1, : width + 1],
            some.keys[b : b + 1, : width + 1],
            some.q[b : b + 1, :width],
            some.drawn[b : b + 1, :width],
        )
        assert alone.accepted[0] == together.accepted[b]
        assert torch.equal(alone.tokens[0], together.tokens[b, : width + 1])
        assert torch.equal(alone.path[0], together.path[b, :width])


def test_a_chain_beside_trees_is_what_it_is_among_chains() -> None:
    some = scene(6, 400, chains=True)
    draft = some.draft
    assert draft.is_chain
    as_trees = Draft(draft.tokens, draft.parents, draft.counts, False)
    walked = rejection_choices(as_trees, some.p, some.keys, some.q, some.drawn)
    assert torch.equal(walked, rejection_choices(draft, some.p, some.keys, some.q, some.drawn))


@pytest.mark.parametrize("chains", [True, False])
def test_copied_drafts_beside_drawn_ones_are_what_they_are_by_themselves(chains: bool) -> None:
    some = scene(7, 400, chains=chains)
    draft, none = some.draft, torch.zeros_like(some.drawn)
    alone = rejection_choices(draft, some.p, some.keys)
    assert torch.equal(alone, rejection_choices(draft, some.p, some.keys, some.q, none))
    # a row of q that cannot be true counts as none
    assert torch.equal(alone, rejection_choices(draft, some.p, some.keys, torch.full_like(some.q, torch.nan)))
    assert torch.equal(alone, rejection_choices(draft, some.p, some.keys, torch.zeros_like(some.q)))


@pytest.mark.parametrize("vocab", [3, V, 5003])
def test_copied_trees_at_once_are_what_they_are_one_by_one(vocab: int) -> None:
    """Of a small vocabulary nothing may be left, and of all some rows are of no use."""
    some = scene(10, 600 if vocab < 1000 else 150, vocab=vocab, width=30 if vocab > 3 else 12)
    p = some.p.clone()
    p[p < 0.3 / vocab] = 0.0
    for b, tree in enumerate(some.trees):  # what is guessed is likely, so that paths are long
        for token, parent in zip(tree.tokens, tree.parents, strict=True):
            p[b, parent + 1, token] += 0.4
    p /= p.sum(2, keepdim=True)
    p[::7, 1], p[3::11, 0] = torch.nan, 0.0
    draft, none = some.draft, torch.zeros_like(some.drawn)
    at_once = rejection_choices(draft, p, some.keys)
    assert torch.equal(at_once, rejection_choices(draft, p, some.keys, some.q, none))
    assert (at_once >= 0).sum(1).max() > 4


def test_a_copied_tree_is_as_many_steps_for_any_number_of_nodes() -> None:
    """Each is a launch of a captured round."""

    def steps(width: int) -> int:
        draft = Draft.pack([Tree(tuple(range(width)), (ROOT,) * width)], CPU)
        p, keys = (
            torch.full((1, width + 1, 100), 0.01),
            rejection_keys(torch.zeros(1).long(), torch.zeros(1).long(), width + 1),
        )
        counting = Counting()  # type: ignore[no-untyped-call]
        with counting:
            rejection_choices(draft, p, keys)
        return counting.steps

    assert steps(60) <= steps(8) + 40  # views are counted, too; and pointers are longer
    assert steps(60) < 400


@pytest.mark.parametrize("chains", [True, False])
def test_the_choices_are_one_path_that_ends_beside_the_draft(chains: bool) -> None:
    some = scene(8, 400, chains=chains)
    draft, verdicts = some.draft, some.verdicts()
    choices = rejection_choices(draft, some.p, some.keys, some.q, some.drawn)
    assert torch.equal((choices >= 0).sum(1), verdicts.accepted + 1)
    for b, tree in enumerate(some.trees):
        path = verdicts.path[b, : verdicts.accepted[b]].tolist()
        assert [tree.parents[node] for node in path] == [ROOT, *path[:-1]][: len(path)]
        last = path[-1] if path else ROOT
        own = int(choices[b, last + 1])
        assert own not in [token for token, parent in zip(tree.tokens, tree.parents, strict=True) if parent == last]


@pytest.mark.parametrize("is_chain", [True, False])
@pytest.mark.parametrize("broken", [torch.nan, torch.inf, 0.0])
def test_a_row_without_use_ends_the_path(is_chain: bool, broken: float) -> None:
    draft = Draft(torch.tensor([[1, 2, 3]] * 2), torch.tensor([[-1, 0, 1]] * 2), torch.tensor([3, 3]), is_chain)
    p = torch.zeros(2, 4, V)
    p[:, [0, 1, 2, 3], [1, 2, 3, 4]] = 1.0
    if broken:
        p[0, 1, 7], p[1, 0, 7] = broken, broken  # beside the token that would be right
    else:
        p[0, 1], p[1, 0] = 0.0, 0.0
    q = torch.full((2, 3, V), 1 / V)
    for told in (None, q):
        verdicts = verify_rejection(draft, p, rejection_keys(torch.arange(2), torch.arange(2), 4), told)
        assert verdicts.tokens.tolist() == [[1, -1, 0, 0], [-1, 0, 0, 0]]
        assert verdicts.accepted.tolist() == [1, 0]


def test_padding_may_hold_anything() -> None:
    draft = Draft(
        tokens=torch.tensor([[3, 4, -1], [3, 3, 99]]),
        parents=torch.tensor([[-1, -1, 77], [-5, 0, 1]]),
        counts=torch.tensor([2, 0]),
        is_chain=False,
    )
    p = torch.zeros(2, 4, V)
    p[:, :, 4] = 1.0
    p[0, 3], p[1, 1:] = torch.nan, torch.nan
    q = torch.full((2, 3, V), 1 / V)
    q[0, 2], q[1] = torch.nan, torch.nan
    verdicts = verify_rejection(draft, p, rejection_keys(torch.arange(2), torch.arange(2), 4), q)
    assert verdicts.tokens.tolist() == [[4, 4, 0, 0], [4, 0, 0, 0]]
    assert verdicts.path.tolist() == [[1, 0, 0], [0, 0, 0]]


def test_no_draft_draws_from_p() -> None:
    p = pair(SETTINGS["T 0.6, top-p 0.9"]).p[START].expand(REQUESTS, 1, V)
    keys = rejection_keys(torch.arange(REQUESTS), torch.zeros(REQUESTS, dtype=torch.int64), 1)
    verdicts = verify_rejection(Draft.pack([Tree()] * REQUESTS, CPU), p, keys)
    assert verdicts.accepted.sum() == 0
    assert chi_square(verdicts.tokens[:, 0], p[0, 0]) > LEAST


@pytest.mark.parametrize("is_chain", [True, False])
@pytest.mark.parametrize("told", [True, False])
def test_no_value_is_looked_at(is_chain: bool, told: bool) -> None:
    """Tensors without values go through it."""
    whole = torch.zeros(2, 5, dtype=torch.int64, device="meta")
    draft = Draft(whole, whole, whole[:, 0], is_chain)
    q = torch.zeros(2, 5, V, device="meta") if told else None
    keys = rejection_keys(whole[:, 0], whole[:, 0], 6)
    assert rejection_choices(draft, torch.zeros(2, 6, V, device="meta"), keys, q).shape == (2, 6)


def test_inputs_are_left_alone() -> None:
    for chains in (True, False):
        some = scene(9, 20, chains=chains)
        draft = some.draft
        inputs = (draft.tokens, draft.parents, draft.counts, some.p, some.q, some.drawn, some.keys)
        before = [tensor.clone() for tensor in inputs]
        verify_rejection(draft, some.p, some.keys, some.q, some.drawn)
        assert all(torch.equal(a, b) for a, b in zip(before, inputs, strict=True))
