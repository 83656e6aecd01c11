"""Traffic for simulations and for real runs: when requests come, and how long they are."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from slipstream.bench.recording import Trace
from slipstream.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Coming:
    """One request: seconds after the first, its lengths, and which recorded one it behaves like."""

    at: float
    prompt_tokens: int
    output_tokens: int
    like: int


def poisson_times(rate: float, count: int, seed: int) -> list[float]:
    """Arrivals at this rate, independent of each other; the first at 0."""
    if not rate > 0:
        raise ConfigError(f"--rate {rate:g}: must be above 0 requests a second")
    dice = random.Random(f"arrivals {seed}")
    times = [0.0]
    while len(times) < count:
        times.append(times[-1] + dice.expovariate(rate))
    return times


def poisson(rate: float, count: int, traces: Sequence[Trace], seed: int) -> list[Coming]:
    """Requests as they were recorded, in random order, all of them before one comes again."""
    likes = _dealt(len(traces), count, seed)
    times = poisson_times(rate, count, seed)
    return [
        Coming(at, traces[like].prompt_tokens, traces[like].output_tokens, like)
        for at, like in zip(times, likes, strict=True)
    ]


def replay(traces: Sequence[Trace]) -> list[Coming]:
    """The recorded requests when they came."""
    first = min(trace.arrived for trace in traces)
    return [Coming(t.arrived - first, t.prompt_tokens, t.output_tokens, i) for i, t in enumerate(traces)]


def read_traffic(path: Path, traces: Sequence[Trace], seed: int, rate: float | None = None) -> list[Coming]:
    """JSON lines with `arrival` (seconds), `prompt_tokens` and `output_tokens`.

    rate: stretch or squeeze the times so that so many come a second; None: as they are written.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--traffic {path}: cannot be read as text ({error})") from error
    found: list[tuple[float, int, int]] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            one = (float(entry["arrival"]), int(entry["prompt_tokens"]), int(entry["output_tokens"]))
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"--traffic {path}:{number}: {error!r}; a line must be JSON such as "
                '{"arrival": 1.5, "prompt_tokens": 200, "output_tokens": 80}'
            ) from error
        if one[0] < 0 or min(one[1:]) < 1:
            raise ConfigError(f"--traffic {path}:{number}: arrival must be 0 or more, and the lengths 1 or more")
        found.append(one)
    if not found:
        raise ConfigError(f"--traffic {path}: holds no requests; one JSON object a line")
    found.sort()
    first, last = found[0][0], found[-1][0]
    scale = 1.0
    if rate is not None and last > first:
        scale = (len(found) - 1) / (last - first) / rate
    likes = _dealt(len(traces), len(found), seed)
    return [Coming((at - first) * scale, p, o, like) for (at, p, o), like in zip(found, likes, strict=True)]


def _dealt(cards: int, count: int, seed: int) -> list[int]:
    dice = random.Random(f"requests {seed}")
    dealt: list[int] = []
    while len(dealt) < count:
        deck = list(range(cards))
        dice.shuffle(deck)
        dealt += deck
    return dealt[:count]
