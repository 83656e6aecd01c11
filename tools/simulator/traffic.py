"""Traffic for simulations and for real runs: when requests come, and how long they are."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from simulator.recording import Trace
from slipstream.bench.traffic import Served, poisson_times
from slipstream.core.errors import ConfigError, read_named

_SUCH_AS = 'a line must be such as {"arrival": 1.5, "prompt_tokens": 200, "output_tokens": 80}'

_ALONE, _TOGETHER, _BEHIND, _CROWDS = 3, 4, 8, (16, 32)
"""Answers of a rehearsal that come each alone, together, or one behind the other; and crowds of them."""
_SMALL = (1, 4)
"""Nodes of drafts in a rehearsal, beside the usual ones."""
_APART = 1.2
"""Of what it takes to read a prompt: the next one comes when that was read, and its own is read beside the answer."""


@dataclass(frozen=True, slots=True)
class Coming:
    """One request: seconds after the first, its lengths, which recorded one it behaves like, where it is written."""

    at: float
    prompt_tokens: int
    output_tokens: int
    like: int
    where: str = ""


def rehearse(send: Callable[[Sequence[float], int], Sequence[Served]], *, drafts: bool, crowds: bool) -> float:
    """Have some answers beside the traffic that is recorded: without drafts, or nobody would know what small passes
    cost; each alone, some together, and some of which each has its prompt read beside those before it.

    send: is given when they come, in seconds, and how many nodes their drafts have, 0: they have none.
    drafts: some with small drafts, too, or nobody would know what those cost: of drafters on the device, where each
    guess takes time.
    crowds: some of them many at once, since traffic may bring that.
    Returns what one answer alone took, in seconds: asked again it tells whether the machine kept its speed.
    """
    alone = [one for _ in range(_ALONE) for one in send([0.0], 0)]
    send([0.0] * _TOGETHER, 0)
    apart_s = _APART * median(one.ttft for one in alone)
    send([apart_s * i for i in range(_BEHIND)], 0)
    for crowd in _CROWDS if crowds else ():
        send([0.0] * crowd, 0)
    for nodes in _SMALL if drafts else ():
        send([0.0], nodes)
        send([0.0] * _TOGETHER, nodes)
    return median(one.ended for one in alone)


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
    lines = read_named(path, "--traffic").splitlines()
    found = [_read_line(line, f"--traffic {path}:{n}") for n, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise ConfigError(f"--traffic {path}: holds no requests; one JSON object a line")
    found.sort(key=lambda one: one.at)
    first, last = found[0].at, found[-1].at
    scale = 1.0
    if rate is not None and len(found) > 1:
        if last == first:
            raise ConfigError(f"--rate {rate:g}: the requests of {path} all come at once; leave it out, or spread them")
        scale = (len(found) - 1) / (last - first) / rate
    likes = _dealt(len(traces), len(found), seed)
    return [replace(one, at=(one.at - first) * scale, like=like) for one, like in zip(found, likes, strict=True)]


def _read_line(line: str, where: str) -> Coming:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: not JSON ({error}); {_SUCH_AS}") from error
    if not isinstance(entry, dict):
        raise ConfigError(f"{where}: no JSON object; {_SUCH_AS}")
    found: dict[str, Any] = {}
    for key, least, kind in (("arrival", 0, "seconds"), ("prompt_tokens", 1, "tokens"), ("output_tokens", 1, "tokens")):
        if key not in entry:
            raise ConfigError(f"{where}: {key} is missing; {_SUCH_AS}")
        value = entry[key]
        right = isinstance(value, int if least else int | float) and not isinstance(value, bool)
        if not right or not least <= value < math.inf:
            raise ConfigError(f"{where}: {key}={value!r}: must be a number of {kind}, {least} or more; {_SUCH_AS}")
        found[key] = value
    return Coming(found["arrival"], found["prompt_tokens"], found["output_tokens"], 0, where)


def _dealt(cards: int, count: int, seed: int) -> list[int]:
    dice = random.Random(f"requests {seed}")
    dealt: list[int] = []
    while len(dealt) < count:
        deck = list(range(cards))
        dice.shuffle(deck)
        dealt += deck
    return dealt[:count]
