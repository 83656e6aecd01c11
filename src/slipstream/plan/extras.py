"""What a drafted round takes beyond its pass and its guesses: packing, checking and telling of nodes is work, too.

It is in no pass and in no drafter's time, so it is learned by itself: what rounds with nodes take besides, and what
rounds without them do, for about as many requests. The difference is what nodes cost, however few they are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from math import log

_REMEMBER = 15
"""Rounds of a kind that are kept: their median forgets a hiccup."""
_ENOUGH = 3
"""Rounds with nodes that say something; of those without, one does."""


SOME = 32
"""More requests are many: what is known of them is a mean already, and a change costs all of them."""


def crowd_of(requests: int) -> int:
    """Numbers of requests that are told apart: 1, 2, 4, 8, …"""
    return 1 << max(requests - 1, 0).bit_length()


def nearest_crowd(known: Iterable[int], crowd: int) -> int | None:
    """Of these the one that is most like it; None: there is none."""
    return min(known, key=lambda other: abs(log(other / crowd)), default=None)


class RoundExtras:
    """Seconds that a round with nodes takes more than one without, pass and guesses left out."""

    def __init__(self) -> None:
        self._seen: dict[tuple[int, bool], deque[float]] = {}  # by crowd, with nodes or without
        self._known: dict[int, float] = {}  # by crowd

    def observe(self, requests: int, drafted: bool, beyond_s: float) -> None:
        """A round of so many took so long beyond its pass and its guesses."""
        crowd = crowd_of(requests)
        self._seen.setdefault((crowd, drafted), deque(maxlen=_REMEMBER)).append(beyond_s)
        if drafted:  # these are the fewer
            self._judge(crowd)

    def seconds(self, requests: int) -> float:
        """0 as long as nobody knows."""
        crowd = crowd_of(requests)
        near = crowd if crowd in self._known else nearest_crowd(self._known, crowd)
        return 0.0 if near is None else self._known[near]

    def _judge(self, crowd: int) -> None:
        drafted, plain = self._seen[crowd, True], self._seen.get((crowd, False), ())
        if len(drafted) >= _ENOUGH and plain:
            self._known[crowd] = max(0.0, sorted(drafted)[len(drafted) // 2] - sorted(plain)[len(plain) // 2])
