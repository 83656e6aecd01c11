"""How many levels trees are planned with: more where text is easy, fewer where it surprises, by a scripted clock."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.core.draft import MAX_NODES
from slipstream.drafters.features import FeatureDrafter
from slipstream.engine.levels import levels_of, no_deeper
from slipstream.plan.acceptance import Acceptance
from slipstream.plan.adaptive import AdaptivePlanner
from slipstream.plan.cost import SIZES, PassCost
from slipstream.plan.measured import Curve, DraftSeen, Load, MeasuredCosts
from slipstream.plan.planner import Beside, Levels, Planner, TreeSeen
from slipstream.plan.ranks import NodeRanks
from slipstream.plan.traits import Traits
from slipstream.plan.trees import level_choices, tree_choices
from tiny_heads import RandomHead

DEPTH = 10
ROWS = (1, 8, 32, 64, 128, 256)
PASSES = (3.85, 4.1, 4.6, 4.94, 6.2, 9.5)
"""Milliseconds of passes of a 7B-class target on a GPU, the last two made up."""


def pass_ms(rows: int) -> float:
    return float(np.interp(next(size for size in SIZES if size >= rows), ROWS, PASSES))


def draft_ms(levels: int) -> float:
    return 0.32 + 0.22 * (levels - 1)


@dataclass
class Text:
    """Each token is in a whole tree with such a chance; which of its nodes it is depends on the depth."""

    chance: float
    spread: float = 1.0
    dice: random.Random = field(default_factory=lambda: random.Random(5))

    def path(self, nodes: int, levels: int) -> list[int]:
        found: list[int] = []
        for depth in range(1, levels + 1):
            if self.dice.random() >= self.chance:
                break
            drawn = depth - 1 + int(self.dice.expovariate(1 / (self.spread * depth)))
            rank = max(found[-1] + 1 if found else 0, drawn)
            if rank >= nodes:
                break
            found.append(rank)
        return found


class Game:
    """Rounds of some requests with one head, on a scripted clock."""

    def __init__(self, requests: int = 1, depth: int = DEPTH, most: int = MAX_NODES) -> None:
        self.planner = AdaptivePlanner(PassCost(0.001))
        self.planner.pad_passes()
        drafts = tuple(DraftSeen(n, Curve((1, depth), (draft_ms(1), draft_ms(depth)))) for n in (1, 64))
        self.planner.adopt(MeasuredCosts(Curve(ROWS, PASSES), drafts={"head": drafts}))
        self.levels = [Levels(deep, most) for deep in level_choices(depth)]
        self.ids = [f"r{i}" for i in range(requests)]
        self.caps = [min(most, 256 // requests - 1)] * requests
        for one in self.ids:
            self.planner.start(one, Traits())
        self.plans: list[tuple[int, int]] = []  # nodes, levels

    def play(self, texts: Sequence[Text], rounds: int) -> float:
        """Tokens a millisecond."""
        tokens, spent = 0, 0.0
        for _ in range(rounds):
            self.planner.next_round(len(self.ids))
            sizes, deep = self.planner.budget_trees("head", self.ids, self.caps, len(self.ids), levels=self.levels)
            drafted = max(sizes)
            self.plans.append((drafted, deep if drafted else 0))
            rows = len(sizes) + sum(sizes)
            self.planner.observe_pass(rows, pass_ms(rows))
            took = draft_ms(deep) if drafted else 0.0
            if drafted:
                self.planner.observe_draft("head", deep, took, len(self.ids), is_tree=True)
            for one, text, nodes in zip(self.ids, texts, sizes, strict=True):
                path = text.path(nodes, deep) if nodes else []
                tokens += 1 + len(path)
                if nodes:
                    self.planner.observe("head", one, min(nodes, deep), len(path), TreeSeen(nodes, path))
            spent += pass_ms(rows) + took
        return tokens / spent

    def usual(self, last: int = 60) -> tuple[float, float]:
        """Nodes and levels of late, on average."""
        nodes, levels = np.array(self.plans[-last:]).T
        return float(nodes.mean()), float(levels.mean())


EASY, MIXED, WARM, HARD = 0.96, 0.8, 0.62, 0.3


class TestPlans:
    def test_easy_text_goes_deeper_than_surprising_text(self) -> None:
        deep: dict[float, float] = {}
        for chance in (EASY, MIXED, WARM, HARD):
            game = Game()
            game.play([Text(chance)], 200)
            deep[chance] = game.usual()[1]
        assert deep[EASY] > 8.5
        assert deep[EASY] > deep[MIXED] > deep[WARM] > deep[HARD]
        assert 4 < deep[MIXED] < 9
        assert deep[WARM] < 5

    def test_fewer_nodes_where_trees_are_dearer_than_chains_of_as_many_rows(self) -> None:
        planned = []
        for dearer in (0.0, 1.0):  # of 64 rows
            game = Game(4)
            for _ in range(20):
                for rows in (32, 64, 128, 256):
                    game.planner.observe_pass(rows, pass_ms(rows), Load(4))
                    game.planner.observe_pass(rows, pass_ms(rows) * (1 + dearer * rows / 64), Load(4), is_tree=True)
            game.planner.next_round(4)
            budget = game.planner.budget_trees("head", game.ids, game.caps, 4, levels=game.levels)
            planned.append(sum(budget.nodes))
        assert 0 < planned[1] < planned[0]

    @pytest.mark.parametrize(("chance", "spread", "faster"), [(EASY, 0.5, 1.1), (MIXED, 1.5, 0.97), (WARM, 2.0, 1.03)])
    def test_nearly_as_fast_as_the_best_pair_for_the_text(self, chance: float, spread: float, faster: float) -> None:
        """And faster than always six levels and 63 nodes, but where those are the best."""

        def always(nodes: int, levels: int) -> float:
            text = Text(chance, spread)
            tokens = sum(1 + len(text.path(nodes, levels)) for _ in range(2000)) / 2000
            return tokens / (pass_ms(1 + nodes) + draft_ms(levels))

        pairs = [(n, deep) for n in (7, 15, 31, 47, 63) for deep in level_choices(DEPTH)]
        best = max(always(*pair) for pair in pairs)
        planned = float(np.mean([Game().play([Text(chance, spread, random.Random(s))], 300) for s in range(3)]))
        assert planned > 0.92 * best
        assert planned > faster * always(63, 6)

    def test_it_follows_a_text_that_changes(self) -> None:
        game = Game()
        game.play([Text(EASY)], 100)
        assert game.usual(20)[1] >= 8
        game.play([Text(WARM)], 25)
        assert game.usual(5)[1] <= 6
        game.play([Text(EASY)], 25)
        assert game.usual(5)[1] >= 8

    def test_a_round_of_many_has_one_number_of_levels_by_what_all_of_them_bring(self) -> None:
        easy, mixed, hard = Game(8), Game(8), Game(8)
        easy.play([Text(EASY, 0.3)] * 8, 100)
        mixed.play([Text(EASY, 0.3)] * 4 + [Text(WARM, 0.3)] * 4, 100)
        hard.play([Text(WARM, 0.3)] * 8, 100)
        assert easy.usual()[1] >= mixed.usual()[1] > hard.usual()[1] + 2
        assert all(len({levels for _, levels in game.plans[-20:]}) < 4 for game in (easy, mixed, hard))

    def test_levels_beyond_those_that_were_seen_are_tried(self) -> None:
        """Where six are nearly always right, eight are expected to be; where they are not, they are not."""
        for right, wanted in ((6, True), (1, False)):
            game = Game()
            for _ in range(20):
                path = list(range(right))
                game.planner.observe("head", "r0", 6, right, TreeSeen(MAX_NODES, path))
            sizes, deep = game.planner.budget_trees("head", ["r0"], [MAX_NODES], 1, levels=game.levels)
            assert sizes[0] > 0
            assert (deep >= 8) == wanted

    def test_no_deeper_and_no_larger_than_allowed(self) -> None:
        game = Game(depth=4, most=20)
        game.play([Text(0.99, 0.1)], 100)
        assert max(game.plans) <= (20, 4)
        assert game.usual()[1] > 3.5

    def test_few_sizes_and_levels_are_captured(self) -> None:
        game = Game()
        for chance in (EASY, WARM, MIXED, HARD, EASY):
            game.play([Text(chance)], 80)
        assert {levels for _, levels in game.plans} <= {0, *level_choices(DEPTH)}
        assert {nodes for nodes, _ in game.plans} <= {0, 1, 2, 3, 5, 7, 11, 15, 23, 31, 47, 63}
        assert len(set(game.plans)) < 25

    def test_what_is_larger_is_tried_in_shapes_that_are_there_already(self) -> None:
        """Every 64th tree or so; a new shape is recorded while everybody waits, so few are, and one step at a time."""
        late = 0
        for requests, chance in ((8, WARM), (4, HARD), (8, HARD)):
            game, found = Game(requests), list[set[tuple[int, int]]]()
            for rounds in (100, 1000):
                game.play([Text(chance, 0.3)] * requests, rounds)
                found.append({(PassCost.filled(requests * (1 + n)), levels) for n, levels in game.plans if n})
            late += len(found[1] - found[0])
        assert late <= 2

    def test_rounds_without_trees_record_no_shape(self) -> None:
        """Five requests are filled up to eight rows: a tree of theirs would have been taken for one that is there."""
        game, texts = Game(5), [Text(0.0)] * 5
        game.play(texts, 100)
        drafted = sum(nodes > 0 for nodes, _ in game.plans)
        shapes = {(PassCost.filled(5 * (1 + nodes)), levels) for nodes, levels in game.plans if nodes}
        assert drafted < len(game.plans)
        assert {shape[1:] for shape in game.planner._sizes._rounds} == shapes

    def test_a_step_beyond_the_best_and_then_no_new_one(self) -> None:
        sizes, levels = (3, 7, 15, 31, 63), [Levels(deep, 63) for deep in (2, 4, 8)]
        found = tree_choices(sizes, levels, [63], np.full((8, 1), 0.8).cumprod(0), NodeRanks().kept(63))
        pairs, rate = list(zip(found.nodes, found.levels, strict=True)), np.ones(len(found.nodes))
        best = pairs.index((15, 4))
        assert pairs[found.larger(best, rate)] == (63, 8), "where nothing is recorded, as large as may be"
        old = [pair == (15, 4) for pair in pairs]
        assert pairs[found.larger(best, rate, old)] == (31, 4)
        old = [pair in {(15, 4), (31, 4), (63, 2)} for pair in pairs]
        assert pairs[found.larger(best, rate, old)] == (31, 4), "what was tried is tried again; less deep is not larger"
        rate[pairs.index((31, 4)) :] = 0.5
        assert found.larger(len(pairs) - 1, np.ones(len(pairs)), old) == len(pairs) - 1

    def test_what_others_have_right_is_no_reason_for_levels(self) -> None:
        game = Game()
        game.play([Text(MIXED)], 100)
        for _ in range(60):
            game.planner.observe("free", "r0", 10, 10)
        sizes = game.planner.budget_trees("head", ["r0"], [40], 1, [(Beside("free", 20),)], levels=game.levels).nodes
        assert sizes == [0]

    def test_the_decision_says_how_deep(self) -> None:
        game = Game()
        game.play([Text(EASY)], 50)
        nodes, levels = game.plans[-1]
        assert game.planner.reasons()["head"].startswith(f"head {nodes} in {levels} levels: ")

    def test_the_fixed_planner_drafts_all(self) -> None:
        levels = [Levels(2, 9), Levels(7, 20)]
        assert Planner().budget_trees("head", ["a", "b"], [20, 3], 2, levels=levels) == ([20, 3], 7)


class TestRanks:
    def test_smaller_trees_are_known_by_larger_ones(self) -> None:
        ranks = NodeRanks()
        for _ in range(300):
            ranks.observe((0, 20), MAX_NODES)
        kept = ranks.kept(MAX_NODES)
        assert kept[0, 1] > 0.9
        assert kept[1, 15] < 0.1
        assert kept[1, 23] > 0.9

    def test_small_trees_say_nothing_of_larger_ones(self) -> None:
        """Half of the right nodes are beyond the seventh: seven nodes never see one of those."""
        dice, ranks = random.Random(1), NodeRanks()
        for number in range(3000):
            rank, nodes = dice.choice((3, 40)), 63 if number % 10 == 0 else 7
            ranks.observe((rank,) if rank < nodes else (), nodes)
        assert ranks.kept(MAX_NODES)[0, 7] == pytest.approx(0.5, abs=0.1)

    @settings(max_examples=60, deadline=None)
    @given(
        st.lists(st.tuples(st.sets(st.integers(0, 62), max_size=14), st.integers(1, 63)), max_size=30),
        st.integers(1, 63),
    )
    def test_more_nodes_never_have_less(self, seen: list[tuple[set[int], int]], whole: int) -> None:
        ranks = NodeRanks()
        for nodes, most in seen:
            ranks.observe(sorted(node for node in nodes if node < most), most)
        kept = ranks.kept(whole)
        assert ((kept >= 0) & (kept <= 1 + 1e-9)).all()
        assert (np.diff(kept, axis=1) >= -1e-9).all()
        assert (kept[:whole, whole] > 1 - 1e-9).all()
        assert 0 <= ranks.missed(0.7, min(7, whole), 2) <= 0.7 + 1e-9

    def test_what_a_small_tree_lacked_counts_as_half_right(self) -> None:
        """A chance is that of a whole tree, though most trees are small."""
        dice, ranks, chances = random.Random(2), NodeRanks(), Acceptance()
        for number in range(4000):
            nodes = MAX_NODES if number % 16 == 0 else 7
            rank = dice.choice((1, 40)) if dice.random() < 0.8 else 99
            path = [rank] if rank < nodes else []
            missed = ranks.missed(chances.alpha("a"), nodes, len(path))
            ranks.observe(path, nodes)
            ranks.kept(MAX_NODES)
            chances.observe("a", 1, len(path), missed)
        late = []
        for _ in range(400):
            path = [1] if dice.random() < 0.4 else []
            chances.observe("a", 1, len(path), ranks.missed(chances.alpha("a"), 7, len(path)))
            late.append(chances.alpha("a"))
        assert float(np.mean(late)) == pytest.approx(0.8, abs=0.15)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 63), st.integers(2, 63), st.integers(1, 63), st.integers(1, 63))
def test_choices_make_sense(depth: int, width: int, most: int, cap: int) -> None:
    if width + (depth - 1) * width**2 > 8192:
        depth = 2
    drafter = FeatureDrafter(RandomHead(), depth=depth, width=width, nodes=most)
    levels = levels_of(drafter)
    assert levels[-1] == (depth, drafter.most_nodes)
    assert [one.deep for one in levels] == sorted({one.deep for one in levels})
    cap = min(cap, drafter.most_nodes)
    chances = np.full((depth, 2), 0.9).cumprod(0)
    found = tree_choices(range(1, cap + 1), levels, [cap, max(1, cap // 2)], chances, NodeRanks().kept(63))
    assert (found.nodes[0], found.levels[0]) == (0, 0)
    assert found.nodes[-1] == cap
    assert (np.diff(found.drafted, axis=1) <= 0).all()
    for nodes, deep, gained in zip(found.nodes, found.levels, found.gained, strict=True):
        assert nodes <= (drafter.most_at(deep) if deep else 0)
        assert (gained <= chances[:deep].sum(0) + 1e-9).all()
        if nodes:
            assert no_deeper(levels, deep, nodes) == deep
