"""Events in the device's queue: how long rounds took, by its own clock."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from slipstream.engine.tickets import Ticket


class Marks:
    """The events of one engine, which are used again and again. has_clock: is there a device that has them?"""

    def __init__(self, *, has_clock: bool) -> None:
        self.has_clock = has_clock
        self._free: list[Any] = []
        self._ended: Any = None  # behind the round that was closed last; None: the device had nothing to do since

    def put(self) -> Any:
        """An event behind all that is queued; None without a clock."""
        if not self.has_clock:
            return None
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def close(self, ticket: Ticket) -> float:
        """Seconds from the end of the round before it, or where that was long ago from its beginning, to its end.

        By when the host hears of rounds that could not be told: it may be at a later one still, and what it does there
        (prompts, a graph to record) has nothing to do with this one. Asked once, of each in turn: its events are free.
        """
        before, end = ticket.begun if self._ended is None else self._ended, ticket.ended
        lasted_s = float(before.elapsed_time(end)) / 1e3
        self.rest()
        self._ended = end
        self.give_back([mark for mark in ticket.free_marks() if mark is not end])
        return lasted_s

    def rest(self) -> None:
        """The device has nothing to do: what comes next begins by itself."""
        if self._ended is not None:
            self._free.append(self._ended)
            self._ended = None

    def give_back(self, marks: Iterable[Any]) -> None:
        """Nobody asks these any more."""
        self._free += marks
