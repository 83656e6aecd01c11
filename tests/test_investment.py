"""Drafts that are taken whole: judged by what they bring over many rounds, tried again in stretches, never cut."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.core.draft import Tree
from slipstream.plan.adaptive import AdaptivePlanner
from slipstream.plan.cost import PassCost
from slipstream.plan.gains import Turn
from slipstream.plan.planner import Planner
from slipstream.plan.traits import Traits

BIG = Tree.chain(range(60))


class Trial:
    """A planner, asked round after round, and what became of the drafts that it took."""

    def __init__(self, slope: float) -> None:
        self.planner = AdaptivePlanner(PassCost(slope))
        self.slope = slope

    def round(self, *accepted: int) -> list[bool]:
        """One round for as many requests, whose drafts bring so much: which were taken?"""
        rows = len(accepted)
        ids = [str(i) for i in range(rows)]
        self.planner.next_round()
        taken = self.planner.take("d", ids, [BIG] * rows, rows)
        assert all(tree in (BIG, Tree()) for tree in taken)
        drafted = sum(len(tree) for tree in taken)
        self.planner.observe_pass(rows + drafted, 1 + self.slope * (rows + drafted - 1))
        for request_id, tree, right in zip(ids, taken, accepted, strict=True):
            self.planner.observe("d", request_id, len(tree), right if tree else 0)
        return [bool(tree) for tree in taken]


def test_the_fixed_planner_takes_everything() -> None:
    assert Planner().take("d", ["a", "b"], [BIG, Tree()], 2) == [BIG, Tree()]


def test_where_rows_are_cheap_a_draft_that_brings_something_goes_on() -> None:
    trial = Trial(0.001)
    taken = [trial.round(i % 3 == 0) for i in range(400)]  # a third of a token for 6% of a pass
    assert sum(map(sum, taken)) >= 390  # all but a few: a plain pass must be seen now and then


def test_what_brings_nothing_is_given_up_and_tried_again_in_stretches() -> None:
    trial = Trial(0.001)
    taken = [trial.round(0)[0] for _ in range(2000)]
    given_up = taken.index(False)
    assert given_up < 200
    later = taken[given_up:]
    assert 0.02 < sum(later) / len(later) < 0.2  # rows are cheap: a sixteenth of a pass
    stretches = "".join("x" if took else " " for took in later).split()
    assert min(map(len, stretches[:-1])) >= 12  # one round would teach nothing
    text_changes = [trial.round(2)[0] for _ in range(600)]
    assert sum(text_changes[-100:]) >= 98  # it comes back


def test_where_rows_are_dear_it_is_hardly_ever_tried() -> None:
    trial = Trial(0.15)
    assert sum(trial.round(1)[0] for _ in range(3000)) <= 24


def test_it_says_what_it_decided_and_the_guard_hears_of_it() -> None:
    """Drafts that bring a token, in rounds that take three times as long for reasons that nobody is told."""
    planner = AdaptivePlanner(PassCost(0.001))
    planner.pad_passes()
    planner.start("0", Traits())
    taken = list[bool]()
    for _ in range(400):
        planner.next_round(1)
        may = planner.speculates("0", ("d",))
        taken.append(may and bool(planner.take("d", ["0"], [BIG], 1)[0]))
        if may:
            assert planner.reasons()["d"].startswith("d 60: 1.") == (planner.hoped > 1)
        nodes = 60 * taken[-1]
        planner.observe("d", "0", nodes, int(taken[-1]))
        planner.observe_pass(1 + nodes, 1 + 0.001 * nodes)
        turn = Turn("0", nodes, 2, ("d",)) if nodes else Turn("0", 0, 1)
        planner.observe_round([turn], 3.0 if nodes else 1.0, hoped=planner.hoped)
    assert any(taken[:30])
    assert sum(taken) < 80
    why = planner.why("0", "d")
    assert why is not None
    assert "as fast as none" in why


def test_the_requests_that_it_pays_for_are_taken() -> None:
    trial = Trial(0.002)
    for _ in range(300):
        taken = trial.round(3, 0, 3, 0)
    assert taken == [True, False, True, False]


def test_what_a_request_brought_is_forgotten_with_it() -> None:
    trial = Trial(0.002)
    for _ in range(300):
        trial.round(3, 0)
    invested = trial.planner._investments["d"]
    assert invested.gain("0") > 2.5
    assert invested.gain("1") < 0.5
    trial.planner.forget("0")
    assert invested.gain("0") == pytest.approx(invested.gain("somebody else"))


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=6), st.floats(0, 0.5), st.data())
def test_whole_or_not_at_all(sizes: list[int], slope: float, data: st.DataObject) -> None:
    planner = AdaptivePlanner(PassCost(slope))
    ids = [str(i) for i in range(len(sizes))]
    trees = [Tree.chain(range(size)) for size in sizes]
    for _ in range(data.draw(st.integers(1, 20))):
        planner.next_round()
        for tree, kept in zip(trees, planner.take("d", ids, trees, len(ids)), strict=True):
            assert kept in (tree, Tree())
