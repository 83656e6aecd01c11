"""The plan for 32 requests with an n-gram drafter: it finds who is worth guessing for, and whether waiting pays at all.

Costs are those of an H200 with a 7B model; rounds are filled up to the next size that they come in. The drafter is on
the host, so a round that it is asked for waits for it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import pytest

from slipstream.core.draft import Tree
from slipstream.drafters.promise import PromiseTable
from slipstream.engine.round_shape import RoundShape
from slipstream.plan.adaptive import AdaptivePlanner
from slipstream.plan.cost import SIZES, PassCost
from slipstream.sampling.table import Features

REQUESTS, DEEP = 32, 8
MS = {1: 4.0, 8: 4.1, 32: 4.4, 64: 4.6, 128: 5.0, 192: 6.3, 256: 7.6, 384: 10.2}
SETTLED = 60  # rounds that it has to find out


def pass_s(rows: int) -> float:
    size = next(s for s in SIZES if s >= rows)
    return float(np.interp(size, list(MS), list(MS.values()))) / 1e3


@dataclass
class Crowd:
    """32 requests whose guesses are right with these chances, round by round."""

    chances: list[float]
    wait_s: float = 0.0
    planner: AdaptivePlanner = field(default_factory=lambda: AdaptivePlanner(PassCost(0.001)))
    dice: random.Random = field(default_factory=lambda: random.Random(0))
    table: PromiseTable = field(default_factory=lambda: PromiseTable([0.6]))
    sizes: list[list[int]] = field(default_factory=list)  # nodes of each request, by round
    tokens: float = 0.0
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self.planner.pad_passes()

    def play(self, rounds: int) -> float:
        """Tokens by the second that these rounds bring on average, by the true chances."""
        self.tokens = self.seconds = 0.0
        for _ in range(rounds):
            self._round()
        return self.tokens / self.seconds

    def _round(self) -> None:
        self.planner.next_round()
        ids = [str(i) for i in range(REQUESTS)]
        asked = not self.planner.rests("ngram", REQUESTS)
        sizes = [0] * REQUESTS
        if asked:
            promises = [self.table.along(i, [0] * DEEP) for i in ids]
            trees = self.planner.trim("ngram", ids, [Tree.chain(range(DEEP))] * REQUESTS, promises, REQUESTS)
            sizes = [len(tree) for tree in trees]
        self.sizes.append(sizes)
        lasts = pass_s(REQUESTS + sum(sizes))
        self.planner.observe_pass(next(s for s in SIZES if s >= REQUESTS + sum(sizes)), lasts)
        self.seconds += lasts + self.wait_s * asked
        self.tokens += sum(_emitted(chance, nodes) for chance, nodes in zip(self.chances, sizes, strict=True))
        if asked:
            told = 0
            for name, chance, nodes in zip(ids, self.chances, sizes, strict=True):
                right = next((d for d in range(DEEP) if self.dice.random() >= chance), DEEP)
                emitted = [*range(min(right, nodes)), -7 if right <= nodes else nodes][: nodes + 1]
                self.table.learn(name, [0] * DEEP, range(DEEP), emitted)
                self.planner.observe("ngram", name, nodes, min(right, nodes))
                told += 1 + min(right, nodes)
            if self.wait_s:
                self.planner.observe_wait("ngram", self.wait_s)
                self.planner.observe_waited(["ngram"], REQUESTS, told, lasts + self.wait_s)

    def best(self) -> float:
        """Tokens by the second with the best sizes for the true chances, asked or not."""
        nodes = sorted((chance**depth for chance in self.chances for depth in range(1, DEEP + 1)), reverse=True)
        gained = np.concatenate(([0.0], np.cumsum(nodes)))
        drafting = max((REQUESTS + gained[n]) / (pass_s(REQUESTS + n) + self.wait_s) for n in range(len(nodes) + 1))
        return max(float(drafting), plain())


def _emitted(chance: float, nodes: int) -> float:
    return sum(chance**depth for depth in range(nodes + 1))


def plain() -> float:
    return REQUESTS / pass_s(REQUESTS)


def test_rounds_come_in_the_sizes_that_the_planner_reckons_with() -> None:
    def filled(rows: int) -> int:
        return RoundShape.of([rows - 1], 1, is_tree=False, features=Features(), version=0, keeps_logits=False).rows

    assert [next(s for s in SIZES if s >= rows) for rows in range(1, 513)] == [filled(n) for n in range(1, 513)]


def test_it_finds_the_few_that_are_worth_it() -> None:
    crowd = Crowd([0.85] * 4 + [0.01] * 28)
    crowd.play(SETTLED)
    speed = crowd.play(400)
    assert speed > 0.98 * crowd.best()
    assert speed > 1.2 * plain()
    late = np.array(crowd.sizes[SETTLED:])  # [rounds, requests]
    assert late[:, :4].mean() > 4


@pytest.mark.parametrize("chances", [[0.6] * 32, [0.9] * 32, [0.9] * 16 + [0.3] * 16])
def test_where_it_pays_for_many_the_pass_does_not_grow_too_large(chances: list[float]) -> None:
    """Passes of 192 rows are dear: it must have looked at smaller ones to know."""
    crowd = Crowd(chances)
    crowd.play(SETTLED)
    assert crowd.play(400) > 0.96 * crowd.best()


@pytest.mark.parametrize("wait_ms", [0.0, 0.5, 1.5])
@pytest.mark.parametrize("chance", [0.0, 0.005, 0.02])
def test_where_nobody_is_worth_it_nothing_is_lost(chance: float, wait_ms: float) -> None:
    crowd = Crowd([chance] * REQUESTS, wait_ms / 1e3)
    crowd.play(SETTLED)
    assert crowd.play(600) > 0.98 * max(crowd.best(), plain())


@pytest.mark.parametrize("wait_ms", [0.1, 0.5, 3.0])
def test_the_wait_is_weighed_against_what_the_few_bring(wait_ms: float) -> None:
    crowd = Crowd([0.85] * 4 + [0.01] * 28, wait_ms / 1e3)
    crowd.play(SETTLED)
    assert crowd.play(600) > 0.98 * crowd.best()
    rests = sum(not any(sizes) for sizes in crowd.sizes[SETTLED:])
    assert (rests > 500) == (wait_ms > 2)


def play_alone(promises: list[list[float]], wait_s: float) -> list[bool]:
    """One request, whose n-grams promise this in each round: in which of them was the drafter asked?"""
    planner = AdaptivePlanner(PassCost(0.001))
    planner.pad_passes()
    asked = []
    for promise in promises:
        tree = Tree.chain(range(len(promise)))
        asked.append(not planner.rests("ngram", 1) or planner.peek("ngram", ["a"], [tree], [promise], 1))
        nodes = 0
        if asked[-1]:
            nodes = len(planner.trim("ngram", ["a"], [tree], [promise], 1)[0])
            planner.observe_wait("ngram", wait_s)
        planner.next_round()
        planner.observe_pass(next(s for s in SIZES if s > nodes), pass_s(1 + nodes))
        if asked[-1]:
            brought = 1 + round(sum(promise[:nodes]))
            planner.observe_waited(["ngram"], 1, brought, pass_s(1 + nodes) + wait_s)
    return asked


def test_alone_a_stretch_without_guesses_is_no_reason_to_stop_listening() -> None:
    """A text that quotes does so now and then. Nobody waits meanwhile, and as soon as there is much to say again, its
    drafter is heard."""
    quoting: list[list[float]] = ([[]] * 50 + [[0.9, 0.85, 0.8, 0.75, 0.7]] * 10) * 10
    asked = play_alone(quoting, 0.25e-3)
    assert all(one for one, promise in zip(asked, quoting, strict=True) if promise)


def test_alone_nobody_waits_for_ever_for_guesses_that_never_come() -> None:
    asked = play_alone([[]] * 2000, 0.25e-3)
    assert asked.index(False) < 200
    assert sum(asked) / len(asked) < 0.25
    assert all(play_alone([[]] * 2000, 0.1e-3))  # so short a wait is borne


def test_it_is_asked_again_when_most_have_left_or_the_text_has_changed() -> None:
    crowd = Crowd([0.01] * REQUESTS, 1.5e-3)
    crowd.play(20)
    assert crowd.planner.rests("ngram", REQUESTS)
    assert crowd.planner.rests("ngram", REQUESTS // 2), "about as many: what was seen of those holds for these"
    assert not crowd.planner.rests("ngram", REQUESTS // 4), "those were not tried themselves"
    assert not crowd.planner.rests("ngram", REQUESTS // 8)
    crowd.chances = [0.9] * REQUESTS
    crowd.play(700)
    assert not crowd.planner.rests("ngram", REQUESTS)
    assert crowd.play(100) > 0.98 * crowd.best()
