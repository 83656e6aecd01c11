"""What it takes until a drafter guesses again that had stopped: it reads what it missed, and the round waits."""

from __future__ import annotations

from collections import deque

from slipstream.plan.extras import crowd_of, nearest_crowd

_REMEMBER = 5
"""Rounds that are kept: their median forgets a hiccup."""
_STAYS, _MOST = 32, 1.15
"""Rounds over which that must come in again, and the most that is asked for it: one hiccup silences nobody."""


class CatchUps:
    """Seconds of a round in which a drafter caught up, beyond its pass and its guesses."""

    def __init__(self) -> None:
        self._seen: dict[str, dict[int, deque[float]]] = {}  # by drafter and crowd

    def observe(self, drafter: str, requests: int, seconds: float) -> None:
        crowds = self._seen.setdefault(drafter, {})
        crowds.setdefault(crowd_of(requests), deque(maxlen=_REMEMBER)).append(seconds)

    def seconds(self, drafter: str, requests: int) -> float:
        """0 as long as nobody knows."""
        crowds = self._seen.get(drafter, {})
        near = nearest_crowd(crowds, crowd_of(requests))
        if near is None:
            return 0.0
        seen = sorted(crowds[near])
        return seen[(len(seen) - 1) // 2]

    def margin(self, drafter: str, requests: int, pass_s: float) -> float:
        """How many times as fast as without it rounds must be for a while, so that catching up is worth it."""
        return min(1 + self.seconds(drafter, requests) / (_STAYS * pass_s), _MOST)
