"""How short a round can be at all, because of the host: where many run, it may have more to do than the device has.

While the device is at one round, the host hears of the one before it and plans the next. If that takes longer than the
device needs, the device waits, and fewer guesses make no round shorter. It is learned from rounds in which it did.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from slipstream.plan.extras import crowd_of

_REMEMBER, _ENOUGH = 9, 3
"""Rounds that are kept, and that say something where the device waited in most of them: a few are late for reasons of
their own, such as those before which nobody ran. The median of those in which it did forgets a hiccup."""
_NOTICED = 0.02
"""Of a round, such a part at least that the device waits: less is no sign of a host that is late."""
_OLD = 512
"""Rounds after which it is forgotten if it was not seen again: small rounds are tried again then."""


class _Seen(NamedTuple):
    seconds: float
    is_late: bool  # the device waited


class HostFloor:
    """Seconds below which no round is, by how many requests are in it and whether there are guesses to check."""

    def __init__(self) -> None:
        self._seen: dict[tuple[int, bool], deque[_Seen]] = {}
        self._known: dict[tuple[int, bool], float] = {}
        self._last: dict[tuple[int, bool], int] = {}  # the round in which it was seen last

    def observe(self, requests: int, drafted: bool, seconds: float, waited_s: float, now: int) -> None:
        """Round `now` took so long, of which the device waited for the host, which had begun with it in time."""
        key = crowd_of(requests), drafted
        if now - self._last.get(key, now) > _OLD:
            self._forget(key)
        is_late = waited_s > _NOTICED * seconds
        if not is_late and seconds >= self._known.get(key, seconds + 1):
            return  # the host may need any shorter time, and what is known of that stands
        seen = self._seen.setdefault(key, deque(maxlen=_REMEMBER))
        seen.append(_Seen(seconds, is_late))
        late = sorted([one.seconds for one in seen if one.is_late])
        self._last[key] = now
        if len(late) >= _ENOUGH and 2 * len(late) > len(seen):
            self._known[key] = late[len(late) // 2]
        else:
            self._known.pop(key, None)

    def seconds(self, requests: int, drafted: bool, now: int) -> float:
        """0 where it is not known, or was long ago."""
        key = crowd_of(requests), drafted
        return self._known.get(key, 0.0) if now - self._last.get(key, now) <= _OLD else 0.0

    def _forget(self, key: tuple[int, bool]) -> None:
        self._seen.pop(key, None)
        self._known.pop(key, None)
        del self._last[key]
