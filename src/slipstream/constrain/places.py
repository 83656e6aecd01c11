"""Who may have a form compiled, and whose turn it is: work that takes long is shared out by tenant.

One tenant's heavy forms must not keep another's from being taken in, nor have it wait behind all of them.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from slipstream.core.errors import QueueFull

_CROWD = 3
"""Times the places of one tenant that all of them may have together, however many they are."""


class Places:
    """Counts those who are inside. A tenant alone may have all places, one of several its share of as many."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside: Counter[str] = Counter()

    @contextmanager
    def taken(self, tenant: str, most: int) -> Iterator[None]:
        """Have a place, or raise `QueueFull` at once. most: those of a tenant alone."""
        with self._lock:
            share = max(1, most // len({*self._inside, tenant}))
            if self._inside[tenant] >= share or self._inside.total() >= _CROWD * most:
                self._inside += Counter()  # forget those who have none
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
    """So many work at a time. The next is who has least at work, then who was served longest ago."""

    def __init__(self, at_once: int) -> None:
        self._at_once = at_once
        self._changed = threading.Condition()
        self._numbers = itertools.count(1)
        self._waiting: list[_Waiter] = []
        self._working: Counter[str] = Counter()
        self._served: dict[str, int] = {}

    @contextmanager
    def turn(self, tenant: str) -> Iterator[None]:
        """Wait for it, and have it."""
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
                self._working += Counter()  # forget those who have none
                here = {*self._working, *(waiter.tenant for waiter in self._waiting)}
                self._served = {one: at for one, at in self._served.items() if one in here}
                self._changed.notify_all()

    def _next(self) -> _Waiter:
        return min(
            self._waiting, key=lambda one: (self._working[one.tenant], self._served.get(one.tenant, 0), one.number)
        )
