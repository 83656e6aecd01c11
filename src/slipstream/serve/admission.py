"""Whether the server takes a request: the limits of the queue, the end of the server, and its health."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from slipstream.core.outputs import Pulse
from slipstream.engine.streams import OutputStream
from slipstream.serve.config import ServeConfig
from slipstream.serve.errors import ApiError

_LONGEST_WAIT_S = 600
_LATEST = 64
"""The number of latest requests whose ends give the drain rate."""
_PARTS = 4
"""With several tenants, each may fill this fraction of the queue."""
_AGAIN_S = 5
"""Retry-After of a server that shuts down: time for a new server to start."""


class Admission:
    """Counts answers: a request has `n` for each prompt. Only for the event loop's thread.

    places: answers that the engine runs at once.
    several: whether there are several tenants.

    A tenant without any request inside is always admitted, so that others cannot fill the queue for it.
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
        """Times of ends since all places were taken, with the number of answers; the first entry is that start."""
        self._rate: float | None = None  # answers a second, when all places were last taken

    @property
    def inside(self) -> int:
        return self._inside.total()

    def inside_of(self, tenant: str) -> int:
        return self._inside[tenant]

    def check(self, tenant: str, answers: int = 1) -> None:
        """Raise 429 or 503 if this many more answers cannot be admitted."""
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
        """ran: they reached the engine. Others say nothing about its speed."""
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
        """Count work that does not need the engine as one answer."""
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
        """Whole seconds until this many answers have left, at the measured rate.

        Before the first measurement, one answer is assumed to end now.
        """
        rate = self._measured() or self._rate
        if rate is None:
            rate = 1 / max(self._clock() - self._ends[0][0], 1e-3) if self._ends else 1.0
        return max(1, min(_LONGEST_WAIT_S, math.ceil(answers / rate)))


class Drain:
    """The end of the server: no request is admitted, running ones have some seconds, then each gets an error.

    The port stays open, so that clients are told to retry instead of being disconnected. For the event loop's thread,
    except `begin` and `hurry`.
    """

    def __init__(self, seconds: float) -> None:
        self.watchers_end = asyncio.Event()  # watchers do not keep a server alive
        self.over_at: float | None = None  # by time.monotonic: when running requests were cut off
        self._seconds = seconds
        self._began: float | None = None
        self._until: float | None = None
        self._streams: set[OutputStream] = set()

    def begin(self) -> bool:
        """Callable from any thread or a signal handler. False: it had begun already."""
        if self._until is not None:
            return False
        self._began = time.monotonic()
        self._until = self._began + self._seconds
        return True

    def hurry(self) -> None:
        """Begin, and cut off running requests now. Callable from any thread or a signal handler."""
        self.begin()
        self._until = time.monotonic()

    @property
    def lasted_s(self) -> float:
        return 0.0 if self._began is None else time.monotonic() - self._began

    @property
    def begun(self) -> bool:
        return self._until is not None

    @property
    def due(self) -> bool:
        """The time of running requests is up, and they were not cut off yet."""
        return self._until is not None and self.over_at is None and time.monotonic() >= self._until

    def refusal(self) -> ApiError:
        again = {"Retry-After": str(_AGAIN_S)}
        return ApiError(503, "the server is shutting down; try again", code="shutting_down", headers=again)

    @contextmanager
    def following(self, stream: OutputStream) -> Iterator[None]:
        """Include the stream in `cut_off` for this long."""
        self._streams.add(stream)
        if self.over_at is not None:
            stream.fail(self.refusal())
        try:
            yield
        finally:
            self._streams.discard(stream)

    def cut_off(self) -> int:
        """End all running streams with an error; their number."""
        self.over_at = time.monotonic()
        running = [stream for stream in self._streams if not stream.finished]
        for stream in running:
            stream.fail(self.refusal())
        return len(running)


@dataclass(frozen=True, slots=True)
class Health:
    status: Literal["ok", "draining", "crowded", "stalled", "dead"]
    reason: str = ""

    @property
    def http_status(self) -> int:
        """A crowded server works: a supervisor that restarted it would end all answers."""
        return 200 if self.status in ("ok", "crowded") else 503


def health_of(pulse: Pulse, *, draining: bool, crowded: str, stall_s: float) -> Health:
    """crowded: why the server lately had no room for a connection, or ""."""
    if not pulse.alive:
        return Health("dead", f"{pulse.why or 'the engine has ended'}: start the server again")
    if pulse.busy_s > stall_s:
        return Health("stalled", f"the engine gave no sign of progress for {pulse.busy_s:.0f} s")
    if draining:
        return Health("draining", "the server is shutting down")
    if crowded:
        return Health("crowded", crowded)
    return Health("ok")
