"""One simulated engine: the real scheduler, planner and drafting rules, on recorded costs in place of models.

`Replica.step` is a round as `Engine.step` has it, without tensors: what takes time there is looked up here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch

from simulator.costs import RoundCosts
from simulator.effects import Wake
from simulator.recording import Recording
from simulator.replayed import NEVER, ReplayedDevice, Walk, Walks, made_prompt, replayed
from slipstream.bench.traffic import Served
from slipstream.core.draft import MAX_NODES, ROOT, Tree, merge_trees
from slipstream.core.errors import CapacityError
from slipstream.core.outputs import CompletionOutput, RequestOutput
from slipstream.core.params import SamplingParams, SpeculationParams
from slipstream.core.verdict import Authors, Verdict, author
from slipstream.engine.chunks import ChunkRule
from slipstream.engine.draft_loops import Drafts
from slipstream.engine.drafting import Drafting
from slipstream.engine.followers import QueuedFollowers
from slipstream.engine.listening import RoundTimes
from slipstream.engine.odds import reach
from slipstream.engine.plans import Gathered, Plan
from slipstream.engine.scheduler import Scheduler
from slipstream.engine.state import Answer, Job, Phase
from slipstream.engine.text import TextStream
from slipstream.kv.pages import PagePool
from slipstream.plan.cost import filled
from slipstream.plan.planner import AdaptivePlanner, Planner
from slipstream.plan.types import Load

Speculation = Literal["off", "fixed", "planned"]


@dataclass(frozen=True, slots=True)
class Setting:
    """How a simulated engine speculates. draft_tokens: None: as the recorded engine was told, or the drafter's own.
    min_gain: as an engine's, where drafts are planned."""

    speculation: Speculation
    drafter: str | None = None
    draft_tokens: int | None = None
    min_gain: float = 1.0


class _TimedPlanner(AdaptivePlanner):
    """The real planner, told the recorded time of a draft where the engine would have measured one."""

    def __init__(self, slope: float, costs: RoundCosts, min_gain: float) -> None:
        super().__init__(slope, min_gain=min_gain)
        self._costs = costs
        self.requests = 1

    def observe_draft(self, drafter: str, size: int, seconds: float, requests: int) -> None:
        super().observe_draft(drafter, size, self._costs.draft_s(drafter, self.requests, size), self.requests)


class _Mute:
    """A simulation has no text."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        return ""


@dataclass(slots=True)
class Replica:
    """Runs requests in simulated time. Same recording, setting and requests: same result."""

    recording: Recording
    costs: RoundCosts
    setting: Setting
    alphas: Mapping[str, float] = field(default_factory=dict)
    busy_until: float = 0.0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    deciding: list[tuple[int, float]] = field(default_factory=list)
    """Of rounds that wait for the host: requests, and the seconds that rules and planner took here and now."""
    scheduler: Scheduler = field(init=False)
    drafting: Drafting = field(init=False)
    _followers: QueuedFollowers = field(init=False)
    _walks: Walks = field(init=False, default_factory=Walks)
    _wake: Wake = field(init=False, default_factory=Wake)
    _served: dict[str, Served] = field(init=False, default_factory=dict)
    _count: int = field(init=False, default=0)
    _verdicts: list[Callable[[], None]] = field(init=False, default_factory=list)
    """What became of guesses in the last round, which drafters and planner are to be told: behind the next plan, where
    rounds are queued and nobody waits."""
    _times: list[Callable[[], None]] = field(init=False, default_factory=list)
    """What it took: behind the next plan, where rounds are queued."""
    _late: list[Answer] = field(init=False, default_factory=list)
    """Came while a round ran whose successor was queued already: they join the one behind that."""

    def __post_init__(self) -> None:
        machine = self.recording.machine
        self.scheduler = Scheduler(
            PagePool(machine.num_pages, machine.page_size),
            max_running=machine.max_num_seqs,
            chunks=ChunkRule(machine.batch_tokens),
            copy_pages=lambda copies: None,
            on_admit=self._admit,
            on_release=self._release,
        )
        planner = (
            _TimedPlanner(machine.row_slope, self.costs, self.setting.min_gain)
            if self.setting.speculation == "planned"
            else Planner()
        )
        drafters = {kind.name: replayed(kind, self._walks) for kind in self.recording.drafters}
        self.drafting = Drafting(
            drafters,
            self.setting.drafter,
            planner,
            vocab_size=2 * NEVER,
            device=torch.device("cpu"),
            draft_tokens=machine.draft_tokens,
            max_rows=machine.draft_rows,
            max_len=machine.max_model_len,
            reserve=self.scheduler.reserve_draft,
        )
        self._followers = QueuedFollowers(self.drafting, prefixes=None)
        self.drafting.records = not machine.queued  # how often it asks then depends on a real clock
        on_device = [drafter for drafter in drafters.values() if isinstance(drafter, ReplayedDevice)]
        most = MAX_NODES if machine.draft_tokens is None else machine.draft_tokens
        sizes = {drafter.name: drafter.depth or min(reach(drafter), most) for drafter in on_device}
        planner.adopt(self.costs.known(machine.draft_rows, sizes))
        if machine.queued:
            planner.pad_passes()

    @property
    def load(self) -> int:
        """Requests that run or wait."""
        return len(self._served)

    def add(self, request: Served, walk: Walk) -> None:
        self._count += 1
        speculation = SpeculationParams(
            enabled=self.setting.speculation != "off",
            drafter=self.setting.drafter,
            draft_tokens=self.setting.draft_tokens,
        )
        most = request.output_tokens + walk.trace.spare
        params = SamplingParams(temperature=walk.trace.temperature, seed=0, max_tokens=most, speculation=speculation)
        prompt = made_prompt(request.prompt_tokens, walk.trace.overlap)
        job = Job(str(self._count), None, prompt, params, _nobody, arrived=request.arrived)
        answer = Answer(job, 0, 0, list(prompt), TextStream(_Mute(), ()), CompletionOutput(0))
        job.answers.append(answer)
        self._served[answer.id] = request
        self._walks.begin(answer.id, walk)
        if self.recording.machine.queued and (self._late or request.arrived < self.busy_until):  # nobody overtakes
            self._late.append(answer)
        else:
            self.scheduler.add(answer)

    def clear(self) -> None:
        """End all requests, however far they are."""
        self._take_in()
        for answer in [*self.scheduler.running, *self.scheduler.waiting]:
            answer.phase = Phase.ENDED
            self.scheduler.release(answer)
            self._walks.end(answer.id)
        self._served.clear()
        self._walks.unheard = {}
        self._verdicts.clear()
        self._times.clear()

    def _admit(self, answer: Answer) -> None:
        self.drafting.start(answer)
        if self.recording.machine.queued:
            self._followers.resume(answer)

    def _release(self, answer: Answer) -> None:
        self.drafting.stop(answer)
        answer.behind.clear()
        answer.missed.clear()

    def step(self, now: float) -> list[Served]:
        """One round that begins now and lasts to `busy_until`: the requests that it ends."""
        if not (self.scheduler.running or self.scheduler.waiting):
            self._take_in()  # nothing was queued
        schedule = self.scheduler.schedule()
        self._take_in()
        decodes, chunks = schedule.decodes, schedule.chunks
        if not schedule:
            raise CapacityError(
                f"a simulated request does not fit the {self.recording.machine.num_pages} cache pages of the recorded "
                "engine: record one with more --memory"
            )
        planner, queued = self.drafting.planner, self.recording.machine.queued
        if isinstance(planner, _TimedPlanner):
            planner.requests = max(1, len(decodes))
        begun = time.perf_counter()
        waits = queued and self.drafting.waits(decodes)  # by a look at those who rest, before anybody hears of a round
        self._walks.unheard = {}
        verdicts_of_last, times_of_last = self._verdicts, self._times
        self._verdicts, self._times = [], []
        if waits or not queued:
            _tell(verdicts_of_last)
        if not queued:
            _tell(times_of_last)
        plan = self.drafting.plan(decodes) if decodes or not queued else Gathered(0).plan()
        if waits:
            self.deciding.append((len(decodes), time.perf_counter() - begun))
        hoped = planner.expected_gain
        lagging = self.drafting.following.lagging(decodes, plan) if queued else {}
        if queued and not waits:  # it was planned while the device was still at work on the round before
            _tell(verdicts_of_last)
        if queued:
            _tell(times_of_last)
        if lagging:
            self.drafting.catch_up(lagging)
        if queued:
            self.drafting.following.follows(decodes, plan)
        drafts = [self._draft(plan, i, answer) for i, answer in enumerate(decodes)]
        on_device = [(size.drafter, size.levels or size.nodes) for size in plan.drafts]
        guesses = [*on_device, *self._costly(plan)]
        if not queued:  # else they are part of the wait
            guesses += self._free(plan)
        draft_s = sum([self.costs.draft_s(name, len(decodes), nodes) for name, nodes in guesses])
        rows = len(decodes) + sum(len(tree) for tree, _ in drafts)
        if queued and decodes:
            rows = filled(len(decodes) + sum(plan.counts))
        read_rows = sum(chunk.rows for chunk in chunks)
        load = Load(len(decodes), sum(len(answer.tokens) for answer in decodes))
        is_tree = self.drafting.makes_trees(plan.drafts)
        wake = self._wake.felt(rows + read_rows, now)
        along = bool(self.drafting.reading_along(chunks))
        verify_s = self.costs.pass_s(rows, read_rows, load, is_tree=is_tree, wake=wake, along=along)
        self._wake.passed(rows + read_rows, verify_s, now + verify_s)
        verdicts = [_judged(answer, *draft) for answer, draft in zip(decodes, drafts, strict=True)]
        completing = [chunk.answer for chunk in chunks if chunk.completes]
        for chunk in chunks:
            self.scheduler.commit(chunk)
        host_s = self.costs.host_s(len(decodes) + len(completing))
        waiting_s = self.costs.wait_s(len(decodes), rows, schedule.newcomers) if queued else 0.0
        if self.setting.speculation == "planned":
            waiting_s += self.recording.planning.seconds(len(decodes))
        wait_s = waiting_s if waits and plan.hosts else 0.0
        if lagging:  # what they missed must be known and read first
            late_s = sum(self.costs.catch_up_s(name, len(theirs)) for name, theirs in lagging.items())
            late_s += 0.0 if waits else waiting_s
            host_s += late_s
            if not chunks:
                self._times += [partial(planner.observe_catch_up, name, len(lagging[name]), late_s) for name in lagging]
        read_s = 0.0
        if chunks and decodes:
            read_s = max(0.0, verify_s - self.costs.pass_s(rows, 0, load, is_tree=is_tree))
        times = RoundTimes(host_s + wait_s, draft_s, verify_s, rows, read_rows, hoped, read=read_s)
        lasted_s = times.host + times.draft + times.verify
        self.busy_until = now + lasted_s
        self.rounds += 1
        done = self._emit(decodes, verdicts, completing, plan.drafts)
        if (queued and (lagging or not decodes)) or (chunks and not queued):
            return done  # a step like no other: what it took is not told
        for size in plan.drafts if queued else ():
            took = self.costs.draft_s(size.drafter, len(decodes), size.levels or size.nodes)
            self._times.append(partial(self.drafting.observe_draft, size, took, len(decodes)))
        if wait_s:
            self._times += [partial(planner.observe_wait, name, len(decodes), wait_s) for name in plan.hosts]
        told = partial(self.drafting.observe_step, decodes, verdicts, times, load, lasted_s - read_s)
        self._times.append(partial(told, waited=plan.hosts, wait_s=wait_s, is_tree=is_tree))
        return done

    def _take_in(self) -> None:
        for answer in self._late:
            self.scheduler.add(answer)
        self._late.clear()

    def _emit(
        self, decodes: Sequence[Answer], verdicts: Sequence[Verdict], completing: Sequence[Answer], drafts: Drafts
    ) -> list[Served]:
        done: list[Served] = []
        told = [*verdicts, *(Verdict(answer.id, (answer.generated,), 0, 0, ()) for answer in completing)]
        for answer, verdict in zip(decodes, verdicts, strict=True):
            assert answer.table is not None
            answer.table.commit(1 + verdict.accepted)
            self.drafted += verdict.drafted
            self.accepted += verdict.accepted
        running: list[tuple[Answer, Verdict]] = []
        if self.recording.machine.queued:
            self._walks.unheard = {verdict.request_id: len(verdict.tokens) for verdict in told}
        for answer, verdict in zip((*decodes, *completing), told, strict=True):
            served = self._served[answer.id]
            served.first_token = served.first_token or self.busy_until
            served.rounds += 1
            answer.tokens.extend(verdict.tokens)
            if answer.generated < served.output_tokens:
                running.append((answer, verdict))
                continue
            answer.phase = Phase.ENDED
            served.ended = self.busy_until
            self.scheduler.release(answer)
            self._walks.end(answer.id)
            done.append(self._served.pop(answer.id))
        grown = {size.drafter: size.levels for size in drafts if size.levels}
        self._verdicts.append(partial(self._observe, running, grown))
        return done

    def _observe(self, running: Sequence[tuple[Answer, Verdict]], grown: Mapping[str, int]) -> None:
        """Whoever ended or was preempted meanwhile does not listen any more."""
        heard = [(answer, verdict) for answer, verdict in running if answer.phase is Phase.RUNNING]
        for answer, verdict in heard if self.recording.machine.queued else ():
            self.drafting.following.falls_behind(answer, verdict)
        self.drafting.observe([answer for answer, _ in heard], [verdict for _, verdict in heard], grown)

    def _draft(self, plan: Plan, index: int, answer: Answer) -> tuple[Tree, Authors]:
        """A request's whole draft: the host drafters' tree, and what device drafters make of their shares."""
        tree, authors = plan.trees[index], plan.authors[index]
        for name, nodes in plan.shares[index]:
            drafter = self.drafting.drafters[name]
            assert isinstance(drafter, ReplayedDevice)
            guess = drafter.guess(answer.id, answer.generated, nodes, plan.levels.get(name, 0))
            if not tree.tokens:
                tree, authors = guess, author(name)
                continue
            merged = merge_trees((tree, guess), MAX_NODES)
            known = [n for n in authors.names if n != name][: len(authors.places) or 1]
            places = authors.places or (merged.places[0],)
            mixed = frozenset((name,)) if self.recording.machine.queued and drafter.makes_trees else frozenset()
            tree, authors = merged.tree, Authors((*known, name), (*places, merged.places[1]), mixed)
        return tree, authors

    def _costly(self, plan: Plan) -> list[tuple[str, int]]:
        """Host drafters whose guesses take time by their size."""
        found = []
        for name in plan.hosts:
            if self.drafting.guards[name].drafter.costly:
                deep = [len(t) for t, who in zip(plan.trees, plan.authors, strict=True) if name in who.names]
                found.append((name, max(deep, default=0)))
        return found

    def _free(self, plan: Plan) -> list[tuple[str, int]]:
        """Host drafters whose guesses take the same time, however many are taken."""
        asked = {name: self.drafting.guards[name].drafter for name in plan.hosts}
        said = self.setting.draft_tokens or self.recording.machine.draft_tokens
        return [(name, said or drafter.default_draft_tokens) for name, drafter in asked.items() if not drafter.costly]


def _judged(answer: Answer, tree: Tree, authors: Authors) -> Verdict:
    """Follow the tokens that are to come through the tree, as `verify_exact` does."""
    children = {edge: node for node, edge in enumerate(zip(tree.parents, tree.tokens, strict=True))}
    path: list[int] = []
    place = answer.generated
    while (node := children.get((path[-1] if path else ROOT, place + len(path)))) is not None:
        path.append(node)
    tokens = tuple(range(place, place + len(path) + 1))
    return Verdict(answer.id, tokens, len(tree), len(path), tuple(path)).by(authors)


def _tell(news: Sequence[Callable[[], None]]) -> None:
    for told in news:
        told()


def _nobody(output: RequestOutput) -> None:
    """Whom a simulated request tells."""
