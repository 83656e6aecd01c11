"""How much may be lost by drafts: what is saved up for it, by who drafts and for which kinds of requests.

Text that a drafter is sure of and wrong about costs rows every time, however right it was elsewhere. So no draft may
lose more than its requests have won by drafts, and what is in a purse beside, which is filled again slowly: then even
text of which every guess is wrong is hardly slower than without any.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from slipstream.plan.traits import Traits

_FIRST, _MOST = 3.0, 5.0
"""Plain rounds in a purse at first, and at the most."""
_WARNED = 1.0
"""At first where its drafters have lost all that they had with requests of other kinds."""
_ALLOWANCE = 0.01
"""What every round adds."""
_HEARD = 0.25
"""What a guess adds that was not sent and would have been right, or takes where it would have been wrong."""


class Whose(NamedTuple):
    """Rounds of about so many requests, in which these draft for requests of these kinds."""

    crowd: int
    drafters: frozenset[str]
    traits: frozenset[Traits]

    @staticmethod
    def of(crowd: int, drafters: Iterable[str], traits: Iterable[Traits]) -> Whose:
        return Whose(crowd, frozenset(drafters), frozenset(traits))


@dataclass(slots=True)
class _Purse:
    rounds: float
    at: int  # the round when so much was in it


class Purses:
    """All of an engine's."""

    def __init__(self) -> None:
        self._purses: dict[Whose, _Purse] = {}

    def left(self, whose: Whose, now: int) -> float:
        """Plain rounds that may be lost."""
        purse = self._purses.get(whose)
        return self._first(whose, now) if purse is None else _filled(purse, now)

    def _first(self, whose: Whose, now: int) -> float:
        """What a kind of requests begins with: less, where others of as many requests made its drafters poor."""
        others = [_filled(purse, now) for one, purse in self._purses.items() if one[:2] == whose[:2]]
        return min(_FIRST, max(_WARNED, sum(others) / len(others))) if others else _FIRST

    def put(self, whose: Whose, won: float, now: int) -> None:
        """So many rounds were won, or lost where it is below 0."""
        self._purses[whose] = _Purse(max(min(self.left(whose, now) + won, _MOST), 0.0), now)

    def hear(self, whose: Whose, right: bool, requests: int, now: int) -> None:
        """A guess for one of so many requests was not sent."""
        if whose in self._purses:  # else nothing was lost yet
            self.put(whose, (_HEARD if right else -_HEARD) / requests, now)


def _filled(purse: _Purse, now: int) -> float:
    return min(purse.rounds + _ALLOWANCE * (now - purse.at), _MOST)
