"""Traffic through simulated engines: what any number of replicas would do at any rate, far faster than real time."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence

from simulator.costs import RoundCosts
from simulator.recording import Recording, Trace
from simulator.replayed import Walk, chances
from simulator.replica import Replica, Setting
from simulator.traffic import Coming
from slipstream.bench.traffic import Served
from slipstream.core.errors import CapacityError, ConfigError
from slipstream.engine.config import EngineConfig

ENOUGH = 20
"""Recorded requests that a simulation should rest on."""
_STEADY = 1.15
"""Of what one answer takes, so many times as much later on: by less even machines that keep their speed differ."""


def drafters_of(recording: Recording) -> list[str]:
    """Who drafted in the recording, `A+B` where two did together; the one with most requests first."""
    counts: dict[str, int] = {}
    for trace in recording.traces:
        if trace.drafters:
            name = "+".join(trace.drafters)
            counts[name] = counts.get(name, 0) + 1
    return sorted(counts, key=lambda name: -counts[name])


def traces_of(recording: Recording, drafter: str | None) -> list[Trace]:
    """The requests that ran with this drafter; all of them where there is none to follow."""
    own = [trace for trace in recording.traces if "+".join(trace.drafters) == drafter]
    return own or list(recording.traces)


def doubts(recording: Recording, drafter: str | None, *, together: bool) -> list[str]:
    """Why what is simulated of a recording may not hold; nothing: there is no reason to think so.

    together: whether requests may come while others run.
    """
    found = []
    seats, made = recording.machine.max_num_seqs, recording.made
    if together and seats < EngineConfig().max_num_seqs:
        several = "s" if seats != 1 else ""
        found.append(
            f"the recorded engine serves {seats} request{several} at a time (max_num_seqs): record with --rate for one "
            "that serves more"
        )
    if drafter is not None and made.planner == "adaptive":
        found.append(
            "recorded with the adaptive planner: what drafters that it let rest would have guessed is not known; "
            "record with --planner fixed"
        )
    if made.busy:
        found.append("the machine was busy before it was recorded: do not trust what passes cost; record it again")
    if made.alone_s and max(made.alone_s) > _STEADY * min(made.alone_s):
        found.append(
            "the machine did not keep its speed while it was recorded: one answer alone took between "
            f"{min(made.alone_s):.3g} and {max(made.alone_s):.3g} s; record it again when nothing else runs, or "
            "elsewhere"
        )
    if not made.ranks and any(kind.levels for kind in recording.drafters):
        found.append(
            "trees were merged with guesses of others, of which ranks are not known: small trees seem too good; "
            "record each drafter alone"
        )
    count = len(traces_of(recording, drafter))
    if count < ENOUGH:
        several = "s were" if count != 1 else " was"
        found.append(f"only {count} request{several} recorded: record at least {ENOUGH} (--requests {ENOUGH})")
    return found


def simulate(
    recording: Recording,
    setting: Setting,
    traffic: Sequence[Coming],
    traces: Sequence[Trace],
    *,
    replicas: int = 1,
    seed: int = 0,
    on_served: Callable[[int], None] = lambda count: None,
) -> list[Served]:
    """Every request, as it fared. Each goes to the replica with the fewest; the same input gives the same result.

    on_served: is told how many more have their answers.
    """
    if replicas < 1:
        raise ConfigError(f"--replicas {replicas}: must be 1 or more")
    for coming in traffic:
        _check_fits(coming, recording)
    machine = recording.machine
    costs = RoundCosts(recording.costs, apart=machine.queued)
    alphas = chances(traces)
    engines = [Replica(recording, costs, setting, alphas) for _ in range(replicas)]
    served: list[Served] = []
    rounds: list[tuple[float, int]] = []  # when each engine that has work begins its next round; a heap
    idle = set(range(replicas))  # no requests; the round that ended the last one may still be under way
    waiting = sorted(traffic, key=lambda coming: coming.at)
    place = 0
    while place < len(waiting) or rounds:
        if place < len(waiting) and (not rounds or waiting[place].at <= rounds[0][0]):
            coming, place = waiting[place], place + 1
            index = min(range(replicas), key=lambda i: (engines[i].load, i))
            trace = traces[coming.like]
            walk = Walk(trace, alphas, random.Random(f"{seed} {place}"))
            engines[index].add(Served(coming.at, coming.prompt_tokens, coming.output_tokens), walk)
            if index in idle:
                idle.remove(index)
                heapq.heappush(rounds, (max(coming.at, engines[index].busy_until), index))
            continue
        now, index = heapq.heappop(rounds)
        engine = engines[index]
        ended = engine.step(now)
        if ended:
            served += ended
            on_served(len(ended))
        if engine.load:
            heapq.heappush(rounds, (engine.busy_until, index))
        else:
            idle.add(index)
    return served


def _check_fits(coming: Coming, recording: Recording) -> None:
    longest = recording.machine.max_model_len
    if coming.prompt_tokens + coming.output_tokens > longest:
        where = f"{coming.where}: " if coming.where else ""
        raise CapacityError(
            f"{where}a request of {coming.prompt_tokens} and {coming.output_tokens} tokens: the recorded engine has a "
            f"context of {longest}; record one with a longer --max-model-len, or leave such requests out"
        )
