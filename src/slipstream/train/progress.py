"""What a run is at while nothing else is heard of it: what is being loaded, written or measured, and how far it is."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from types import TracebackType

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
    """Say every so often how far something is that says nothing itself.

    tell: in words, asked on another thread; "": there is nothing to say.
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
    """The name of a model, and how much there is to read."""
    return f"{model.name} ({weights_bytes(model) / 1e9:.2f} GB)"


class Clock(AbstractContextManager["Clock"]):
    """How far the writing of texts is, how fast, and how long it will take: said every so often while it is open.

    longest: most tokens of a text. written: tokens of those that have not ended yet. On a CPU all of the first ones can
    be written for minutes before one of them ends.
    """

    def __init__(self, what: str, texts: int, longest: int, say: Progress, written: Callable[[], int]) -> None:
        self._what, self._texts, self._longest, self._say, self._written = what, texts, longest, say, written
        self._begun = time.perf_counter()
        self._done = self._tokens = 0
        self._open = ExitStack()

    def __enter__(self) -> Clock:
        self._open.enter_context(watched(self._say, self.told))
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
        """One more is written, of so many tokens."""
        self._done += 1
        self._tokens += tokens
        if self._done == self._texts:
            self._say(self.told())

    def told(self) -> str:
        done, written, seconds = self._done, self._written(), max(self.seconds, 1e-9)
        tokens, missing = self._tokens + written, self._texts - done
        line = f"{self._what}: {done:,} of {self._texts:,}"
        if not tokens:
            return f"{line}, reading what they follow"
        left = max(0, missing * self._longest - written) * seconds / tokens  # at most: those who begin together end so
        if done:
            left = min(left, missing * seconds / done)
        return f"{line}, {tokens:,} tokens, {tokens / seconds:,.0f} tok/s, at most {left:.0f} s left"
