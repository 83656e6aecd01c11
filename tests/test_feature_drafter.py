"""Heads on the target's hidden states, at any number of levels: the same tokens, and no row out of place."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from planning import Scripted
from queueing import Queue
from slipstream import CompletionOutput, SamplingParams, SpeculationParams
from slipstream.core.draft import MAX_NODES, Tree
from slipstream.core.errors import ConfigError
from slipstream.drafters.base import DeviceTree, DraftRequest, DraftRound, HostDrafter
from slipstream.drafters.eagle import EagleDrafter
from slipstream.drafters.heads import FeatureDrafter
from slipstream.engine.caps import levels_of
from slipstream.plan.planner import AdaptivePlanner
from slipstream.plan.types import Budget, Curve, DraftSeen, MeasuredCosts, Offer, TreeSeen
from stepping import Arrival, Stepper
from tiny_heads import DoubtingHead, KnowingHead, RandomHead, save_forgetful, target_features

ENGINES = [Stepper, Queue]


@dataclass
class Noted:
    """A draft: for whom, behind which token, and what."""

    request: str
    length: int  # tokens before the last one
    tokens: list[int]
    parents: list[int]


class Noting(FeatureDrafter):
    """Keeps what it guessed."""

    name: ClassVar[str] = "noting"

    def __init__(self, head: RandomHead, **options: Any) -> None:
        super().__init__(head, **options)
        self.at_slot: dict[int, str] = {}
        self.prompts: dict[str, list[int]] = {}
        self.noted: list[Noted] = []

    def start(self, request: DraftRequest) -> None:
        super().start(request)
        self.at_slot[request.slot] = request.id
        self.prompts[request.id] = list(request.tokens[: request.prompt_length])

    def draft(self, round: DraftRound) -> Tensor | DeviceTree:
        made = super().draft(round)
        tokens = made.tokens if isinstance(made, DeviceTree) else made
        chain = torch.arange(-1, tokens.shape[1] - 1).expand_as(tokens)
        parents = made.parents if isinstance(made, DeviceTree) else chain
        parts = (round.lanes, round.state.length[round.lanes], tokens, parents)
        for lane, length, line, above in zip(*(part.tolist() for part in parts), strict=True):
            if lane in self.at_slot:
                self.noted.append(Noted(self.at_slot[lane], length, line, above))
        return made


def job(prompt: int, tokens: int, joins: int = 0, **params: Any) -> Arrival:
    wanted: dict[str, Any] = {"temperature": 0, "max_tokens": tokens, "ignore_eos": True, **params}
    return Arrival(prompt, SamplingParams(**wanted), joins)


JOBS = [
    job(1, 25),
    job(9, 20, temperature=1.0, seed=3),
    job(40, 18, joins=3, temperature=0.8, top_p=0.9, seed=5),
    job(3, 22, joins=1, frequency_penalty=0.7, presence_penalty=0.3),
    job(16, 15, temperature=1.0, seed=8, n=2),
]


def texts(jobs: Sequence[Arrival], outs: Sequence[CompletionOutput]) -> list[list[int]]:
    """Prompts as `Stepper.run` draws them, with the answers; in the order of the answers."""
    dice = random.Random(len(jobs))
    drawn = [(job, dice.choices(range(256), k=job.prompt)) for job in jobs]
    whole = [prompt for job, prompt in sorted(drawn, key=lambda pair: pair[0].joins) for _ in range(job.params.n)]
    return [[*prompt, *out.token_ids] for prompt, out in zip(whole, outs, strict=True)]


@pytest.fixture(scope="module")
def forgetful(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_forgetful(tmp_path_factory.mktemp("forgetful") / "target")


@pytest.mark.parametrize("kind", ENGINES)
@pytest.mark.parametrize("shape", [{"depth": 4}, {"depth": 3, "width": 3, "nodes": 12}], ids=["chain", "tree"])
class TestTokensStay:
    """With whatever head: greedy and sampled, filtered, penalized, forked, in company."""

    def test_with_a_vocabulary_of_its_own(self, tiny_target: Path, kind: Any, shape: dict[str, int]) -> None:
        head = RandomHead(ids=range(5, 200, 3))
        plain = Stepper(tiny_target, None).run(JOBS)
        got = kind(tiny_target, Noting(head, **shape)).run(JOBS)
        assert [out.token_ids for out in got] == [out.token_ids for out in plain]
        kind(tiny_target, drafter := Noting(head, **shape)).run(JOBS[:2])
        assert {token for noted in drafter.noted for token in noted.tokens} <= set(range(5, 200, 3))

    def test_a_short_context_of_its_own(self, tiny_target: Path, kind: Any, shape: dict[str, int]) -> None:
        """Where the head's context ends, the answer goes on."""
        jobs = [job(10, 40), job(60, 10)]
        plain = Stepper(tiny_target, None).run(jobs)
        got = kind(tiny_target, Noting(RandomHead(max_positions=32), **shape)).run(jobs)
        assert [out.token_ids for out in got] == [out.token_ids for out in plain]
        assert "noting" not in got[1].speculation.by_drafter


@pytest.mark.parametrize("kind", ENGINES)
@pytest.mark.parametrize("shape", [{"depth": 4}, {"depth": 4, "width": 3, "nodes": 30}], ids=["chain", "tree"])
def test_who_knows_is_never_wrong(forgetful: Path, kind: Any, shape: dict[str, int]) -> None:
    """The target's own logits at every step: the same noise at the same positions, penalties along the path."""
    plain = Stepper(forgetful, None).run(JOBS)
    got = kind(forgetful, Noting(KnowingHead(forgetful), **shape), draft_tokens=shape.get("nodes", 4)).run(JOBS)
    for ours, theirs in zip(got, plain, strict=True):
        assert ours.token_ids == theirs.token_ids
        stats = ours.speculation
        # five tokens a round, but for the first, which the prompt gives, and the last ones, which a limit cuts
        assert stats.rounds <= 1 + -(-len(ours.token_ids) // 5) + (1 if "width" not in shape else 3)


@pytest.mark.parametrize("kind", ENGINES)
@pytest.mark.parametrize("shape", [{"depth": 4}, {"depth": 4, "width": 3, "nodes": 30}], ids=["chain", "tree"])
def test_rejection_sampling_has_drafts_with_other_noise(forgetful: Path, kind: Any, shape: dict[str, int]) -> None:
    """With the request's own, who knows the logits would know the answer of plain decoding, whatever it says then."""
    plainly, rejecting = (
        job(9, 20, temperature=1.0, seed=3, speculation=SpeculationParams(verifier=verifier))
        for verifier in ("exact", "rejection")
    )
    known = []
    for one in (plainly, rejecting):
        drafter = Noting(KnowingHead(forgetful), **shape)
        (plain,) = Stepper(forgetful, None).run([one])
        kind(forgetful, drafter, draft_tokens=shape.get("nodes", 4)).run([one])
        known.append(tuple(plain.token_ids[1:4]) in paths(drafter.noted[0]))
    assert known == [True, False]


class Reference:
    """What a head would guess behind a text, computed at once from transformers' hidden states."""

    def __init__(self, head: RandomHead, target: Path, text: Sequence[int]) -> None:
        self.head, self.text = head, list(text)
        self.features = head.combine(target_features(target, text))

    @torch.inference_mode()
    def scores(self, length: int, path: Sequence[int]) -> Tensor:  # [V]
        """Log probabilities behind the committed text and these guesses, of the token that follows."""
        features, ids = self.features[:length], self.text[1 : length + 1]
        for token in path:
            hidden = self.head.plain(ids, features)
            features = torch.cat((features, hidden[-1:, : features.shape[1]]))
            ids = [*ids, token]
        logits = self.head.logits(self.head.plain(ids, features)[-1:])[0]
        return logits.log_softmax(0)

    def chain(self, length: int, depth: int) -> list[int]:
        path: list[int] = []
        for _ in range(depth):
            path.append(int(self.scores(length, path).argmax()))
        return path

    def tree(self, length: int, depth: int, width: int, nodes: int) -> set[tuple[int, ...]]:
        """The paths of the surest nodes among all that a beam meets."""
        offered: dict[tuple[int, ...], float] = {}
        beam: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
        for _ in range(depth):
            children: list[tuple[tuple[int, ...], float]] = []
            for path, score in beam:
                best = self.scores(length, path).topk(width)
                pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
                children += [((*path, token), score + value) for token, value in pairs]
            offered.update(children)
            beam = sorted(children, key=lambda child: -child[1])[:width]
        return set(sorted(offered, key=lambda path: -offered[path])[:nodes])


def paths(noted: Noted) -> set[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    for token, parent in zip(noted.tokens, noted.parents, strict=True):
        assert parent < len(found)
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return set(found)


@pytest.mark.parametrize("kind", ENGINES)
@pytest.mark.parametrize("shape", [{"depth": 4}, {"depth": 3, "width": 3, "nodes": 9}], ids=["chain", "tree"])
def test_every_guess_is_the_heads_own(forgetful: Path, kind: Any, shape: dict[str, int]) -> None:
    """No row is missing, stale or out of place: after prompts in chunks, beside others, after right guesses."""
    jobs = [job(1, 26), job(37, 24), job(5, 22, joins=2)]
    drafter = Noting(DoubtingHead(forgetful), **shape)
    bench = kind(forgetful, drafter, page_size=4, max_num_batched_tokens=24, max_num_seqs=8)
    outs = bench.run(jobs)
    whole = texts(jobs, outs)
    assert 5 < sum(out.speculation.accepted for out in outs) < 0.9 * sum(out.speculation.drafted for out in outs)
    head = drafter.head
    assert isinstance(head, RandomHead)
    references = [Reference(head, forgetful, text) for text in whole]
    seen = 0
    for noted in drafter.noted:
        text = next(r for r in references if _is_of(noted, r.text, drafter))
        if noted.length + 1 > len(text.text):
            continue  # a round too many
        seen += 1
        if "width" in shape:
            count = len(noted.tokens)
            assert paths(noted) == text.tree(noted.length, min(3, count), 3, count)
        else:
            assert noted.tokens == text.chain(noted.length, len(noted.tokens))
    assert seen > 10


def _is_of(noted: Noted, text: Sequence[int], drafter: Noting) -> bool:
    return drafter.prompts[noted.request] == text[: len(drafter.prompts[noted.request])]


@pytest.mark.parametrize("waits", [False, True], ids=["ahead", "waiting"])
@pytest.mark.parametrize("shape", [{"depth": 3}, {"depth": 3, "width": 3, "nodes": 9}], ids=["chain", "tree"])
def test_what_it_missed_it_reads_before_it_drafts_again(forgetful: Path, shape: dict[str, int], waits: bool) -> None:
    """Rounds without drafts between: as if it had been there all the time. Right guesses before them are read, too."""
    head = DoubtingHead(forgetful)
    head.lm_head *= 0.5  # right more often, several times in a row
    drafter = Noting(head, **shape)
    bench = Queue(forgetful, drafter, page_size=4)
    heard: list[Any]
    logprobs = 1 if waits else None  # somebody reads every round before the next one is queued
    params = SamplingParams(temperature=0, max_tokens=90, ignore_eos=True, logprobs=logprobs)
    held, heard = bench.add([5, 6, 7], params)
    planner = bench.engine.drafting.planner
    plan, rounds = planner.plan, 0
    while bench.engine.busy:
        rests = rounds % 7 in range(3, 6)
        nothing = [Budget([0], 3 if "width" in shape else 0)]
        planner.plan = (lambda *_, to=nothing: to) if rests else plan  # type: ignore[method-assign]
        bench.engine.step()
        rounds += 1
    text = [5, 6, 7, *heard[-1].outputs[0].token_ids]
    reference = Reference(head, forgetful, text)
    drafts = [noted for noted in drafter.noted if noted.length + 1 <= len(text)]
    assert len(drafts) > 8
    assert heard[-1].outputs[0].speculation.accepted > len(drafts)
    for noted in drafts:
        count = len(noted.tokens)
        if "width" in shape:
            assert paths(noted) == reference.tree(noted.length, min(3, count), 3, count)
        else:
            assert noted.tokens == reference.chain(noted.length, count)
    assert held.answers[0].ended


@pytest.mark.parametrize("wrong", [{"depth": 0}, {"depth": 64}, {"depth": 2, "width": 0}, {"depth": 2, "nodes": 64}])
def test_shapes_that_cannot_be_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=r"at most|1 to 63"):
        FeatureDrafter(RandomHead(), **wrong)


def test_memory_is_planned_for_it(tiny_target: Path) -> None:
    plain, drafted = (
        Stepper(tiny_target, drafter).engine.plan for drafter in (None, Noting(RandomHead(), depth=3, width=4))
    )
    own = 2 * 2 * 8 * 4 + 2 * 32 * 4  # K and V of the head, and two hidden states, of each slot
    page = 16
    assert drafted.cache_bytes // drafted.num_pages - plain.cache_bytes // plain.num_pages == own * page
    assert drafted.draft_weights_bytes == 1234
    assert drafted.workspace_bytes > plain.workspace_bytes


class Truth(HostDrafter):
    """Knows the whole answer, and guesses far ahead."""

    name: ClassVar[str] = "truth"
    bounded: ClassVar[bool] = True

    def __init__(self, text: Sequence[int]) -> None:
        self.text = list(text)

    def propose(self, requests: Sequence[DraftRequest], budget: Sequence[int]) -> Sequence[Tree]:
        return [Tree.chain(self.text[len(r.tokens) :][:n]) for r, n in zip(requests, budget, strict=True)]


@pytest.mark.parametrize("kind", ENGINES)
@pytest.mark.parametrize("shape", [{"depth": 2}, {"depth": 2, "width": 2, "nodes": 4}], ids=["chain", "tree"])
def test_it_follows_where_others_went_far_ahead(forgetful: Path, kind: Any, shape: dict[str, int]) -> None:
    """In a merged draft more may be accepted than it reads again: it must not go on from what it guessed itself."""
    (plain,) = Stepper(forgetful, None).run([job(4, 60)])
    (text,) = texts([job(4, 60)], [plain])
    drafter = Noting(DoubtingHead(forgetful), **shape)
    both = job(4, 60, speculation=SpeculationParams(drafter="truth+noting", draft_tokens=12))
    (out,) = kind(forgetful, [Truth(text), drafter], page_size=4).run([both])
    assert out.token_ids == plain.token_ids
    assert out.speculation.accepted / out.speculation.rounds > 2
    reference = Reference(drafter.head, forgetful, text)  # type: ignore[arg-type]
    drafts = [noted for noted in drafter.noted if noted.length + 1 <= len(text)]
    assert len(drafts) > 3
    for noted in drafts:
        if "width" not in shape:
            assert noted.tokens == reference.chain(noted.length, len(noted.tokens))
        else:
            assert paths(noted) == reference.tree(noted.length, 2, 2, len(noted.tokens))


class Levelling(Scripted):
    """Another number of levels in every round, and of nodes."""

    def __init__(self) -> None:
        self.rounds = 0
        self.asked: list[int] = []

    def nodes(self, offer: Offer) -> Budget:
        self.rounds += 1
        chosen = offer.levels[self.rounds * 5 % len(offer.levels)]
        self.asked.append(chosen.deep)
        most = min(chosen.nodes, (MAX_NODES, 7, chosen.deep)[self.rounds // 7 % 3])
        return Budget([min(cap, most) for cap in offer.caps], chosen.deep)


class Deep(Noting):
    """Notes the levels of its drafts as well."""

    def __init__(self, head: RandomHead, **options: Any) -> None:
        super().__init__(head, **options)
        self.levels: list[int] = []

    def draft(self, round: DraftRound) -> Any:
        made = super().draft(round)
        self.levels += [round.depth] * (len(self.noted) - len(self.levels))
        return made


@pytest.mark.parametrize("kind", ENGINES)
class TestRounds:
    @pytest.mark.parametrize("shape", [{"depth": 9, "width": 3}, {"depth": 5, "width": 2, "nodes": 11}])
    def test_the_same_tokens_whatever_the_levels(self, forgetful: Path, kind: Any, shape: dict[str, int]) -> None:
        plain = Stepper(forgetful, None).run(JOBS)
        drafter = Deep(KnowingHead(forgetful), **shape)
        bench = kind(forgetful, drafter, draft_tokens=shape.get("nodes", MAX_NODES))
        bench.engine.drafting.planner = Levelling()
        got = bench.run(JOBS)
        assert [out.token_ids for out in got] == [out.token_ids for out in plain]
        assert not any(out.speculation.by_drafter["noting"].failures for out in got)
        assert len(set(drafter.levels)) > 2
        assert max(drafter.levels) == shape["depth"]

    def test_every_guess_is_the_heads_own(self, forgetful: Path, kind: Any) -> None:
        """Levels change from round to round: what the round before had right is read again all the same."""
        jobs = [job(1, 40), job(19, 36), job(5, 30, joins=2)]
        head = DoubtingHead(forgetful)
        head.lm_head *= 0.3  # right several times in a row
        drafter = Deep(head, depth=6, width=3, nodes=20)
        bench = kind(forgetful, drafter, page_size=4, max_num_seqs=8)
        bench.engine.drafting.planner = Levelling()
        outs = bench.run(jobs)
        references = [Reference(head, forgetful, text) for text in texts(jobs, outs)]
        checked: set[int] = set()
        for noted, levels in list(zip(drafter.noted, drafter.levels, strict=True))[::3]:
            prompt = drafter.prompts[noted.request]
            text = next(r for r in references if r.text[: len(prompt)] == prompt)
            if noted.length + 1 <= len(text.text):
                assert paths(noted) == text.tree(noted.length, levels, 3, len(noted.tokens))
                checked.add(levels)
        assert checked == {1, 2, 4, 6}
        assert max(out.speculation.accepted for out in outs) > 15

    def test_the_planner_of_the_engine(self, forgetful: Path, kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """One that knows goes as deep as it may, where guesses cost next to nothing; the tokens stay."""
        one = job(4, 150)
        (plain,) = Stepper(forgetful, None).run([one])
        head = KnowingHead(forgetful)
        head.table = 20 * head.table  # and is sure of it
        drafter = Deep(head, depth=9, width=2)
        bench = kind(forgetful, drafter, planner="adaptive", draft_tokens=30)
        planner = bench.engine.drafting.planner
        assert isinstance(planner, AdaptivePlanner)
        monkeypatch.setattr(planner, "observe_step", lambda *_: None)
        monkeypatch.setattr(planner, "observe_draft", lambda *_, **__: None)
        planner.adopt(MeasuredCosts(Curve((1, 64), (1.0, 1.1)), drafts={"noting": GROWN}))
        (got,) = bench.run([one])
        assert got.token_ids == plain.token_ids
        assert drafter.levels[0] < 9
        assert drafter.levels.count(9) > len(drafter.levels) / 2


GROWN = (DraftSeen(1, Curve((1, 9), (0.02, 0.5))),)


def test_both_engines_guess_alike(forgetful: Path) -> None:
    """A round behind or not: as many guesses of as many levels, and as many of them right."""
    found = []
    for kind in ENGINES:
        drafter = Deep(DoubtingHead(forgetful), depth=6, width=3, nodes=20)
        bench = kind(forgetful, drafter)
        bench.engine.drafting.planner = Levelling()
        (out,) = bench.run([job(7, 60)])
        stats = out.speculation
        found.append((out.token_ids, stats.accepted, stats.rounds))
    assert found[0] == found[1]
    assert found[0][1] > 10


@pytest.mark.parametrize("kind", ENGINES)
def test_what_is_learned_knows_how_deep_the_round_was(forgetful: Path, kind: Any) -> None:
    """A tree that was right to its last level is no failure: nobody knows what would have come."""
    heard: list[tuple[int, int, TreeSeen | None]] = []

    class Listening(Levelling):
        def observe(
            self, drafter: str, request_id: str, drafted: int, accepted: int, tree: TreeSeen | None = None
        ) -> None:
            heard.append((drafted, accepted, tree))

    bench = kind(forgetful, Deep(KnowingHead(forgetful), depth=6, width=3))
    bench.engine.drafting.planner = Listening()
    bench.run([job(7, 120)])
    assert {drafted for drafted, _, _ in heard} >= {1, 2, 4, 6}
    assert all(accepted <= drafted for drafted, accepted, _ in heard)
    assert sum(drafted == accepted for drafted, accepted, _ in heard) > len(heard) / 2
    assert all(tree is not None and list(tree.path) == sorted(tree.path) for _, _, tree in heard)


@pytest.mark.parametrize(("draft_tokens", "deepest"), [(3, 4), (63, 6)])
def test_limits_of_a_request_hold(forgetful: Path, draft_tokens: int, deepest: int) -> None:
    """Of trees with few nodes no more levels are computed than they can have."""
    drafter = Deep(KnowingHead(forgetful), depth=6, width=4)
    one = job(7, 30, speculation=SpeculationParams(draft_tokens=draft_tokens))
    (out,) = Queue(forgetful, drafter, planner="fixed").run([one])
    assert max(drafter.levels) == deepest
    assert out.speculation.drafted <= draft_tokens * out.speculation.rounds


def test_by_default_a_head_may_go_to_ten_levels() -> None:
    drafter = EagleDrafter(RandomHead())
    assert [one.deep for one in levels_of(drafter)] == [1, 2, 4, 6, 8, 10]
    assert [one.nodes for one in levels_of(drafter)] == [8, 63, 63, 63, 63, 63]
    assert drafter.rereads == 11
