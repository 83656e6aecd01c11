"""Who may come in: not more than can run and wait, of each tenant its part, and nobody when the server drains."""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from slipstream.serve.config import ServeConfig
from slipstream.serve.drain import Drain
from slipstream.serve.errors import ApiError

_LONGEST_WAIT_S = 600
_LATEST = 64
"""Requests by whose ends the drain rate is measured."""
_PARTS = 4
"""One of several tenants may fill such a part of the queue."""


class Admission:
    """Counts answers, the `n` of a request each. On the event loop's thread only.

    places: answers that the engine runs at once.
    several: whether there are several tenants.

    A tenant without any request here is always let in: others cannot fill the queue for it.
    """

    def __init__(
        self,
        places: int,
        config: ServeConfig,
        drain: Drain,
        several: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.refused = 0
        self._places, self._config, self._drain, self._several, self._clock = places, config, drain, several, clock
        self._inside: Counter[str] = Counter()
        self._ends: deque[tuple[float, int]] = deque(maxlen=_LATEST + 1)
        """When requests ended while all places were taken, and of how many answers; the first says since when."""
        self._rate: float | None = None  # answers a second, as measured the last time that all places were taken

    @property
    def inside(self) -> int:
        return self._inside.total()

    def inside_of(self, tenant: str) -> int:
        return self._inside[tenant]

    def check(self, tenant: str, answers: int = 1) -> None:
        """Raise 429 or 503 where so many more cannot come in."""
        if self._drain.begun:
            raise self._drain.refusal()
        own, most = self._inside[tenant], self._most_of_one
        too_many = self.inside + answers - self._places - self._config.max_queue
        too_many_own = own + answers - self._places - most
        if not own or max(too_many, too_many_own) <= 0:
            return
        self.refused += 1
        wait = max(self._wait_s(too_many), self._wait_s(too_many_own * len(self._inside)))
        whose = " of this key" if tenant else ""
        why = f"{own} answers{whose} run or wait" if too_many_own >= too_many else "the queue is full"
        raise ApiError(
            429,
            f"too many requests: {why}; try again in {wait} s",
            code="rate_limit_exceeded",
            headers={"Retry-After": str(wait)},
        )

    def enter(self, tenant: str, answers: int) -> None:
        self.check(tenant, answers)
        self._inside[tenant] += answers
        if self.inside >= self._places and not self._ends:
            self._ends.append((self._clock(), 0))

    def leave(self, tenant: str, answers: int, *, ran: bool = True) -> None:
        """ran: they had the engine's places; else they were not even started, and say nothing of how fast it is."""
        if self._ends and ran:
            self._ends.append((self._clock(), answers))
        self._inside[tenant] -= answers
        if not self._inside[tenant]:
            del self._inside[tenant]
        if self.inside < self._places:
            self._rate = self._measured() or self._rate
            self._ends.clear()

    @contextmanager
    def brief(self, tenant: str) -> Iterator[None]:
        """Inside for work that does not need the engine."""
        self.enter(tenant, 1)
        try:
            yield
        finally:
            self.leave(tenant, 1, ran=False)

    @property
    def _most_of_one(self) -> int:
        most, own = self._config.max_queue, self._config.max_queue_per_key
        return own if own is not None else most // _PARTS if self._several() else most

    def _measured(self) -> float | None:
        """Answers a second since all places are taken; None: none has ended."""
        if len(self._ends) < 2:
            return None
        (begun, _), *ends = self._ends
        return sum([answers for _, answers in ends]) / max(self._clock() - begun, 1e-3)

    def _wait_s(self, answers: int) -> int:
        """Whole seconds until so many have left, by the rate at which they leave.

        Where nothing was measured yet, one answer is taken to end now.
        """
        rate = self._measured() or self._rate
        if rate is None:
            rate = 1 / max(self._clock() - self._ends[0][0], 1e-3) if self._ends else 1.0
        return max(1, min(_LONGEST_WAIT_S, math.ceil(answers / rate)))
