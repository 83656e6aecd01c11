"""Who may stand in the queue: a limit on those who wait, and how long it will take until there is room.

Callers ask on their own threads, so that a refusal does not wait for the round in flight.
"""

from __future__ import annotations

from slipstream.core.errors import QueueFull

_FIRST_GUESS_S = 1.0
_NEWS = 0.1
"""How much the last answer counts beside those before it."""


class Admission:
    """Refuses requests when too many wait. The engine's thread tells it how long answers take."""

    def __init__(self, max_queue: int | None) -> None:
        self.max_queue = max_queue
        self.refused = 0
        self._answer_s = _FIRST_GUESS_S  # how long an answer runs, lately
        self._seen = False

    def check(self, waiting: int, running: int) -> None:
        """Raise `QueueFull` where so many wait, beyond those who can start at once."""
        if self.max_queue is None or waiting < self.max_queue:
            return
        self.refused += 1
        leaving = waiting - self.max_queue + 1  # so many must have their turn first
        seconds = leaving * self._answer_s / max(1, running)
        raise QueueFull(
            f"{waiting} requests wait, and max_queue={self.max_queue}: come again in about {seconds:.1f} s", seconds
        )

    def observe(self, seconds: float) -> None:
        """An answer ran this long."""
        self._answer_s += (_NEWS if self._seen else 1.0) * (seconds - self._answer_s)
        self._seen = True
