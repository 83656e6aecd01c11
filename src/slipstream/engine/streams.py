"""Outputs on their way from the engine's thread to an event loop: one wake-up a round, however many streams there are.

Waking a loop costs a system call and hands it the interpreter in the middle of a round. So the engine's thread only
puts outputs down, and wakes the loop once, when its turn is over. While the loop tells its clients, the engine waits
for the interpreter: some microseconds for each of a crowd, nothing beside the round of a large model, but as long as
the round of a small one. There the crowd hears of several rounds together: its outputs are not even made until then.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from slipstream.core.errors import RequestError
from slipstream.core.outputs import RequestOutput

_CROWD = 8
"""Fewer streams hear of every round."""
_PART = 0.25
"""Of a round: telling everybody may take so long before it is too long. The device has a round in hand meanwhile."""
_SHARE = 0.04
"""Of all time, that telling takes where it is too long for every round."""
_LONGEST_S = 0.025
"""Nobody waits longer to hear what is there, but for the round that runs by then."""
_NEWEST = 0.2
"""Weight of the last figure in a running one."""

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


class Reporter(Protocol):
    """A request whose output can wait."""

    def report(self) -> None:
        """Put down all that was not told yet."""


class Deliveries:
    """Between one engine and one event loop. clock, cpu: seconds of the wall, and of the calling thread's own work."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        clock: Callable[[], float] = time.perf_counter,
        cpu: Callable[[], float] = time.thread_time,
    ) -> None:
        self.loop = loop
        self._clock, self._cpu = clock, cpu
        self._waiting: deque[tuple[OutputStream, Arrival]] = deque()
        self._called = False  # the loop was woken, and has not looked yet
        self._each_s = 0.0  # what telling one stream costs the loop, as far as that was seen; the loop alone writes it
        # the rest is the engine's thread's
        self._holding: dict[Reporter, None] = {}  # those with something to tell
        self._asked = self._crowd = 0  # who wanted to tell something in this round, and in the last one
        self._telling = False  # now it is time
        self._round_s = 0.0
        self._last = self._next = 0.0  # the last round's end; when a crowd may hear again

    def put(self, stream: OutputStream, arrival: Arrival) -> None:
        """On the engine's thread."""
        if self.loop.is_closed():
            raise RequestError("the event loop that asked is closed")
        self._waiting.append((stream, arrival))

    def holds(self, request: Reporter, urgent: bool) -> bool:
        """On the engine's thread: is what this request has to tell to wait? Then it is asked again when it is time.

        urgent: it tells now, whatever is said here.
        """
        if self._telling:
            return False
        self._asked += not urgent
        if urgent or not self._pace_s:
            self._holding.pop(request, None)  # all that it has to tell is told now
            return False
        self._holding[request] = None
        return True

    @property
    def _pace_s(self) -> float:
        """How far apart a crowd's news are; 0: they come with every round."""
        telling = self._crowd * self._each_s
        if self._crowd < _CROWD or telling <= _PART * self._round_s:
            return 0.0
        return min(telling / _SHARE, _LONGEST_S)

    def flush(self) -> None:
        """On the engine's thread, when its turn is over."""
        now = self._clock()
        if self._asked:
            self._round_s += _NEWEST * (min(now - self._last, _LONGEST_S) - self._round_s)
            self._last = now
            self._crowd, self._asked = self._asked, 0
        if self._holding and now >= self._next:
            self._next = now + self._pace_s
            self._telling = True
            for request in self._holding:
                request.report()
            self._telling, self._holding = False, {}
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
        if count >= _CROWD:  # those who wait for it come next, and what they write goes out behind them
            self.loop.call_soon(self.loop.call_soon, self._handed_out, began, count)

    def _handed_out(self, began: float, count: int) -> None:
        each = (self._cpu() - began) / count
        self._each_s += _NEWEST * (each - self._each_s)
