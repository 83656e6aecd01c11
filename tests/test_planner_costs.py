"""Costs by context and by number of requests: played rounds with a scripted clock, against the best fixed size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest

from slipstream.core.draft import Tree
from slipstream.plan.adaptive import AdaptivePlanner
from slipstream.plan.context import ContextCost
from slipstream.plan.cost import SIZES, PassCost
from slipstream.plan.costs import Costs
from slipstream.plan.draft_cost import DraftCost
from slipstream.plan.gains import Gains, Turn
from slipstream.plan.measured import Curve, DraftSeen, Load, MeasuredCosts
from slipstream.plan.traits import Traits

DEEP = 8
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


@dataclass(frozen=True)
class Machine:
    """Seconds of a pass and of a draft."""

    bare: Callable[[int], float]  # by rows
    key_s: float = 0.0
    row_key_s: float = 0.0
    level_s: Callable[[int], float] = lambda requests: 0.0  # of a draft, by requests
    padded: bool = False

    def pass_s(self, rows: int, load: Load) -> float:
        rows = next(size for size in SIZES if size >= rows) if self.padded else rows
        return self.bare(rows) + self.key_s * load.context + self.row_key_s * rows * load.each

    def measured(self) -> MeasuredCosts:
        curve = Curve(ROWS, tuple(self.bare(n) for n in ROWS))
        drafts = tuple(DraftSeen(n, Curve((1, DEEP), (self.level_s(n), DEEP * self.level_s(n)))) for n in (1, 8, 64))
        return MeasuredCosts(curve, self.key_s, self.row_key_s, {"d": drafts} if self.level_s(1) else {})


def most_nodes(requests: int) -> int:
    """256 rows are shared by all."""
    return min(DEEP, 256 // requests - 1)


def gpu_ms(rows: int) -> float:
    """A 7B model on an H200."""
    return float(np.interp(rows, [1, 8, 32, 64, 128, 256, 512], [4.0, 4.1, 4.4, 4.6, 5.0, 7.6, 12.8])) / 1e3


CPU = Machine(lambda rows: 0.011 + 0.0022 * (rows - 1), row_key_s=2e-6)
GPU = Machine(gpu_ms, key_s=1.6e-7, level_s=lambda n: 4e-4 * (1 + 0.01 * n), padded=True)
"""0.5 MB a token at 3.2 TB/s; a head's level takes a tenth of a pass, and more with many requests."""


@dataclass
class Play:
    machine: Machine
    alpha: float
    measured: bool = True
    sizes: list[float] = field(default_factory=list)  # nodes of a request, on average, by round
    seconds: float = 0.0
    tokens: float = 0.0
    dice: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def __post_init__(self) -> None:
        self.planner = AdaptivePlanner(PassCost(0.001 if self.machine.padded else 0.15))
        if self.machine.padded:
            self.planner.pad_passes()
        if self.measured:
            self.planner.adopt(self.machine.measured())

    def rounds(self, count: int, requests: int, each: int, *, grows: int = 0) -> Play:
        """So many rounds of requests with so many tokens each, which grow by `grows` a round."""
        ids = [f"r{i}" for i in range(requests)]
        for name in ids:
            self.planner.start(name, Traits())
        self.seconds = self.tokens = 0.0
        for number in range(count):
            self._round(ids, Load(requests, requests * (each + grows * number)))
        for name in ids:
            self.planner.forget(name)
        return self

    def _round(self, ids: list[str], load: Load) -> None:
        planner, machine = self.planner, self.machine
        planner.next_round(*load)
        mine = [name for name in ids if planner.speculates(name, ("d",))]
        deep = most_nodes(load.requests)
        sizes, draft_s = [deep] * len(mine), 0.0
        if mine and machine.level_s(1):
            sizes = planner.budget("d", mine, sizes, load.requests)
            if deepest := max(sizes):
                draft_s = machine.level_s(load.requests) * deepest
                planner.observe_draft("d", deepest, draft_s, load.requests)
        elif mine:
            promise = [self.alpha ** (depth + 1) for depth in range(deep)]
            trees = planner.trim("d", mine, [Tree.chain(range(deep))] * len(mine), [promise] * len(mine), load.requests)
            sizes = [len(tree) for tree in trees]
        rows = load.requests + sum(sizes)
        pass_s = machine.pass_s(rows, load)
        filled = next(size for size in SIZES if size >= rows) if machine.padded else rows
        planner.observe_pass(filled, pass_s, load)
        turns = {name: Turn(name, 0, 1) for name in ids}
        for name, size in zip(mine, sizes, strict=True):
            right = 0
            while right < size and self.dice.random() < self.alpha:
                right += 1
            planner.observe("d", name, size, right)
            turns[name] = Turn(name, size, 1 + right, ("d",))
        planner.observe_round(list(turns.values()), pass_s + draft_s, load.context)
        self.seconds += pass_s + draft_s
        self.tokens += load.requests - len(mine) + sum(_expected(self.alpha, size) for size in sizes)
        self.sizes.append(sum(sizes) / load.requests)

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds

    def best(self, load: Load) -> float:
        """Tokens a second of the best size for all, drafts or none."""

        def rate(size: int) -> float:
            emitted = load.requests * _expected(self.alpha, size)
            pass_s = self.machine.pass_s(load.requests * (1 + size), load)
            return emitted / (pass_s + self.machine.level_s(load.requests) * size)

        return max(rate(size) for size in range(most_nodes(load.requests) + 1))


def _expected(alpha: float, size: int) -> float:
    return sum(alpha**depth for depth in range(size + 1))


@pytest.mark.parametrize("machine", [CPU, GPU], ids=["cpu", "gpu"])
@pytest.mark.parametrize("each", [100, 1000, 8000])
@pytest.mark.parametrize("requests", [1, 8, 64])
@pytest.mark.parametrize("alpha", [0.3, 0.6, 0.9])
def test_from_the_first_round_on_the_plan_is_right(machine: Machine, each: int, requests: int, alpha: float) -> None:
    play = Play(machine, alpha)
    play.planner._estimate("d")._shared.right = 4.0 * alpha  # nobody is a newcomer here: costs alone are in question
    play.rounds(60, requests, each)
    assert play.speed > 0.91 * play.best(Load(requests, requests * each))


@pytest.mark.parametrize("measured", [True, False])
def test_a_context_that_jumps_is_followed(measured: bool) -> None:
    """From 100 tokens to 8000 and back: what plain passes cost then is not what they cost now."""
    play = Play(GPU, 0.8, measured).rounds(150, 16, 100)
    for each in (8000, 100, 8000):
        play.rounds(100, 16, each)
        assert play.speed > 0.93 * play.best(Load(16, 16 * each))


def test_requests_come_and_go() -> None:
    """A head's guesses for 64 cost more than for one, and their rows leave little to gain."""
    play = Play(GPU, 0.8)
    for requests, rounds in ((1, 60), (64, 60), (1, 20)):
        play.rounds(rounds, requests, 300)
        assert play.speed > 0.93 * play.best(Load(requests, requests * 300)), requests


def test_a_long_answer_is_not_taken_for_drafts_that_slow_it_down() -> None:
    """Every round is dearer than the one before, drafted or not; the guard compares with rounds of as much context."""
    play = Play(CPU, 0.95).rounds(1200, 1, 100, grows=6)
    assert play.planner.why("r0") is None
    assert np.mean([size > 0 for size in play.sizes[-200:]]) > 0.9


def test_what_the_context_adds_is_learned_where_it_was_not_measured() -> None:
    context = ContextCost()
    cost = PassCost(0.2, context=context)
    for number in range(200):
        rows, each = 1 + number % 4, 50 + 20 * number
        cost.observe(rows, 0.01 + 0.002 * rows + 2e-6 * rows * each, Load(1, each))
    assert context.row_key_s == pytest.approx(2e-6, rel=0.1)
    cost.at(Load(1, 100))
    short = cost.seconds(4)
    cost.at(Load(1, 8000))
    assert cost.seconds(4) - short == pytest.approx(2e-6 * 4 * 7900, rel=0.15)


def test_what_could_not_be_measured_of_the_context_is_learned() -> None:
    costs = Costs(PassCost(0.15))
    costs.adopt(MeasuredCosts(Curve((1, 2, 4), (0.010, 0.011, 0.013))))
    for number in range(200):
        load = Load(1, 100 + 20 * number)
        costs.at(load)
        costs.passes.observe(1, 0.010 + 2e-6 * load.context, load)
    assert costs.passes.context.row_key_s == pytest.approx(2e-6, rel=0.2)


def test_noise_is_not_taken_for_context() -> None:
    context, dice = ContextCost(), np.random.default_rng(1)
    for number in range(400):
        context.learn(1, 1, 0.01 * float(dice.uniform(0.8, 1.2)), Load(1, 100 + number))
    assert not context.matters


def test_drafts_by_number_of_requests() -> None:
    cost = DraftCost(0.1)
    assert not cost.observed
    assert cost.curve(4, 11)[-1] / cost.curve(4, 1)[-1] == pytest.approx(1 + 0.1 * 15), "filled up to 16"
    cost.observe(4, 8, 0.8)
    assert cost.curve(4, 8)[-1] == pytest.approx(0.8)
    assert cost.curve(2, 8)[-1] == pytest.approx(0.4)
    assert cost.curve(4, 1)[-1] == pytest.approx(0.8 / 1.7)
    cost.observe(4, 1, 0.1)
    assert cost.curve(4, 1)[-1] == pytest.approx(0.1)
    assert cost.curve(4, 8)[-1] == pytest.approx(0.8)


def test_drafts_between_and_beyond_what_was_measured() -> None:
    seen = (DraftSeen(1, Curve((1, 5), (1.0, 5.0))), DraftSeen(8, Curve((1, 5), (2.0, 10.0))))
    cost = DraftCost(0.0, seen)
    assert cost.curve(3, 1)[-1] == pytest.approx(3)
    assert cost.curve(5, 8)[-1] == pytest.approx(10)
    assert 1 < cost.curve(1, 4)[-1] < 2
    assert cost.curve(1, 64)[-1] == pytest.approx(2 + 56 / 7)
    cost.observe(5, 8, 20.0)  # twice as slow as measured: so are the others
    assert cost.curve(5, 1)[-1] == pytest.approx(10)


def test_before_anything_is_known_guesses_are_not_weighed_against_passes() -> None:
    costs = Costs(PassCost(0.1))
    costs.observe_draft("d", 4, 1, 40.0)
    assert costs.guess_curve("d", 4, 1)[-1] == 0
    assert costs.spent("d") == 0
    costs.passes.observe(1, 1.0)
    costs.observe_draft("d", 4, 1, 40.0)
    assert costs.guess_curve("d", 4, 1)[-1] == pytest.approx(40)
    assert (costs.spent("d"), costs.spent("d")) == (40.0, 0.0)


def test_trees_cost_what_they_were_seen_to_and_chains_do_not() -> None:
    """Of as many rows, a pass that checks trees is a little dearer on a GPU: by what it attends to."""
    costs = Costs(PassCost(0.001))
    costs.pad_passes()
    costs.adopt(MeasuredCosts(Curve((1, 64), (4.0, 5.0))))
    load = Load(4, 1000)
    costs.at(load)
    measured = costs.tree_curve(4, 64)
    assert measured == pytest.approx(costs.passes.curve(4, 64)), "nothing else is known"
    for _ in range(40):
        costs.observe_pass(64, 6.0, load, is_tree=True)
        costs.observe_pass(64, 5.0, load, is_tree=False)
    costs.at(load)
    assert costs.passes.seconds(64) == pytest.approx(5.0, rel=0.01)
    trees = costs.tree_curve(4, 64)
    assert trees[-1] == pytest.approx(6.0, rel=0.01)
    assert trees[0] == pytest.approx(costs.passes.seconds(4)), "with nothing to check it is no tree"
    assert (trees[1:] >= costs.passes.seconds(4)).all()
    for _ in range(40):
        costs.observe_pass(64, 8.0, load, is_tree=False)
    costs.at(load)
    assert costs.tree_curve(4, 64)[-1] == pytest.approx(8.0, rel=0.01), "never below chains"


def test_where_rounds_do_not_overlap_trees_are_passes_like_others() -> None:
    costs = Costs(PassCost(0.1))
    costs.adopt(MeasuredCosts(Curve((1, 64), (4.0, 5.0))))
    for _ in range(40):
        for rows, seconds in ((1, 8.0), (8, 12.0), (64, 40.0)):
            costs.observe_pass(rows, seconds, None, is_tree=True)
    assert costs.tree_curve(1, 64)[[0, 7, 63]] == pytest.approx([8, 12, 40], rel=0.01)


def test_a_first_pass_that_is_of_trees_tells_what_passes_take() -> None:
    """Where nothing was measured: else plain passes and trees would be in different units."""
    costs = Costs(PassCost(0.001))
    costs.pad_passes()
    costs.observe_pass(16, 0.004, Load(1, 100), is_tree=True)
    assert costs.passes.observed
    assert costs.tree_curve(1, 64).max() < 0.01


def test_what_context_adds_is_not_counted_twice_when_it_becomes_known() -> None:
    """The guard's plain rounds were seen before it was: what they took is what they took."""
    context = ContextCost()
    plain = PassCost(0.1, context=context, learns=False)
    load = Load(1, 1000)
    for _ in range(5):
        plain.observe(1, 0.010, load)
    context.row_key_s = 5e-6  # learned from drafted passes meanwhile: half of it
    plain.at(load)
    assert plain.seconds(1) == pytest.approx(0.010, rel=0.05)
    plain.at(Load(1, 200))
    assert plain.seconds(1) == pytest.approx(0.006, rel=0.05)


def test_drafts_are_not_compared_with_plain_rounds_of_another_length() -> None:
    """As long as nobody knows what length adds there is nothing to compare with: nothing is better than a prior."""
    gains = Gains(0.15)
    gains.start("r", Traits())
    for _ in range(4):
        gains.observe([Turn("r", 0, 1)], 0.010, context=100)
    gains.observe([Turn("r", 2, 2)], 0.015, context=2000)
    assert gains.of("r").measured == 1.0
    gains.observe([Turn("r", 0, 1)], 0.012, context=2000)
    gains.observe([Turn("r", 2, 2)], 0.016, context=2000)
    assert gains.of("r").measured == pytest.approx(1.5)
