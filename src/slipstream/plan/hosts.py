"""Drafters on the host: what it costs to wait for them, and drafts taken whole; and how often anybody is asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from slipstream.core.draft import MAX_NODES, Tree
from slipstream.plan.asking import Asking
from slipstream.plan.cost import PassCost
from slipstream.plan.decisions import Decision
from slipstream.plan.dips import Dips
from slipstream.plan.extras import RoundExtras, crowd_of
from slipstream.plan.gains import Gains
from slipstream.plan.hopes import Hopes
from slipstream.plan.investment import Investment, most_worth
from slipstream.plan.measured import Floats
from slipstream.plan.planner import Planner
from slipstream.plan.sizes import MARGIN
from slipstream.plan.waits import CrowdWaits, Waits

EXPLORE = 8
"""Every so many rounds a size of pass is tried that was not seen lately, as long as there is one."""

NOTHING = Tree()

_HICCUP = 6.0
"""No round is taken to have lasted longer than so many passes."""
_PEEKED, _WORTH_WAKING = 8, 2.0
"""A drafter that nobody waits for is looked at: for all of up to so many requests, for a few of more (`samples.py`). It
is waited for again when it says so many times as much as a wait costs: the more, the more often that was in vain."""
_WORTH_WAKING_OF_MANY = 1.25
"""Of many, whose rows cost much: when rounds would be so many times as fast as they are."""
_FORGET = 16
"""Rounds after which it does not count what the device's guesses promised: it may guess for nobody any more."""
_REMEMBER = 64
"""… and what they brought, where nobody was waited for."""
_OLDER = 0.9
"""Weight of what was known in a running figure."""


class _Alone(NamedTuple):
    speed: float  # times that of plain ones
    round: int  # when it was heard of


class HostPlans(Planner):
    """The part of a planner that knows what drafters cost beside their guesses: questions, and waits for the host."""

    def __init__(self, cost: PassCost, min_gain: float = 1.0) -> None:
        self._cost = cost
        self._margin, self._min_gain = max(MARGIN, min_gain), min_gain
        self._gains = Gains(cost.slope, min_gain, cost.context, cost)
        self._extras = RoundExtras()
        self._investments: dict[str, Investment] = {}  # of those whose drafts are taken whole
        self._asking: dict[str, Asking] = {}
        self._hopes = Hopes(cost, self._margin)
        self._waits: dict[str, CrowdWaits] = {}  # of the drafters that rounds wait for
        self._hosts: set[str] = set()  # drafters that rounds may wait for
        self._asked_rows = 1  # requests of the round in which drafters on the host were asked last
        self._asked_at: dict[tuple[str, int], int] = {}  # by drafter and crowd: … and when
        self._alone: dict[int, _Alone] = {}  # by requests: what rounds promise with guesses that nobody waits for
        self._brought: dict[int, _Alone] = {}  # by crowd: … and what they brought
        self._decided: dict[str, Decision] = {}  # by drafter: the last plan of its guesses
        self._hoped = 1.0  # the best gain that was expected of guesses of this round
        self._guessing: tuple[str, ...] = ()  # whose guesses are in it so far
        self._rounds = 0
        self._dips = Dips()

    def _usually(self, rows: int) -> int:
        """So many requests, or those that are usual where this is a dip."""
        return self._dips.usual if self._dips.is_dip(rows) else rows

    def rests(self, drafter: str, rows: int) -> bool:
        self._hosts.add(drafter)
        if drafter not in self._waits:
            return False
        waits = self._waits[drafter].of(max(self._usually(rows), 1))
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

    def peeks(self, drafter: str, rows: int, requests: int) -> Sequence[int]:
        if not self._cost.padded or drafter not in self._waits or self._dips.is_dip(rows):
            return ()
        return range(requests) if rows <= _PEEKED else self._waits[drafter].of(rows).sample.choose(requests)

    def _wakes(self, drafter: str, rows: int, chances: Sequence[float]) -> bool:
        """chances [B]: tokens that its guesses for each are expected to bring, from where the texts stood when the
        round under way began: what that brings itself is not to be won any more."""
        waits, spare = self._waits[drafter].of(rows), self._spare(rows)
        won = [max(0.0, tokens - 2 * spare) for tokens in chances]
        if rows <= _PEEKED:  # whose rows cost next to nothing
            worth = _WORTH_WAKING * (1 + waits.failed) * waits.seconds * rows * spare
            is_worth = sum(won) * self._cost.seconds(rows) > worth
        else:
            least = max(_WORTH_WAKING_OF_MANY, self._margin) * spare
            is_worth = self._speeds_up(waits, rows, won) > least and self._rounds >= waits.deaf
        if is_worth:
            waits.wake(self._rounds)
        return is_worth

    def _speeds_up(self, waits: Waits, rows: int, won: Sequence[float]) -> float:
        """How many times as fast as plain ones rounds would be that wait, if as much is won for all as for these."""
        room = self._hopes.most_rows / rows - 1
        brought = waits.sample.add([min(tokens, room) for tokens in won])
        if brought is None:
            return 0.0
        seconds = self._cost.seconds(rows + round(brought)) + waits.seconds
        return (1 + brought / rows) * self._cost.seconds(rows) / seconds

    def limit_rows(self, rows: int) -> None:
        self._hopes.most_rows = rows

    def asks(self, drafter: str, rows: int) -> bool:
        asking = self._asking.get(drafter)
        return asking is None or self._cost.padded or asking.due(self._cost.about(rows))

    def observe_asked(self, drafter: str, taken: bool, seconds: float, *, costly: bool = False) -> None:
        if self._cost.observed and not self._cost.padded:
            gain = self._decided[drafter].gain - 1 if taken and drafter in self._decided else 0.0
            self._asking.setdefault(drafter, Asking(costly)).observe(gain, seconds)

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
        self._decide(drafter, Decision(rows, nodes[best] if pays else 0, float(rates[1:].max(initial=0) / rates[0])))
        if not order or not invested.tries(pays, float(costs[-1] / costs[0]) - 1):
            return [NOTHING] * len(trees)
        if self._rounds % EXPLORE == EXPLORE - 1 and not self._cost.seen(rows):
            return [NOTHING] * len(trees)  # what a plain pass costs must be known, too
        taken = set(order[: best if pays else len(order)])
        return [tree if i in taken else NOTHING for i, tree in enumerate(trees)]

    def allows(self, request_id: str, drafters: tuple[str, ...] = ()) -> bool:
        return self._gains.drafts(request_id, drafters)

    @property
    def hoped(self) -> float:
        return self._hoped

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

    def observe_waited(self, drafters: Sequence[str], requests: int, tokens: int, seconds: float) -> None:
        """Was it more than without them? By what became of it: what several promise together never comes."""
        pass_s = self._cost.seconds(requests)
        spent = min(seconds / pass_s, _HICCUP) * self._spare(requests)
        for drafter in drafters:
            if drafter in self._waits:
                self._waits[drafter].of(requests).weigh(tokens / requests, spent, pass_s, self._rounds, requests)

    def _suppose_alone(
        self,
        rows: int,
        curve: Callable[[int, int], Floats],  # of passes: as `PassCost.curve`
        gained: Floats,  # [K + 1, B]
        drafted: NDArray[np.int64],  # [K + 1, B]
        draft_s: Floats,  # [K + 1]
    ) -> None:
        """Guesses of the device would bring so much by themselves, in rounds that wait for nobody."""
        nodes = drafted.sum(1)
        seconds = curve(rows, rows + int(nodes.max()))[nodes] + draft_s
        rates = (rows + gained.sum(1)) / seconds
        self._hear_alone(rows, float(rates.max()) * self._cost.seconds(rows) / rows)

    def _hear_alone(self, rows: int, speed: float) -> None:
        """A round in which nobody is waited for promises to be so many times as fast as a plain one."""
        self._alone[rows] = self._smoothed(self._alone.get(rows), speed, _FORGET)

    def _hear_brought(self, rows: int, speed: float) -> None:
        """… and was."""
        crowd = crowd_of(rows)
        self._brought[crowd] = self._smoothed(self._brought.get(crowd), speed, _REMEMBER)

    def _smoothed(self, last: _Alone | None, speed: float, lasts: int) -> _Alone:
        known = speed if last is None or self._rounds - last.round > lasts else last.speed
        return _Alone(speed + _OLDER * (known - speed), self._rounds)

    def _spare(self, rows: int) -> float:
        """How many times as fast as plain ones rounds of so many would be in which nobody is waited for."""
        brought = self._speed(self._brought.get(crowd_of(rows)), _REMEMBER)
        return max(brought, self._speed(self._alone.get(rows), _FORGET))

    def _speed(self, known: _Alone | None, lasts: int) -> float:
        """1 where that was long ago."""
        return 1.0 if known is None or self._rounds - known.round > lasts else max(known.speed, 1.0)
