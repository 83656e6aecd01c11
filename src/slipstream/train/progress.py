"""What a run is at while nothing else is heard of it: what is being loaded, written or measured, and how far it is."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from slipstream.models.headers import weights_bytes
from slipstream.models.paths import Progress

_EVERY_S = 10.0


@contextmanager
def under_way(say: Progress, what: str) -> Iterator[None]:
    """Say what is being done, and when it is done how long it took."""
    begun = time.perf_counter()
    say(f"{what} ...")
    yield
    say(f"{what}: {time.perf_counter() - begun:.1f} s")


@contextmanager
def watched(say: Progress, tell: Callable[[], str], every_s: float = _EVERY_S) -> Iterator[None]:
    """Say every so often how far something is that says nothing itself. tell: in words; asked on another thread."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(every_s):
            say(tell())

    thread = threading.Thread(target=watch, name="slipstream-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def sized(model: Path) -> str:
    """The name of a model, and how much there is to read."""
    return f"{model.name} ({weights_bytes(model) / 1e9:.2f} GB)"


class Clock:
    """How far the writing of texts is, how fast, and how long it will take."""

    def __init__(self, what: str, texts: int, say: Progress) -> None:
        self._what, self._texts, self._say = what, texts, say
        self._begun = self._said = time.perf_counter()
        self._done = self._tokens = 0

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._begun

    @property
    def rate(self) -> float:
        return self._tokens / max(self.seconds, 1e-9)

    def tick(self, tokens: int) -> None:
        """One more is written, of so many tokens."""
        self._done += 1
        self._tokens += tokens
        now = time.perf_counter()
        if now - self._said >= _EVERY_S or self._done == self._texts:
            self._said = now
            left = self.seconds / self._done * (self._texts - self._done)
            self._say(
                f"{self._what}: {self._done:,} of {self._texts:,}, {self._tokens:,} tokens, {self.rate:,.0f} tok/s, "
                f"{left:.0f} s left"
            )
