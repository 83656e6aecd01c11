"""Does a drafter keep its promises? What it says of its guesses is bent by what became of them.

Only downwards: a drafter that promises too little is asked less, which costs little; one that promises too much costs
rows in every round. Those that learn their promises themselves are right on average, and this leaves them alone.
"""

from __future__ import annotations

_DECAY = 0.9
_WEIGHT = 8.0
"""Tokens of a kept promise that a newcomer starts with."""


class Calibration:
    """Of one drafter, by request: tokens that its drafts promised, and tokens that they brought."""

    def __init__(self) -> None:
        self._promised: dict[str, float] = {}  # by the draft that is being checked
        self._sums: dict[str, tuple[float, float]] = {}  # promised and brought so far

    def factor(self, request_id: str) -> float:
        promised, brought = self._sums.get(request_id, (0.0, 0.0))
        return min(1.0, (brought + _WEIGHT) / (promised + _WEIGHT))

    def promise(self, request_id: str, tokens: float) -> None:
        """A draft of which the drafter, by its own word, expects so many tokens is in the pass."""
        self._promised[request_id] = tokens

    def observe(self, request_id: str, accepted: int) -> None:
        said = self._promised.pop(request_id, None)
        if said is not None:
            promised, brought = self._sums.get(request_id, (0.0, 0.0))
            self._sums[request_id] = promised * _DECAY + said, brought * _DECAY + accepted

    def forget(self, request_id: str) -> None:
        self._promised.pop(request_id, None)
        self._sums.pop(request_id, None)
