"""Our engine in the cells: one engine for all settings, a closed loop of requests, adversaries and switches.

Fixed settings have a planner of their own, put in between two measurements; `auto` runs with the engine's planner,
which hears of its own rounds only.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import fcntl
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import count
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar

import cells_peers
from cells_work import (
    FEW,
    WARM_S,
    Beat,
    Cell,
    Window,
    by_task,
    keep_rounds,
    prompts_of,
    side_by_side,
    tokens_of,
    window,
)
from curve_ours import Mode, Models, peer_draft
from kernel_clock import free
from results import Report
from slipstream import LLM, SamplingParams, SpeculationParams
from slipstream.core.draft import Tree
from slipstream.core.interpreter import responsive
from slipstream.core.verdict import Verdict
from slipstream.drafters import merged_name, parse_merged
from slipstream.drafters.base import Drafter, DraftRequest, HostDrafter
from slipstream.drafters.suffix import SuffixDrafter
from slipstream.drafters.suffix.store import SuffixStore
from slipstream.engine.caps import made_for
from slipstream.engine.flight import StepTimes
from slipstream.engine.state import Answer
from slipstream.engine.step import Engine
from slipstream.models.graphs import recorded
from slipstream.models.load import load_config
from slipstream.plan.planner import Planner
from work import PEER_DEPTH

AUTO, PLAIN = "auto", "plain"
SETTINGS = (
    Mode(PLAIN),
    Mode(AUTO),  # its drafters depend on the engine
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
"""From a request's number to its prompt and parameters."""
_TICK_S = 0.002
_PATIENCE_S = 180.0
_TURN_S = 0.02
"""Pause after a turn, in which a process that waits begins its own."""


class Meter:
    """Listens to an engine and keeps a beat for every round."""

    def __init__(self) -> None:
        self.beats: list[Beat] = []

    def step(
        self, answers: Sequence[Answer], verdicts: Sequence[Verdict], kept: Sequence[int], times: StepTimes
    ) -> None:
        drafted = sum(verdict.drafted for verdict in verdicts)
        now, cpu_s = time.perf_counter(), time.process_time()
        made = recorded.graphs + recorded.kernels
        parts = times.host, times.draft, times.verify
        who = tuple(sorted({name for verdict in verdicts if verdict.drafted for name in verdict.authors.names}))
        counts = len(answers), sum(kept), drafted, times.read_rows, made
        self.beats.append(Beat(now, *counts, recorded.seconds, parts, cpu_s, times.expected_gain, who))


class Crowd:
    """A closed loop of requests: when one ends, the next begins."""

    def __init__(self, llm: LLM, ask: Ask, meter: Meter) -> None:
        self.meter = meter
        self._llm, self._ask, self._numbers = llm, ask, count()
        self._tasks: list[asyncio.Task[None]] = []

    def grow(self, requests: int) -> None:
        self._tasks += [asyncio.create_task(self._place()) for _ in range(requests - len(self._tasks))]

    async def shrink(self, requests: int) -> None:
        """End the requests that came last."""
        gone, self._tasks = self._tasks[requests:], self._tasks[:requests]
        for task in gone:
            task.cancel()
        await asyncio.gather(*gone, return_exceptions=True)

    async def until(self, done: Callable[[list[Beat]], bool], patience_s: float = _PATIENCE_S) -> None:
        """Wait until `done` holds for the rounds so far. Raises if a request failed or after `patience_s`."""
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


@contextmanager
def turn(file: Path | None) -> Iterator[None]:
    """While no other process with the same file measures; None: at once."""
    if file is None:
        yield
        return
    with file.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    time.sleep(_TURN_S)


@dataclass(slots=True)
class Bench:
    """An engine under measurement. All requests share a tenant, so prompts are read once, and no answer is
    remembered."""

    llm: LLM
    auto: str  # the drafter that requests name under `auto`
    turns: Path | None = None  # see `turn`
    planner: Planner = field(init=False)

    def __post_init__(self) -> None:
        self.planner = self.llm.engine.drafting.planner
        self.llm.between_rounds(forget_answers)

    @contextmanager
    def planned(self, planner: Planner | None) -> Iterator[None]:
        """Run with this planner; None: always draft the most allowed nodes."""
        self._put(planner or Planner())
        try:
            yield
        finally:
            self._put(self.planner)

    def run(self, ask: Ask, play: Callable[[Crowd], Awaitable[None]]) -> list[Beat]:
        """The rounds of `play`, from an idle engine to an idle engine."""
        meter = Meter()
        self.llm.between_rounds(lambda engine: engine.listen(meter))

        async def whole() -> None:
            crowd = Crowd(self.llm, ask, meter)
            try:
                await play(crowd)
            finally:
                await crowd.shrink(0)

        with turn(self.turns):
            try:
                asyncio.run(whole())
            finally:
                self.llm.between_rounds(lambda engine: engine.listen(None))
                while self.llm.between_rounds(lambda engine: engine.busy):
                    time.sleep(_TICK_S)  # dropped requests end within a round
        return meter.beats

    def read(self, prompts: Sequence[list[int]]) -> None:
        """Put the prompts into the cache of the target and of all drafters, so that no setting pays for that."""
        keeping = [name for name, drafter in self.llm.engine.drafting.drafters.items() if drafter.needs.own_cache]
        params = self.params(Mode("all", tuple(keeping)), 0.0, 0, 1)
        with turn(self.turns), self.planned(None):  # a planner may leave out drafters that have not guessed for long
            outputs = self.llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
        for output in outputs:
            if output.outputs[0].error:
                raise RuntimeError(f"a prompt could not be read: {output.outputs[0].error}")

    def measure(self, mode: Mode, cell: Cell, prompts: Sequence[list[int]], max_tokens: int, seconds: float) -> Window:
        """Measure one setting in one cell."""

        def ask(number: int) -> tuple[list[int], SamplingParams]:
            seed, most = number % len(prompts), tokens_of(number, cell.at_once, max_tokens)
            return prompts[seed], self.params(mode, cell.temperature, seed, most)

        with self.planned(self.planner if mode.name == AUTO else None):
            return self.window(ask, cell.at_once, seconds)

    def window(self, ask: Ask, at_once: int, seconds: float) -> Window:
        """Measure these requests, from the first round in which all of them decode."""

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
        """By setting: the first setting that drafts the same at this batch size, since a pass has a limited number of
        rows."""
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
            if engine.backend.depth and planner is not self.planner:
                planner.pad_passes()
            engine.drafting.planner = planner

        self.llm.between_rounds(put)


def _lasted(beats: Sequence[Beat], first: int) -> float:
    """Seconds since that round, without the time of recording graphs."""
    begin, end = beats[first], beats[-1]
    return end.at - begin.at - (end.recording_s - begin.recording_s)


def forget_answers(engine: Engine) -> None:
    """Disable the suffix store: prompts repeat with the same answers, which it would know."""
    for drafter in engine.drafting.drafters.values():
        if isinstance(drafter, SuffixDrafter):
            drafter.store = SuffixStore(0)


LONG = 6
"""Guesses of a draft."""
SURE = 0.95
"""The stated chance of each guess, right or not."""

Answers = Mapping[tuple[int, ...], Sequence[int]]
"""By prompt: the answer of plain decoding."""


class Knowing(HostDrafter):
    """Guesses the answer or something else, by the number of the request's round."""

    bounded: ClassVar[bool] = True
    default_draft_tokens: ClassVar[int] = LONG

    def __init__(self, name: str, right: Callable[[int], bool]) -> None:
        self.name = name  # type: ignore[misc]  # every instance is a drafter of its own
        self.right = right
        self.answers: Answers = {}
        self._rounds: dict[str, int] = {}  # by request, so far
        self._sizes: dict[str, int] = {}  # of its last draft

    def start(self, request: DraftRequest) -> None:
        self._rounds[request.id] = 0

    def propose(self, requests: Sequence[DraftRequest], budget: Sequence[int]) -> Sequence[Tree]:
        return [self._one(request, most) for request, most in zip(requests, budget, strict=True)]

    def promise(self, request_id: str) -> Sequence[float] | None:
        return [SURE ** (depth + 1) for depth in range(self._sizes.get(request_id, 0))]

    def observe(self, verdicts: Sequence[Verdict]) -> None:
        for verdict in verdicts:
            self._rounds[verdict.request_id] = self._rounds.get(verdict.request_id, 0) + 1

    def stop(self, request_id: str) -> None:
        self._rounds.pop(request_id, None)
        self._sizes.pop(request_id, None)

    def _one(self, request: DraftRequest, most: int) -> Tree:
        answer = self.answers.get(tuple(request.tokens[: request.prompt_length]), ())
        coming = answer[len(request.tokens) - request.prompt_length :][:most]
        if not self.right(self._rounds.get(request.id, 0)):
            coming = [token - 1 if token else 1 for token in coming]  # some other token of the vocabulary
        self._sizes[request.id] = len(coming)
        return Tree.chain(coming)


class Slow(Knowing):
    """Always right, and takes `seconds` for each guess."""

    costly: ClassVar[bool] = True

    def __init__(self, name: str) -> None:
        super().__init__(name, lambda _: True)
        self.seconds = 0.0

    def propose(self, requests: Sequence[DraftRequest], budget: Sequence[int]) -> Sequence[Tree]:
        end = time.perf_counter() + self.seconds * max(budget, default=0)
        while time.perf_counter() < end:  # it works; it does not sleep
            pass
        return super().propose(requests, budget)


NEAR = 0.25
"""The plan has followed a change when it is within this part of the way to its final state."""
SMOOTH = 6
"""Rounds in the mean by which that is judged: a probe or a plain round for comparison is no change of plan."""
LEAST = 0.5
"""Nodes of a request: plans that differ by less count as equal."""


def scripted(phase: int) -> list[Knowing]:
    """The drafters of the trials, to be opened with the engine. phase: rounds between changes of the text."""
    return [
        Knowing("wrong", lambda _: False),
        Slow("slow"),
        Knowing("alternating", lambda number: number % 2 == 0),
        Knowing("switching", lambda number: number // phase % 2 == 0),
    ]


ADVERSARIES = ("wrong", "slow", "alternating")


@dataclass(slots=True)
class Trials:
    """The trials of one engine, each with a copy of its planner. drafters: those of `scripted`. keep: receives the
    windows."""

    bench: Bench
    drafters: Sequence[Knowing]
    prompts: Sequence[list[int]]
    max_tokens: int
    keep: Callable[[str, str, Window], None] = lambda where, setting, seen: None
    _known: dict[tuple[int, ...], list[int]] = field(default_factory=dict)  # plain decoding's answers to the prompts

    def adversaries(self, at_once: int, seconds: float, repeats: int) -> dict[str, Any]:
        """Measure planned decoding with each adversary beside plain decoding."""
        self._known = self._known or self._answers(self.prompts, self.max_tokens)
        self._tell(self._known)
        planners = {name: copy.deepcopy(self.bench.planner) for name in ADVERSARIES}

        def measure(name: str) -> Window:
            with self.bench.planned(planners.get(name)):
                seen = self.bench.window(self._asking(Mode(name, () if name == PLAIN else (name,))), at_once, seconds)
            if name == PLAIN:
                for drafter in self.drafters:
                    if isinstance(drafter, Slow):
                        drafter.seconds = 2 * seen.seconds / len(seen.spans)  # two passes for each guess
            self.keep(f"adversaries x{at_once}", name, seen)
            return seen

        return side_by_side((PLAIN, *ADVERSARIES), measure, repeats)

    def text(self, at_once: int, phase: int) -> dict[str, Any]:
        """From echoing to surprising text and back: the drafter is right, wrong, and right again for a phase each."""
        tokens = phase * (2 * (LONG + 1) + 1) + LONG + 2
        room = self.bench.llm.max_model_len - tokens - 1
        prompts = [prompt[:room] for prompt in self.prompts[:at_once]]
        self._tell(self._answers(prompts, tokens, to_the_end=True))
        params = self._params(Mode("switching", ("switching",)), tokens, to_the_end=True)

        async def play(crowd: Crowd) -> None:
            crowd.grow(at_once)
            await crowd.until(lambda beats: len(_full(beats, at_once)) >= 3 * phase)

        with self.bench.planned(copy.deepcopy(self.bench.planner)):
            beats = _full(self.bench.run(lambda number: (prompts[number % at_once], params), play), at_once)
        drafted = [beat.drafted / beat.requests for beat in beats]
        return asdict(followed([drafted[n * phase : (n + 1) * phase] for n in range(3)], returns=True))

    def load(self, at_once: int, phase: int) -> dict[str, Any]:
        """Measure one request, then `at_once`, then one again, all planned."""
        marks: list[int] = []

        async def play(crowd: Crowd) -> None:
            for requests in (1, at_once, 1):
                crowd.grow(requests)
                await crowd.shrink(requests)
                begin = len(crowd.meter.beats)
                await crowd.until(lambda b, n=requests, at=begin: len(_exactly(b[at:], n)) >= phase)  # type: ignore[misc]
                marks.append(len(crowd.meter.beats))

        with self.bench.planned(copy.deepcopy(self.bench.planner)):
            beats = self.bench.run(self._asking(Mode(AUTO)), play)
        parts = zip((1, at_once, 1), (0, *marks[:2]), marks, strict=True)
        phases = [_exactly(beats[begin:end], requests) for requests, begin, end in parts]
        return asdict(followed([[beat.drafted / beat.requests for beat in part] for part in phases], again=True))

    def _asking(self, mode: Mode) -> Ask:
        params = self._params(mode, self.max_tokens)
        return lambda number: (self.prompts[number % len(self.prompts)], params)

    def _params(self, mode: Mode, max_tokens: int, *, to_the_end: bool = False) -> SamplingParams:
        own = self.bench.params(mode, 0.0, 0, max_tokens)
        return SamplingParams(
            temperature=0, seed=0, max_tokens=max_tokens, ignore_eos=to_the_end, speculation=own.speculation
        )

    def _answers(
        self, prompts: Sequence[list[int]], tokens: int, *, to_the_end: bool = False
    ) -> dict[tuple[int, ...], list[int]]:
        """The answers of plain decoding."""
        params = self._params(Mode(PLAIN), tokens, to_the_end=to_the_end)
        with turn(self.bench.turns), self.bench.planned(Planner()):
            outputs = self.bench.llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
        return {tuple(p): list(o.outputs[0].token_ids) for p, o in zip(prompts, outputs, strict=True)}

    def _tell(self, answers: Answers) -> None:
        """Give the answers to the scripted drafters."""
        for drafter in self.drafters:
            drafter.answers = answers


@dataclass(frozen=True, slots=True)
class Followed:
    """The plan's reaction to changes. levels: settled nodes of a request by phase; rounds: until the plan followed each
    change, None if it did not change; nodes: by phase and round.
    """

    levels: list[float]
    rounds: list[int | None]
    nodes: list[list[float]]


def followed(phases: Sequence[Sequence[float]], *, returns: bool = False, again: bool = False) -> Followed:
    """phases: nodes of a request, round by round.

    returns: the last phase has the load of the first. A plan that drafts less in it has followed when it reaches the
    level of the first; if it never does, all rounds of the phase count. again: as the first phase, but with other
    texts: the plan has followed when it reaches the first level or its own settled level.
    """
    levels = [fmean(phase[len(phase) // 2 :]) for phase in phases]
    pairs = zip(levels, levels[1:], phases[1:], strict=False)
    rounds = [_rounds(part, was, now) for was, now, part in pairs]
    as_then = _rounds(phases[-1], levels[-2], levels[0])
    if returns and levels[-1] < levels[0]:
        rounds[-1] = as_then
    elif again and rounds[-1] is not None and as_then is not None:
        rounds[-1] = min(rounds[-1], as_then)
    nodes = [[round(count, 2) for count in phase] for phase in phases]
    return Followed([round(level, 2) for level in levels], rounds, nodes)


def _rounds(phase: Sequence[float], was: float, now: float) -> int | None:
    way = abs(now - was)
    if way < LEAST:
        return None
    for begin in range(len(phase)):
        if abs(fmean(phase[begin : begin + SMOOTH]) - now) <= NEAR * way:
            return begin
    return len(phase)


def _full(beats: Sequence[Beat], at_once: int) -> list[Beat]:
    """The rounds with requests, from the first one in which all of them decode."""
    first = next((i for i, beat in enumerate(beats) if beat.requests >= at_once), len(beats))
    return [beat for beat in beats[first:] if beat.requests]


def _exactly(beats: Sequence[Beat], requests: int) -> list[Beat]:
    return [beat for beat in beats if beat.requests == requests]


CONTEXT = 2048
WEIGHTS = {"eagle": "eagle3", "model": "draft", "medusa": "medusa"}
"""By drafter: the folder of its weights."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """The lists among the options."""

    parts: tuple[str, ...]
    settings: tuple[str, ...]
    cells: tuple[Cell, ...]
    seconds: dict[int, float]  # of a measurement, by requests at once
    trials: tuple[int, ...]  # requests at once
    peers: tuple[str, ...]


@dataclass(slots=True)
class Clock:
    """The time left, and the estimated time of further steps. budget: None is unlimited."""

    budget: float | None
    seconds: Callable[[], float] = time.perf_counter
    done: int = 0
    spent: float = 0.0
    _begun: float = field(init=False)

    def __post_init__(self) -> None:
        self._begun = self.seconds()

    @contextmanager
    def step(self) -> Iterator[None]:
        begun = self.seconds()
        yield
        self.done += 1
        self.spent += self.seconds() - begun

    @property
    def left(self) -> float:
        return float("inf") if self.budget is None else self.budget - (self.seconds() - self._begun)

    def takes(self, steps: int) -> float:
        """Estimated seconds of further steps."""
        return steps * self.spent / self.done if self.done else 0.0


class Run:
    """One call: models, engine and report."""

    def __init__(self, options: argparse.Namespace, wanted: Wanted, report: Report) -> None:
        self.options, self.wanted, self.report = options, wanted, report
        self.models = Models(options, report)
        self.clock = Clock(options.budget)
        self.texts = by_task(options.prompts)

    @cached_property
    def target(self) -> str:
        """The large model, or the small one without --target."""
        return str(self.models.target if self.options.target else self.models.small)

    @property
    def context(self) -> int:
        positions: int = load_config(
            self.models.target if self.options.target else self.models.small
        ).max_position_embeddings
        return min(CONTEXT, positions)

    def specs(self) -> dict[str, str]:
        """By drafter: the spec to open it with, for all drafters that the settings need."""
        needed = dict.fromkeys(name for mode in SETTINGS if mode.name in self.wanted.settings for name in mode.needs)
        named = (part.name for part in parse_merged(self.options.auto))
        needed |= dict.fromkeys(name for name in named if name != AUTO)
        found: dict[str, str] = {}
        for name in needed:
            spec = self._weights(name) if name in WEIGHTS else name
            if spec is not None:
                found[name] = f"{spec}?{self.options.eagle}" if name == "eagle" and self.options.eagle else spec
        return found

    def _weights(self, name: str) -> str | None:
        if self.options.target:
            return self.models.drafters.get(WEIGHTS[name])
        folder = self.models.heads / WEIGHTS[name]
        return f"{name}:{folder}" if (folder / "config.json").is_file() else None

    def modes(self, there: Sequence[str]) -> list[Mode]:
        """The settings whose drafters are available."""
        wanted = [mode for mode in SETTINGS if mode.name in self.wanted.settings]
        found = [mode for mode in wanted if set(there).issuperset(mode.needs)]
        self.report.put([mode.name for mode in wanted if mode not in found], "left_out")
        return found

    @contextmanager
    def engine(self, specs: dict[str, str], own: Sequence[Drafter]) -> Iterator[Bench]:
        """Open the one engine for all measurements."""
        options, on_gpu = self.options, self.options.device.startswith("cuda")
        parts = [part.name for part in parse_merged(options.auto)]
        auto = "+".join(specs.get(name, name) for name in parts if name == AUTO or name in specs)
        at_once = max([cell.at_once for cell in self.wanted.cells] + list(self.wanted.trials))
        with turn(options.turns):
            llm = LLM(
                self.target,
                drafter=[auto, *(spec for spec in specs.values() if spec != auto), *own],
                device=options.device,
                dtype=str(self.models.dtype).removeprefix("torch."),
                memory="32GiB" if on_gpu else None,
                max_model_len=self.context,
                max_num_seqs=max(at_once, 32),
                rounds=options.rounds,
            )
        try:
            yield Bench(llm, merged_name(parse_merged(auto)), options.turns)
        finally:
            llm.close()

    def keep(self, where: str, setting: str, seen: Window) -> None:
        """Write the rounds to the file of --rounds-to."""
        if self.options.rounds_to:
            keep_rounds(self.options.rounds_to, where, setting, seen)

    def prompts(self, llm: LLM, cell: Cell) -> list[list[int]]:
        room = llm.max_model_len - self.options.max_tokens - 1
        return prompts_of(llm.tokenizer, self.texts[cell.task], cell.at_once, room, self.options.prompts_each)


def run(options: argparse.Namespace, wanted: Wanted, report: Report) -> None:
    """All parts that are wanted. One that fails is noted, and the others go on."""
    whole = Run(options, wanted, report)
    report.results["on"] = options.device
    if {"cells", "adversaries", "switches"} & set(wanted.parts):
        with report.part("ours"):
            _ours(whole)
        report.say(f"{free(whole.models.device) / 1e9:.2f} GB of the device still held")
    if "peers" in wanted.parts:
        _peers(whole)


def _ours(whole: Run) -> None:
    own = scripted(whole.options.phase) if {"adversaries", "switches"} & set(whole.wanted.parts) else []
    specs = whole.specs()
    modes = whole.modes(list(specs))
    with whole.engine(specs, own) as bench, responsive():  # as the server runs it
        whole.report.put(sorted(bench.llm.engine.drafting.auto), "auto")
        if "cells" in whole.wanted.parts:
            _cells(whole, bench, modes)
        trials = Trials(bench, own, _mixed(whole, bench.llm), whole.options.max_tokens, whole.keep)
        for name, part in (("adversaries", _adversaries), ("switches", _switches)):
            if name in whole.wanted.parts:
                with whole.report.part(name):
                    part(whole, trials)


def _cells(whole: Run, bench: Bench, modes: Sequence[Mode]) -> None:
    """Measure cell after cell, except those that the results have and those without time."""
    report, options, by_name = whole.report, whole.options, {mode.name: mode for mode in modes}
    known = report.results.get("cells", {})
    left = [cell for cell in whole.wanted.cells if not by_name.keys() <= known.get(cell.name, {}).keys()]
    warm = set[tuple[int, float]]()  # loads
    for number, cell in enumerate(left):
        needed = whole.clock.takes(1)
        if whole.clock.left < needed:
            rest = len(left) - number
            report.say(f"no time for {rest} cells, which would take {whole.clock.takes(rest):.0f} s")
            report.put([cell.name for cell in left[number:]], "cells_left")
            return
        with report.part(f"cell {cell.name}"), whole.clock.step():
            prompts, seconds = whole.prompts(bench.llm, cell), whole.wanted.seconds[cell.at_once]
            bench.read(prompts)

            def measure(
                name: str, cell: Cell = cell, prompts: list[list[int]] = prompts, seconds: float = seconds
            ) -> Any:
                seen = bench.measure(by_name[name], cell, prompts, options.max_tokens, seconds)
                whole.keep(cell.name, name, seen)
                return seen

            firsts = bench.distinct(modes, cell.at_once)
            names = list(dict.fromkeys(firsts.values()))
            for name in names if cell.load not in warm else ():
                bench.measure(by_name[name], cell, prompts, options.max_tokens, WARM_S)
            warm.add(cell.load)
            found = side_by_side(names, measure, options.repeats)
            if AUTO in found:
                found[AUTO]["plan"] = bench.planner.reasons()  # its last decisions in words
            alike = {name: found[as_] | ({"same_as": as_} if as_ != name else {}) for name, as_ in firsts.items()}
            report.put(known.get(cell.name, {}) | alike, "cells", cell.name)
        report.say(f"{number + 1} of {len(left)} cells; {whole.clock.takes(len(left) - number - 1):.0f} s to go")
    report.put([], "cells_left")


def _mixed(whole: Run, llm: LLM) -> list[list[int]]:
    """Prompts of all tasks in turn, for the trials."""
    most = max(whole.wanted.trials)
    by_tasks = [whole.prompts(llm, Cell(task, most, 0.0)) for task in whole.texts]
    return [prompts[i] for i in range(max(map(len, by_tasks))) for prompts in by_tasks if i < len(prompts)][: 2 * most]


def _adversaries(whole: Run, trials: Trials) -> None:
    for at_once in whole.wanted.trials:
        found = trials.adversaries(at_once, whole.options.trial_seconds, whole.options.repeats)
        whole.report.put(found, "adversaries", str(at_once))


def _switches(whole: Run, trials: Trials) -> None:
    phase = whole.options.phase
    for at_once in whole.wanted.trials:
        whole.report.put(trials.text(at_once, phase), "switches", f"echoing, surprising, echoing; {at_once} at once")
    most = max(whole.wanted.trials)
    if most > 1:
        whole.report.put(trials.load(most, phase), "switches", f"1, {most}, 1 at once")


def _peers(whole: Run) -> None:
    options = whole.options
    for mode in whole.wanted.peers:
        with whole.report.part(f"vLLM {mode}"):
            task = cells_peers.Task(
                mode,
                whole.target,
                peer_draft(whole.models, mode) if options.target else None,
                str(options.prompts) if options.prompts else None,
                whole.wanted.cells,
                whole.context,
                options.max_tokens,
                options.prompts_each,
                tuple(whole.wanted.seconds[cell.at_once] for cell in whole.wanted.cells),
                options.repeats,
            )
            found = cells_peers.run_apart(task, options.peer_path, options.peer_timeout)
            older = whole.report.results.get("vllm", {}).get(mode, {}).get("cells", {})
            whole.report.put(found | {"cells": older | found.get("cells", {})}, "vllm", mode)
