"""News on their way out of the engine's process: one message a turn, written by the engine's own thread.

To pickle and write takes it less time than a thread beside it would take away by wanting the interpreter. Where the
other process does not read, the engine waits: nothing piles up here.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

from slipstream.core.outputs import RequestOutput
from slipstream.engine.pacing import CROWD, Pacing
from slipstream.engine.remote.messages import Beat, News, line_of

SHARE = 0.02
"""Of all time, that telling may take: it is the engine's own. More is too long for every round."""


class Outbox(Pacing):
    """On the engine's thread. send: writes a message; look: how the engine is doing; clock, cpu: as in `Deliveries`."""

    def __init__(
        self,
        send: Callable[[News], None],
        look: Callable[[], Beat],
        clock: Callable[[], float] = time.perf_counter,
        cpu: Callable[[], float] = time.thread_time,
    ) -> None:
        super().__init__(SHARE, SHARE, clock)
        self._send, self._look, self._cpu = send, look, cpu
        self._waiting: list[tuple[int, RequestOutput]] = []

    def put(self, number: int, output: RequestOutput) -> None:
        self._waiting.append((number, output))

    def flush(self) -> None:
        """The turn is over. What telling costs is counted with the making of outputs that had to wait."""
        began = self._cpu()
        self.end_turn()
        if not self._waiting:
            return
        told, self._waiting = self._waiting, []
        ends = any(output.finished for _, output in told)
        lines = [line_of(number, output) for number, output in told]
        with suppress(OSError):  # the other process has ended: whoever reads finds out, and ends this one
            self._send(News(lines, self._look() if ends else None))
        if len(told) >= CROWD and not ends:
            self.note_cost(self._cpu() - began, len(told))
