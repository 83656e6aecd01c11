"""Drafters whose guesses take time and that may guess for the same requests: one of them does in a round, the best.

Two heads say much the same, and each takes its time: together they are hardly ever worth it. Which one is better
depends on how many requests run, and on the text. So each is reckoned as if it were alone, in every round, and the one
that promises most has its turn; the others are probed now and then, like all that do not pay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.plan.extras import crowd_of
from slipstream.plan.planner import Beside

_OLD = 8
"""Rounds after which what one promised does not count any more: it may not be asked at all."""
_BETTER = 1.03
"""Whoever takes another's turn must promise so many times as much: it has to read what it missed."""


@dataclass(slots=True)
class _Promise:
    speed: float  # times that of a round without it
    round: int


class Rivals:
    """Of one planner."""

    def __init__(self) -> None:
        self._promises: dict[int, dict[str, _Promise]] = {}  # by crowd and drafter
        self._turns: dict[int, str] = {}  # by crowd: whose it is

    def beside(self, beside: Sequence[Sequence[Beside]]) -> Sequence[Sequence[Beside]]:
        """Those who guess already, without rivals."""
        known = {drafter for promises in self._promises.values() for drafter in promises}
        if len(known) < 2:
            return beside
        return [[one for one in theirs if one.drafter not in known] for theirs in beside]

    def has_turn(self, drafter: str, rows: int, speed: float, now: int) -> bool:
        """It promises to make this round so many times as fast. Is no other one better?"""
        crowd = crowd_of(rows)
        promises = self._promises.setdefault(crowd, {})
        promises[drafter] = _Promise(speed, now)
        fresh = {name: one.speed for name, one in promises.items() if now - one.round <= _OLD}
        best, last = max(fresh, key=fresh.__getitem__), self._turns.get(crowd, drafter)
        if last not in fresh or fresh[best] > _BETTER * fresh[last]:
            last = best
        self._turns[crowd] = last
        return last == drafter
