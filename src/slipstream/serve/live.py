"""The state of the engine right now, for the page: as JSON, or as a stream of server-sent events."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cached_property

from slipstream.core.outputs import DrafterStats, Snapshot, SpeculationStats
from slipstream.serve.errors import ApiError
from slipstream.serve.telemetry import Record

PACES_S = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0)
"""Other paces become the next slower one: the engine is asked once for each pace."""
MAX_WATCHERS = 256


@dataclass(frozen=True)
class Live:
    """The engine's counts, and their rates since the view before (in the first view, since the start)."""

    time: float
    uptime_s: float
    seconds: float  # over which the rates are taken
    tokens_per_s: float
    rounds_per_s: float
    accepted_per_s: float
    inside: int  # admitted answers that have not ended
    health: str
    engine: Snapshot

    @cached_property
    def json(self) -> str:
        return json.dumps(asdict(self), ensure_ascii=False)


@dataclass(slots=True)
class Own:
    """The counts of one tenant's requests. Running answers add their tokens so far, and the rest when they end."""

    finished: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    stats: SpeculationStats = field(default_factory=SpeculationStats)

    def note(self, record: Record, generated: int) -> None:
        """Add a request that ended. generated: its tokens, also those of answers that a disconnect cut off."""
        self.prompt_tokens += record.prompt_tokens
        self.cached_tokens += record.cached_tokens
        self.generated_tokens += generated
        for answer in record.answers:
            self.finished[str(answer.finish_reason)] += 1
            self.stats.add(answer.speculation)
            self.stats.plan = answer.speculation.plan or self.stats.plan

    def snapshot(self, running: int, waiting: int, running_tokens: int, names: Iterable[str]) -> Snapshot:
        """running_tokens: tokens of running answers; names: the loaded drafters.

        Values that belong to all tenants together, such as pages, are 0 or empty.
        """
        stats, drafters = self.stats, self.stats.by_drafter.values()
        drafts, declined = sum([one.drafts for one in drafters]), sum([one.declined for one in drafters])
        return Snapshot(
            running=running,
            waiting=waiting,
            pages=0,
            pages_used=0,
            pages_cached=0,
            prefix_queries=self.prompt_tokens,
            prefix_hits=self.cached_tokens,
            preemptions=0,
            refused=0,
            finished=dict(self.finished),
            prompt_tokens=self.prompt_tokens,
            generated_tokens=self.generated_tokens + running_tokens,
            rounds=stats.rounds,
            turns=stats.rounds,
            draft_s=stats.draft_s,
            verify_s=stats.verify_s,
            host_s=stats.host_s,
            drafts=drafts,
            draft_tokens=stats.drafted,
            accepted_tokens=stats.accepted,
            accepted_by_position=(),
            drafters={name: stats.by_drafter.get(name) or DrafterStats() for name in names},
            decisions={"drafted": drafts, "declined": declined},
            plan=stats.plan,
        )


@dataclass(frozen=True, slots=True)
class Seen:
    """The counts of an earlier view. at: by time.perf_counter."""

    at: float
    tokens: int = 0
    rounds: int = 0
    accepted: int = 0


class LiveView:
    """look: reads the engine's counts; inside: the admitted answers; health: in one word; ended: set when the server
    drains; may_look: the watcher's key is still valid; begun: when the server started."""

    def __init__(
        self,
        look: Callable[[], Snapshot],
        inside: Callable[[], int],
        health: Callable[[], str],
        ended: asyncio.Event | None = None,
        may_look: Callable[[], bool] = lambda: True,
        begun: Seen | None = None,
    ) -> None:
        self._look = look
        self._inside = inside
        self._health = health
        self._ended = ended or asyncio.Event()
        self._may_look = may_look
        self._beats: dict[float, _Beat] = {}  # by pace
        self.begun = begun or Seen(time.perf_counter())

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

    async def pause(self, seconds: float) -> None:
        """Sleep, but not beyond the beginning of the drain."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._ended.wait()

    def watch(self, every_s: float) -> AsyncGenerator[str, None]:
        """`events` at one of the fixed paces. Raises 429 beyond MAX_WATCHERS."""
        watching = sum(beat.listeners for beat in self._beats.values())
        if watching >= MAX_WATCHERS:
            wait = {"Retry-After": "10"}
            raise ApiError(429, f"{watching} watch already; try again later", code="rate_limit_exceeded", headers=wait)
        return self.events(next(pace for pace in PACES_S if pace >= every_s))

    async def events(self, every_s: float) -> AsyncGenerator[str, None]:
        """A view now and one every `every_s` seconds, as server-sent events, until the server drains."""
        beat = self._beats.get(every_s) or _Beat(self, every_s)
        self._beats[every_s] = beat
        beat.listeners += 1
        try:
            yield f"data: {beat.last.json}\n\n"
            while not self._ended.is_set() and self._may_look():
                yield f"data: {(await beat.next()).json}\n\n"
        finally:
            beat.listeners -= 1
            if not beat.listeners:
                del self._beats[every_s]


class _Beat:
    """Views at one pace, shared by all its listeners."""

    def __init__(self, view: LiveView, every_s: float) -> None:
        self.listeners = 0
        self.last, self._seen = view.view(view.begun)
        self._view = view
        self._every_s = every_s
        self._coming: asyncio.Task[Live] | None = None

    async def next(self) -> Live:
        """The next view. The first listener starts the clock; a listener that leaves stops nothing."""
        if self._coming is None or self._coming.done():
            self._coming = asyncio.create_task(self._look())
        return await asyncio.shield(self._coming)

    async def _look(self) -> Live:
        await self._view.pause(self._every_s)
        self.last, self._seen = self._view.view(self._seen)
        return self.last
