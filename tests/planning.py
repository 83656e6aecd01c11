"""Planners for tests, and the play of steps that a planner is judged by. Not a test file."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from slipstream.core.draft import Tree
from slipstream.plan.planner import AdaptivePlanner, Planner
from slipstream.plan.types import Budget, Curve, DraftSeen, Load, MeasuredCosts, Offer, StepSeen, Turn


class Scripted(Planner):
    """Asks `nodes` for each offer of each step."""

    def nodes(self, offer: Offer) -> list[int] | Budget:
        raise NotImplementedError

    def plan(self, offers: Sequence[Offer], load: Load) -> list[Budget]:
        found = [self.nodes(offer) for offer in offers]
        return [
            one if isinstance(one, Budget) else Budget(one, offer.levels[-1].deep if offer.levels else 0)
            for one, offer in zip(found, offers, strict=True)
        ]


CPU, GPU = Curve((1, 2, 64), (0.010, 0.0115, 0.120)), Curve((1, 64, 256), (0.004, 0.005, 0.009))
"""A CPU, where a row more costs 15%, and a GPU."""


@dataclass
class Drafter:
    """Guesses chains. right: by step, the chance of each guess."""

    right: Callable[[int], float]
    guess_s: float = 0.0  # a node; 0: it is free, and makes promises
    promise: float | None = None  # of each node; None: it does not say
    most: int = 8
    hidden_s: float = 0.0  # that a drafted step takes besides, which no estimate knows


@dataclass
class Play:
    """One engine's steps. Times are exact, and so is what the planner is told of them."""

    drafters: dict[str, Drafter]
    passes: Curve = GPU
    requests: int = 1
    min_gain: float = 1.0
    answer: int = 200  # steps of a request
    step: int = 0
    seconds: float = 0.0
    tokens: int = 0
    drafted: dict[str, int] = field(default_factory=dict)  # by drafter: steps

    def __post_init__(self) -> None:
        self.planner = AdaptivePlanner(0.15, min_gain=self.min_gain)
        timed = {name: d for name, d in self.drafters.items() if d.guess_s}
        drafts = {n: (DraftSeen(1, Curve((1, 8), (d.guess_s, 8 * d.guess_s))),) for n, d in timed.items()}
        self.planner.adopt(MeasuredCosts(self.passes, drafts=drafts))
        self.dice = random.Random(1)

    def run(self, steps: int) -> float:
        """Tokens a second by those of plain decoding."""
        seconds, tokens = self.seconds, self.tokens
        for _ in range(steps):
            self.one()
        plain_s = self._pass(self.requests) / self.requests
        return (self.tokens - tokens) / (self.seconds - seconds) * plain_s

    def _pass(self, rows: int) -> float:
        import numpy as np

        return float(self.passes.at(np.array([float(rows)]))[0])

    def one(self) -> None:
        planner, load = self.planner, Load(self.requests, 100 * self.requests)
        ids = [f"{i}/{(self.step + 7 * i) // self.answer}" for i in range(self.requests)]
        chains: dict[str, list[int]] = {}
        free = {name: d for name, d in self.drafters.items() if not d.guess_s}
        for name, one in free.items():
            if planner.compares or not planner.asks(name, self.requests):
                continue
            trees = [Tree.chain([1] * one.most)] * len(ids)
            said = None if one.promise is None else [one.promise**k for k in range(1, one.most + 1)]
            chains[name] = [len(tree) for tree in planner.trim(name, ids, trees, [said] * len(ids), self.requests)]
            planner.observe_wait(name, self.requests, 0.0)
        timed = [name for name in self.drafters if name not in free]
        offers = [Offer(name, ids, [self.drafters[name].most] * len(ids)) for name in timed]
        for offer, budget in zip(offers, planner.plan(offers, load), strict=True):
            chains[offer.drafter] = budget.nodes
        self._verify(ids, chains, load)

    def _verify(self, ids: Sequence[str], chains: dict[str, list[int]], load: Load) -> None:
        rows, seconds = self.requests, 0.0
        best = [0] * len(ids)
        owners: list[list[str]] = [[] for _ in ids]
        drafted = [0] * len(ids)
        for name, nodes in chains.items():
            one = self.drafters[name]
            if any(nodes):
                self.drafted[name] = self.drafted.get(name, 0) + 1
                took = one.guess_s * max(nodes)
                seconds += took + one.hidden_s
                if took:
                    self.planner.observe_draft(name, max(nodes), took, self.requests)
            for i, count in enumerate(nodes):
                if count:
                    right = next((k for k in range(count) if self.dice.random() >= one.right(self.step)), count)
                    self.planner.observe(name, ids[i], count, right)
                    best[i] = max(best[i], right)
                    drafted[i] += count
                    owners[i].append(name)
                    rows += count
        pass_s = self._pass(rows)
        turns = [
            Turn(name, count, 1 + right, tuple(who))
            for name, count, right, who in zip(ids, drafted, best, owners, strict=True)
        ]
        total = pass_s + seconds
        gain = self.planner.expected_gain
        self.planner.observe_step(StepSeen(load, turns, total, rows, pass_s, expected_gain=gain))
        self.step += 1
        self.seconds += total
        self.tokens += sum(turn.emitted for turn in turns)
