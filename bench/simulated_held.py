"""Real runs of traffic, and what is simulated from the recorded ones of them, one beside the other."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from statistics import fmean, median
from typing import Any

from slipstream.bench.costs import RoundCosts
from slipstream.bench.outcome import Outcome, Served, Speculation, Targets
from slipstream.bench.recording import Costs, Planning, Recording
from slipstream.bench.replica import Setting
from slipstream.bench.simulate import simulate
from slipstream.bench.traffic import Coming
from slipstream.plan.measured import Load

WAYS: tuple[Speculation, ...] = ("fixed", "off", "planned")
RUNS = "runs.jsonl"
GOOD = "good"  # the part of all requests that met the targets

_USUAL = 1.5
"""Latencies that make a request good, unless they are said: so many times what half of all have without drafts."""
_LONGER, _PAUSE_S = 2.0, 5.0
"""Of what a run took, and behind that: then the next one that is simulated begins."""


@dataclass(frozen=True, slots=True)
class Run:
    """Requests that came at a rate, answered in one way.

    window: which prompts and times they were. counts: False where it only let the engine see such traffic once.
    alone_s: what one answer without drafts took before it, which tells how fast the machine was.
    costs: as they were; None: they are those of the recording, or the run does not count.
    """

    rate: float
    window: int
    way: Speculation
    counts: bool
    alone_s: float
    served: tuple[Served, ...]
    costs: Costs | None = None

    def packed(self) -> str:
        parts = asdict(self) | {"costs": None if self.costs is None else self.costs.packed()}
        return json.dumps(parts, separators=(",", ":"))

    @staticmethod
    def unpacked(line: str) -> Run:
        parts: dict[str, Any] = json.loads(line)
        parts["served"] = tuple(Served(**one) for one in parts["served"])
        if parts["costs"] is not None:
            parts["costs"] = Costs.unpacked(parts["costs"])
        return Run(**parts)


@dataclass(frozen=True, slots=True)
class Compared:
    """One figure of one way at one rate.

    each: of every real run by itself, in their order.
    """

    rate: float
    way: str
    figure: str
    real: float
    simulated: float
    each: tuple[float, ...] = ()

    @property
    def off_by(self) -> float:
        """As a part of what is real; of a part of all requests the difference."""
        return self.simulated - self.real if self.figure == GOOD else self.simulated / self.real - 1

    def told(self) -> dict[str, Any]:
        return {"off_by": self.off_by, **asdict(self)}


def load_runs(folder: Path) -> list[Run]:
    return [Run.unpacked(line) for line in (folder / RUNS).read_text().splitlines()]


def figures(runs: Sequence[Sequence[Served]], targets: Targets) -> dict[str, float]:
    """Of all requests of all runs: medians, and means, since a median jumps where half of the requests meet another's
    prompt; by the second of the time in which they were answered."""
    outcomes = [Outcome.of(served, targets) for served in runs]
    whole = Outcome.of(list(chain(*runs)), targets)
    seconds = sum(one.seconds for one in outcomes)
    return {
        "tokens_per_s": sum(one.tokens_per_s * one.seconds for one in outcomes) / seconds,
        GOOD: whole.good,
        "ttft": whole.ttft.p50,
        "tpot": whole.tpot.p50,
        "ttft_mean": fmean(one.ttft for one in chain(*runs)),
        "tpot_mean": fmean(one.tpot for one in chain(*runs)),
    }


def targets_of(runs: Sequence[Run]) -> Targets:
    """What is good at one rate, where nobody said."""
    plain = [one for run in runs if run.way == "off" and run.counts for one in run.served]
    return Targets(_USUAL * median(one.ttft for one in plain), _USUAL * median(one.tpot for one in plain))


def held(runs: Sequence[Run], recording: Recording, drafter: str, targets: Targets) -> list[Compared]:
    """All figures of all ways at one rate. runs: of which those with all drafts that count are the recorded ones."""
    recorded = [one for run in runs if run.way == "fixed" and run.counts for one in run.served]
    ours, theirs = (
        sorted((one.prompt_tokens, one.output_tokens) for one in some) for some in (recorded, recording.traces)
    )
    if ours != theirs:
        raise ValueError("these runs are not those that were recorded")
    found = []
    for way in WAYS:
        own = [run for run in runs if run.way == way]
        real = [run.served for run in own if run.counts]
        told = figures(_simulated(own, recording, Setting(way, drafter)), targets)
        each = [figures([served], targets) for served in real]
        for name, value in figures(real, targets).items():
            found.append(Compared(own[0].rate, way, name, value, told[name], tuple(one[name] for one in each)))
    return found


def _simulated(runs: Sequence[Run], recording: Recording, setting: Setting) -> list[list[Served]]:
    """The runs that count. One engine serves all of a rate, one run behind the other, as the real one did, whose
    planner begins anew at each rate."""
    coming, begins, recorded, next_at = list[Coming](), list[float](), 0, 0.0
    for run in runs:
        begins.append(next_at)
        next_at += _LONGER * max(one.ended for one in run.served) + _PAUSE_S
        for place, one in enumerate(run.served):
            at = begins[-1] + one.arrived
            coming.append(Coming(at, one.prompt_tokens, one.output_tokens, recorded + place))
        recorded += len(run.served) if run.counts else 0
    by_run: list[list[Served]] = [[] for _ in runs]
    for one in simulate(recording, setting, coming, recording.traces):
        by_run[bisect_right(begins, one.arrived) - 1].append(one)
    return [served for served, run in zip(by_run, runs, strict=True) if run.counts]


def costs_off_by(run: Run, costs: RoundCosts, planning: Planning) -> Mapping[str, float]:
    """How much longer passes of a run are taken to last, in all, than they did: those with prompts and the others, and
    waits for the host, the planner's own time included where it plans."""
    if run.costs is None:
        return {}
    real: dict[str, float] = defaultdict(float)
    told: dict[str, float] = defaultdict(float)
    for seen in run.costs.passes:
        kind = "prompts" if seen.read_rows else "decodes"
        load = Load(seen.requests, seen.context)
        real[kind] += seen.count * seen.seconds
        told[kind] += seen.count * costs.pass_s(seen.rows, seen.read_rows, load, wake=seen.wake, along=seen.along)
    for wait in run.costs.waits:
        real["waits"] += wait.count * wait.seconds
        own_s = planning.seconds(wait.requests) if run.way == "planned" else 0.0
        told["waits"] += wait.count * (costs.wait_s(wait.requests, wait.rows, wait.newcomers) + own_s)
    return {kind: told[kind] / real[kind] - 1 for kind in real if real[kind]}
