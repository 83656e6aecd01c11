"""Drafters on the host: how often each is asked, and what it costs that rounds wait for it."""

from __future__ import annotations

from slipstream.plan.asking import Asking
from slipstream.plan.cost import PassCost
from slipstream.plan.decisions import Decision
from slipstream.plan.planner import Planner
from slipstream.plan.waits import Waits


class HostPlans(Planner):
    """The part of a planner that knows what host drafters cost beside their guesses."""

    def __init__(self, cost: PassCost) -> None:
        self._cost = cost
        self._asking: dict[str, Asking] = {}
        self._waits: dict[str, Waits] = {}  # of the drafters that rounds wait for
        self._decided: dict[str, Decision] = {}  # by drafter: the last plan of its guesses
        self._hoped = 1.0  # the best gain that was expected of guesses of this round
        self._rounds = 0

    def rests(self, drafter: str, rows: int) -> bool:
        return drafter in self._waits and self._waits[drafter].rests(self._rounds, rows)

    def asks(self, drafter: str, rows: int) -> bool:
        asking = self._asking.get(drafter)
        return asking is None or self._cost.padded or asking.due(self._cost.seconds(rows))

    def observe_asked(self, drafter: str, taken: bool, seconds: float) -> None:
        if self._cost.observed:
            gain = self._decided[drafter].gain - 1 if taken and drafter in self._decided else 0.0
            self._asking.setdefault(drafter, Asking()).observe(gain, seconds)

    def observe_wait(self, drafter: str, seconds: float) -> None:
        self._waits.setdefault(drafter, Waits()).observe(seconds)

    def _decide(self, drafter: str, decision: Decision) -> None:
        self._decided[drafter] = decision
        if decision.nodes:
            self._hoped = max(self._hoped, decision.gain)

    def _wait(self, drafter: str) -> float:
        """Seconds that a round waits for this drafter, its guesses not counted, whatever is then taken of them."""
        waits = self._waits.get(drafter)
        return waits.seconds if waits is not None and self._cost.observed else 0.0

    def _weigh(self, drafter: str, rows: int, rate: float) -> None:
        """With these guesses a round brings so many tokens by the second: more than one that waits for nobody?"""
        waits = self._waits.get(drafter)
        if waits is not None and self._cost.observed:
            pass_s = self._cost.seconds(rows)
            waits.weigh(rate * pass_s / rows, pass_s, self._rounds, rows)
