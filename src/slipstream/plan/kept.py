"""Do rounds bring what was foretold of them? Of drafters whose guesses take time, by whose turn it was.

Costs and chances are learned apart, and what is wrong with them together shows in no one of them: a pass that takes
longer behind a draft, levels of a tree that hang together. Among rivals that decides wrongly for as long as both run.
So what each foretold is added up beside what came of it, tokens and seconds, and its next promise is bent by that, as
far as it kept its word less or more than all: where the host is slow, all rounds are, and that decides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from slipstream.plan.extras import crowd_of

_DECAY, _FADES = 0.95, 0.995
"""The last 20 rounds or so of its own speak for it; how that is forgotten in rounds of others."""
_TRUST = 6.0
"""Rounds like all of that crowd, which everybody starts with."""
_LEAST, _MOST = 0.7, 1.2
"""So far a promise is bent at most: what is further off is another matter, and the guard's."""
_ALIKE = 0.2
"""Rounds whose nodes differ by no more than such a part are of the kind that was foretold: not so probes."""


class Foretold(NamedTuple):
    """What a round is to bring: all its tokens and nodes, those of others included."""

    tokens: float
    seconds: float
    nodes: int


@dataclass(slots=True)
class _Sums:
    """Of rounds: as parts of what was foretold."""

    tokens: float = 0.0
    seconds: float = 0.0

    def add(self, tokens: float, seconds: float) -> None:
        self.tokens = self.tokens * _DECAY + tokens
        self.seconds = self.seconds * _DECAY + seconds

    def fade(self) -> None:
        self.tokens *= _FADES
        self.seconds *= _FADES

    def kept(self, usual: float) -> float:
        """How many times as fast they were as foretold; usual: … as those of all were."""
        return (self.tokens + _TRUST * usual) / (self.seconds + _TRUST)


class KeptPromises:
    """Of one planner, by crowd and drafter."""

    def __init__(self) -> None:
        self._sums: dict[int, dict[str, _Sums]] = {}
        self._all: dict[int, _Sums] = {}
        self._foretold: dict[tuple[int, str], Foretold] = {}

    def foretell(self, drafter: str, requests: int, foretold: Foretold) -> None:
        """Of a round of so many in which it guesses."""
        self._foretold[crowd_of(requests), drafter] = foretold

    def observe(self, drafters: frozenset[str], requests: int, tokens: int, seconds: float, nodes: int) -> None:
        """A round is over in which these guessed. It may have been planned before the last that was foretold."""
        crowd = crowd_of(requests)
        for drafter, sums in self._sums.get(crowd, {}).items():
            if drafter not in drafters:
                sums.fade()
        for drafter in drafters:
            foretold = self._foretold.get((crowd, drafter))
            if foretold is not None and abs(nodes - foretold.nodes) <= _ALIKE * foretold.nodes:
                parts = tokens / foretold.tokens, seconds / foretold.seconds
                self._sums.setdefault(crowd, {}).setdefault(drafter, _Sums()).add(*parts)
                self._all.setdefault(crowd, _Sums()).add(*parts)

    def kept(self, drafter: str, requests: int) -> float:
        """How many times as fast its rounds were as was foretold of them, by those of all."""
        crowd = crowd_of(requests)
        sums = self._sums.get(crowd, {}).get(drafter)
        if sums is None:
            return 1.0
        every = self._all[crowd]
        if not (every.tokens and every.seconds):
            return 1.0
        usual = every.tokens / every.seconds
        return min(max(sums.kept(usual) / usual, _LEAST), _MOST)
