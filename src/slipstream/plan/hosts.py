"""Drafters on the host: how often each is asked, what it costs that rounds wait for it, and drafts taken whole."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from slipstream.core.draft import MAX_NODES, Tree
from slipstream.plan.asking import Asking
from slipstream.plan.cost import PassCost
from slipstream.plan.decisions import Decision
from slipstream.plan.extras import RoundExtras, crowd_of
from slipstream.plan.gains import Gains
from slipstream.plan.hopes import Hopes
from slipstream.plan.investment import Investment, most_worth
from slipstream.plan.planner import Planner
from slipstream.plan.sizes import MARGIN
from slipstream.plan.waits import CrowdWaits

EXPLORE = 8
"""Every so many rounds a size of pass is tried that was not seen lately, as long as there is one."""

NOTHING = Tree()

_COMPARE = 32
"""Every so many rounds nobody is waited for, where the device guesses as well."""
_OLDER = 0.9
"""Weight of what was known in a running figure."""


class _Waited(NamedTuple):
    """What a drafter brings that a round waits for, by itself."""

    rows: int
    rate: float  # tokens by the second, the wait counted


class HostPlans(Planner):
    """The part of a planner that knows what host drafters cost beside their guesses."""

    def __init__(self, cost: PassCost, min_gain: float = 1.0) -> None:
        self._cost = cost
        self._margin = max(MARGIN, min_gain)
        self._gains = Gains(cost.slope, min_gain, cost.context)
        self._extras = RoundExtras()
        self._investments: dict[str, Investment] = {}  # of those whose drafts are taken whole
        self._asking: dict[str, Asking] = {}
        self._hopes = Hopes(cost, self._margin)
        self._waits: dict[str, CrowdWaits] = {}  # of the drafters that rounds wait for
        self._asked_rows = 1  # requests of the round in which drafters on the host were asked last
        self._asked_at: dict[tuple[str, int], int] = {}  # by drafter and crowd: … and when
        self._waited: dict[str, _Waited] = {}  # … those that this round waits for
        self._alone: dict[int, float] = {}  # by requests: how fast rounds are with guesses that nobody waits for
        self._shared: set[int] = set()  # requests of rounds in which there were both
        self._decided: dict[str, Decision] = {}  # by drafter: the last plan of its guesses
        self._hoped = 1.0  # the best gain that was expected of guesses of this round
        self._guessing: tuple[str, ...] = ()  # whose guesses are in it so far
        self._rounds = 0

    def rests(self, drafter: str, rows: int) -> bool:
        if drafter not in self._waits:
            return False
        if rows in self._shared and self._rounds % _COMPARE == 0:
            return True  # or nobody knows what the others bring alone
        waits = self._waits[drafter].of(max(rows, 1))
        if waits.rests(self._rounds, rows):
            return True
        return waits.seen and not self._may_hope(drafter, rows, waits.seconds)

    def _may_hope(self, drafter: str, rows: int, wait_s: float) -> bool:
        """Could it be worth the wait with so many requests, if its guesses were good? Or was it not asked for long?"""
        asked = self._asked_at.get((drafter, crowd_of(rows)), -Hopes.RARELY)
        if not rows or self._rounds - asked >= Hopes.RARELY:
            return True
        costs = np.full(MAX_NODES + 1, wait_s)
        return self._hopes.any(drafter, rows, costs, self._rounds)

    def limit_rows(self, rows: int) -> None:
        self._hopes.most_rows = rows

    def asks(self, drafter: str, rows: int) -> bool:
        asking = self._asking.get(drafter)
        return asking is None or self._cost.padded or asking.due(self._cost.about(rows))

    def observe_asked(self, drafter: str, taken: bool, seconds: float) -> None:
        if self._cost.observed:
            gain = self._decided[drafter].gain - 1 if taken and drafter in self._decided else 0.0
            self._asking.setdefault(drafter, Asking()).observe(gain, seconds)

    def least(self, rows: int) -> float:
        if self._cost.padded or not self._cost.observed or self._rounds % EXPLORE == 0:
            return 0.0  # rows that cost nothing pay for anything; and drafters learn from what they guess
        return self._cost.least_chance(rows, self._margin, self._extras.seconds(rows))

    def take(self, drafter: str, request_ids: Sequence[str], trees: Sequence[Tree], rows: int) -> list[Tree]:
        """Keep the drafts that pay by what drafts of this drafter brought; now and then all of them, for a stretch."""
        invested = self._investments.setdefault(drafter, Investment())
        gains = [invested.gain(request_id) for request_id in request_ids]
        sizes = [len(tree.tokens) for tree in trees]
        order = most_worth(gains, sizes)
        nodes = list(accumulate((sizes[i] for i in order), initial=0))
        costs = self._cost.curve(rows, rows + nodes[-1])[nodes] + self._wait(drafter, rows)
        costs[1:] += self._extras.seconds(rows)
        rates = (np.array(list(accumulate((gains[i] for i in order), initial=rows)))) / costs
        best = int(rates.argmax())
        pays = bool(rates[best] > rates[0] * self._margin * self._gains.doubt(self._with(drafter)))
        self._weigh(drafter, rows, float(rates[best]))
        if not order or not invested.tries(pays, float(costs[-1] / costs[0]) - 1):
            return [NOTHING] * len(trees)
        if self._rounds % EXPLORE == EXPLORE - 1 and not self._cost.seen(rows):
            return [NOTHING] * len(trees)  # what a plain pass costs must be known, too
        taken = set(order[: best if pays else len(order)])
        return [tree if i in taken else NOTHING for i, tree in enumerate(trees)]

    def observe_wait(self, drafter: str, seconds: float) -> None:
        self._waits.setdefault(drafter, CrowdWaits()).of(self._asked_rows).observe(seconds)

    def _decide(self, drafter: str, decision: Decision) -> None:
        self._decided[drafter] = decision
        if decision.nodes:
            self._hoped = max(self._hoped, decision.gain)
            self._guessing = self._with(drafter)

    def _with(self, drafter: str) -> tuple[str, ...]:
        """Those who guess in this round, and this one."""
        return self._guessing if drafter in self._guessing else (*self._guessing, drafter)

    def _wait(self, drafter: str, rows: int) -> float:
        """Seconds that a round of so many requests waits for this drafter, its guesses not counted, whatever is then
        taken of them."""
        self._asked_rows = rows
        self._asked_at[drafter, crowd_of(rows)] = self._rounds
        waits = self._waits.get(drafter)
        return waits.of(rows).seconds if waits is not None and self._cost.observed else 0.0

    def _explore(self, rows: int, nodes: int) -> int:
        """Fewer nodes once in a while, to see what a smaller pass costs: a rule that always takes many never learns."""
        if not nodes or not self._cost.padded or self._rounds % EXPLORE != EXPLORE - 1:
            return nodes
        size = self._cost.unseen(rows, rows + nodes)
        return nodes if size is None else size - rows

    def _weigh(self, drafter: str, rows: int, rate: float) -> None:
        """With these guesses a round brings so many tokens by the second: more than one that waits for nobody?

        That is not said before it is known who else guesses in it.
        """
        if drafter in self._waits and self._cost.observed:
            self._waited[drafter] = _Waited(rows, rate)

    def _settle(self) -> None:
        """Nobody else guessed in the round: hold those that it waited for against plain ones."""
        for drafter, (rows, rate) in self._waited.items():
            pass_s = self._cost.seconds(rows)
            self._waits[drafter].of(rows).weigh(rate * pass_s / rows, pass_s, self._rounds, rows)
        self._waited.clear()

    def _settle_beside(self, rows: int, tokens: float, seconds: float, drafted: bool, others: int) -> None:
        """The device guesses in the round as well, and it brings so many tokens in so long, the wait not counted.

        So those that it waited for are held against rounds in which the device guesses alone, which wait for nobody.
        drafted: does the device guess anything? others: nodes of theirs.
        """
        pass_s = self._cost.seconds(rows)
        speed = tokens / seconds * pass_s / rows
        if others:
            self._shared.add(rows)
        elif drafted:
            self._alone[rows] = speed + _OLDER * (self._alone.get(rows, speed) - speed)
        if not self._waited:
            return
        wait_s = max(self._waits[drafter].of(rows).seconds for drafter in self._waited)
        alone = max(speed if not others else self._alone.get(rows, 1.0), 1.0)
        for drafter in self._waited:
            self._waits[drafter].of(rows).weigh(
                speed * seconds / (seconds + wait_s) / alone, pass_s, self._rounds, rows
            )
        self._waited.clear()
