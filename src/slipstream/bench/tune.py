"""Which drafter, how many guesses and which verifier for how many requests at once: measured on the user's prompts."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import exp, fsum, log
from pathlib import Path
from statistics import median
from typing import Any

from slipstream.bench.run import PLAIN, EngineRunner, Runner
from slipstream.core.errors import ConfigError
from slipstream.core.params import SamplingParams

_CLEARLY = 1.02
"""A way of speculating must be so much faster than plain decoding to be recommended: measurements are no better."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A way to run: plain, or a drafter with a size and a verifier. draft_tokens: None: the drafter's own."""

    runner: Runner
    drafter: str | None
    draft_tokens: int | None = None
    verifier: str = "exact"


@dataclass(frozen=True, slots=True)
class Tuned:
    """What one candidate came to with so many requests at once. predicted: None: nothing was recorded to tell by."""

    concurrency: int
    name: str
    drafter: str | None
    draft_tokens: int | None
    verifier: str
    tokens_per_s: float
    predicted: float | None = None


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
) -> list[Tuned]:
    """Every candidate at every concurrency, in turn, so that a machine that slows down slows all of them."""
    found: list[Tuned] = []
    for level in levels:
        batch = [i % len(prompts) for i in range(level)]
        rates: dict[str, list[float]] = {option.runner.name: [] for option in options}
        for turn in range(repeats):
            for option in [*options[turn % len(options) :], *options[: turn % len(options)]]:
                on_step(level, option.runner.name)
                done = option.runner.answer([prompts[i] for i in batch], [params[i] for i in batch])
                rates[option.runner.name].append(sum(len(a.token_ids) for a in done.answers) / done.wall_s)
        found += [
            Tuned(level, o.runner.name, o.drafter, o.draft_tokens, o.verifier, median(rates[o.runner.name]))
            for o in options
        ]
    return found


def best(rows: Sequence[Tuned]) -> Mapping[int, Tuned]:
    """By concurrency: the fastest, or plain decoding where nothing is clearly faster."""
    found: dict[int, Tuned] = {}
    for level in dict.fromkeys(row.concurrency for row in rows):
        own = [row for row in rows if row.concurrency == level]
        plain = next(row for row in own if row.name == PLAIN)
        fastest = max(own, key=lambda row: row.tokens_per_s)
        found[level] = fastest if fastest.tokens_per_s > _CLEARLY * plain.tokens_per_s else plain
    return found


def best_of_all(rows: Sequence[Tuned]) -> Tuned:
    """The one for an engine that sees all these concurrencies: by the geometric mean of its speeds."""
    names = dict.fromkeys(row.name for row in rows)
    mean = {n: exp(fsum(log(r.tokens_per_s) for r in rows if r.name == n) / len(best(rows))) for n in names}
    name = max(names, key=mean.__getitem__)
    name = name if mean[name] > _CLEARLY * mean[PLAIN] else PLAIN
    return next(row for row in rows if row.name == name)


def configuration(model: str, rows: Sequence[Tuned]) -> dict[str, Any]:
    """For `slipstream serve --config FILE`, or `LLM(**json["engine"])`; what was measured stands beside it."""
    chosen = best_of_all(rows)
    return {
        "engine": {"model": model, "drafter": chosen.drafter, "draft_tokens": chosen.draft_tokens},
        "verifier": chosen.verifier,
        "by_concurrency": {str(level): asdict(row) for level, row in best(rows).items()},
    }


def read_engine(path: Path) -> dict[str, Any]:
    """The `engine` part of a configuration file: model, drafter, draft_tokens."""
    try:
        whole = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--config {path}: cannot be read as JSON ({error})") from error
    engine = whole.get("engine") if isinstance(whole, dict) else None
    if not isinstance(engine, dict):
        raise ConfigError(f'--config {path}: must have "engine": {{…}}, as `slipstream tune --config FILE` writes it')
    if unknown := set(engine) - {"model", "drafter", "draft_tokens"}:
        raise ConfigError(f"--config {path}: engine.{min(unknown)} is unknown; must be model, drafter or draft_tokens")
    for key, kinds in (("model", str), ("drafter", str | None), ("draft_tokens", int | None)):
        if key in engine and not isinstance(engine[key], kinds):
            raise ConfigError(f"--config {path}: engine.{key}={engine[key]!r} is of the wrong kind")
    return engine
