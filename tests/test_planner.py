"""The plan: sizes follow costs and chances, trees stay trees, and no drafter is trusted or given up for good."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.core.draft import ROOT, Tree
from slipstream.plan.acceptance import Acceptance
from slipstream.plan.adaptive import AdaptivePlanner
from slipstream.plan.cost import PassCost
from slipstream.plan.planner import Planner

FLAT, STEEP = 0.0, 10.0


def flat() -> AdaptivePlanner:
    return AdaptivePlanner(PassCost(FLAT))


def teach(planner: AdaptivePlanner, request_id: str, drafted: int, accepted: int, times: int = 30) -> None:
    for _ in range(times):
        planner.observe("d", request_id, drafted, accepted)


class TestPassCost:
    def test_before_anything_was_seen_the_prior_speaks(self) -> None:
        cost = PassCost(0.5)
        assert not cost.observed
        assert cost.curve(1, 4).tolist() == [1.0, 1.5, 2.0, 2.5]

    def test_what_was_seen_is_believed_and_its_neighbours_follow(self) -> None:
        cost = PassCost(0.0)
        cost.observe(1, 2.0)
        cost.observe(16, 8.0)
        assert cost.observed
        assert cost.seconds(1) == pytest.approx(2)
        assert cost.seconds(4) == pytest.approx(5)  # half the way, by doublings
        assert cost.seconds(16) == pytest.approx(8)
        assert cost.seconds(500) == pytest.approx(8)

    def test_beyond_what_was_seen_the_prior_gives_the_slope(self) -> None:
        cost = PassCost(0.5)
        cost.observe(1, 2.0)
        assert cost.curve(1, 3).tolist() == pytest.approx([2, 3, 4])

    def test_a_hiccup_changes_nothing(self) -> None:
        cost = PassCost(0.0)
        for seconds in (1.0, 1.0, 50.0, 1.0, 1.0):
            cost.observe(8, seconds)
        assert cost.seconds(8) == pytest.approx(1)

    def test_it_follows_a_lasting_change(self) -> None:
        cost = PassCost(0.0)
        for seconds in [1.0] * 100 + [3.0] * 9:
            cost.observe(8, seconds)
        assert cost.seconds(8) == pytest.approx(3)

    def test_a_size_that_never_came_again_is_forgotten(self) -> None:
        """One slow pass of some size would otherwise keep everybody from trying that size again."""
        cost = PassCost(0.0)
        cost.observe(8, 100.0)
        for _ in range(512):
            cost.observe(1, 1.0)
            assert cost.seconds(8) == pytest.approx(100)
        cost.observe(1, 1.0)
        assert cost.seconds(8) == pytest.approx(1)

    @given(
        slope=st.floats(0, 2),
        seen=st.lists(st.tuples(st.integers(1, 600), st.floats(1e-6, 10)), max_size=20),
        low=st.integers(1, 100),
        more=st.integers(0, 200),
    )
    def test_more_rows_never_cost_less(self, slope: float, seen: list[tuple[int, float]], low: int, more: int) -> None:
        cost = PassCost(slope)
        for rows, seconds in seen:
            cost.observe(rows, seconds)
        curve = cost.curve(low, low + more)
        assert curve.shape == (more + 1,)
        assert (curve > 0).all()
        assert np.isfinite(curve).all()
        assert (np.diff(curve) >= 0).all()

    @given(
        padded=st.booleans(),
        seen=st.lists(st.tuples(st.integers(1, 600), st.floats(1e-6, 10)), min_size=1, max_size=20),
        low=st.integers(1, 100),
        more=st.integers(0, 500),
    )
    def test_steps_leave_nothing_out(self, padded: bool, seen: list[tuple[int, float]], low: int, more: int) -> None:
        """Every number of rows costs what the next step does, also after more was seen."""
        cost = PassCost(0.001)
        cost.padded = padded
        for rows, seconds in seen:
            cost.observe(rows, seconds)
            steps = cost.steps(low, low + more)
            assert steps.rows == sorted(set(steps.rows))
            assert (steps.rows[0], steps.rows[-1] >= low + more) == (low, True)
            reached = [steps.seconds[bisect_left(steps.rows, n)] for n in range(low, low + more + 1)]
            assert reached == cost.curve(low, low + more).tolist()

    @pytest.mark.parametrize("pace", [0.3, 3.0])
    def test_a_size_not_seen_since_is_as_at_first_by_what_the_machine_does_now(self, pace: float) -> None:
        """It was busy when passes with guesses were tried last: their cost of then would keep them from being tried."""
        cost = PassCost(0.02)
        for _ in range(9):
            cost.observe(1, 0.06)
            cost.observe(8, 0.2)
        for _ in range(9):
            cost.observe(1, 0.06 * pace)
        assert cost.seconds(8) == pytest.approx(0.06 * pace * (1 + 7 * 0.02), rel=0.01)
        for _ in range(9):
            cost.observe(8, 0.1)
        assert cost.seconds(8) == pytest.approx(0.1), "what is seen counts for more"

    def test_a_little_more_or_less_says_nothing_of_other_sizes(self) -> None:
        cost = PassCost(0.02)
        for _ in range(9):
            cost.observe(1, 0.06)
            cost.observe(8, 0.08)
        for _ in range(9):
            cost.observe(1, 0.05)
        assert cost.seconds(8) == pytest.approx(0.08)

    def test_sizes_between_two_that_cost_the_same_are_not_worth_a_look(self) -> None:
        cost = PassCost(0.001)
        cost.observe(16, 4.0)
        assert cost.unseen(1, 16) == 8  # what one row costs is a guess so far
        cost.observe(1, 3.9)
        assert cost.unseen(1, 16) is None
        cost.observe(32, 5.0)
        assert cost.unseen(1, 32) == 8


class TestAcceptance:
    def test_it_learns_by_request_and_newcomers_inherit(self) -> None:
        seen = Acceptance()
        start = seen.alpha("new")
        assert start == pytest.approx(0.6)
        for _ in range(50):
            seen.observe("good", 5, 5)
        assert seen.alpha("good") > 0.95
        assert seen.alpha("new") > start  # everybody's record
        for _ in range(50):
            seen.observe("bad", 5, 0)
        assert seen.alpha("bad") < 0.2 < 0.8 < seen.alpha("good")
        seen.forget("good")
        assert seen.alpha("good") == pytest.approx(seen.alpha("new"))

    def test_guesses_behind_a_wrong_one_were_not_tried(self) -> None:
        long, short = Acceptance(), Acceptance()
        for _ in range(20):
            long.observe("a", 60, 2)
            short.observe("a", 3, 2)
        assert long.alpha("a") == pytest.approx(short.alpha("a"))
        assert long.alpha("a") == pytest.approx(2 / 3, abs=0.01)

    @given(st.lists(st.integers(0, 8).flatmap(lambda d: st.tuples(st.just(d), st.integers(0, d))), max_size=60))
    def test_it_stays_a_probability(self, rounds: list[tuple[int, int]]) -> None:
        seen = Acceptance()
        for drafted, accepted in rounds:
            seen.observe("a", drafted, accepted)
        assert 0 <= seen.alpha("a") <= 1
        assert 0 < seen.alpha("b") < 1

    def test_one_that_fares_worse_than_the_others_does_not_live_on_their_record(self) -> None:
        seen = Acceptance()
        for _ in range(100):
            seen.observe("good", 4, 4)
            seen.observe("bad", 4, 0)
        assert seen.alpha("bad") < 0.01

    def test_short_drafts_do_not_make_it_forget_what_long_ones_were_worth(self) -> None:
        """Of a text whose first word is hard and the rest easy. With 64 at once ten rounds of one guess are enough to
        have seen nothing else."""
        seen = Acceptance()
        for right in (0, 5, 5, 0, 5) * 40:
            seen.observe("long", 5, right)
        before = seen.paths(["new"], 5)[:, 0]
        assert before[4] > 0.85 * before[0]
        for right in (0, 1, 1, 0, 1) * 128:
            seen.observe("short", 1, right)
        after = seen.paths(["new"], 5)[:, 0]
        assert after[4] > 0.7 * after[0]

    @pytest.mark.parametrize("deep", [0, 1])
    def test_nor_is_it_remembered_for_ever(self, deep: int) -> None:
        """Chains of one guess are never proved wrong, or right, about a second: some hundred rounds later it is taken
        to fare as the first."""
        seen = Acceptance()
        for _ in range(200):
            seen.observe("long", 2, 2 * deep or 1)
        chances = [seen.paths(["new"], 2)[1, 0] / seen.paths(["new"], 2)[0, 0]]
        for _ in range(500):
            seen.next_round()
            for name in "abcd":
                seen.observe(name, 1, int(name != "a"))  # three of four are right
        first, both = seen.paths(["new"], 2)[:, 0]
        assert both / first == pytest.approx(first, abs=0.1)
        assert abs(chances[0] - first) > 0.2

    def test_it_follows_a_change(self) -> None:
        seen = Acceptance()
        for _ in range(200):
            seen.observe("a", 4, 0)
        for _ in range(10):
            seen.observe("a", 4, 4)
        assert seen.alpha("a") > 0.5


class TestBudget:
    def test_where_rows_cost_nothing_it_takes_everything(self) -> None:
        assert flat().budget("d", ["a", "b"], [5, 3], 2) == [5, 3]

    def test_where_rows_cost_a_pass_each_it_takes_nothing(self) -> None:
        assert AdaptivePlanner(PassCost(STEEP)).budget("d", ["a"], [5], 1) == [0]

    def test_nothing_to_give(self) -> None:
        assert flat().budget("d", ["a"], [0], 1) == [0]
        assert flat().budget("d", [], [], 3) == []

    def test_the_better_the_guesses_the_deeper(self) -> None:
        depths = []
        for accepted in (0, 1, 2, 4, 8):
            planner = AdaptivePlanner(PassCost(0.1))
            teach(planner, "a", 8, accepted)
            depths.append(planner.budget("d", ["a"], [8], 1)[0])
        assert depths == sorted(depths)
        assert depths[0] == 0
        assert 0 < depths[2] < depths[-1] == 8

    def test_the_depth_is_the_best_one(self) -> None:
        """Against the formula written out: tokens by seconds, draft and pass."""
        planner = AdaptivePlanner(PassCost(0.0))
        for rows in (1, 2, 3, 4, 6, 8):
            planner.observe_pass(rows, 1 + 0.02 * rows)
        for nodes in (1, 2, 3, 4, 6):
            planner.observe_draft("d", nodes, 0.15 * nodes)
        teach(planner, "a", 6, 3)

        def rate(depth: int) -> float:  # three guesses are right, and the fourth never is
            return (1 + min(depth, 3)) / (1 + 0.02 * (1 + depth) + 0.15 * depth)

        best = max(range(7), key=rate)
        assert 0 < best < 6
        assert planner.budget("d", ["a"], [6], 1) == [best]

    def test_dear_drafts_are_not_made(self) -> None:
        planner = flat()
        planner.observe_pass(1, 1.0)
        planner.observe_draft("d", 4, 40.0)
        assert planner.budget("d", ["a"], [4], 1) == [0]
        cheap = flat()
        cheap.observe_pass(1, 1.0)
        cheap.observe_draft("d", 4, 0.001)
        assert cheap.budget("d", ["a"], [4], 1) == [4]

    def test_draft_seconds_are_not_weighed_against_a_prior_without_unit(self) -> None:
        planner = flat()
        planner.observe_draft("d", 4, 40.0)  # no pass was measured yet: 40 of what?
        assert planner.budget("d", ["a"], [4], 1) == [4]

    def test_a_perfect_record_does_not_break_the_sum(self) -> None:
        planner = flat()
        teach(planner, "a", 63, 63, times=2000)
        assert planner.budget("d", ["a"], [63], 1) == [63]

    def test_others_in_the_pass_count(self) -> None:
        """One request's guesses slow the pass for all: what they bring is weighed against everybody's tokens."""
        alone, in_company = AdaptivePlanner(PassCost(0.3)), AdaptivePlanner(PassCost(0.3))
        for planner in (alone, in_company):
            for rows in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32):
                planner.observe_pass(rows, 1 + 0.3 * (rows - 1))
            teach(planner, "a", 4, 1)
        assert alone.budget("d", ["a"], [4], 1)[0] > 0
        # 32 requests emit 32 tokens in 10.3: half a token more in 10.6 is less by the second
        assert in_company.budget("d", ["a"], [4], 32) == [0]


def trees(max_nodes: int = 12) -> st.SearchStrategy[Tree]:
    """Valid trees: parents first, no token twice under a parent."""

    def grow(parents: list[int]) -> Tree:
        chosen = tuple(min(p, i - 1) for i, p in enumerate(parents))
        return Tree(tuple(range(len(chosen))), chosen)

    return st.lists(st.integers(ROOT, max_nodes), max_size=max_nodes).map(grow)


class TestTrim:
    def test_where_rows_cost_nothing_it_keeps_everything(self) -> None:
        tree = Tree.chain([1, 2, 3])
        assert flat().trim("d", ["a"], [tree], [None], 1) == [tree]

    def test_where_rows_cost_a_pass_each_it_keeps_nothing(self) -> None:
        planner = AdaptivePlanner(PassCost(STEEP))
        assert planner.trim("d", ["a"], [Tree.chain([1, 2, 3])], [(0.9, 0.8, 0.7)], 1) == [Tree()]

    def test_the_likeliest_nodes_of_all_requests_stay(self) -> None:
        planner = AdaptivePlanner(PassCost(0.2))
        sure, unsure = Tree.chain([1, 2, 3]), Tree.chain([4, 5, 6])
        kept = planner.trim("d", ["a", "b"], [sure, unsure], [(0.99, 0.98, 0.97), (0.3, 0.02, 0.01)], 2)
        assert kept == [sure, Tree()]

    def test_a_subtree_is_renumbered(self) -> None:
        planner = AdaptivePlanner(PassCost(0.1))
        tree = Tree((1, 2, 3, 4), (ROOT, ROOT, 0, 1))
        (kept,) = planner.trim("d", ["a"], [tree], [(0.01, 0.9, 0.01, 0.9)], 1)
        assert kept == Tree((2, 4), (ROOT, 0))

    def test_siblings_share_their_parents_chance(self) -> None:
        """Only one of them can be right: sixty guesses at one token are not sixty tokens."""
        planner = AdaptivePlanner(PassCost(0.05))
        (kept,) = planner.trim("d", ["a"], [Tree(tuple(range(60)), (ROOT,) * 60)], [None], 1)
        assert 1 <= len(kept) <= 4  # 0.6, 0.24, 0.1, 0.04 of a token for a twentieth of a pass each

    def test_a_child_is_never_likelier_than_its_parent(self) -> None:
        planner = AdaptivePlanner(PassCost(0.3))
        (kept,) = planner.trim("d", ["a"], [Tree.chain([1, 2])], [(0.01, 0.99)], 1)
        assert kept == Tree()

    def test_no_guesses_are_no_probe(self) -> None:
        planner = AdaptivePlanner(PassCost(STEEP))
        for _ in range(1000):
            assert planner.trim("d", ["a", "b"], [Tree(), Tree()], [None, None], 2) == [Tree(), Tree()]
        assert planner.trim("d", ["a"], [Tree.chain([1])], [None], 1) == [Tree()]
        assert planner.trim("d", [], [], [], 1) == []

    def test_others_in_the_pass_count(self) -> None:
        cost = PassCost(0.3)
        tree = Tree.chain([1])
        assert AdaptivePlanner(cost).trim("d", ["a"], [tree], [(0.5,)], 1) == [tree]
        # 32 requests emit 32 tokens in 10.3: 32.9 in 10.6 are fewer by the second
        assert AdaptivePlanner(cost).trim("d", ["a"], [tree], [(0.9,)], 32) == [Tree()]

    @settings(deadline=None, max_examples=200)
    @given(
        drawn=st.lists(trees(), max_size=4),
        slope=st.floats(0, 1),
        rounds=st.integers(1, 3),
        data=st.data(),
    )
    def test_what_is_kept_is_a_tree(self, drawn: list[Tree], slope: float, rounds: int, data: st.DataObject) -> None:
        """Each kept tree is the old one without some subtrees: same tokens, same parents, in the same order."""
        planner = AdaptivePlanner(PassCost(slope))
        ids = [str(i) for i in range(len(drawn))]
        for _ in range(rounds):
            promises: list[Sequence[float] | None] = [
                data.draw(st.none() | st.lists(st.floats(0, 1), min_size=len(t), max_size=len(t))) for t in drawn
            ]
            kept = planner.trim("d", ids, drawn, promises, max(1, len(drawn)))
            assert len(kept) == len(drawn)
            for small, large in zip(kept, drawn, strict=True):
                small.check(vocab_size=64, budget=len(large))
                place = {token: node for node, token in enumerate(large.tokens)}  # tokens are all different here
                assert list(small.tokens) == sorted(small.tokens, key=place.__getitem__)
                for token, parent in zip(small.tokens, small.parents, strict=True):
                    before = large.parents[place[token]]
                    assert parent == ROOT if before == ROOT else small.tokens[parent] == large.tokens[before]


class TestProbes:
    """A device drafter (`budget`) and a host drafter without promises (`trim`) against a target that decides."""

    @staticmethod
    def play(planner: AdaptivePlanner, how: str, rounds: int, right: bool) -> list[int]:
        """Nodes drafted in each round."""
        sizes = []
        for _ in range(rounds):
            planner.next_round(1)
            if how == "budget":
                nodes = planner.budget("d", ["a"], [6], 1)[0]
            else:
                nodes = len(planner.trim("d", ["a"], [Tree.chain(range(6))], [None], 1)[0])
            sizes.append(nodes)
            planner.observe_pass(1 + nodes, 1 + 0.05 * nodes)
            planner.observe("d", "a", nodes, nodes if right else 0)
        return sizes

    @pytest.mark.parametrize("how", ["budget", "trim"])
    def test_an_always_wrong_drafter_is_tried_ever_more_rarely(self, how: str) -> None:
        sizes = self.play(AdaptivePlanner(PassCost(0.05)), how, 2000, right=False)
        tried = [i for i, nodes in enumerate(sizes) if nodes]
        first_pause = next(i for i, nodes in enumerate(sizes) if not nodes)
        assert first_pause < 40
        pauses = np.diff([i for i in tried if i > first_pause])
        assert (np.diff(pauses) >= 0).all()
        assert pauses[-1] == (256 if how == "budget" else 16), "where guesses are free, a probe of one row is cheap"
        assert 0.05 * sum(sizes[first_pause:]) < 0.01 * len(sizes)

    @pytest.mark.parametrize("how", ["budget", "trim"])
    def test_one_that_became_good_comes_back(self, how: str) -> None:
        planner = AdaptivePlanner(PassCost(0.05))
        self.play(planner, how, 2000, right=False)
        sizes = self.play(planner, how, 600, right=True)
        back = next(i for i, nodes in enumerate(sizes) if nodes)
        assert back <= 256
        assert all(sizes[back:])  # one probe was enough
        assert sizes[-1] == 6

    def test_a_failed_probe_of_one_drafter_does_not_silence_another(self) -> None:
        planner = AdaptivePlanner(PassCost(0.05))
        self.play(planner, "budget", 500, right=False)
        assert planner.budget("other", ["a"], [6], 1)[0] > 0

    def test_a_request_that_ended_is_forgotten(self) -> None:
        planner = AdaptivePlanner(PassCost(0.1))
        teach(planner, "a", 6, 6, times=100)
        teach(planner, "b", 6, 0, times=20)
        assert planner.budget("d", ["b"], [6], 1) == [0]
        planner.forget("b")
        assert planner.budget("d", ["b"], [6], 1)[0] > 0  # as everybody fares


def test_the_fixed_planner_takes_what_was_asked_for() -> None:
    planner, tree = Planner(), Tree.chain([1, 2, 3])
    planner.observe_pass(1, 1.0)
    planner.observe_draft("d", 3, 100.0)
    for _ in range(100):
        planner.observe("d", "a", 3, 0)
    planner.forget("a")
    assert planner.budget("d", ["a", "b"], [7, 3], 2) == [7, 3]
    assert planner.trim("d", ["a"], [tree], [(0.0, 0.0, 0.0)], 1) == [tree]
