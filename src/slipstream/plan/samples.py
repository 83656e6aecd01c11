"""Of many requests, a few speak for all: where a drafter on the host is only looked at, and nobody waits for it.

A round of many has no time to spare for a look at each of them, and without one nobody would know for a thousand rounds
that their texts have begun to repeat themselves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

_AT_ONCE, _LOOKS = 4, 4
"""Requests that are looked at in a round, and rounds for which they are the same. The first look does not count: what
comes of it tells what the drafter's word is worth by now."""
_ENOUGH = 2 * _AT_ONCE * (_LOOKS - 1)
"""Looks, at so many requests that two or three of them which repeat themselves do not speak for the others."""


class Sample:
    """Of the requests of one drafter, while about as many run."""

    def __init__(self) -> None:
        self._rounds = 0  # in which somebody was looked at
        self._all = 0  # requests that those who are looked at speak for
        self._won: deque[float] = deque(maxlen=_ENOUGH)

    def choose(self, requests: int) -> list[int]:
        """Those of so many that are looked at in this round, by their numbers."""
        self._all = requests
        first, apart = self._rounds // _LOOKS, max(requests // _AT_ONCE, 1)  # neighbours came together, and are alike
        return sorted({(first + i * apart) % requests for i in range(_AT_ONCE)})

    def add(self, won: Sequence[float]) -> float | None:
        """Guesses for those who were chosen would bring so many tokens each. How many for all of them, by all that was
        looked at lately? None: too little was."""
        if self._rounds % _LOOKS:
            self._won.extend(won)
        self._rounds += 1
        return sum(self._won) / _ENOUGH * self._all if len(self._won) == _ENOUGH else None

    def begin(self) -> None:
        """What was seen so far is over: others are looked at from now on."""
        self._won.clear()
        self._rounds += -self._rounds % _LOOKS
