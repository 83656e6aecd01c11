"""Rejection sampling through real engines with trees of heads, and with guesses made of the target's own choices.

None of these nodes was drawn from a q that is told, so each has q = 1: the distribution is the model's all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import ClassVar

import pytest

import eagle_scenes
from conftest import save_model, tiny_llama
from medusa_checkpoints import chained_medusa, knowing_medusa
from rejection_scenes import V
from slipstream.core.draft import Tree
from slipstream.core.verdict import Verdict
from slipstream.drafters.base import DraftRequest, HostDrafter, Needs
from slipstream.drafters.lookahead import LookaheadDrafter
from slipstream.plan.planner import Planner
from slipstream.verify import rejection
from verifier_scenes import ALWAYS, FOUND, SETTINGS, Crowd, Expected, asked, expected

REQUESTS = 12  # times the samples of each
CASES = [("medusa", "eager"), ("eagle", "queued"), ("chained", "queued"), ("medusa", "queued"), ("eagle", "eager")]
NAMED = {"chained": "medusa"}
"""What the drafter is called, where that is something else."""
NODES = 10


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One layer, and small weights: it is never sure."""
    config = tiny_llama(num_hidden_layers=1, initializer_range=0.2)
    return save_model(tmp_path_factory.mktemp("models") / "shallow", config, seed=3)


@pytest.fixture(scope="module")
def wanted(target: Path) -> Callable[[str], Expected]:
    return cache(lambda name: expected(target, SETTINGS[name]))


@pytest.fixture(scope="module")
def headed(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Crowd]:
    """An engine with a head, by its name and the kind of rounds."""
    folder = tmp_path_factory.mktemp("heads")
    eagle = eagle_scenes.eagle1().write(folder / "eagle")
    heads = {
        "medusa": f"medusa:{knowing_medusa(folder / 'medusa', target)}",
        "chained": f"medusa:{chained_medusa(folder / 'chained')}?width=3",
        "eagle": f"eagle:{eagle}?width=3&depth=3&nodes={NODES}",
    }
    return cache(lambda name, rounds: Crowd(target, heads[name], rounds=rounds, draft_tokens=NODES))


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize(("name", "rounds"), CASES)
def test_trees_of_heads(
    headed: Callable[[str, str], Crowd], wanted: Callable[[str], Expected], setting: str, name: str, rounds: str
) -> None:
    tokens = headed(name, rounds).tokens(asked(SETTINGS[setting], NAMED.get(name, name)), REQUESTS)
    assert wanted(setting).p_value(tokens) > ALWAYS


@pytest.mark.parametrize(("name", "rounds"), CASES[:3])
def test_a_biased_acceptance_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
    headed: Callable[[str, str], Crowd],
    wanted: Callable[[str], Expected],
    name: str,
    rounds: str,
) -> None:
    monkeypatch.setattr(rejection, "_passes", lambda u, chance, odds: u * odds < chance * 3)
    tokens = headed(name, rounds).tokens(asked(SETTINGS["T 1, top-k 6"], NAMED.get(name, name)), REQUESTS)
    assert wanted("T 1, top-k 6").p_value(tokens) < FOUND


class NowAndThen(Planner):
    """Every second round is drafted."""

    def __init__(self) -> None:
        self.rounds = 0

    def trim(
        self, drafter: str, request_ids: Sequence[str], trees: Sequence[Tree], *_: object, **__: object
    ) -> list[Tree]:
        self.rounds += 1
        return list(trees) if self.rounds % 2 else [Tree()] * len(trees)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("rounds", ["eager", "queued"])
def test_lookahead_with_plain_rounds_between(
    target: Path, wanted: Callable[[str], Expected], setting: str, rounds: str
) -> None:
    crowd = Crowd(target, LookaheadDrafter(window=2, ngram=3), rounds=rounds, draft_tokens=NODES)
    crowd.engine.drafting.planner = NowAndThen()
    tokens = crowd.tokens(asked(SETTINGS[setting], "lookahead"), REQUESTS)
    assert wanted(setting).p_value(tokens) > ALWAYS


class Peeking(HostDrafter):
    """Looks what the target chooses behind a guess that is hardly ever right, and then drafts only if that was a token
    of its liking: so whether a place is drafted depends on the noise of that place."""

    name: ClassVar[str] = "peeking"
    needs: ClassVar[Needs] = Needs(choices=True)
    bounded: ClassVar[bool] = True
    liking: ClassVar[frozenset[int]] = frozenset({5, 11})

    def __init__(self) -> None:
        self.seen: dict[str, int | None] = {}  # by request: what was chosen behind its guess; None: it may look

    def propose(self, requests: Sequence[DraftRequest], budget: Sequence[int]) -> Sequence[Tree]:
        trees = []
        for request, nodes in zip(requests, budget, strict=True):
            peeked = self.seen.get(request.id)
            guess = [] if peeked is not None and peeked not in self.liking else [(request.tokens[-1] + 4) % V]
            trees.append(Tree.chain(guess[:nodes]))
        return trees

    def observe(self, verdicts: Sequence[Verdict]) -> None:
        for verdict in verdicts:
            peeks = verdict.drafted and not verdict.accepted
            self.seen[verdict.request_id] = verdict.choices[1] if peeks and len(verdict.choices) > 1 else None

    def stop(self, request_id: str) -> None:
        self.seen.pop(request_id, None)


def test_noise_that_was_seen_decides_nothing(
    monkeypatch: pytest.MonkeyPatch, target: Path, wanted: Callable[[str], Expected]
) -> None:
    setting = "T 1, top-k 6"
    params = asked(SETTINGS[setting], "peeking")
    assert wanted(setting).p_value(Crowd(target, Peeking()).tokens(params, 2 * REQUESTS)) > ALWAYS
    judged = rejection.mixed_choices

    def plain_where_undrafted(choices, logits, rows, row_of, draft, *rest, **more):  # type: ignore[no-untyped-def]
        found = judged(choices, logits, rows, row_of, draft, *rest, **more)
        return found.where((draft.counts > 0)[:, None], choices)

    monkeypatch.setattr("slipstream.engine.engine.mixed_choices", plain_where_undrafted)
    assert wanted(setting).p_value(Crowd(target, Peeking()).tokens(params, 2 * REQUESTS)) < FOUND
