"""Trees of as many levels as the plan says, in both engines: always the same tokens, and no row out of place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from planning import Scripted
from queueing import Queue
from slipstream import SpeculationParams
from slipstream.core.draft import MAX_NODES
from slipstream.drafters.base import DraftRound
from slipstream.drafters.eagle import EagleDrafter
from slipstream.drafters.heads import FeatureDrafter
from slipstream.engine.gathering import levels_of
from slipstream.engine.measuring import _draft_sizes
from slipstream.engine.queued import QueuedEngine
from slipstream.plan.planner import AdaptivePlanner
from slipstream.plan.types import Budget, Curve, DraftSeen, MeasuredCosts, Offer, TreeSeen
from stepping import Stepper
from test_feature_drafter import JOBS, Noting, Reference, job, paths, texts
from tiny_heads import DoubtingHead, KnowingHead, RandomHead, save_forgetful


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


@pytest.fixture(scope="module")
def forgetful(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_forgetful(tmp_path_factory.mktemp("forgetful") / "target")


class Deep(Noting):
    """Notes the levels of its drafts as well."""

    def __init__(self, head: RandomHead, **options: Any) -> None:
        super().__init__(head, **options)
        self.levels: list[int] = []

    def draft(self, round: DraftRound) -> Any:
        made = super().draft(round)
        self.levels += [round.depth] * (len(self.noted) - len(self.levels))
        return made


ENGINES = [Stepper, Queue]


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


def test_a_loop_is_made_for_each_number_of_levels_and_not_of_nodes(forgetful: Path) -> None:
    drafter = Deep(KnowingHead(forgetful), depth=6, width=3)
    bench = Queue(forgetful, drafter)
    bench.engine.drafting.planner = planner = Levelling()
    bench.run([job(7, 120)])
    engine = bench.engine
    assert isinstance(engine, QueuedEngine)
    loops = {shape.drafts for shape in engine.rounds._loops._loops}
    assert {size.levels for (size,) in loops} == set(planner.asked) == {1, 2, 4, 6}
    by_keys = {(shape.keys, shape.features): 0 for shape in engine.rounds._loops._loops}
    for shape in engine.rounds._loops._loops:
        by_keys[shape.keys, shape.features] += 1
    assert max(by_keys.values()) <= 4


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


@pytest.mark.parametrize(("draft_tokens", "deepest"), [(3, 4), (1, 1), (63, 6)])
def test_limits_of_a_request_hold(forgetful: Path, draft_tokens: int, deepest: int) -> None:
    """Of trees with few nodes no more levels are computed than they can have."""
    drafter = Deep(KnowingHead(forgetful), depth=6, width=4)
    one = job(7, 30, speculation=SpeculationParams(draft_tokens=draft_tokens))
    (out,) = Queue(forgetful, drafter, planner="fixed").run([one])
    assert max(drafter.levels) == deepest
    assert out.speculation.drafted <= draft_tokens * out.speculation.rounds


def test_levels_are_timed_at_both_ends() -> None:
    tree = FeatureDrafter(RandomHead(), depth=9, width=3, nodes=40)
    assert {size: tuple(draft)[1:] for size, draft in _draft_sizes("head", tree, 40).items()} == {1: (3, 1), 9: (40, 9)}
    assert list(_draft_sizes("head", tree, 5)) == [1, 5]
    chain = FeatureDrafter(RandomHead(), depth=5)
    assert {size: tuple(draft)[1:] for size, draft in _draft_sizes("head", chain, 5).items()} == {
        1: (1, 0),
        3: (3, 0),
        5: (5, 0),
    }


def test_by_default_a_head_may_go_to_ten_levels() -> None:
    drafter = EagleDrafter(RandomHead())
    assert [one.deep for one in levels_of(drafter)] == [1, 2, 4, 6, 8, 10]
    assert [one.nodes for one in levels_of(drafter)] == [8, 63, 63, 63, 63, 63]
    assert drafter.rereads == 11
