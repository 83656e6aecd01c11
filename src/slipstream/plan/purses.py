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
        self._purses: dict[tuple[int, frozenset[str]], dict[frozenset[Traits], _Purse]] = {}  # as in `Whose`

    def left(self, whose: Whose, now: int) -> float:
        """Plain rounds that may be lost."""
        purses = self._purses.get(whose[:2])
        if not purses:
            return _FIRST
        if (purse := purses.get(whose.traits)) is not None:
            return _filled(purse, now)
        # a kind of requests begins with less, where others of as many requests made its drafters poor
        others = [_filled(purse, now) for purse in purses.values()]
        return min(_FIRST, max(_WARNED, sum(others) / len(others)))

    def put(self, whose: Whose, won: float, now: int) -> None:
        """So many rounds were won, or lost where it is below 0."""
        left = _Purse(max(min(self.left(whose, now) + won, _MOST), 0.0), now)
        self._purses.setdefault(whose[:2], {})[whose.traits] = left

    def hear(self, whose: Whose, right: bool, requests: int, now: int) -> None:
        """A guess for one of so many requests was not sent."""
        if whose.traits in self._purses.get(whose[:2], ()):  # else nothing was lost yet
            self.put(whose, (_HEARD if right else -_HEARD) / requests, now)


def _filled(purse: _Purse, now: int) -> float:
    return min(purse.rounds + _ALLOWANCE * (now - purse.at), _MOST)
