"""Outputs on their way from the engine's thread to an event loop: one wake-up a round, however many streams there are.

Waking a loop costs a system call and hands it the interpreter in the middle of a round. So the engine's thread only
puts outputs down, and wakes the loop once, when its turn is over. While the loop tells its clients, the engine waits
for the interpreter: that is what telling costs here (`pacing.py`).
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from slipstream.core.errors import RequestError
from slipstream.core.outputs import RequestOutput
from slipstream.engine.pacing import CROWD, Pacing

_PART = 0.25
"""Of a round: telling everybody may take so long before it is too long. The device has a round in hand meanwhile."""
SHARE = 0.04
"""Of all time, that telling takes where it is too long for every round."""

Arrival = RequestOutput | Exception  # what came of a request, or why it was refused


class OutputStream:
    """Requests that were started together, as their event loop sees them. Only `put` is for another thread.

    drop: ends those of them that run.
    """

    def __init__(self, deliveries: Deliveries, drop: Callable[[], None], requests: int = 1) -> None:
        self.finished = False
        self._running = requests
        self._deliveries = deliveries
        self._drop = drop
        self._arrived: list[RequestOutput] = []
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    def put(self, arrival: Arrival) -> None:
        """On the engine's thread. Raises where nobody can listen any more, so that the request ends."""
        self._deliveries.put(self, arrival)

    async def take(self) -> list[RequestOutput]:
        """Everything that came since the last call; waits for something to come.

        Raises what a request was refused for. Empty only when all is over, or the stream was closed.
        """
        if not (self._arrived or self._error or self.finished):
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self._error is not None:
            raise self._error
        arrived, self._arrived = self._arrived, []
        return arrived

    def close(self) -> None:
        """Stop listening: what runs ends within a round, and who waits in `take` wakes up."""
        if not self.finished:
            self.finished = True
            self._arrived = []
            self._drop()
            self._wake()

    def fail(self, error: Exception) -> None:
        """End it as `close` does; `take` raises this error."""
        if not self.finished:
            self._error = error
            self.close()

    def _hear(self, arrival: Arrival) -> None:
        """On the event loop."""
        if self.finished:
            return
        if isinstance(arrival, Exception):
            self.fail(arrival)
            return
        self._arrived.append(arrival)
        self._running -= arrival.finished
        self.finished = not self._running
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Deliveries(Pacing):
    """Between one engine and one event loop. clock, cpu: seconds of the wall, and of the calling thread's own work."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        clock: Callable[[], float] = time.perf_counter,
        cpu: Callable[[], float] = time.thread_time,
    ) -> None:
        super().__init__(_PART, SHARE, clock)
        self.loop = loop
        self._cpu = cpu
        self._waiting: deque[tuple[OutputStream, Arrival]] = deque()
        self._called = False  # the loop was woken, and has not looked yet

    def put(self, stream: OutputStream, arrival: Arrival) -> None:
        """On the engine's thread."""
        if self.loop.is_closed():
            raise RequestError("the event loop that asked is closed")
        self._waiting.append((stream, arrival))

    def flush(self) -> None:
        """On the engine's thread, when its turn is over."""
        self.end_turn()
        if self._waiting and not self._called:
            self._called = True
            with suppress(RuntimeError):  # the loop is closed: `put` says so to whoever comes next
                self.loop.call_soon_threadsafe(self._hand_out)

    def _hand_out(self) -> None:
        """On the event loop."""
        self._called = False  # before looking: what comes from now on wakes it again
        began, count = self._cpu(), 0
        with suppress(IndexError):
            while True:
                stream, arrival = self._waiting.popleft()
                stream._hear(arrival)
                count += 1
        if count >= CROWD:  # those who wait for it come next, and what they write goes out behind them
            self.loop.call_soon(self.loop.call_soon, self._handed_out, began, count)

    def _handed_out(self, began: float, count: int) -> None:
        self.note_cost(self._cpu() - began, count)


class Listeners:
    """The event loops that listen to one engine, and what is on its way to each."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._deliveries: dict[asyncio.AbstractEventLoop, Deliveries] = {}  # replaced, not changed

    def to(self, loop: asyncio.AbstractEventLoop) -> Deliveries:
        """On any thread."""
        with self._lock:
            if loop not in self._deliveries:
                kept = {one: deliveries for one, deliveries in self._deliveries.items() if not one.is_closed()}
                self._deliveries = {**kept, loop: Deliveries(loop)}
            return self._deliveries[loop]

    def flush(self) -> None:
        """On the thread that puts things down, when its turn is over."""
        for deliveries in self._deliveries.values():
            deliveries.flush()
