"""Delivery of outputs from the engine's thread to event loops, or to a server in another process.

The engine's thread collects outputs during its turn and sends them at the end: one wake-up or one message for all
streams. Reporting a step takes microseconds a stream, which is little beside a step of a large model, but as much as
a step of a small one. `Pacing` then reports several steps together.
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
"""Fewer streams get a report of every step."""
LONGEST_S = 0.025
"""Longest time that an output waits, apart from the step in progress."""
NEWEST = 0.2
"""Weight of the newest value in a running mean."""
LOOP_PART = 0.25
"""An event loop may take this part of a step for its outputs, since the device computes meanwhile."""
LOOP_SHARE = 0.04
"""Share of all time that it may take when that part is exceeded."""
OUTBOX_SHARE = 0.02
"""Both limits for an outbox, which takes time of the engine's own thread."""

Arrival = RequestOutput | Exception  # an output of a request, or the reason for its refusal


class Reporter(Protocol):
    """A request whose outputs can be held."""

    def report(self) -> None:
        """Send an output with all news."""


class Pacing:
    """Decides when requests report. Runs on the engine's thread, except for `note_cost`.

    part: of a step that reporting may take; above it, several steps are reported together.
    share: of all time that reporting takes in that case. clock: wall time in seconds.
    """

    def __init__(self, part: float, share: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self._part, self._share = part, share
        self._clock = clock
        self._each_s = 0.0  # measured cost of a report to one stream
        self._holding: dict[Reporter, None] = {}  # requests whose news are held
        self._asked = self._crowd = 0  # requests with news in this step, and in the last one
        self._reporting = False
        self._step_s = 0.0
        self._last = self._next = 0.0  # end of the last step; when held news are due

    def holds(self, request: Reporter, urgent: bool) -> bool:
        """Whether to hold this request's news; if so, its `report` is called when they are due. urgent: never hold."""
        if self._reporting:
            return False
        self._asked += not urgent
        if urgent or not self._pace_s:
            self._holding.pop(request, None)  # its report includes what was held
            return False
        self._holding[request] = None
        return True

    def end_turn(self) -> None:
        """Let the held requests report, if their news are due."""
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
        """Record the time of a report to this number of streams. Called by one thread."""
        self._each_s += NEWEST * (seconds / streams - self._each_s)

    @property
    def _pace_s(self) -> float:
        """Time between two reports; 0: report every step."""
        cost = self._crowd * self._each_s
        if self._crowd < CROWD or cost <= self._part * self._step_s:
            return 0.0
        return min(cost / self._share, LONGEST_S)


class Outbox(Pacing):
    """Sends outputs to another process, by one call of `send` a turn on the engine's thread.

    A second thread would cost more, since it would compete for the interpreter. cpu: CPU time of the calling thread.
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
        """End the turn."""
        began = self._cpu()  # the cost includes making the held outputs
        self.end_turn()
        if not self._outputs:
            return
        outputs, self._outputs = self._outputs, []
        self._send(outputs)
        if len(outputs) >= CROWD and not any(output.finished for _, output in outputs):
            self.note_cost(self._cpu() - began, len(outputs))


class OutputStream:
    """The outputs of requests that were started together. All methods except `put` belong to its event loop.

    drop: aborts the running requests.
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
        """Called on the thread of the engine or of its channel. Raises `RequestError` if the event loop is closed."""
        self._deliveries.put(self, arrival)

    async def take(self) -> list[RequestOutput]:
        """Wait for outputs, and return all since the last call: none at the end or after `close`.

        Raises the error of a refused request.
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
        """Abort the running requests, and let `take` return."""
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

    def receive(self, arrival: Arrival) -> None:
        """Called on the event loop by `Deliveries`."""
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
    """Sends outputs of one engine to the streams of one event loop. cpu: CPU time of the calling thread."""

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
        self._called = False  # a call of `_hand_out` is due

    def put(self, stream: OutputStream, arrival: Arrival) -> None:
        """Called on the engine's thread."""
        if self.loop.is_closed():
            raise RequestError("the event loop that asked is closed")
        self._waiting.append((stream, arrival))

    def flush(self) -> None:
        """Called on the engine's thread at the end of its turn."""
        self.end_turn()
        if self._waiting and not self._called:
            self._called = True
            with suppress(RuntimeError):  # the loop is closed: `put` raises that for the next output
                self.loop.call_soon_threadsafe(self._hand_out)

    def _hand_out(self) -> None:
        """Called on the event loop."""
        self._called = False  # before reading: later outputs wake the loop again
        began, count = self._cpu(), 0
        with suppress(IndexError):
            while True:
                stream, arrival = self._waiting.popleft()
                stream.receive(arrival)
                count += 1
        if count >= CROWD:  # the cost includes the tasks that wait for these outputs, and the writes that they cause
            self.loop.call_soon(self.loop.call_soon, self._handed_out, began, count)

    def _handed_out(self, began: float, count: int) -> None:
        self.note_cost(self._cpu() - began, count)


class Listeners:
    """The `Deliveries` of one engine, one for each event loop."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._deliveries: dict[asyncio.AbstractEventLoop, Deliveries] = {}  # replaced, not changed

    def to(self, loop: asyncio.AbstractEventLoop) -> Deliveries:
        """Called on any thread."""
        with self._lock:
            if loop not in self._deliveries:
                kept = {one: deliveries for one, deliveries in self._deliveries.items() if not one.is_closed()}
                self._deliveries = {**kept, loop: Deliveries(loop)}
            return self._deliveries[loop]

    def flush(self) -> None:
        """Called on the thread that puts outputs, at the end of its turn."""
        for deliveries in self._deliveries.values():
            deliveries.flush()
