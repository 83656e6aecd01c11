"""What is going on right now, for pages that show it: a typed view of the engine, as JSON or as a stream of events."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, dataclass

from slipstream.core.snapshot import Snapshot


@dataclass(frozen=True, slots=True)
class Live:
    """The engine's counts, and how fast they grew since the view before (since the start, in the first)."""

    time: float
    uptime_s: float
    seconds: float  # over which the rates below are taken
    tokens_per_s: float
    rounds_per_s: float
    accepted_per_s: float
    inside: int  # answers that the server has taken in and not finished
    health: str
    engine: Snapshot

    def json(self) -> str:
        return json.dumps(asdict(self), ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class Seen:
    """An earlier look at the engine."""

    at: float  # by time.perf_counter
    tokens: int = 0
    rounds: int = 0
    accepted: int = 0


class LiveView:
    """look: the engine's counts; inside: answers taken in; health: in a word."""

    def __init__(self, look: Callable[[], Snapshot], inside: Callable[[], int], health: Callable[[], str]) -> None:
        self._look = look
        self._inside = inside
        self._health = health
        self.begun = Seen(time.perf_counter())

    def view(self, before: Seen) -> tuple[Live, Seen]:
        engine, now = self._look(), time.perf_counter()
        seconds = max(now - before.at, 1e-9)
        live = Live(
            time=time.time(),
            uptime_s=now - self.begun.at,
            seconds=seconds,
            tokens_per_s=(engine.generated_tokens - before.tokens) / seconds,
            rounds_per_s=(engine.rounds - before.rounds) / seconds,
            accepted_per_s=(engine.accepted_tokens - before.accepted) / seconds,
            inside=self._inside(),
            health=self._health(),
            engine=engine,
        )
        return live, Seen(now, engine.generated_tokens, engine.rounds, engine.accepted_tokens)

    async def events(self, every_s: float) -> AsyncIterator[str]:
        """A view now, and one every so many seconds, as server-sent events."""
        live, seen = self.view(self.begun)
        while True:
            yield f"data: {live.json()}\n\n"
            await asyncio.sleep(every_s)
            live, seen = self.view(seen)
