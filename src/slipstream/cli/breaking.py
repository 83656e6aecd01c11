"""Ctrl-C in the middle of what takes long: what was measured by then shall not be lost."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from slipstream.cli.show import note


class BreakingOff:
    """Ctrl-C ends what is done within, and nothing more, if there is something to tell already. The next one ends all.

    May be entered again for what comes behind it.
    """

    def __init__(self, has_something: Callable[[], object]) -> None:
        self.happened = False
        self._has_something = has_something

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> bool:
        if not isinstance(error, KeyboardInterrupt) or self.happened or not self._has_something():
            return False
        self.happened = True
        note("stopping: what was measured is told first (Ctrl-C again: end at once)")
        return True
