"""Measures drafters, draft sizes and verifiers on the user's prompts, and recommends one of each by concurrency."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from math import exp, fsum, log
from pathlib import Path
from statistics import median
from typing import Any

from slipstream.bench.run import PLAIN, EngineRunner, Runner
from slipstream.core.errors import ConfigError, read_named
from slipstream.core.params import SamplingParams
from slipstream.engine.config import EngineConfig

_CLEARLY = 1.02
"""A recommended drafter is faster than plain decoding by at least this factor: smaller differences are noise."""
_MOST_BATCHES = 8
"""Most batches of prompts to measure of one candidate at one concurrency."""
_ENGINE: Mapping[str, tuple[Any, str]] = {
    "model": (str, "a text"),
    "drafter": (str | None, "a text, or null for none"),
    "draft_tokens": (int | None, "a whole number, or null for the drafter's own"),
    "min_gain": (int | float, "a number, 1 or more"),
}
"""The keys of an engine in a configuration file: types, and how an error names them."""
ENOUGH = 8
"""Prompts that a recommendation needs."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A mode to measure: plain, or a drafter with a size (None: its own) and a verifier."""

    runner: Runner
    drafter: str | None
    draft_tokens: int | None = None
    verifier: str = "exact"


@dataclass(frozen=True, slots=True)
class Tuned:
    """The speed of one candidate at one number of requests at once.

    prompts: the number of different prompts; batches: timed runs; gain: the lowest and the highest speed-up over plain
    decoding of a run.
    """

    concurrency: int
    name: str
    drafter: str | None
    draft_tokens: int | None
    verifier: str
    tokens_per_s: float
    prompts: int = 0
    batches: int = 0
    gain: tuple[float, float] = (1.0, 1.0)


def candidates(runners: Sequence[EngineRunner], sizes: Sequence[int]) -> list[Candidate]:
    """Each runner as it is, and those with a drafter once more for every size."""
    found: list[Candidate] = []
    for runner in runners:
        spec = runner.speculation
        if not spec.enabled:
            found.append(Candidate(runner, None))
            continue
        drafter = runner.name.partition(",")[0]
        found.append(Candidate(runner, drafter, spec.draft_tokens, spec.verifier))
        for size in sizes:
            own = replace(runner, name=f"{runner.name}, {size}", speculation=replace(spec, draft_tokens=size))
            found.append(Candidate(own, drafter, size, spec.verifier))
    return found


def measure(
    options: Sequence[Candidate],
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    levels: Sequence[int],
    *,
    repeats: int = 1,
    on_step: Callable[[int, str], None] = lambda concurrency, name: None,
) -> Iterator[list[Tuned]]:
    """Measure all candidates in turn, concurrency by concurrency, so that a machine that slows down slows all of them.

    A batch holds the prompts that run at once. Batches go on until each prompt was asked once, or `_MOST_BATCHES` ran.
    """
    for level in levels:
        found: list[Tuned] = []
        count = min(_MOST_BATCHES, -(-len(prompts) // level))
        batches = [[(first * level + i) % len(prompts) for i in range(level)] for first in range(count)]
        tokens: dict[str, list[int]] = {option.runner.name: [] for option in options}
        seconds: dict[str, list[float]] = {option.runner.name: [] for option in options}
        for turn in range(repeats):
            for number, batch in enumerate(batches):
                first = (turn + number) % len(options)
                for option in [*options[first:], *options[:first]]:
                    name = option.runner.name
                    on_step(level, name)
                    done = option.runner.answer([prompts[i] for i in batch], [params[i] for i in batch])
                    tokens[name].append(sum(len(a.token_ids) for a in done.answers))
                    seconds[name].append(done.wall_s)
        rates = {name: [n / s for n, s in zip(tokens[name], seconds[name], strict=True)] for name in tokens}
        asked = len({i for batch in batches for i in batch})
        for option in options:
            name = option.runner.name
            gains = [own / plain for own, plain in zip(rates[name], rates.get(PLAIN, rates[name]), strict=True)]
            speed = median(_together(tokens[name], seconds[name], count))
            own = Tuned(level, name, option.drafter, option.draft_tokens, option.verifier, speed)
            gain = (round(min(gains), 3), round(max(gains), 3))
            found.append(replace(own, prompts=asked, batches=len(gains), gain=gain))
        yield found


def _together(tokens: Sequence[int], seconds: Sequence[float], count: int) -> list[float]:
    """Tokens per second of each turn, over its batches."""
    turns = range(0, len(tokens), count)
    return [sum(tokens[at : at + count]) / fsum(seconds[at : at + count]) for at in turns]


def how_sure(row: Tuned, rows: Sequence[Tuned]) -> str:
    """The evidence for a recommendation, as text."""
    plain = next(one for one in rows if one.name == PLAIN and one.concurrency == row.concurrency)
    several = "s" if row.prompts != 1 else ""
    basis = f"{row.prompts} prompt{several} in {row.batches} run{'s' if row.batches != 1 else ''}"
    if row.name == PLAIN:
        return f"nothing was clearly faster ({basis})"
    times = f"{row.tokens_per_s / plain.tokens_per_s:.2f} times as fast as plain"
    return f"{times} ({row.gain[0]:.2f} to {row.gain[1]:.2f} in single runs; {basis})"


def doubts(rows: Sequence[Tuned]) -> list[str]:
    """Reasons for which a recommendation may not hold."""
    found = []
    asked = min((row.prompts for row in rows), default=0)
    if asked < ENOUGH:
        several = "s were" if asked != 1 else " was"
        found.append(f"only {asked} prompt{several} asked: give at least {ENOUGH} (--prompts) of your own kind")
    for level, row in best(rows).items():
        if row.name != PLAIN and row.gain[0] < 1:
            found.append(
                f"{level} at once: {row.name} was slower than plain in some runs; measure more "
                "(--repeats 3), or prompts of one kind: some may be faster without it"
            )
    return [*found, *_slower_together(rows)]


def _recommended(rows: Sequence[Tuned]) -> list[Tuned]:
    """Plain decoding and the recommended rows."""
    chosen = {id(row) for row in best(rows).values()}
    return [row for row in rows if row.name == PLAIN or id(row) in chosen]


def _slower_together(rows: Sequence[Tuned]) -> list[str]:
    """Doubts about rates that fall with the concurrency: a sign that other programs used the machine."""
    found = []
    for name in dict.fromkeys(row.name for row in _recommended(rows)):
        own = sorted((row for row in rows if row.name == name), key=lambda row: row.concurrency)
        for few, many in pairwise(own):
            if few.tokens_per_s > _CLEARLY * many.tokens_per_s:
                found.append(
                    f"{name} was slower with {many.concurrency} at once ({many.tokens_per_s:.1f} tok/s in all) than "
                    f"with {few.concurrency} ({few.tokens_per_s:.1f}); measure again (--repeats 3)"
                )
    return found


def best(rows: Sequence[Tuned]) -> Mapping[int, Tuned]:
    """By concurrency, the fastest candidate, or plain decoding if none is clearly faster."""
    found: dict[int, Tuned] = {}
    for level in dict.fromkeys(row.concurrency for row in rows):
        own = [row for row in rows if row.concurrency == level]
        plain = next(row for row in own if row.name == PLAIN)
        fastest = max(own, key=lambda row: row.tokens_per_s)
        found[level] = fastest if fastest.tokens_per_s > _CLEARLY * plain.tokens_per_s else plain
    return found


def best_of_all(rows: Sequence[Tuned]) -> Tuned:
    """The candidate with the highest geometric mean of speeds over all concurrencies."""
    names = dict.fromkeys(row.name for row in rows)
    mean = {n: exp(fsum(log(r.tokens_per_s) for r in rows if r.name == n) / len(best(rows))) for n in names}
    name = max(names, key=mean.__getitem__)
    name = name if mean[name] > _CLEARLY * mean[PLAIN] else PLAIN
    return next(row for row in rows if row.name == name)


def configuration(model: str, rows: Sequence[Tuned], min_gain: float | None = None) -> dict[str, Any]:
    """The JSON for `slipstream serve --config FILE` and `LLM(**json["engine"])`, with the measurements beside it.

    min_gain: the setting of the measurement; None: the default.
    """
    chosen = best_of_all(rows)
    engine = {"model": model, "drafter": chosen.drafter, "draft_tokens": chosen.draft_tokens}
    return {
        "engine": engine if min_gain is None else {**engine, "min_gain": min_gain},
        "verifier": chosen.verifier,
        "by_concurrency": {str(level): asdict(row) for level, row in best(rows).items()},
        "doubts": doubts(rows),
    }


def read_engine(path: Path) -> dict[str, Any]:
    """The `engine` part of a configuration file: model, drafter, draft_tokens, min_gain."""
    try:
        whole = json.loads(read_named(path, "--config", "`slipstream tune --config FILE` writes one"))
    except json.JSONDecodeError as error:
        raise ConfigError(f"--config {path}: cannot be read as JSON ({error})") from error
    engine = whole.get("engine") if isinstance(whole, dict) else None
    if not isinstance(engine, dict):
        raise ConfigError(f'--config {path}: must have "engine": {{…}}, as `slipstream tune --config FILE` writes it')
    if unknown := set(engine) - set(_ENGINE):
        raise ConfigError(f"--config {path}: engine.{min(unknown)} is unknown; must be one of {', '.join(_ENGINE)}")
    for key, value in engine.items():
        kinds, words = _ENGINE[key]
        if not isinstance(value, kinds) or isinstance(value, bool):
            raise ConfigError(f"--config {path}: engine.{key}={json.dumps(value)}: must be {words}")
    try:
        EngineConfig(draft_tokens=engine.get("draft_tokens"), min_gain=engine.get("min_gain", 1.0))
    except ConfigError as error:
        raise ConfigError(f"--config {path}: engine.{error}") from error
    return engine
