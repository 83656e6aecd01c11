"""Outputs on their way from the engine's thread to those who listen: an event loop, or a server in another process.

The engine's thread only collects outputs, and sends them when its turn is over: one wake-up or one message a turn,
however many streams there are. Reporting a step takes some microseconds a stream. That is nothing beside the step of a
large model, but as long as the step of a small one: there `Pacing` reports several steps together.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

from slipstream.core.errors import RequestError
from slipstream.core.outputs import RequestOutput

CROWD = 8
"""Fewer streams are told of every step."""
LONGEST_S = 0.025
"""Longest time that an output waits, except for the step that runs then."""
NEWEST = 0.2
"""Weight of the newest figure in a running mean."""
LOOP_PART = 0.25
"""Part of a step that an event loop may take for its outputs, while a device has the next step in hand."""
LOOP_SHARE = 0.04
"""Share of all time for that, where it takes more than this part."""
OUTBOX_SHARE = 0.02
"""The same for an outbox, which takes the engine's own thread; more than this share of a step is too much."""

Arrival = RequestOutput | Exception  # an output of a request, or why it was refused


class Reporter(Protocol):
    """A request whose output can wait."""

    def report(self) -> None:
        """Put everything new into an output."""


class Pacing:
    """Decides when streams are told of steps. On the engine's thread, except for `note_cost`.

    part: of a step, that reporting to all streams may take; above it, steps are reported together.
    share: of all time, that reporting takes then. clock: seconds of the wall.
    """

    def __init__(self, part: float, share: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self._part, self._share = part, share
        self._clock = clock
        self._each_s = 0.0  # measured cost of one stream
        self._holding: dict[Reporter, None] = {}  # requests with held news
        self._asked = self._crowd = 0  # requests with news in this step, and in the last one
        self._reporting = False
        self._step_s = 0.0
        self._last = self._next = 0.0  # end of the last step; when held news are due

    def holds(self, request: Reporter, urgent: bool) -> bool:
        """Whether this request's news must wait; it is asked to report when they are due. urgent: they never wait."""
        if self._reporting:
            return False
        self._asked += not urgent
        if urgent or not self._pace_s:
            self._holding.pop(request, None)  # its report includes what was held
            return False
        self._holding[request] = None
        return True

    def end_turn(self) -> None:
        """Ask the requests that were held to report, if their news are due."""
        now = self._clock()
        if self._asked:
            self._step_s += NEWEST * (min(now - self._last, LONGEST_S) - self._step_s)
            self._last = now
            self._crowd, self._asked = self._asked, 0
        if self._holding and now >= self._next:
            self._next = now + self._pace_s
            self._reporting = True
            for request in self._holding:
                request.report()
            self._reporting, self._holding = False, {}

    def note_cost(self, seconds: float, streams: int) -> None:
        """Reporting to this many streams took this long. Called by one thread."""
        self._each_s += NEWEST * (seconds / streams - self._each_s)

    @property
    def _pace_s(self) -> float:
        """Time between two reports to a crowd; 0: every step is reported."""
        cost = self._crowd * self._each_s
        if self._crowd < CROWD or cost <= self._part * self._step_s:
            return 0.0
        return min(cost / self._share, LONGEST_S)


class Outbox(Pacing):
    """Outputs for another process: one call of `send` a turn, on the engine's thread.

    cpu: seconds of the calling thread's own work. Pickling and writing take the engine's thread less time than a second
    thread would by competing for the interpreter.
    """

    def __init__(
        self,
        send: Callable[[Sequence[tuple[int, RequestOutput]]], None],
        clock: Callable[[], float] = time.perf_counter,
        cpu: Callable[[], float] = time.thread_time,
    ) -> None:
        super().__init__(OUTBOX_SHARE, OUTBOX_SHARE, clock)
        self._send, self._cpu = send, cpu
        self._outputs: list[tuple[int, RequestOutput]] = []

    def put(self, number: int, output: RequestOutput) -> None:
        self._outputs.append((number, output))

    def flush(self) -> None:
        """End the turn. The cost includes the making of outputs that were held."""
        began = self._cpu()
        self.end_turn()
        if not self._outputs:
            return
        outputs, self._outputs = self._outputs, []
        self._send(outputs)
        if len(outputs) >= CROWD and not any(output.finished for _, output in outputs):
            self.note_cost(self._cpu() - began, len(outputs))


class OutputStream:
    """Requests that were started together, as their event loop sees them. Only `put` is for other threads.

    drop: aborts those that run.
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
        """On the thread of the engine or of its channel. Raises `RequestError` if the event loop is closed."""
        self._deliveries.put(self, arrival)

    async def take(self) -> list[RequestOutput]:
        """Wait for outputs, and return all that came since the last call; empty at the end, or after `close`.

        Raises the error of a request that was refused.
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
        """Stop listening: running requests end within a step, and `take` returns."""
        if not self.finished:
            self.finished = True
            self._arrived = []
            self._drop()
            self._wake()

    def fail(self, error: Exception) -> None:
        """Close the stream; `take` raises this error."""
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
    """Between one engine and one event loop. cpu: seconds of the calling thread's own work."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        clock: Callable[[], float] = time.perf_counter,
        cpu: Callable[[], float] = time.thread_time,
    ) -> None:
        super().__init__(LOOP_PART, LOOP_SHARE, clock)
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
        """On the engine's thread, at the end of its turn."""
        self.end_turn()
        if self._waiting and not self._called:
            self._called = True
            with suppress(RuntimeError):  # the loop is closed: `put` raises that for the next output
                self.loop.call_soon_threadsafe(self._hand_out)

    def _hand_out(self) -> None:
        """On the event loop."""
        self._called = False  # before looking: later outputs wake the loop again
        began, count = self._cpu(), 0
        with suppress(IndexError):
            while True:
                stream, arrival = self._waiting.popleft()
                stream._hear(arrival)
                count += 1
        if count >= CROWD:  # tasks that wait for these run next, and then what they write is sent
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
        """On the thread that puts outputs, at the end of its turn."""
        for deliveries in self._deliveries.values():
            deliveries.flush()
