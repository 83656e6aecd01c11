"""Progress messages of long work, and stopping a run at the end of its step."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from slipstream.models.headers import weights_bytes
from slipstream.models.paths import Progress

_EVERY_S = 10.0


@contextmanager
def under_way(say: Progress, what: str) -> Iterator[None]:
    """Report the begin of a step, and at its end its duration."""
    begun = time.perf_counter()
    say(f"{what} ...")
    yield
    say(f"{what}: {time.perf_counter() - begun:.1f} s")


@contextmanager
def watched(say: Progress, tell: Callable[[], str], every_s: float = _EVERY_S) -> Iterator[None]:
    """Report the progress of silent work every `every_s` seconds.

    tell: returns the line to say, or "" for none. It runs on another thread.
    """
    over = threading.Event()

    def watch() -> None:
        while not over.wait(every_s):
            if line := tell():
                say(line)

    thread = threading.Thread(target=watch, name="slipstream-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def sized(model: Path) -> str:
    """A model's name and the bytes to read."""
    return f"{model.name} ({weights_bytes(model) / 1e9:.2f} GB)"


class Clock(AbstractContextManager["Clock"]):
    """Reports how many texts are written, how fast, and the time left, while it is open.

    longest: the most tokens of a text. written: returns the tokens of unfinished texts; on a CPU the first texts can
    take minutes before one of them ends.
    """

    def __init__(self, what: str, texts: int, longest: int, say: Progress, written: Callable[[], int]) -> None:
        self._what, self._texts, self._longest, self._say, self._written = what, texts, longest, say, written
        self._begun = time.perf_counter()
        self._done = self._tokens = 0
        self._open = ExitStack()

    def __enter__(self) -> Clock:
        self._open.enter_context(watched(self._say, self.line))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._begun

    @property
    def rate(self) -> float:
        return self._tokens / max(self.seconds, 1e-9)

    def tick(self, tokens: int) -> None:
        """Count one finished text of `tokens` tokens."""
        self._done += 1
        self._tokens += tokens
        if self._done == self._texts:
            self._say(self.line())

    def line(self) -> str:
        done, written, seconds = self._done, self._written(), max(self.seconds, 1e-9)
        tokens, missing = self._tokens + written, self._texts - done
        line = f"{self._what}: {done:,} of {self._texts:,}"
        if not tokens:
            return f"{line}, reading prompts"
        left = max(0, missing * self._longest - written) * seconds / tokens  # an upper bound
        if done:
            left = min(left, missing * seconds / done)
        return f"{line}, {tokens:,} tokens, {tokens / seconds:,.0f} tok/s, at most {left:.0f} s left"


_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_NOTICE = "stopping after this step, which is saved; a second Ctrl-C stops at once, with the last checkpoint"


@dataclass(slots=True)
class Stop:
    """Whether a stop was asked for."""

    asked: bool = False
    waits: bool = True  # finish the step first

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Within this block the first Ctrl-C is raised."""
        self.waits = False
        try:
            if self.asked:
                raise KeyboardInterrupt
            yield
        finally:
            self.waits = True


@contextmanager
def stop_asked(say: Callable[[str], None], *, at_once: bool = False) -> Iterator[Stop]:
    """Within this block the first Ctrl-C or kill is noted and announced; the second is raised.

    at_once: raise the first one too. Several ranks hear a signal at different steps, so none of them could save.
    """
    stop = Stop()
    if at_once or threading.current_thread() is not threading.main_thread():
        yield stop  # only the main thread receives signals
        return

    def on_signal(number: int, frame: Any) -> None:
        again, stop.asked = stop.asked, True
        if again or not stop.waits:
            raise KeyboardInterrupt
        threading.Thread(target=say, args=(_NOTICE,), daemon=True).start()  # a signal may interrupt a print

    before = {number: signal.signal(number, on_signal) for number in _SIGNALS}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
