"""Our engine in the cells: one engine for all settings, and a closed loop of requests that is listened to.

Whether drafts are planned is a matter of the engine's planner, which is another one for fixed settings; it is put in
between two measurements, when nothing runs. The planner that plans is the engine's own, and hears of its own rounds.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count

from cells_work import FEW, Beat, Cell, Window, tokens_of, window
from curve_ours import Mode
from slipstream import LLM, SamplingParams, SpeculationParams
from slipstream.core.verdict import Verdict
from slipstream.drafters.suffix import SuffixDrafter
from slipstream.drafters.suffix.store import SuffixStore
from slipstream.engine.engine import Engine
from slipstream.engine.listening import RoundTimes
from slipstream.engine.odds import made_for
from slipstream.engine.state import Answer
from slipstream.models.graphs import recorded
from slipstream.plan.planner import Planner
from work import PEER_DEPTH

AUTO, PLAIN = "auto", "plain"
SETTINGS = (
    Mode(PLAIN),
    Mode(AUTO),  # what it needs is said when the engine is there
    Mode("eagle3", ("eagle",)),
    Mode("eagle3-15", ("eagle",), 15),
    Mode("eagle3-3", ("eagle",), 3),
    Mode("suffix", ("suffix",)),
    Mode("eagle3+suffix", ("suffix", "eagle")),
    Mode("draft", ("model",), PEER_DEPTH),
    Mode("draft-2", ("model",), 2),
    Mode("medusa", ("medusa",)),
    Mode("ngram", ("ngram",)),
)
Ask = Callable[[int], tuple[list[int], SamplingParams]]
"""The prompt and the parameters of the first request, the second, …"""
_TICK_S = 0.002
_PATIENCE_S = 180.0


class Meter:
    """Listens to an engine: a beat for every round."""

    def __init__(self) -> None:
        self.beats: list[Beat] = []

    def offered(self, offer: object) -> None: ...

    def drew(self, drafter: str, nodes: int, seconds: float) -> None: ...

    def round(
        self, answers: Sequence[Answer], verdicts: Sequence[Verdict], kept: Sequence[int], times: RoundTimes
    ) -> None:
        drafted = sum(verdict.drafted for verdict in verdicts)
        now, cpu_s = time.perf_counter(), time.process_time()
        made = recorded.graphs + recorded.kernels
        parts = times.host, times.draft, times.verify
        who = tuple(sorted({name for verdict in verdicts if verdict.drafted for name in verdict.authors.names}))
        counts = len(answers), sum(kept), drafted, times.read_rows, made
        self.beats.append(Beat(now, *counts, recorded.seconds, parts, cpu_s, times.hoped, who))


class Crowd:
    """Requests in a closed loop: as many as were asked for run, and where one ends the next begins."""

    def __init__(self, llm: LLM, ask: Ask, meter: Meter) -> None:
        self.meter = meter
        self._llm, self._ask, self._numbers = llm, ask, count()
        self._tasks: list[asyncio.Task[None]] = []

    def grow(self, requests: int) -> None:
        self._tasks += [asyncio.create_task(self._place()) for _ in range(requests - len(self._tasks))]

    async def shrink(self, requests: int) -> None:
        """End those that came last."""
        gone, self._tasks = self._tasks[requests:], self._tasks[:requests]
        for task in gone:
            task.cancel()
        await asyncio.gather(*gone, return_exceptions=True)

    async def until(self, done: Callable[[list[Beat]], bool], patience_s: float = _PATIENCE_S) -> None:
        """Wait until the rounds so far say so. Raises where a request failed, or it takes too long."""
        begun = time.monotonic()
        while not done(self.meter.beats):
            for task in self._tasks:
                if task.done():
                    task.result()
            if time.monotonic() - begun > patience_s:
                raise TimeoutError(f"waited {patience_s:g} s, and heard of {len(self.meter.beats)} rounds")
            await asyncio.sleep(_TICK_S)

    async def _place(self) -> None:
        while True:
            prompt, params = self._ask(next(self._numbers))
            stream = self._llm.open_stream({"prompt_token_ids": prompt}, params, streaming=False)
            try:
                last = None
                while arrived := await stream.take():
                    last = arrived[-1]
            finally:
                stream.close()
            if last is not None and last.outputs[0].error:
                raise RuntimeError(f"a request failed: {last.outputs[0].error}")


@dataclass(slots=True)
class Bench:
    """An engine that is measured. One tenant for all, so that prompts are read once; and no answer is remembered."""

    llm: LLM
    auto: str  # by what a request asks for everything that is planned
    planner: Planner = field(init=False)

    def __post_init__(self) -> None:
        self.planner = self.llm.engine.drafting.planner
        self.llm.between_rounds(forget_answers)

    @contextmanager
    def planned(self, planner: Planner | None) -> Iterator[None]:
        """With this planner in the engine's place; None: always draft as much as was asked for."""
        self._put(planner or Planner())
        try:
            yield
        finally:
            self._put(self.planner)

    def run(self, ask: Ask, play: Callable[[Crowd], Awaitable[None]]) -> list[Beat]:
        """The rounds of what is played, from nobody to nobody."""
        meter = Meter()
        self.llm.between_rounds(lambda engine: engine.listen(meter))

        async def whole() -> None:
            crowd = Crowd(self.llm, ask, meter)
            try:
                await play(crowd)
            finally:
                await crowd.shrink(0)

        try:
            asyncio.run(whole())
        finally:
            self.llm.between_rounds(lambda engine: engine.listen(None))
            while self.llm.between_rounds(lambda engine: engine.busy):
                time.sleep(_TICK_S)  # what was dropped ends within a round
        return meter.beats

    def read(self, prompts: Sequence[list[int]]) -> None:
        """Have the prompts in the cache, of the target and of all drafters that keep one: or who comes first pays."""
        keeping = [name for name, drafter in self.llm.engine.drafting.drafters.items() if drafter.needs.own_cache]
        params = self.params(Mode("all", tuple(keeping)), 0.0, 0, 1)
        with self.planned(None):  # a planner may leave out who has not guessed for long
            outputs = self.llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
        for output in outputs:
            if output.outputs[0].error:
                raise RuntimeError(f"a prompt could not be read: {output.outputs[0].error}")

    def measure(self, mode: Mode, cell: Cell, prompts: Sequence[list[int]], max_tokens: int, seconds: float) -> Window:
        """One setting in one cell, for so long."""

        def ask(number: int) -> tuple[list[int], SamplingParams]:
            seed, most = number % len(prompts), tokens_of(number, cell.at_once, max_tokens)
            return prompts[seed], self.params(mode, cell.temperature, seed, most)

        with self.planned(self.planner if mode.name == AUTO else None):
            return self.window(ask, cell.at_once, seconds)

    def window(self, ask: Ask, at_once: int, seconds: float) -> Window:
        """So many of these requests at once, for so long from when all of them decode."""

        async def play(crowd: Crowd) -> None:
            crowd.grow(at_once)
            await crowd.until(lambda beats: any(beat.requests >= at_once for beat in beats[-1:]))
            first = len(crowd.meter.beats) - 1
            await crowd.until(lambda beats: len(beats) > first + FEW and _lasted(beats, first) >= seconds)

        return window(self.run(ask, play), at_once)

    def params(self, mode: Mode, temperature: float, seed: int, max_tokens: int) -> SamplingParams:
        drafter = self.auto if mode.name == AUTO else "+".join(mode.needs)
        speculation = SpeculationParams(
            enabled=bool(drafter), drafter=drafter or None, draft_tokens=mode.draft_tokens, tenant="cells"
        )
        return SamplingParams(temperature=temperature, seed=seed, max_tokens=max_tokens, speculation=speculation)

    def distinct(self, modes: Sequence[Mode], at_once: int) -> dict[str, str]:
        """By setting, the first that drafts the same with so many requests: a pass has room for so many rows only."""
        room = self.llm.engine.config.draft_rows // at_once - 1
        drafters = self.llm.engine.drafting.drafters
        first: dict[tuple[tuple[str, ...], int], str] = {}
        found: dict[str, str] = {}
        for mode in modes:
            usual = sum(made_for(drafters[name]) for name in mode.needs)
            nodes = min(room, usual if mode.draft_tokens is None else mode.draft_tokens)
            is_fixed = mode.needs and mode.name != AUTO
            found[mode.name] = first.setdefault((mode.needs, nodes), mode.name) if is_fixed else mode.name
        return found

    def _put(self, planner: Planner) -> None:
        def put(engine: Engine) -> None:
            if getattr(engine, "rounds", None) is not None and planner is not self.planner:
                planner.pad_passes()
            engine.drafting.planner = planner

        self.llm.between_rounds(put)


def _lasted(beats: Sequence[Beat], first: int) -> float:
    """Seconds since that round, without those in which graphs were recorded."""
    begin, end = beats[first], beats[-1]
    return end.at - begin.at - (end.recording_s - begin.recording_s)


def forget_answers(engine: Engine) -> None:
    """Prompts come again and again, with the same answers: who remembers those would know them."""
    for drafter in engine.drafting.drafters.values():
        if isinstance(drafter, SuffixDrafter):
            drafter.store = SuffixStore(0)
