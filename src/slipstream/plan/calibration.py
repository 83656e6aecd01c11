"""Does a drafter keep its promises? What it says of its guesses is bent by what became of them.

Only downwards: a drafter that promises too little is asked less, which costs little; one that promises too much costs
rows in every round. Those that learn their promises themselves are right on average, and this leaves them alone.
"""

from __future__ import annotations

from dataclasses import dataclass

_DECAY = 0.85
_WEIGHT = 4.0
_LEAST_WEIGHT = 2.0
"""Tokens of a kept promise that a newcomer starts with; they fade like everything else, but never wholly."""


@dataclass(slots=True)
class _Sums:
    promised: float = 0.0
    brought: float = 0.0
    trust: float = _WEIGHT


class Calibration:
    """Of one drafter, by request: tokens that its drafts promised, and tokens that they brought."""

    def __init__(self) -> None:
        self._promised: dict[str, float] = {}  # by the draft that is being checked
        self._sums: dict[str, _Sums] = {}

    def factor(self, request_id: str) -> float:
        sums = self._sums.get(request_id)
        return 1.0 if sums is None else min(1.0, (sums.brought + sums.trust) / (sums.promised + sums.trust))

    def promise(self, request_id: str, tokens: float) -> None:
        """A draft of which the drafter, by its own word, expects so many tokens is in the pass."""
        self._promised[request_id] = tokens

    def observe(self, request_id: str, accepted: int) -> None:
        said = self._promised.pop(request_id, None)
        if said is not None:
            sums = self._sums.setdefault(request_id, _Sums())
            sums.promised = sums.promised * _DECAY + said
            sums.brought = sums.brought * _DECAY + accepted
            sums.trust = max(_LEAST_WEIGHT, sums.trust * _DECAY)

    def forget(self, request_id: str) -> None:
        self._promised.pop(request_id, None)
        self._sums.pop(request_id, None)
