"""Who may come in: not more than can run and wait, and nobody when the server is about to end."""

from __future__ import annotations

import math

from slipstream.serve.drain import Drain
from slipstream.serve.errors import ApiError

_LONGEST_WAIT_S = 60
_MEMORY = 0.1
"""How much the latest answer counts in the mean."""


class Admission:
    """Counts answers, the `n` of a request each. On the event loop's thread only.

    places: answers that the engine runs at once.
    max_queue: how many more may be here.
    """

    def __init__(self, places: int, max_queue: int, drain: Drain) -> None:
        self.places = places
        self.max_queue = max_queue
        self.inside = 0
        self.refused = 0
        self._drain = drain
        self._mean_s = 1.0  # of an answer, lately

    def check(self, answers: int = 1) -> None:
        """Raise 429 or 503 where so many more cannot come in."""
        if self._drain.begun:
            raise self._drain.refusal()
        if self.inside and self.inside + answers > self.places + self.max_queue:
            self.refused += 1
            wait = self.wait_s
            raise ApiError(
                429,
                f"too many requests: {self.inside} are running or waiting; try again in {wait} s",
                code="rate_limit_exceeded",
                headers={"Retry-After": str(wait)},
            )

    def enter(self, answers: int) -> None:
        self.check(answers)
        self.inside += answers

    def leave(self, answers: int, seconds: float) -> None:
        self.inside -= answers
        self._mean_s += _MEMORY * (seconds - self._mean_s)

    @property
    def wait_s(self) -> int:
        """Whole seconds until there is likely to be room."""
        return max(1, min(_LONGEST_WAIT_S, math.ceil(self._mean_s / max(1, self.places))))
