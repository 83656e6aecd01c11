"""The drafters of an engine: planned for, asked, told of verdicts, and dropped if they fail.

A drafter that is late, raises or returns nonsense is dropped for that request, which goes on. It is counted, logged
once, and named in the request's `why`. With `strict` its error is raised between two steps instead.
"""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar, cast, get_args

import torch

from slipstream.core.draft import Draft, Tree
from slipstream.core.errors import DrafterError
from slipstream.core.outputs import DrafterStats, Undrafted
from slipstream.core.verdict import Verdict
from slipstream.drafters import chosen_for, names_of
from slipstream.drafters.base import DeviceDrafter, Drafter, DraftRequest, HostDrafter
from slipstream.drafters.guard import DrafterGuard, Failure, FailureLog
from slipstream.engine.caps import DraftRoom, NodeCaps, Traits, judged_nodes
from slipstream.engine.chunks import Chunk
from slipstream.engine.constraining import Constraining, forced_tokens
from slipstream.engine.draft_loops import DraftFailed, Drafts, DraftSize
from slipstream.engine.drafts import Gathered, Plan
from slipstream.engine.flight import StepTimes
from slipstream.engine.following import Following
from slipstream.engine.reasons import COMPARED, Decode, Outcomes, note_plan
from slipstream.engine.state import Answer, Copied
from slipstream.kv.pages import PageCopy
from slipstream.models.batch import PassBatch
from slipstream.plan.planner import Planner
from slipstream.plan.types import Budget, Levels, Load, Offer, StepSeen, TreeSeen, Turn

T = TypeVar("T")


class _Group(NamedTuple):
    """The requests of a step that one drafter may guess for."""

    drafter: str
    requests: list[int]  # their numbers in the step
    answers: list[Answer]
    caps: list[int]  # most nodes of each
    used: list[int]  # nodes that other drafters gave already
    size: int  # requests of the step


class Drafting:
    """Calls the drafters. Whatever they do, every decoding request gets a draft, if only an empty one.

    default: the drafter of requests that name none. auto: the drafters that the name `auto` stands for. reserve,
    places: as in `DraftRoom` and `NodeCaps`. decode: token ids to text, for explanations.
    """

    def __init__(
        self,
        drafters: Mapping[str, Drafter],
        default: str | None,
        planner: Planner,
        *,
        vocab_size: int,
        device: torch.device,
        draft_tokens: int | None,
        max_rows: int,
        max_len: int,
        reserve: Callable[[Answer, int], int],
        auto: Sequence[str] = (),
        places: int | None = None,
        decode: Decode = lambda _: "",
        strict: bool = False,
    ) -> None:
        self.drafters = dict(drafters)
        self.default = default
        self.auto = tuple(auto)
        self.planner = planner
        self.enabled = True  # False: no drafts for any request until it is True again
        self.caution = ""  # a warning about the model, for the `why` of every answer
        self.traits = {name: Traits.of(drafter) for name, drafter in drafters.items()}
        self._device_names = frozenset(name for name, traits in self.traits.items() if traits.on_device)
        self._reading = frozenset(name for name, traits in self.traits.items() if traits.reads_choices)
        self.totals = {name: DrafterStats() for name in drafters}
        self.undrafted = dict.fromkeys(get_args(Undrafted), 0)  # by reason: requests without a drafter's guesses
        self.drops = {name: Counter[str]() for name in drafters}  # by reason: answers that went on without it
        self.raised: DrafterError | None = None  # the last error that failed the requests of a strict engine
        self._log = FailureLog(strict=strict)
        hosts = {name: drafter for name, drafter in drafters.items() if isinstance(drafter, HostDrafter)}
        self.guards = {name: DrafterGuard(drafter, vocab_size, self._log) for name, drafter in hosts.items()}
        self.following = Following(drafters)
        self.constraining = Constraining(vocab_size, device)
        self.room = DraftRoom(reserve)
        self._caps = NodeCaps(
            self.traits,
            draft_tokens=draft_tokens,
            judged_nodes=judged_nodes(list(drafters.values()), draft_tokens),
            max_rows=max_rows,
            max_len=max_len,
            places=places,
        )
        self._outcomes = Outcomes(self.undrafted, self.totals)
        self._decode = decode
        self._resting: set[str] = set()  # host drafters that the planner does not ask in this step
        self._failures: dict[str, dict[str, Failure]] = {}  # by drafter and request: not reported to the request yet
        self._step_s = 0.0  # the last step, by which the deadline of host drafters is set
        self._guessed_s = 0.0  # costly host drafters, in the plan under way

    # --- requests come and go

    def start(self, answer: Answer) -> None:
        """The answer was admitted: choose its drafters and start them."""
        wanted = answer.params.speculation
        named = wanted.drafter or chosen_for(self.default, bool(answer.prediction))
        names = names_of(named, self.auto) if wanted.enabled and named else ()
        if not self.drafters.keys() >= set(names):
            names = ()
        forced = None
        if answer.constraint is not None and wanted.enabled and "grammar" in self.drafters:
            names = ("grammar", *[name for name in names if name != "grammar"])
            forced = functools.partial(forced_tokens, answer)
        answer.drafters = names
        if not names:
            return
        if (barred := self._caps.barred(answer)) is not None:
            answer.decided = dict.fromkeys(names, barred)
        view = answer.view = DraftRequest(
            answer.id,
            answer.tokens,
            answer.prompt_length,
            answer.params,
            answer.slot,
            answer.prediction,
            answer.material,
            forced,
        )
        for name in names:
            guard = self.guards.get(name)
            if guard is not None and guard.dropped is not None:
                self._refuse(answer, name, guard.dropped)
            self._guarded(name, [answer], functools.partial(self._callee(name).start, view))

    def stop(self, answer: Answer) -> None:
        """The answer ended or was preempted."""
        note_plan(answer, self.planner, self.room, self._decode, enabled=self.enabled)
        answer.output.speculation.caution = self.caution
        self.room.forget(answer)
        self.planner.forget(answer.id)
        for name in answer.drafters:
            self._guarded(name, [answer], functools.partial(self._callee(name).stop, answer.id))
            self._failures.get(name, {}).pop(answer.id, None)

    def copy_pages(self, copies: Sequence[PageCopy]) -> None:
        for drafter in self._on_device():
            drafter.copy_pages(copies)

    def clear_pages(self, pages: Sequence[int]) -> None:
        for drafter in self._on_device():
            drafter.clear_pages(pages)

    def read(self, chunks: Sequence[Chunk], batch: PassBatch) -> None:
        """The target computes these prompts: device drafters that follow their requests read along."""
        following: dict[str, list[Answer]] = {}
        for chunk in chunks:
            for name in chunk.answer.drafters:
                if self.traits[name].on_device and name not in chunk.answer.behind:
                    following.setdefault(name, []).append(chunk.answer)
        for name, answers in following.items():
            self._guarded(name, answers, functools.partial(self._device(name).read, batch))

    def catch_up(self, lagging: Mapping[str, Sequence[Answer]]) -> None:
        """Let device drafters read what they missed of these requests."""
        for name, answers in lagging.items():
            views = [cast(DraftRequest, answer.view) for answer in answers]
            known = [answer.behind.pop(name) for answer in answers]
            self._guarded(name, answers, functools.partial(self._device(name).catch_up, views, known))

    # --- the plan of a step

    def waits(self, answers: Sequence[Answer]) -> bool:
        """Whether the next step asks a host drafter for one of these, and so must know their tokens first."""
        self._choose_hosts(answers)
        if not self.enabled or self.planner.compares:
            return False
        asked = {name for name, guard in self.guards.items() if guard.dropped is None and name not in self._resting}
        return any(name in asked and name not in a.refused for a in answers for name in a.drafters)

    def plan(self, decodes: Sequence[Answer], *, waits: bool) -> Plan:
        """Ask the host drafters for guesses, and decide the sizes of device drafters. Reserves pages for both.

        waits: the device is idle meanwhile, so a host drafter costs the time that it takes.
        """
        began = time.perf_counter()
        self.check()
        if waits:
            self._choose_hosts(decodes)
        self._guessed_s = 0.0
        gathered = Gathered(len(decodes))
        load = Load(len(decodes), sum([len(answer.tokens) for answer in decodes]))
        asked: list[tuple[str, list[int]]] = []
        if not self.enabled:
            self.undrafted["off"] += len(decodes)
        elif self.planner.compares:
            self._compare(decodes)
        else:
            self._count_undrafted(decodes)
            asked = self._asked(decodes)
        for name, mine in asked:
            if self.traits[name].is_free and (group := self._group(name, mine, decodes, gathered)) is not None:
                self._ask_host(group, group.caps, gathered, waits=waits)
        self._plan_timed([one for one in asked if not self.traits[one[0]].is_free], decodes, gathered, load)
        return gathered.plan(time.perf_counter() - began, self._guessed_s)

    def ask(self, size: DraftSize, answers: Sequence[Answer], budgets: Sequence[int]) -> Draft | None:
        """Let a device drafter guess now. None: it failed, and is dropped for these."""
        drafter = self._device(size.drafter)
        views = [cast(DraftRequest, answer.view) for answer in answers]
        ask = functools.partial(drafter.propose_trees, levels=size.levels) if size.levels else drafter.propose
        started = time.perf_counter()
        draft = self._guarded(size.drafter, answers, lambda: ask(views, budgets))
        self.check()
        self.observe_draft(size, time.perf_counter() - started, len(answers))
        return None if draft is None else self.constraining.lawful_chains(answers, draft)

    def _choose_hosts(self, answers: Sequence[Answer]) -> None:
        names = {name for answer in answers for name in answer.drafters if name in self.guards}
        self._resting = {name for name in names if not self.planner.asks(name, len(answers))}

    def _asked(self, decodes: Sequence[Answer]) -> list[tuple[str, list[int]]]:
        """The drafters that may be asked, in their order, and their requests."""
        groups: dict[str, list[int]] = {}
        for i, answer in enumerate(decodes):
            for name in answer.drafters:
                is_known = not answer.queued or name in self._device_names  # the host continues whole texts only
                if is_known and name not in answer.refused and name not in self._resting:
                    groups.setdefault(name, []).append(i)
        return sorted(groups.items(), key=lambda group: self.traits[group[0]].turn)

    def _group(self, name: str, mine: list[int], decodes: Sequence[Answer], gathered: Gathered) -> _Group | None:
        """Cap a drafter's nodes; None if it may not guess for any of its requests."""
        answers, used = [decodes[i] for i in mine], gathered.used_by(mine)
        caps = self._caps.of(name, answers, used, len(decodes), exclusive=self.planner.exclusive)
        self.undrafted["limited"] += caps.count(0)
        if 0 in caps:
            for answer, most in zip(answers, caps, strict=True):
                if not most and name not in answer.decided:
                    answer.decided[name] = self._caps.why_none(name, answer, len(decodes))
        return _Group(name, mine, answers, caps, used, len(decodes)) if any(caps) else None

    def _plan_timed(
        self, timed: Sequence[tuple[str, list[int]]], decodes: Sequence[Answer], gathered: Gathered, load: Load
    ) -> None:
        """Let the planner size the drafters whose guesses take time.

        An exclusive planner compares them all. Otherwise each has what the ones before it left.
        """
        if self.planner.exclusive:
            groups = [group for one in timed if (group := self._group(*one, decodes, gathered)) is not None]
            budgets = self.planner.plan([self._offer(group) for group in groups], load)
            for group, budget in zip(groups, budgets, strict=True):
                self._use(group, budget, gathered)
            return
        for one in timed:
            if (group := self._group(*one, decodes, gathered)) is not None:
                self._use(group, self.planner.plan([self._offer(group)], load)[0], gathered)

    def _offer(self, group: _Group) -> Offer:
        name, follows = group.drafter, self.following
        lagging = follows.lags(name, group.answers, group.size) if follows.keeps(name) else ()
        ids = [answer.id for answer in group.answers]
        return Offer(name, ids, group.caps, self.traits[name].levels, frozenset(lagging))

    def _use(self, group: _Group, budget: Budget, gathered: Gathered) -> None:
        """Ask a costly host drafter within its budget, or grant a device drafter its nodes."""
        name, traits = group.drafter, self.traits[group.drafter]
        self._outcomes.weigh(name, self.planner.decision(name), group.answers, group.caps, budget.nodes)
        if not traits.on_device:
            self._ask_host(group, budget.nodes, gathered, waits=False)
            return
        parts = zip(group.answers, group.used, budget.nodes, strict=True)
        nodes = [self.room.nodes(*part) for part in parts]
        for i, count in zip(group.requests, nodes, strict=True):
            gathered.grant(i, name, count)
        if budget.levels and any(nodes):
            gathered.levels[name] = _enough_levels(traits.levels, min(budget.levels, max(nodes)))

    def _ask_host(self, group: _Group, caps: Sequence[int], gathered: Gathered, *, waits: bool) -> None:
        """Add a host drafter's trees, cut to what pays and to what there are pages for."""
        name, traits, answers = group.drafter, self.traits[group.drafter], group.answers
        guard = self.guards[name]
        views, ids = [cast(DraftRequest, answer.view) for answer in answers], [answer.id for answer in answers]
        started = time.perf_counter()
        guard.drafter.least_chance = self.planner.least_chance(group.size)
        proposals = guard.propose(views, caps, self._step_s)
        took = time.perf_counter() - started
        gathered.hosts.append(name)
        self._outcomes.fall_silent(name, answers, caps, proposals)
        if not traits.is_free and any(caps):
            self.planner.observe_draft(name, max(caps), took, sum(1 for most in caps if most))
            self._guessed_s += took
        self._note_failures(name, answers, proposals.failures)
        trees: Sequence[Tree] = proposals.trees
        promises: Sequence[Sequence[float] | None] = proposals.promises
        if not traits.is_whole:
            trees, promises = self.constraining.lawful(answers, trees, promises)
        if traits.is_free:
            trees = self.planner.trim(name, ids, trees, promises, group.size, whole=traits.is_whole)
            self._outcomes.weigh(name, self.planner.decision(name), answers, proposals.trees, trees)
        for i, answer, before, tree in zip(group.requests, answers, group.used, trees, strict=True):
            if tree.tokens:
                fitting = self.room.tree(answer, before, tree)
                gathered.add(i, name, fitting)
                if traits.source and fitting.tokens:
                    answer.copied = Copied(name, traits.source, len(answer.tokens), fitting.tokens)
        if waits:
            self.planner.observe_wait(name, group.size, time.perf_counter() - started)

    def _note_failures(self, name: str, answers: Sequence[Answer], found: Mapping[str, Failure]) -> None:
        failures = self._failures.setdefault(name, {})
        failures.update(found)  # also of requests whose prompt is still being computed
        for answer in [answer for answer in answers if answer.id in failures]:
            self._refuse(answer, name, failures.pop(answer.id))
        if (dropped := self.guards[name].dropped) is not None:
            for answer in answers:
                self._refuse(answer, name, dropped)
        self.check()

    def _compare(self, decodes: Sequence[Answer]) -> None:
        """A plain step, to compare drafted ones with."""
        for answer in decodes:
            self.undrafted["plain"] += len(answer.drafters)
            for name in answer.drafters:
                answer.decided.setdefault(name, COMPARED)

    def _count_undrafted(self, decodes: Sequence[Answer]) -> None:
        """Count the requests that go without a drafter before any is asked."""
        self.undrafted["off"] += sum([not answer.drafters for answer in decodes])
        self.undrafted["failed"] += sum([len(answer.refused) for answer in decodes])
        for name in self._resting:
            for answer in decodes:
                if name in answer.drafters and name not in answer.refused:
                    self._outcomes.skip(name, answer)

    # --- what became of it

    def observe(self, answers: Sequence[Answer], verdicts: Sequence[Verdict], grown: Mapping[str, int]) -> None:
        """Tell drafters and planner the verdicts of a step. grown: levels of the trees of its device drafters."""
        told: dict[str, tuple[list[Answer], list[Verdict]]] = {}
        for answer, verdict in zip(answers, verdicts, strict=True):
            authors, others = verdict.authors.names, verdict.undrafted() if verdict.drafted else verdict
            for name in answer.drafters:
                share = verdict.share(name) if name in authors else others
                if share.drafted:
                    # no more nodes of a tree can be accepted than it has levels
                    reached = min(share.drafted, grown.get(name, share.drafted))
                    tree = TreeSeen(share.drafted, share.path) if self.traits[name].levels else None
                    self.planner.observe(name, answer.id, reached, share.accepted, tree)
                if name not in told:
                    told[name] = ([], [])
                theirs, parts = told[name]
                theirs.append(answer)
                parts.append(share)
        for name, (theirs, parts) in told.items():
            self._guarded(name, theirs, functools.partial(self._callee(name).observe, parts))

    def observe_step(
        self,
        answers: Sequence[Answer],
        verdicts: Sequence[Verdict],
        times: StepTimes,
        load: Load,
        *,
        waited: Sequence[str],
        is_tree: bool,
    ) -> None:
        """Tell the planner what a step took and brought. waited: host drafters that were asked."""
        self._step_s = times.draft + times.verify
        parts = zip(answers, verdicts, strict=True)
        turns = [Turn(a.id, v.drafted, len(v.tokens), v.authors.names) for a, v in parts]
        read_s = times.read or 0.0
        total_s, pass_s = times.total - read_s, times.verify - read_s
        gain, wait_s = times.expected_gain, times.waited
        seen = StepSeen(load, turns, total_s, times.rows, pass_s, is_tree, waited, wait_s, read_s, gain)
        self.planner.observe_step(seen)

    def observe_draft(self, size: DraftSize, seconds: float, requests: int) -> None:
        """Tell the planner what a device drafter took to guess for these requests."""
        self.planner.observe_draft(size.drafter, size.levels or size.nodes, seconds, requests)

    def read_choices(self, answers: Sequence[Answer]) -> bool:
        """Whether a drafter of one of these reads the target's choice at every node."""
        return bool(self._reading) and any(not self._reading.isdisjoint(answer.drafters) for answer in answers)

    def tells_q(self, drafts: Drafts) -> bool:
        """Whether one of these device drafters reports distributions."""
        return any(self.traits[size.drafter].tells_q for size in drafts)

    def makes_trees(self, drafts: Drafts) -> bool:
        return any(size.levels for size in drafts)

    # --- failures

    def fail(self, answers: Sequence[Answer], failed: DraftFailed) -> None:
        """Drop a device drafter that failed inside a step."""
        name = str(failed)
        self.drop([answer for answer in answers if name in answer.drafters], name, failed.__cause__ or failed)
        self.check()

    def drop(self, answers: Sequence[Answer], name: str, error: BaseException) -> None:
        """Drop a drafter that raised, for these answers."""
        failure = Failure.of(error)
        self._log.note(name, failure, error)
        for answer in answers:
            self._refuse(answer, name, failure)

    def check(self) -> None:
        """Raise a drafter's error since the last call, if the engine is strict."""
        if (error := self._log.error) is not None:
            self.raised, self._log.error = error, None
            raise error

    def failure(self) -> DrafterError | None:
        """The error that `check` will raise. Waits for drafters with threads of their own."""
        if self._log.strict:
            for guard in self.guards.values():
                guard.settle()
        self.raised = self._log.error or self.raised
        return self._log.error

    def forget_failure(self) -> None:
        """All requests that it could concern have failed."""
        self.failure()
        self._log.error = None

    def _guarded(self, name: str, answers: Sequence[Answer], action: Callable[[], T]) -> T | None:
        """Call a drafter. One that raises is dropped for these requests."""
        try:
            return action()
        except Exception as error:
            self.drop(answers, name, error)
            return None

    def _refuse(self, answer: Answer, name: str, failure: Failure) -> None:
        if name not in answer.refused:
            answer.refused[name] = failure.why
            answer.output.speculation.of(name).failures += 1
            self.totals[name].failures += 1
            self.drops[name][failure.reason] += 1

    def _callee(self, name: str) -> DrafterGuard | Drafter:
        """A host drafter's guard, which handles its failures, or the device drafter itself."""
        return self.guards.get(name) or self.drafters[name]

    def _device(self, name: str) -> DeviceDrafter:
        drafter = self.drafters[name]
        assert isinstance(drafter, DeviceDrafter)
        return drafter

    def _on_device(self) -> list[DeviceDrafter]:
        return [drafter for drafter in self.drafters.values() if isinstance(drafter, DeviceDrafter)]


def _enough_levels(choices: Sequence[Levels], levels: int) -> int:
    """The smallest choice with at least this many levels."""
    return next(one.deep for one in choices if one.deep >= levels)
