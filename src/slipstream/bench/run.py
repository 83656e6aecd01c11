"""Runs the same prompts in several modes and measures them.

All modes run one after another on each unit of work, in an order that rotates from unit to unit, so that a machine that
slows down slows all of them. A unit is a batch of prompts of one category that run at once.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, cycle, islice
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Protocol

from slipstream.bench.prompts import BenchPrompt, by_category, load_prompts
from slipstream.core.errors import CapacityError, RequestError
from slipstream.core.outputs import SpeculationStats
from slipstream.core.params import SamplingParams, SpeculationParams
from slipstream.drafters import merged_name, parse_merged

if TYPE_CHECKING:
    from slipstream.engine.llm import LLM

PLAIN = "plain"
PREFILL_TOKENS = 1024
WARM_UP_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Answer:
    """One prompt's answer in one mode. Seconds count from the request's arrival."""

    token_ids: tuple[int, ...]
    first_token_s: float
    total_s: float
    stats: SpeculationStats | None = None  # None: a peer, which reports none


@dataclass(frozen=True, slots=True)
class Measured:
    """The answers to the prompts of a unit, and the seconds from the first arrival to the last end."""

    answers: tuple[Answer, ...]
    wall_s: float


class Runner(Protocol):
    """One mode: answers prompts given as tokens."""

    @property
    def name(self) -> str: ...

    def answer(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> Measured: ...


@dataclass
class EngineRunner:
    """Slipstream with one drafter, or with none.

    Drafters and caches may use earlier answers, as they do for users, but never answers to the same prompt: a prompt
    that is repeated, in another mode, run or copy, gets another tenant.
    """

    name: str
    llm: LLM
    speculation: SpeculationParams
    _asked: set[tuple[int, ...]] = field(default_factory=set)  # prompts since a new tenant began
    _tenants: int = 0

    def answer(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> Measured:
        tenant, copies, own = self._tenant(prompts), Counter[tuple[int, ...]](), []
        for ids, asked in zip(prompts, params, strict=True):
            copy = copies[tuple(ids)]
            copies[tuple(ids)] += 1
            speculation = replace(self.speculation, tenant=f"{tenant}, copy {copy}" if copy else tenant)
            own.append(replace(asked, speculation=speculation))
        start = time.perf_counter()
        outputs = self.llm.generate([{"prompt_token_ids": list(ids)} for ids in prompts], own)
        wall_s = time.perf_counter() - start
        answers = []
        for output in outputs:
            first = output.outputs[0]
            if first.error is not None:
                raise RequestError(f"mode {self.name}: {first.error}")
            timing = first.timing
            answers.append(Answer(tuple(first.token_ids), timing.first_token_s, timing.total_s, first.speculation))
        return Measured(tuple(answers), wall_s)

    def _tenant(self, prompts: Sequence[Sequence[int]]) -> str:
        asked = {tuple(ids) for ids in prompts}
        if self._asked & asked:
            self._asked.clear()
            self._tenants += 1
        self._asked |= asked
        return f"{self.name}, {self._tenants}"


def engine_runners(llm: LLM, drafters: Sequence[str], speculation: SpeculationParams) -> list[EngineRunner]:
    """Plain decoding first, then one mode a drafter, named as on the command line (`model:PATH`).

    Where `speculation` asks for rejection sampling, each drafter has a second mode with it beside the exact one.
    """
    runners = [EngineRunner(PLAIN, llm, SpeculationParams(enabled=False))]
    for drafter in drafters:
        own = replace(speculation, drafter=merged_name(parse_merged(drafter)))
        runners.append(EngineRunner(drafter, llm, replace(own, verifier="exact")))
        if own.verifier != "exact":
            runners.append(EngineRunner(f"{drafter}, {own.verifier}", llm, own))
    return runners


@dataclass(frozen=True, slots=True)
class Unit:
    """Prompts of one category that run together."""

    category: str
    prompts: tuple[BenchPrompt, ...]
    token_ids: tuple[tuple[int, ...], ...]
    params: tuple[SamplingParams, ...]


@dataclass(frozen=True, slots=True)
class Work:
    """The units to run, and the number of prompts that did not fit the model's context."""

    units: tuple[Unit, ...]
    skipped: int


def plan_work(llm: LLM, prompts: Sequence[BenchPrompt], params: SamplingParams, concurrency: int) -> Work:
    """Units of `concurrency` prompts each. The last unit of a category begins with its first prompts again.

    A sampled request has a seed of its own, the same in every mode.
    """
    units: list[Unit] = []
    fitting, ids = [], {}
    for prompt in prompts:
        ids[prompt.id] = tuple(llm.chat_prompt([{"role": "user", "content": prompt.text}]))
        if len(ids[prompt.id]) + params.max_tokens <= llm.max_model_len:
            fitting.append(prompt)
    if not fitting:
        raise CapacityError(f"no prompt fits max_model_len={llm.max_model_len} with max_tokens={params.max_tokens}")
    seeds = count(params.seed or 0)
    for category, group in by_category(fitting).items():
        for start in range(0, len(group), concurrency):
            part = tuple(islice(cycle(group), start, start + concurrency))
            own = tuple(params if params.greedy else replace(params, seed=next(seeds)) for _ in part)
            units.append(Unit(category, part, tuple(ids[p.id] for p in part), own))
    return Work(tuple(units), len(prompts) - len(fitting))


@dataclass(frozen=True, slots=True)
class Sample:
    """One unit, measured once in one mode."""

    unit: int
    mode: str
    repeat: int
    measured: Measured


def warm_up(unit: Unit, runners: Sequence[Runner]) -> None:
    """Let every mode allocate, compile and learn its costs before anything is timed."""
    short = [replace(p, max_tokens=min(p.max_tokens, WARM_UP_TOKENS)) for p in unit.params]
    for runner in runners:
        runner.answer(unit.token_ids, short)


def measure(
    units: Sequence[Unit],
    runners: Sequence[Runner],
    repeats: int = 1,
    on_step: Callable[[str, str], None] | None = None,
) -> Iterator[Sample]:
    """Every unit in every mode, `repeats` times. `on_step` hears the category and mode before each measurement."""
    for repeat in range(repeats):
        for index, unit in enumerate(units):
            turn = (index + repeat) % len(runners)
            for runner in [*runners[turn:], *runners[:turn]]:
                if on_step:
                    on_step(unit.category, runner.name)
                yield Sample(index, runner.name, repeat, runner.answer(unit.token_ids, unit.params))


def in_all_modes(samples: Sequence[Sample], modes: int) -> list[Sample]:
    """The samples of units that were measured in all modes; after an interruption only these can be compared."""
    counts = Counter((sample.unit, sample.repeat) for sample in samples)
    return [sample for sample in samples if counts[sample.unit, sample.repeat] == modes]


@dataclass
class Cell:
    """The work at one temperature and number of requests at once, and its samples so far."""

    temperature: float
    concurrency: int
    work: Work
    samples: list[Sample] = field(default_factory=list)

    def comparable(self, modes: int) -> list[Sample]:
        return in_all_modes(self.samples, modes)


@dataclass(frozen=True, slots=True)
class PrefillReport:
    """The speed of reading a long prompt, by mode, in prompt tokens per second."""

    prompt_tokens: int
    tokens_per_s: dict[str, float]

    def to_json(self) -> dict[str, Any]:
        rounded = {name: round(rate, 2) for name, rate in self.tokens_per_s.items()}
        return {"prompt_tokens": self.prompt_tokens, "tokens_per_s": rounded}


def long_prompt(llm: LLM) -> tuple[int, ...]:
    """About a thousand tokens of our own text."""
    text = "\n\n".join(prompt.text for prompt in load_prompts() if prompt.category == "summarization")
    ids = llm.chat_prompt([{"role": "user", "content": text}])
    return tuple(ids[: min(PREFILL_TOKENS, llm.max_model_len - 1)])


def measure_prefill(ids: Sequence[int], runners: Sequence[Runner], times: int = 3) -> PrefillReport:
    """Time to the first token of a long prompt. It is rotated for each run, so that no cached prefix can help."""
    params = [SamplingParams(temperature=0, max_tokens=1)]
    seconds: dict[str, list[float]] = {runner.name: [] for runner in runners}
    for time_index in range(times + 1):
        for runner in runners:
            start = (time_index * 37) % len(ids)
            measured = runner.answer([[*ids[start:], *ids[:start]]], params)
            if time_index:  # the first time warms up
                seconds[runner.name].append(measured.answers[0].first_token_s)
    return PrefillReport(len(ids), {name: len(ids) / median(values) for name, values in seconds.items()})


def source_environment() -> dict[str, str]:
    """The environment for a fresh Python that must find this package, installed or not."""
    root = str(Path(__file__).parents[2])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))}


def start_to_first_token(options: Sequence[str]) -> float:
    """Seconds from starting a fresh `slipstream generate` to the first byte of its answer."""
    command = [sys.executable, "-m", "slipstream", "generate", "Say hello.", "--max-tokens", "8", *options]
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=source_environment()) as process:
        assert process.stdout is not None
        first = process.stdout.read(1)
        seconds = time.perf_counter() - start
        _, errors = process.communicate()
    if not first or process.returncode:
        raise RequestError(f"--startup: the fresh process failed: {errors.decode(errors='replace').strip()[-500:]}")
    return seconds
