"""Asked to stop, a run ends its step first: half a step cannot be resumed. What can be begun anew stops at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_HEARD = "asked to stop: after this step, which is saved; asked once more, at once, with what was saved last"


@dataclass(slots=True)
class Stop:
    asked: bool = False
    waits: bool = True  # what is under way is ended first

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Inside, the first Ctrl-C is raised."""
        self.waits = False
        try:
            if self.asked:
                raise KeyboardInterrupt
            yield
        finally:
            self.waits = True


@contextmanager
def stop_asked(say: Callable[[str], None], *, at_once: bool = False) -> Iterator[Stop]:
    """Inside, the first Ctrl-C or kill is noted and not raised, and it is said so; the second one is raised.

    at_once: nothing is noted. Several ranks are not at the same step when they hear of it, so none of them could save.
    """
    stop = Stop()
    if at_once or threading.current_thread() is not threading.main_thread():
        yield stop  # only the main thread hears signals
        return

    def hear(number: int, frame: Any) -> None:
        again, stop.asked = stop.asked, True
        if again or not stop.waits:
            raise KeyboardInterrupt
        threading.Thread(target=say, args=(_HEARD,), daemon=True).start()  # here, a print may be under way

    before = {number: signal.signal(number, hear) for number in _SIGNALS}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
