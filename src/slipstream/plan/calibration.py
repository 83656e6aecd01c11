"""Does a drafter keep its promises? What it says of its guesses is bent by what became of them.

Only downwards: a drafter that promises too little is asked less, which costs little; one that promises too much costs
rows in every round. Those that learn their promises themselves are right on average, and this leaves them alone.
A newcomer takes the drafter's word for what it was worth to others of its kind: nobody finds out from the beginning.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from slipstream.plan.traits import Traits

_DECAY = 0.85
_KIND_DECAY = 0.97
_WEIGHT = 4.0
_KIND_WEIGHT = 8.0
_LEAST_WEIGHT = 2.0
"""Tokens of a promise kept as usual that a newcomer starts with, and a kind with promises that were kept; those of a
request fade like everything else, but never wholly, unless …"""
_BROKEN = 2
"""… so many drafts that promised a token or more brought nothing, and none brought anything between them."""
_GONE, _FORGETS = 4, 0.5
"""Where so many did not, a text that echoed has gone on: what was before is forgotten so much faster."""
_LEAST = 1e-4
"""Somebody who never kept a promise has made some all the same."""


@dataclass(slots=True)
class _Sums:
    promised: float = 0.0
    brought: float = 0.0
    trust: float = _WEIGHT
    failed: int = 0  # drafts of which a token or more was to be right, since one was

    def add(self, promised: float, brought: int, decay: float) -> None:
        self.promised = self.promised * decay + promised
        self.brought = self.brought * decay + brought


class Calibration:
    """Of one drafter, by request: tokens that its drafts promised, and tokens that they brought.

    traits: the kinds of requests, by id; filled in by its owner.
    """

    def __init__(self, traits: Mapping[str, Traits] | None = None) -> None:
        self._promised: dict[str, float] = {}  # by the draft that is being checked
        self._sums: dict[str, _Sums] = {}
        self._kinds: dict[Traits, _Sums] = {}
        self._traits = {} if traits is None else traits

    def factor(self, request_id: str) -> float:
        usual = self._usual(request_id)
        sums = self._sums.get(request_id)
        if sums is None:
            return usual
        return min(1.0, max(_LEAST, (sums.brought + sums.trust * usual) / (sums.promised + sums.trust)))

    def _usual(self, request_id: str) -> float:
        traits = self._traits.get(request_id)
        kind = None if traits is None else self._kinds.get(traits)
        return 1.0 if kind is None else min(1.0, (kind.brought + _KIND_WEIGHT) / (kind.promised + _KIND_WEIGHT))

    def promise(self, request_id: str, tokens: float) -> None:
        """A draft of which the drafter, by its own word, expects so many tokens is in the pass."""
        self._promised[request_id] = tokens

    def observe(self, request_id: str, accepted: int) -> None:
        said = self._promised.pop(request_id, None)
        if said is None:
            return
        sums = self._sums.setdefault(request_id, _Sums())
        sums.failed = 0 if accepted else sums.failed + (said >= 1)
        decay = _DECAY if sums.failed < _GONE else _FORGETS
        sums.add(said, accepted, decay)
        sums.trust *= decay
        if sums.failed < _BROKEN:
            sums.trust = max(_LEAST_WEIGHT, sums.trust)
        kind = self._traits.get(request_id)
        if kind is not None:
            self._kinds.setdefault(kind, _Sums()).add(said, accepted, _KIND_DECAY)

    def forget(self, request_id: str) -> None:
        self._promised.pop(request_id, None)
        self._sums.pop(request_id, None)
