"""What it takes until a drafter guesses again that had stopped: it reads what it missed, and the round waits."""

from __future__ import annotations

from collections import deque

from slipstream.plan.extras import SOME, crowd_of, nearest_crowd

_REMEMBER = 5
"""Rounds that are kept: their median forgets a hiccup."""
_STAYS, _STAYS_OF_MANY, _MOST = 32, 128, 1.15
"""Rounds over which that must come in again, of some requests and of more, whose texts change less together; and the
most that is asked for it: one hiccup silences nobody."""
_ONCE, _EACH = 0.5, 1 / 12
"""Plain passes that it is taken to last, once and for each request, where nobody knows; and how what was seen of some
requests says something of more or fewer."""


class CatchUps:
    """Seconds of a round in which a drafter caught up, beyond its pass and its guesses.

    assumes: is something assumed where nothing was seen? Rounds that are not queued never tell.
    """

    def __init__(self) -> None:
        self.assumes = False
        self._seen: dict[str, dict[int, deque[float]]] = {}  # by drafter, and of about how many: by `_passes` of them

    def observe(self, drafter: str, requests: int, seconds: float) -> None:
        crowds = self._seen.setdefault(drafter, {})
        crowds.setdefault(crowd_of(requests), deque(maxlen=_REMEMBER)).append(seconds / _passes(requests))

    def seconds(self, drafter: str, requests: int, pass_s: float) -> float:
        """Of so many requests that it reads. pass_s: of a plain pass."""
        crowds = self._seen.get(drafter, {})
        near = nearest_crowd(crowds, crowd_of(requests))
        if near is None:
            return self.assumes * pass_s * _passes(requests)
        seen = sorted(crowds[near])
        return seen[(len(seen) - 1) // 2] * _passes(requests)


def margin_for(seconds: float, requests: int, pass_s: float) -> float:
    """How many times as fast as plain ones rounds of so many must be for a while, to be worth so long a catching up."""
    stays = _STAYS if requests <= SOME else _STAYS_OF_MANY
    return min(1 + seconds / (stays * pass_s), _MOST)


def _passes(requests: int) -> float:
    return _ONCE + _EACH * requests
