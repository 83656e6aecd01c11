"""Limits of compiling forms for clients: time, places and turns. Needs no torch.

Heavy forms of one tenant must not keep another's from being taken in, nor let it wait behind all of them.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from slipstream.core.errors import ConfigError, QueueFull

MOST_SHARING = 96
"""Most requests, of all tenants, that wait for the compilation of an equal form."""
THREADS = 160
"""Threads that a server has for requests with forms. More than can wait for heavy ones (the above, and `Places`): light
forms never wait for those."""
_CROWD = 3
"""The places of all tenants together, in places of one tenant."""


@dataclass(frozen=True, slots=True)
class CompileLimits:
    """Limits of heavy forms; light ones have none.

    trial_s: seconds of a CPU with a sample of the vocabulary (`trials.py`). With all of 49,152 tokens compiling takes
        about twenty times as long.
    waiting: forms of one tenant that are tried or compiled, or wait for it; several tenants share (`Places`). More are
        refused with `QueueFull`.
    """

    trial_s: float = 0.25
    waiting: int = 8

    def __post_init__(self) -> None:
        for key in self.__slots__:
            if not getattr(self, key) > 0:
                raise ConfigError(f"{key}={getattr(self, key)!r}: must be above 0")


class Places:
    """Counts the forms under way by tenant. One tenant may have all places; each of several has an equal share."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside: Counter[str] = Counter()

    @contextmanager
    def taken(self, tenant: str, most: int) -> Iterator[None]:
        """Hold a place, or raise `QueueFull` at once. most: the places of a tenant alone."""
        with self._lock:
            share = max(1, most // len({*self._inside, tenant}))
            if self._inside[tenant] >= share or self._inside.total() >= _CROWD * most:
                self._inside += Counter()  # drops zeros
                raise QueueFull("structured_outputs: too many forms are being compiled; try again", 1.0)
            self._inside[tenant] += 1
        try:
            yield
        finally:
            with self._lock:
                self._inside[tenant] -= 1
                self._inside += Counter()


@dataclass(frozen=True, slots=True)
class _Waiter:
    number: int
    tenant: str


class Turns:
    """At most `at_once` work at a time. The next turn goes to the tenant with the least work under way, then to the one
    that was served longest ago."""

    def __init__(self, at_once: int) -> None:
        self._at_once = at_once
        self._changed = threading.Condition()
        self._numbers = itertools.count(1)
        self._waiting: list[_Waiter] = []
        self._working: Counter[str] = Counter()
        self._served: dict[str, int] = {}

    @contextmanager
    def turn(self, tenant: str) -> Iterator[None]:
        """Wait for a turn, and hold it."""
        with self._changed:
            mine = _Waiter(next(self._numbers), tenant)
            self._waiting.append(mine)
            try:
                self._changed.wait_for(lambda: self._working.total() < self._at_once and self._next() is mine)
            finally:
                self._waiting.remove(mine)
                self._changed.notify_all()
            self._working[tenant] += 1
            self._served[tenant] = mine.number
        try:
            yield
        finally:
            with self._changed:
                self._working[tenant] -= 1
                self._working += Counter()  # drops zeros
                here = {*self._working, *(waiter.tenant for waiter in self._waiting)}
                self._served = {one: at for one, at in self._served.items() if one in here}
                self._changed.notify_all()

    def _next(self) -> _Waiter:
        return min(
            self._waiting, key=lambda one: (self._working[one.tenant], self._served.get(one.tenant, 0), one.number)
        )
