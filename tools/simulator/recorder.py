"""Listens to an engine and keeps what a simulation needs: `slipstream bench --record FILE`."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median
from typing import TYPE_CHECKING

import numpy as np

from simulator.effects import Wake
from simulator.recording import (
    Costs,
    DrafterKind,
    DraftSeen,
    HostSeen,
    Machine,
    Made,
    Offer,
    PassSeen,
    Recording,
    Trace,
    WaitSeen,
)
from slipstream.core.draft import ROOT, Tree
from slipstream.core.verdict import Verdict
from slipstream.drafters.base import DeviceDrafter, Drafter, HostDrafter
from slipstream.engine.config import ROW_SLOPE
from slipstream.engine.listening import Offered, RoundTimes
from slipstream.engine.queued import QueuedEngine
from slipstream.engine.state import Answer

if TYPE_CHECKING:
    from slipstream.engine.engine import Engine

_IDLE = 0.5
"""A pause between two rounds that is longer than this part of a round is none of the engine's doing."""

_ACCIDENT = 8.0

_What = tuple[int, int, int, int, int, bool]
"""Kinds of passes: requests and rows of decodes, rows of prompts, about which context, about which wake, and whether
drafters read the prompts, too."""


@dataclass(slots=True)
class Guess:
    """A tree that was offered, or what a device drafter's came to."""

    position: int
    tree: Tree | None
    promises: Sequence[float] | None = None
    nodes: int = 0
    path: Sequence[int] = ()


@dataclass(slots=True)
class _Open:
    """A request that runs."""

    guesses: dict[str, list[Guess]] = field(default_factory=lambda: defaultdict(list))


class Recorder:
    """Notes rounds while it listens. On the engine's thread it computes hardly more than what a request comes to."""

    def __init__(self, engine: Engine) -> None:
        """engine: whose rounds it will hear of, once `Engine.listen` is told."""
        self._engine = engine
        self._requests: dict[str, _Open] = defaultdict(_Open)
        self._passes: dict[_What, list[tuple[int, float, float]]] = defaultdict(list)
        self._wake = Wake()
        self._drafts: dict[tuple[str, int, int], list[float]] = defaultdict(list)
        self._host: dict[int, list[float]] = defaultdict(list)
        self._waits: dict[tuple[int, int, int], list[float]] = defaultdict(list)
        self._queued = isinstance(engine, QueuedEngine)
        self._traces: list[Trace] = []
        self._ranks = True  # so far, of all trees of the device
        self._guessed = 0.0  # seconds of guesses on the host since a round was told: where they are queued, of the next
        self._apart = 0.0  # … of these, what is no part of a wait, where rounds are queued
        self._drew: list[tuple[str, int, float]] = []
        self._last: float | None = None  # when the round before ended, if others were to follow

    def offered(self, offer: Offered) -> None:
        self._guessed += offer.seconds
        if self._engine.drafting.guards[offer.drafter].drafter.costly:
            self._apart += offer.seconds
        self._drafts[offer.drafter, len(offer.answers), max(offer.caps)].append(offer.seconds)
        for answer, tree, promise in zip(offer.answers, offer.trees, offer.promises, strict=True):
            if tree.tokens:
                guess = Guess(answer.generated, tree, promise)
                self._requests[answer.id].guesses[offer.drafter].append(guess)

    def drew(self, drafter: str, nodes: int, seconds: float) -> None:
        self._drew.append((drafter, nodes, seconds))

    def round(
        self, answers: Sequence[Answer], verdicts: Sequence[Verdict], kept: Sequence[int], times: RoundTimes
    ) -> None:
        contexts = [len(a.tokens) for a, count in zip(answers, kept, strict=True) if a.generated > count]
        decodes, context = len(contexts), sum(contexts)
        wake = 0.0 if self._queued else self._felt(times)
        if times.read:
            self._passed(0, 0, times.read_rows, 0, times.read, along=times.along)
        if times.rows or not times.read:
            read_rows = 0 if times.read else times.read_rows
            self._passed(decodes, times.rows, read_rows, context, max(0.0, times.verify - times.read), wake)
        self._host[len(answers)].append(max(0.0, self._beside_s(times)))
        if times.waited:
            waited = min(times.waited, times.host)  # by the device's clock
            self._waits[decodes, times.newcomers, times.rows].append(waited)
        for drafter, nodes, seconds in self._drew if decodes else ():
            self._drafts[drafter, decodes, nodes].append(seconds)
        self._guessed, self._apart, self._drew = 0.0, 0.0, []
        for answer, verdict, count in zip(answers, verdicts, kept, strict=True):
            for name in verdict.authors.names:
                share = verdict.share(name)
                if name in self._engine.drafting.on_device and share.drafted:
                    path = share.path or range(share.accepted)  # which they were is not told of mixed trees
                    self._ranks &= name not in share.authors.mixed
                    guess = Guess(answer.generated - count, None, None, share.drafted, path)
                    self._requests[answer.id].guesses[name].append(guess)
            if answer.ended:
                self._finish(answer)

    def _passed(
        self,
        decodes: int,
        rows: int,
        read_rows: int,
        context: int,
        seconds: float,
        wake: float = 0.0,
        *,
        along: bool = False,
    ) -> None:
        about = int(2 * math.log2(1 + context))  # passes of one size are kept apart by context, or its cost is lost
        self._passes[decodes, rows, read_rows, about, round(wake), along].append((context, seconds, wake))

    def _felt(self, times: RoundTimes) -> float:
        """What a pass that has just ended felt of those before it."""
        now, rows = time.perf_counter(), times.rows + times.read_rows
        felt = self._wake.felt(rows, now - times.verify)
        self._wake.passed(rows, times.verify, now)
        return felt

    def _beside_s(self, times: RoundTimes) -> float:
        """Seconds of a round beside its pass, its drafts and the wait for them."""
        if self._queued:  # by the device's clock: a round lasts from the end of the one before
            return times.host - times.waited - self._apart
        now, known = time.perf_counter(), times.host + times.draft + times.verify
        pause = 0.0 if self._last is None else now - self._last - known
        whole = known + (pause if 0 < pause < _IDLE * known else 0.0)
        self._last = now if self._engine.scheduler.running or self._engine.scheduler.waiting else None
        return whole - times.verify - self._guessed - sum(seconds for _, _, seconds in self._drew)

    def _finish(self, answer: Answer) -> None:
        opened = self._requests.pop(answer.id, _Open())
        if answer.output.error is not None:
            return
        said = answer.tokens[answer.prompt_length :]
        offers = {
            name: tuple(offer_of(guess, said) for guess in _once(guesses)) for name, guesses in opened.guesses.items()
        }
        timing = answer.output.timing
        self._traces.append(
            Trace(
                answer.prompt_length,
                len(said),
                answer.job.arrived,
                timing.first_token_s,
                timing.total_s,
                tuple(answer.drafters),
                offers,
                answer.params.temperature,
                round(overlap(answer.tokens[: answer.prompt_length]), 3),
                max(0, answer.params.max_tokens - len(said)),
            )
        )

    @property
    def requests(self) -> int:
        """How many are kept so far."""
        return len(self._traces)

    def forget_requests(self, since: int) -> None:
        """Those behind the first ones were there for what they cost: they are no traffic. Ask when nothing runs."""
        del self._traces[since:]

    def recording(self, model: str, *, busy: bool, alone_s: Sequence[float] = ()) -> Recording:
        """Everything so far. Ask between rounds, or when nothing runs. busy, alone_s: see `Made`."""
        engine, config = self._engine, self._engine.config
        passes = [_passes_of(what, seen) for what, seen in sorted(self._passes.items())]
        drafts = [DraftSeen(*what, _typical(seen), len(seen)) for what, seen in sorted(self._drafts.items())]
        host = [HostSeen(requests, _typical(seen), len(seen)) for requests, seen in sorted(self._host.items())]
        waits = list(_waits_of(self._waits))
        machine = Machine(
            engine.pool.num_pages,
            config.page_size,
            engine.plan.max_model_len,
            config.max_num_seqs,
            config.pass_tokens(engine.target.device.type),
            config.draft_rows,
            config.draft_tokens,
            ROW_SLOPE[engine.target.device.type],
            self._queued,
        )
        begun = min((trace.arrived for trace in self._traces), default=0.0)
        traces = sorted(self._traces, key=lambda trace: trace.arrived)
        return Recording(
            model,
            machine,
            tuple(_kind(name, drafter) for name, drafter in engine.drafting.drafters.items()),
            Costs(tuple(passes), tuple(drafts), tuple(host), tuple(waits)),
            tuple(replace(trace, arrived=trace.arrived - begun) for trace in traces),
            Made(config.planner, busy, self._ranks, tuple(alone_s)),
        )


def _passes_of(what: _What, seen: Sequence[tuple[int, float, float]]) -> PassSeen:
    """seen: the context of each, its seconds, and what it felt of those before it."""
    contexts, seconds, wakes = zip(*seen, strict=True)
    return PassSeen(*what[:3], int(median(contexts)), _typical(seconds), len(seen), fmean(wakes), what[-1])


def _waits_of(waits: Mapping[tuple[int, int, int], Sequence[float]]) -> Iterator[WaitSeen]:
    """Those of one number of rows are few: what is usual is told by all of as many requests."""
    alike: dict[tuple[int, int], list[float]] = defaultdict(list)
    for (requests, newcomers, _), seen in waits.items():
        alike[requests, newcomers] += seen
    for (requests, newcomers, rows), seen in sorted(waits.items()):
        yield WaitSeen(requests, rows, newcomers, _typical(seen, alike[requests, newcomers]), len(seen))


def _typical(seconds: Sequence[float], alike: Sequence[float] = ()) -> float:
    """The mean: queues grow by it, stalls included. What took many times as long as others was an accident."""
    most = _ACCIDENT * median(alike or seconds)
    return fmean(min(one, most) for one in seconds)


def _once(guesses: Sequence[Guess]) -> list[Guess]:
    """The last guess at each place: one that was preempted guesses again."""
    return list({guess.position: guess for guess in guesses}.values())


def offer_of(guess: Guess, said: Sequence[int]) -> Offer:
    """What the answer says of a guess: also of nodes that were not drafted in the end."""
    tree = guess.tree
    if tree is None:
        return Offer(guess.position, guess.nodes, tuple(guess.path))
    children = {edge: node for node, edge in enumerate(zip(tree.parents, tree.tokens, strict=True))}
    path: list[int] = []
    for token in said[guess.position :]:
        node = children.get((path[-1] if path else ROOT, token))
        if node is None:
            break
        path.append(node)
    promises = None if guess.promises is None else tuple(round(chance, 3) for chance in guess.promises)
    return Offer(guess.position, len(tree), tuple(path), promises, None if tree.is_chain else tree.parents)


def _kind(name: str, drafter: Drafter) -> DrafterKind:
    if isinstance(drafter, HostDrafter):
        return DrafterKind(name, False, drafter.default_draft_tokens, drafter.costly, drafter.whole)
    assert isinstance(drafter, DeviceDrafter)
    levels = drafter.depth if drafter.makes_trees else 0
    width = getattr(drafter, "width", 0) if drafter.grows else 0
    return DrafterKind(
        name,
        True,
        drafter.default_draft_tokens,
        levels=levels,
        most_nodes=drafter.most_nodes,
        width=width,
        planned_draft_tokens=drafter.planned_draft_tokens,
    )


def overlap(prompt: Sequence[int]) -> float:
    """The part of the prompt's runs of three tokens that came before in it."""
    tokens = np.asarray(prompt[-4096:], dtype=np.uint64)
    if len(tokens) < 4:
        return 0.0
    runs = (tokens[:-2] * np.uint64(1_000_003) + tokens[1:-1]) * np.uint64(1_000_003) + tokens[2:]
    runs.sort()
    return int(np.count_nonzero(runs[1:] == runs[:-1])) / len(runs)
