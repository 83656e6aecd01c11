"""How long the planner takes on this machine: rounds that wait for drafters on the host wait for it, too.

Where they were recorded with fixed rules, which take no time, they did not. So requests are simulated from the
recording once by these and once with the planner, which does what it does in an engine, and the clock is looked at.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from itertools import count
from statistics import median

import numpy as np

from slipstream.bench.costs import RoundCosts
from slipstream.bench.outcome import Served
from slipstream.bench.recording import Planning, Recording
from slipstream.bench.replayed import Walk, chances
from slipstream.bench.replica import Replica, Setting
from slipstream.bench.simulate import drafters_of, traces_of

_CROWDS = (1, 1, 1, 4, 4, 8, 8, 16, 16, 32, 32)
"""Requests that run together, one crowd behind the other."""
_ENOUGH = 3
"""Rounds of as many requests that say what such a round takes."""


def with_planning(recording: Recording) -> Recording:
    """The recording with what the planner takes here and now, where rounds wait for the host, and waited without it."""
    drafters = drafters_of(recording)
    waits = recording.machine.queued and bool(recording.costs.waits)
    if not waits or recording.made.planner != "fixed" or not drafters:
        return recording
    fixed = _took(recording, Setting("fixed", drafters[0]))
    planned = _took(recording, Setting("planned", drafters[0]))
    return replace(recording, planning=_line({n: planned[n] - fixed[n] for n in fixed.keys() & planned.keys()}))


def _took(recording: Recording, setting: Setting) -> dict[int, float]:
    """By requests of a round that waits, what rules and planner take: the median, for it is other work that adds."""
    traces = traces_of(recording, setting.drafter)
    alphas, dice, turns = chances(traces), random.Random(0), count()
    engine = Replica(recording, RoundCosts(recording.costs, apart=True), setting, alphas)
    for crowd in _CROWDS:
        for _ in range(min(crowd, recording.machine.max_num_seqs)):
            trace = traces[next(turns) % len(traces)]
            request = Served(engine.busy_until, trace.prompt_tokens, trace.output_tokens)
            engine.add(request, Walk(trace, alphas, dice))
        while engine.load:
            engine.step(engine.busy_until)
    seen: dict[int, list[float]] = defaultdict(list)
    for requests, seconds in engine.deciding:
        seen[requests].append(seconds)
    return {requests: median(seconds) for requests, seconds in seen.items() if len(seconds) >= _ENOUGH}


def _line(longer: Mapping[int, float]) -> Planning:
    """longer: by requests."""
    if len(longer) < 2:
        return Planning(max((0.0, *longer.values())))
    request_s, round_s = np.polyfit(list(longer), list(longer.values()), 1)
    return Planning(float(round_s), float(request_s))
