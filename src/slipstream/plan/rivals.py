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

_OLD = 24
"""Rounds after which what one promised does not count any more: it may not be asked at all."""
_BETTER = 1.03
"""Whoever takes another's turn must promise so many times as much: it has to read what it missed."""


@dataclass(slots=True)
class _Promise:
    speed: float  # times that of a round without it
    round: int
    requests: frozenset[str]  # for whom


class Rivals:
    """Of one planner."""

    def __init__(self) -> None:
        self._promises: dict[tuple[int, bool], dict[str, _Promise]] = {}  # by crowd, others' guesses or none, drafter
        self._turns: dict[int, str] = {}  # by crowd: whose it is
        self._apart: set[frozenset[str]] = set()  # two who were asked for quite other requests, the last time

    def beside(self, beside: Sequence[Sequence[Beside]]) -> Sequence[Sequence[Beside]]:
        """Those who guess already, without rivals."""
        known = {drafter for promises in self._promises.values() for drafter in promises}
        if len(known) < 2:
            return beside
        return [[one for one in theirs if one.drafter not in known] for theirs in beside]

    def has_turn(
        self, drafter: str, request_ids: Sequence[str], rows: int, speed: float, now: int, *, beside: bool = False
    ) -> bool:
        """It promises to make this round so many times as fast by guesses for these requests. Is no other one better?

        Whoever guesses for other requests takes nobody's turn. beside: others' guesses are in the round already, and
        leave less to promise: that is compared with what was promised in such rounds, for rivals are asked in turn.
        """
        crowd, requests = crowd_of(rows), frozenset(request_ids)
        promises = self._promises.setdefault((crowd, beside), {})
        promises[drafter] = _Promise(speed, now, requests)
        for name, one in promises.items():
            if one.round == now and name != drafter:
                pair = frozenset((name, drafter))
                (self._apart.add if one.requests.isdisjoint(requests) else self._apart.discard)(pair)
        recent = [name for name, one in promises.items() if now - one.round <= _OLD]
        fresh = {name: promises[name].speed for name in recent if frozenset((name, drafter)) not in self._apart}
        best, last = max(fresh, key=fresh.__getitem__), self._turns.get(crowd, drafter)
        if last not in fresh:
            other = self._promises.get((crowd, not beside), {}).get(last)
            if other is None or now - other.round > _OLD or frozenset((last, drafter)) in self._apart:
                last = best  # else it is asked in this round, too: what it promises then is not known yet
        elif fresh[best] > _BETTER * fresh[last]:
            last = best
        self._turns[crowd] = last
        return last == drafter
