"""How many threads a compiled pass gets: all of torch's, or one alone where other programs hold the cores.

The threads of a pass wait for each other some two hundred times. Where another program holds one of the cores, each
wait takes as long as the system lets that program run, and a pass a hundred times longer than it should; one thread
alone hardly notices. The results have the same bits either way, so only the time decides.
"""

from __future__ import annotations

import torch

_WORSE = 1.2
"""A crew must be this much slower than one thread before it is sent home: times vary."""
_FIRST_REST, _LAST_REST = 16, 256
"""Passes by one thread before all are tried again: more and more while that fails."""


class Crew:
    """Ask `size` before a pass, and `observe` what it took."""

    def __init__(self) -> None:
        self._alone: float | None = None  # seconds a row of a pass by one thread, lately
        self._suspect: tuple[int, float] | None = None  # rows and seconds of a pass that all of them did too slowly
        self._next_rest = _FIRST_REST
        self._rest = 0

    def size(self) -> int:
        """Threads for the next pass."""
        return 1 if self._rest or self._suspect is not None else torch.get_num_threads()

    def observe(self, size: int, rows: int, seconds: float) -> None:
        """A pass over so many rows took so long with so many threads."""
        if torch.get_num_threads() == 1:
            return
        if size > 1:
            if rows == 1 and self._alone is None:  # once, to have something to compare with
                self._suspect = (rows, seconds)
            elif self._alone is not None and seconds > _WORSE * self._alone * rows:
                self._suspect = (rows, seconds)  # it may be the context that grew: one thread shows
            else:
                self._next_rest = _FIRST_REST
            return
        self._rest = max(0, self._rest - 1)
        self._alone = seconds / rows
        if self._suspect is not None:
            slow_rows, slow_seconds = self._suspect
            self._suspect = None
            # more rows take one thread longer, but never more than so many times longer
            if slow_seconds > _WORSE * seconds * max(1.0, slow_rows / rows):
                self._rest = self._next_rest
                self._next_rest = min(2 * self._next_rest, _LAST_REST)
