"""How short a round can be at all, because of the host: where many run, it may have more to do than the device has.

While the device is at one round, the host hears of the one before it and plans the next. If that takes longer than the
device needs, the device waits, and fewer guesses make no round shorter. What the host took is known of every round that
it made ready meanwhile, whether the device waited or not; those with prompts are left out.
"""

from __future__ import annotations

from collections import deque
from statistics import median_low

from slipstream.plan.extras import crowd_of

_REMEMBER, _ENOUGH = 9, 3
"""Rounds that are kept, and that say something: the median forgets hiccups."""
_OLD = 512
"""Rounds after which it is forgotten if it was not seen again."""


class HostFloor:
    """Seconds below which no round is, by how many requests are in it and whether there are guesses to check."""

    def __init__(self) -> None:
        self._seen: dict[tuple[int, bool], deque[float]] = {}
        self._last: dict[tuple[int, bool], int] = {}  # the round in which it was seen last

    def observe(self, requests: int, drafted: bool, ready_s: float, now: int) -> None:
        """The host took so long to make round `now` ready."""
        key = crowd_of(requests), drafted
        if now - self._last.get(key, now) > _OLD:
            del self._seen[key]
        self._seen.setdefault(key, deque(maxlen=_REMEMBER)).append(ready_s)
        self._last[key] = now

    def seconds(self, requests: int, drafted: bool, now: int) -> float:
        """0 where it is not known, or was long ago."""
        key = crowd_of(requests), drafted
        seen = self._seen.get(key, ())
        return median_low(seen) if len(seen) >= _ENOUGH and now - self._last[key] <= _OLD else 0.0
