"""How a server ends: nobody comes in any more, those inside have some time, and then each is told that it is over.

The port stays open all the while: who comes is told to come again, which says more than a refused connection.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

from slipstream.engine.streams import OutputStream
from slipstream.serve.errors import ApiError

_AGAIN_S = 5
"""When a client may come again: another server has begun by then."""


class Drain:
    """seconds: what running requests have. On the event loop's thread, but for `begin` and `hurry`."""

    def __init__(self, seconds: float) -> None:
        self.watchers_end = asyncio.Event()  # who only watches does not keep a server alive
        self.over_at: float | None = None  # by time.monotonic: when those inside were cut off
        self._seconds = seconds
        self._began: float | None = None
        self._until: float | None = None
        self._streams: set[OutputStream] = set()

    def begin(self) -> bool:
        """Any thread, or a signal. False: it had begun already."""
        if self._until is not None:
            return False
        self._began = time.monotonic()
        self._until = self._began + self._seconds
        return True

    def hurry(self) -> None:
        """Begin, and wait for nobody. Any thread, or a signal."""
        self.begin()
        self._until = time.monotonic()

    @property
    def lasted_s(self) -> float:
        """How long those inside have had by now: less than it was to be, where somebody was in a hurry."""
        return 0.0 if self._began is None else time.monotonic() - self._began

    @property
    def begun(self) -> bool:
        return self._until is not None

    @property
    def due(self) -> bool:
        """Is the time of those inside up, and nobody has told them yet?"""
        return self._until is not None and self.over_at is None and time.monotonic() >= self._until

    def refusal(self) -> ApiError:
        again = {"Retry-After": str(_AGAIN_S)}
        return ApiError(503, "the server is shutting down; try again", code="shutting_down", headers=again)

    @contextmanager
    def following(self, stream: OutputStream) -> Iterator[None]:
        """While this lasts, the stream is one of those that are cut off."""
        self._streams.add(stream)
        if self.over_at is not None:
            stream.fail(self.refusal())
        try:
            yield
        finally:
            self._streams.discard(stream)

    def cut_off(self) -> int:
        """End all streams with an error that their clients hear; how many there were."""
        self.over_at = time.monotonic()
        running = [stream for stream in self._streams if not stream.finished]
        for stream in running:
            stream.fail(self.refusal())
        return len(running)
