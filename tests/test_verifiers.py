"""Rejection sampling in the engine: the distribution is the target's with every drafter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import ClassVar

import pytest
import torch

import eagle_scenes
from conftest import VOCAB, save_model, tiny_llama
from medusa_checkpoints import chained_medusa, knowing_medusa
from rejection_scenes import SHAPES, V
from slipstream import CompletionOutput, SamplingParams, SpeculationParams
from slipstream.core.draft import Draft, Tree
from slipstream.core.errors import InvalidRequest
from slipstream.core.verdict import Verdict
from slipstream.drafters.base import DraftRequest, HostDrafter, Needs
from slipstream.drafters.lookahead import LookaheadDrafter
from slipstream.plan.planner import Planner
from slipstream.sampling import Features, SampleRows, SamplingTable
from slipstream.verify import rejection
from slipstream.verify.rejection import mixed_choices
from verifier_scenes import ALWAYS, FOUND, ONLY, SETTINGS, Copying, Crowd, Drawing, Expected, asked, expected

REQUESTS = 12  # times the samples of each, 768 answers: enough to notice the mistakes below


PLAIN = SpeculationParams(enabled=False)


LONG = SamplingParams(temperature=1.0, max_tokens=40, ignore_eos=True, top_k=8, logit_bias=ONLY)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One layer, and small weights: it is never sure."""
    config = tiny_llama(num_hidden_layers=1, initializer_range=0.2)
    return save_model(tmp_path_factory.mktemp("models") / "shallow", config, seed=3)


@pytest.fixture(scope="module")
def wanted(target: Path) -> Callable[[str], Expected]:
    return cache(lambda name: expected(target, SETTINGS[name]))


@pytest.fixture(scope="module")
def drafted(target: Path, tiny_draft: Path) -> Callable[[str], Crowd]:
    """An engine with a draft model, by the kind of its rounds."""
    return cache(lambda rounds: Crowd(target, f"model:{tiny_draft}", rounds=rounds))


@pytest.fixture(scope="module")
def copied(target: Path) -> Callable[[str], Crowd]:
    return cache(lambda rounds: Crowd(target, Copying(), rounds=rounds))


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("rounds", ["eager", "queued"])
def test_a_draft_models_chains(
    drafted: Callable[[str], Crowd], wanted: Callable[[str], Expected], setting: str, rounds: str
) -> None:
    tokens = drafted(rounds).tokens(asked(SETTINGS[setting], "model"), REQUESTS)
    assert wanted(setting).p_value(tokens) > ALWAYS


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("shape", ["tree", "merged, by turns"])
def test_drawn_and_merged_trees(target: Path, wanted: Callable[[str], Expected], setting: str, shape: str) -> None:
    crowd = Crowd(target, Drawing(SHAPES[shape], SETTINGS[setting]))
    tokens = crowd.tokens(asked(SETTINGS[setting], "drawing"), REQUESTS)
    assert wanted(setting).p_value(tokens) > ALWAYS


@pytest.mark.parametrize("rounds", ["eager", "queued"])
def test_a_draft_model_and_copied_trees_together(
    target: Path, tiny_draft: Path, wanted: Callable[[str], Expected], rounds: str
) -> None:
    setting = "T 0.6, top-p 0.9"
    crowd = Crowd(target, [Copying(), f"model:{tiny_draft}"], rounds=rounds)
    params = asked(SETTINGS[setting], "copying+model")
    assert wanted(setting).p_value(crowd.tokens(params, REQUESTS)) > ALWAYS


@pytest.mark.parametrize("rounds", ["eager", "queued"])
def test_copied_trees(copied: Callable[[str], Crowd], wanted: Callable[[str], Expected], rounds: str) -> None:
    setting = "T 0.6, top-p 0.9"
    tokens = copied(rounds).tokens(asked(SETTINGS[setting], "copying"), REQUESTS)
    assert wanted(setting).p_value(tokens) > ALWAYS


def generous(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rejection, "_passes", lambda u, chance, odds: u * odds < chance * 2)


def from_p_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rejection, "_residual", lambda p, q: p.clone())


@pytest.mark.parametrize("mistake", [generous, from_p_again])
@pytest.mark.parametrize("drafter", ["model", "tree", "merged, drawn first"])
def test_mistakes_are_noticed(
    monkeypatch: pytest.MonkeyPatch,
    target: Path,
    drafted: Callable[[str], Crowd],
    wanted: Callable[[str], Expected],
    mistake: Callable[[pytest.MonkeyPatch], None],
    drafter: str,
) -> None:
    mistake(monkeypatch)
    setting, name = "T 1, top-k 6", "model" if drafter == "model" else "drawing"
    drawing = name == "drawing"
    crowd = Crowd(target, Drawing(SHAPES[drafter], SETTINGS[setting])) if drawing else drafted("eager")
    tokens = crowd.tokens(asked(SETTINGS[setting], name), REQUESTS)
    assert wanted(setting).p_value(tokens) < FOUND


def accepted(answers: Sequence[CompletionOutput]) -> float:
    return sum(a.speculation.accepted for a in answers) / sum(a.speculation.drafted for a in answers)


@pytest.mark.parametrize("rounds", ["eager", "queued"])
def test_a_draft_like_the_target_is_always_believed(target: Path, rounds: str) -> None:
    """Only where the drafter's true q gets to the verifier: with q = 1 half of it would fall."""
    crowd = Crowd(target, f"model:{target}", rounds=rounds, draft_tokens=4)
    one = replace(LONG, presence_penalty=0.4, speculation=SpeculationParams(verifier="rejection"))
    answers = crowd.answers([replace(one, seed=seed) for seed in range(6)])
    assert accepted(answers) > 0.99
    plain = crowd.answers([replace(one, seed=seed, speculation=PLAIN) for seed in range(6)])
    assert all(a.token_ids != b.token_ids for a, b in zip(answers, plain, strict=True))


def test_telling_what_was_drawn_brings_more(target: Path) -> None:
    drafter = Drawing(SHAPES["chain"], SETTINGS["T 1, top-k 6"])
    crowd = Crowd(target, drafter)
    params = [replace(LONG, seed=s, speculation=SpeculationParams(verifier="rejection")) for s in range(40)]
    told = accepted(crowd.answers(params))
    drafter.told = False
    assert told > 1.2 * accepted(crowd.answers(params))


@pytest.mark.parametrize("rounds", ["eager", "queued"])
def test_each_request_has_its_own(target: Path, tiny_draft: Path, rounds: str) -> None:
    """In company: exact and greedy requests give plain tokens, the others what they give alone.

    But for the end, where an engine that works ahead drafts less.
    """
    crowd = Crowd(target, [f"model:{tiny_draft}", Copying()], rounds=rounds, draft_tokens=4)
    rejecting, exact = SpeculationParams(verifier="rejection"), SpeculationParams()
    copied = SpeculationParams(verifier="rejection", drafter="copying")
    plans = [rejecting, exact, copied, rejecting, exact, rejecting, exact]
    params = [replace(LONG, seed=s, temperature=min(s, 1), speculation=how) for s, how in enumerate(plans)]
    together = [a.token_ids for a in crowd.answers(params)]
    plain = [crowd.answers([replace(one, speculation=PLAIN)])[0].token_ids for one in params]
    alone = [crowd.answers([one])[0].token_ids for one in params]
    assert [a == b for a, b in zip(together, plain, strict=True)] == [True, True, False, False, True, False, True]
    assert [tokens[:25] for tokens in together] == [tokens[:25] for tokens in alone]


def test_both_engines_give_the_same_answer(target: Path, tiny_draft: Path) -> None:
    """But for the end, where the engine that works ahead drafts less."""
    plans = [SpeculationParams(verifier="rejection", drafter=name) for name in ("model", "copying", "copying+model")]
    params = [replace(LONG, seed=s, speculation=how) for how in plans for s in range(4)]
    found = []
    for rounds in ("eager", "queued"):
        crowd = Crowd(target, [Copying(), f"model:{tiny_draft}"], rounds=rounds, draft_tokens=6)
        found.append([a.token_ids[:20] for a in crowd.answers(params)])
    assert found[0] == found[1]


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("rounds", ["eager", "queued"])
def test_without_a_draft_it_draws_by_its_own_noise(
    copied: Callable[[str], Crowd], wanted: Callable[[str], Expected], setting: str, rounds: str
) -> None:
    crowd = copied(rounds)
    params = asked(SETTINGS[setting], "copying")
    params = replace(params, speculation=replace(params.speculation, draft_tokens=0))
    tokens = crowd.tokens(params, REQUESTS)
    assert wanted(setting).p_value(tokens) > ALWAYS
    plain = crowd.tokens(replace(params, speculation=PLAIN), 1)
    assert not torch.equal(tokens[: len(plain), 0], plain[:, 0]), "from the first token on"


def test_no_value_is_looked_at_in_a_round() -> None:
    """Tensors without values go through all that a captured round does, top-k and top-p included."""
    table = SamplingTable(4, 50, "meta")
    names = ("temperature", "top_k", "top_p", "log_min_p", "streams", "rejects")
    assert all(getattr(table, name).device.type == "meta" for name in names)
    row = torch.zeros(12, dtype=torch.int64, device="meta")
    nodes = torch.zeros(2, 5, dtype=torch.int64, device="meta")
    for is_chain in (True, False):
        draft = Draft(nodes, nodes, nodes[:, 0], is_chain, torch.zeros(2, 5, 50, device="meta"))
        features = Features(sampled=True, top_k=True, top_p=True, min_p=True, rejection=True)
        found = mixed_choices(
            row.view(2, 6),
            torch.zeros(12, 50, device="meta"),
            SampleRows(row, row, row),
            row.view(2, 6),
            draft,
            table,
            features,
            nodes > 0,
        )
        assert found.shape == (2, 6)


def test_memory_is_planned_for_what_is_drawn_from(target: Path, tiny_draft: Path) -> None:
    """By the draft model, and once more by the nodes of a round: what it is made for, and others beside them."""
    seats = {"max_num_seqs": 8, "max_draft_rows": 256}
    told, plain = (Crowd(target, drafter, **seats).engine.plan for drafter in (f"model:{tiny_draft}", "ngram"))
    assert told.workspace_bytes - plain.workspace_bytes == (5 + 10) * 9 * VOCAB * 4
    fewer = Crowd(target, f"model:{tiny_draft}", draft_tokens=2, **seats).engine.plan
    assert fewer.workspace_bytes - plain.workspace_bytes == (2 + 2) * 9 * VOCAB * 4


@pytest.mark.parametrize("rounds", ["eager", "queued"])
def test_no_more_is_drawn_than_was_planned_for(target: Path, tiny_draft: Path, rounds: str) -> None:
    crowd = Crowd(target, [f"model:{tiny_draft}", Copying()], rounds=rounds)
    for verifier, most in (("rejection", 10), ("exact", 30)):
        how = SpeculationParams(drafter="model", draft_tokens=30, verifier=verifier)  # type: ignore[arg-type]
        stats = crowd.answers([replace(LONG, seed=1, max_tokens=34, speculation=how)])[0].speculation
        drafts = stats.by_drafter["model"].drafts
        assert drafts < stats.drafted <= most * drafts
        assert verifier == "rejection" or stats.drafted > 10 * drafts


def test_a_verifier_that_is_none_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="verifier='typical': must be one of exact, rejection"):
        SpeculationParams(verifier="typical")  # type: ignore[arg-type]


def test_how_many_requests_are_judged_together_changes_nothing(
    target: Path, tiny_draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = [replace(LONG, seed=s, speculation=SpeculationParams(verifier="rejection")) for s in range(5)]
    crowd = Crowd(target, f"model:{tiny_draft}", draft_tokens=4)
    together = [a.token_ids for a in crowd.answers(params)]
    monkeypatch.setattr(rejection, "JUDGED_ROWS", 2 * 5)
    monkeypatch.setattr(rejection, "group_rows", lambda width: 1)
    assert [a.token_ids for a in crowd.answers(params)] == together


CASES = [("medusa", "eager"), ("eagle", "queued"), ("chained", "queued"), ("medusa", "queued"), ("eagle", "eager")]


NAMED = {"chained": "medusa"}
"""What the drafter is called, where that is something else."""


NODES = 10


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

    monkeypatch.setattr("slipstream.engine.eager.mixed_choices", plain_where_undrafted)
    assert wanted(setting).p_value(Crowd(target, Peeking()).tokens(params, 2 * REQUESTS)) < FOUND
