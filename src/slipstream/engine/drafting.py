"""The drafters of an engine: they are asked here, planned for, told of verdicts, and dropped where they fail."""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar, cast, get_args

import torch

from slipstream.core.draft import Draft, Tree
from slipstream.core.errors import DrafterError
from slipstream.core.outputs import DrafterStats, Undrafted
from slipstream.core.verdict import Verdict
from slipstream.drafters import chosen_for, names_of
from slipstream.drafters.base import DeviceDrafter, Drafter, DraftRequest, HostDrafter
from slipstream.drafters.guard import DrafterGuard, Failure, FailureLog
from slipstream.engine.caps import NodeCaps
from slipstream.engine.chunks import Chunk
from slipstream.engine.constraining import Constraining, forced_tokens
from slipstream.engine.draft_loops import DraftFailed, Drafts, DraftSize
from slipstream.engine.following import Following
from slipstream.engine.gathering import Found, Gathering
from slipstream.engine.listening import Offered, RoundListener, RoundTimes
from slipstream.engine.plans import Drafted, Gathered, Group, Guesses, Plan
from slipstream.engine.reasons import COMPARED, Decode, Outcomes, note_plan
from slipstream.engine.room import DraftRoom
from slipstream.engine.state import Answer, Copied
from slipstream.kv.pages import PageCopy
from slipstream.models.batch import PassBatch
from slipstream.plan.planner import Planner
from slipstream.plan.types import Load, StepSeen, TreeSeen, Turn

T = TypeVar("T")


class Drafting:
    """Calls the drafters. Whatever they do, every decoding request gets a draft, if only an empty one."""

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
        """strict: raise what a drafter raises, instead of dropping it."""
        self.drafters = dict(drafters)
        self.default = default
        self.auto = tuple(auto)  # what requests mean by this name
        self.planner = planner
        self.totals = {name: DrafterStats() for name in drafters}  # of all requests since the engine began
        self.undrafted = dict.fromkeys(get_args(Undrafted), 0)  # rounds of a request without a drafter's guesses
        self._outcomes = Outcomes(self.undrafted, self.totals)
        self.drops = {name: Counter[str]() for name in drafters}  # by reason: answers that went on without it
        self.raised: DrafterError | None = None  # the last error of a drafter that failed requests of a strict engine
        self._log = FailureLog(strict=strict)
        hosts = {n: d for n, d in drafters.items() if isinstance(d, HostDrafter)}
        self.guards = {name: DrafterGuard(drafter, vocab_size, self._log) for name, drafter in hosts.items()}
        self.on_device = frozenset(n for n, d in drafters.items() if isinstance(d, DeviceDrafter))
        self.following = Following(drafters)
        self._reading = frozenset(n for n, d in drafters.items() if d.needs.choices)
        self._free = frozenset(n for n, d in drafters.items() if isinstance(d, HostDrafter) and not d.costly)
        self._wholes = frozenset(n for n, d in drafters.items() if isinstance(d, HostDrafter) and d.whole)
        self._grown: Mapping[str, int] = {}  # by drafter: levels of the trees that were planned last
        self._telling = frozenset(n for n, d in drafters.items() if d.needs.probabilities)
        self.guessed_s = 0.0  # what guesses on the host took in the last plan, of drafters that take time
        self.round_s = 0.0  # how long a round took lately: what a late drafter is measured by
        self.caution = ""  # what `why` says of every answer of this model
        self.listener: RoundListener | None = None
        self.records = False  # True: somebody wants all guesses, also those that cannot pay
        self.enabled = True  # False: no drafts for anybody, until it is True again
        self._resting: set[str] = set()  # host drafters that nobody waits for in this round
        self._device = device
        self.constraining = Constraining(vocab_size, device)
        self.room = DraftRoom(reserve)
        self._caps = NodeCaps(drafters, draft_tokens=draft_tokens, max_rows=max_rows, max_len=max_len, places=places)
        self._gathering = Gathering(drafters, self._caps, self.room, self.following, self.undrafted)
        self._decode = decode
        self._sources = {n: d.source for n, d in drafters.items() if isinstance(d, HostDrafter)}
        self._failures: dict[str, dict[str, Failure]] = {}  # by drafter and request: what its next draft will hear of

    def start(self, answer: Answer) -> None:
        """The answer is admitted: choose its drafter and tell it."""
        wanted = answer.params.speculation
        named = wanted.drafter or chosen_for(self.default, bool(answer.prediction))
        names = names_of(named, self.auto) if wanted.enabled and named else ()
        if not self.drafters.keys() >= set(names):
            names = ()
        forced = None
        if answer.constraint is not None and wanted.enabled and "grammar" in self.drafters:
            names = ("grammar", *[name for name in names if name != "grammar"])  # what is forced comes first
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
            self._guarded(name, [answer], functools.partial(self._voice(name).start, view))

    def stop(self, answer: Answer) -> None:
        """The answer ended or was preempted."""
        note_plan(answer, self.planner, self.room, self._decode, enabled=self.enabled)
        answer.output.speculation.caution = self.caution
        self.room.forget(answer)
        self.planner.forget(answer.id)
        for name in answer.drafters:
            self._guarded(name, [answer], functools.partial(self._voice(name).stop, answer.id))
            self._failures.get(name, {}).pop(answer.id, None)

    def copy_pages(self, copies: Sequence[PageCopy]) -> None:
        for drafter in self.drafters.values():
            if isinstance(drafter, DeviceDrafter):
                drafter.copy_pages(copies)

    def clear_pages(self, pages: Sequence[int]) -> None:
        for drafter in self.drafters.values():
            if isinstance(drafter, DeviceDrafter):
                drafter.clear_pages(pages)

    def propose(self, decodes: Sequence[Answer]) -> Drafted:
        """Drafts for the decoding requests. Reserves the pages that they need."""
        gathered = Gathered(len(decodes))
        guessed: dict[str, Guesses] = {}
        self._choose_hosts(decodes)
        for name, mine, budgets in self._gather(decodes, gathered, waits=True):
            asked = DraftSize(name, max(budgets), gathered.levels.get(name, 0))
            guessed[name] = Guesses(mine, self._ask(asked, [decodes[i] for i in mine], budgets))
        return gathered.drafted(guessed, self._device)

    def plan(self, decodes: Sequence[Answer]) -> Plan:
        """As `propose`, but what device drafters guess stays on the device: they are told how far to go."""
        gathered = Gathered(len(decodes))
        for _ in self._gather(decodes, gathered):
            pass
        return gathered.plan()

    def _gather(
        self, decodes: Sequence[Answer], gathered: Gathered, *, waits: bool = False
    ) -> Iterator[tuple[str, list[int], list[int]]]:
        """Ask the host drafters; yield each device drafter, its requests, and how many nodes it may guess for each.

        waits: nothing else goes on while host drafters guess.
        """
        self.check()
        self.guessed_s = 0.0
        self._grown = gathered.levels
        load = Load(len(decodes), sum([len(answer.tokens) for answer in decodes]))
        hosts, timed = self._groups(decodes)
        if self.enabled and self.planner.compares:
            self._compare(decodes)
            hosts, timed = [], []
        else:
            self._count_idle(decodes)
        for name, theirs in hosts:
            found = self._gathering.group(self.planner, name, theirs, decodes, gathered)
            if found is not None:
                self._ask_host(found, found.group.caps, gathered, waits=waits)
        for found, budget in self._gathering.budgets(self.planner, timed, decodes, gathered, load):
            name = found.group.drafter
            decision = self.planner.decision(name)
            self._outcomes.weigh(name, decision, found.group.answers, found.group.caps, budget.nodes)
            if name not in self.on_device:
                self._ask_host(found, budget.nodes, gathered, waits=False)
            elif any(nodes := self._gathering.granted(found, budget, gathered)):
                yield name, found.requests, nodes

    def _ask_host(self, found: Found, caps: Sequence[int], gathered: Gathered, *, waits: bool) -> None:
        gathered.hosts.append(found.group.drafter)
        for i, tree in zip(found.requests, self._trees(found.group, caps, waits=waits), strict=True):
            gathered.add(i, found.group.drafter, tree)

    def _compare(self, decodes: Sequence[Answer]) -> None:
        """All go without, so that there is something to compare drafted steps with."""
        for answer in decodes:
            self.undrafted["plain"] += len(answer.drafters)
            for name in answer.drafters:
                answer.decided.setdefault(name, COMPARED)

    def fail(self, answers: Sequence[Answer], failed: DraftFailed) -> None:
        """A device drafter failed inside a round: it drafts for none of these any more."""
        name = str(failed)
        self.drop([answer for answer in answers if name in answer.drafters], name, failed.__cause__ or failed)
        self.check()

    def drop(self, answers: Sequence[Answer], name: str, error: BaseException) -> None:
        """A drafter raised. A strict engine raises it between two steps, where nothing is half done."""
        failure = Failure.of(error)
        self._log.note(name, failure, error)
        for answer in answers:
            self._refuse(answer, name, failure)

    def read(self, chunks: Sequence[Chunk], batch: PassBatch) -> None:
        """The target computes these prompts: device drafters that will draft for one of them read along."""
        for name, mine in self.reading_along(chunks).items():
            drafter = cast(DeviceDrafter, self.drafters[name])
            self._guarded(name, mine, functools.partial(drafter.read, batch))

    def reading_along(self, chunks: Sequence[Chunk]) -> dict[str, list[Answer]]:
        """By device drafter: those of these for whom it will draft."""
        mine: dict[str, list[Answer]] = {}
        for chunk in chunks:
            for name in chunk.answer.drafters:
                if name in self.on_device and name not in chunk.answer.behind:
                    mine.setdefault(name, []).append(chunk.answer)
        return mine

    def catch_up(self, lagging: Mapping[str, Sequence[Answer]]) -> None:
        """These were decoded without drafts of theirs for a while: let device drafters read what they missed."""
        for name, answers in lagging.items():
            drafter = self.drafters[name]
            assert isinstance(drafter, DeviceDrafter)
            views = [cast(DraftRequest, answer.view) for answer in answers]
            known = [answer.behind.pop(name) for answer in answers]
            self._guarded(name, answers, functools.partial(drafter.catch_up, views, known))

    def observe_catch_up(self, caught_up: Sequence[tuple[str, int]], seconds: float) -> None:
        """By drafter: of how many requests it read what it had missed before a round, which took so much longer."""
        for name, requests in caught_up:
            self.planner.observe_catch_up(name, requests, seconds)

    def waits(self, answers: Sequence[Answer]) -> bool:
        """Is a host drafter asked for one of these in the next step, and so needs to know its tokens first?"""
        self._choose_hosts(answers)
        if not self.enabled or self.planner.compares:
            return False
        awake = {n for n, g in self.guards.items() if g.dropped is None and n not in self._resting}
        return any(name in awake and name not in a.refused for a in answers for name in a.drafters)

    def _choose_hosts(self, answers: Sequence[Answer]) -> None:
        """Which host drafters are asked in the next step."""
        names = {name for answer in answers for name in answer.drafters if name in self.guards}
        self._resting = {n for n in names if not (self.records or self.planner.asks(n, len(answers)))}

    def read_choices(self, answers: Sequence[Answer]) -> bool:
        """Does somebody who drafts for one of these want to know what the target chose at every node?"""
        return bool(self._reading) and any(not self._reading.isdisjoint(answer.drafters) for answer in answers)

    def _groups(self, decodes: Sequence[Answer]) -> tuple[list[tuple[str, list[int]]], list[tuple[str, list[int]]]]:
        """Drafters that may be asked and their requests: those whose guesses are free, and those that take time."""
        groups: dict[str, list[int]] = {}
        for i, answer in enumerate(decodes if self.enabled else ()):
            for name in answer.drafters:
                is_known = not answer.queued or name in self.on_device  # the host goes on from whole texts only
                if is_known and name not in answer.refused and name not in self._resting:
                    groups.setdefault(name, []).append(i)
        ordered = self._gathering.ordered(groups)
        free = [group for group in ordered if group[0] in self._free]
        return free, ordered[len(free) :]

    def _count_idle(self, decodes: Sequence[Answer]) -> None:
        """Who goes without a drafter before anybody is asked."""
        if not self.enabled:
            self.undrafted["off"] += len(decodes)
            return
        self.undrafted["off"] += sum([not answer.drafters for answer in decodes])
        self.undrafted["failed"] += sum([len(answer.refused) for answer in decodes])
        for name in self._resting:
            for answer in decodes:
                if name in answer.drafters and name not in answer.refused:
                    self._outcomes.skip(name, answer)

    def observe(
        self, answers: Sequence[Answer], verdicts: Sequence[Verdict], grown: Mapping[str, int] | None = None
    ) -> None:
        """Tell drafters and planner how a round ended. grown: levels of its trees; None: it was planned last."""
        grown = self._grown if grown is None else grown
        told: dict[str, tuple[list[Answer], list[Verdict]]] = {}
        for answer, verdict in zip(answers, verdicts, strict=True):
            authors, others = verdict.authors.names, verdict.undrafted() if verdict.drafted else verdict
            for name in answer.drafters:
                share = verdict.share(name) if name in authors else others
                if share.drafted:
                    # of a tree no more can be accepted than it has levels
                    reached = min(share.drafted, grown.get(name, share.drafted))
                    tree = TreeSeen(share.drafted, share.path) if self._gathering.levels[name] else None
                    self.planner.observe(name, answer.id, reached, share.accepted, tree)
                if name not in told:
                    told[name] = ([], [])
                theirs, parts = told[name]
                theirs.append(answer)
                parts.append(share)
        for name, (theirs, parts) in told.items():
            self._guarded(name, theirs, functools.partial(self._voice(name).observe, parts))

    def _ask(self, size: DraftSize, answers: Sequence[Answer], budgets: Sequence[int]) -> Draft | None:
        drafter = cast(DeviceDrafter, self.drafters[size.drafter])
        views = [cast(DraftRequest, answer.view) for answer in answers]
        ask = functools.partial(drafter.propose_trees, levels=size.levels) if size.levels else drafter.propose
        started = time.perf_counter()
        draft = self._guarded(size.drafter, answers, lambda: ask(views, budgets))
        self.check()
        self.observe_draft(size, time.perf_counter() - started, sum(1 for nodes in budgets if nodes))
        return None if draft is None else self.constraining.lawful_chains(answers, draft)

    def observe_step(
        self,
        answers: Sequence[Answer],
        verdicts: Sequence[Verdict],
        times: RoundTimes,
        load: Load,
        total_s: float,
        *,
        waited: Sequence[str] = (),
        wait_s: float = 0.0,
        is_tree: bool = False,
    ) -> None:
        """What a step took, as in `StepSeen`, and what it brought each request."""
        self.round_s = times.draft + times.verify
        parts = zip(answers, verdicts, strict=True)
        turns = [Turn(a.id, v.drafted, len(v.tokens), v.authors.names) for a, v in parts]
        pass_s = times.verify - times.read
        seen = StepSeen(load, turns, total_s, times.rows, pass_s, is_tree, waited, wait_s, times.read, times.hoped)
        self.planner.observe_step(seen)

    def observe_draft(self, size: DraftSize, seconds: float, requests: int) -> None:
        """A device drafter took this long to guess so much for each of some requests."""
        name, nodes, levels = size
        self.planner.observe_draft(name, levels or nodes, seconds, requests)
        if self.listener is not None:
            self.listener.drew(name, levels or nodes, seconds)

    def tells_q(self, drafts: Drafts) -> bool:
        """Does one of these device drafters tell what it draws from?"""
        return any(size.drafter in self._telling for size in drafts)

    def makes_trees(self, drafts: Drafts) -> bool:
        """Does one of these device drafters guess trees?"""
        return any(size.levels for size in drafts)

    def _trees(self, group: Group, caps: Sequence[int], *, waits: bool) -> list[Tree]:
        """What a host drafter guesses, cut to what pays and to what there are pages for."""
        name, answers, _, used, rows = group
        views, ids = [cast(DraftRequest, answer.view) for answer in answers], [answer.id for answer in answers]
        is_free, whole = name in self._free, name in self._wholes
        started = time.perf_counter()
        self.guards[name].drafter.least_chance = 0.0 if self.records else self.planner.least_chance(rows)
        proposals = self.guards[name].propose(views, caps, self.round_s)
        self._outcomes.fall_silent(name, answers, caps, proposals)
        took = time.perf_counter() - started
        if self.listener is not None:
            self.listener.offered(Offered(name, answers, caps, proposals.trees, proposals.promises, took))
        if not is_free and any(caps):
            self.planner.observe_draft(name, max(caps), took, sum(1 for most in caps if most))
            self.guessed_s += took
        failures = self._failures.setdefault(name, {})
        failures.update(proposals.failures)  # also of requests whose prompt is still being computed
        for answer in [answer for answer in answers if answer.id in failures]:
            self._refuse(answer, name, failures.pop(answer.id))
        if (dropped := self.guards[name].dropped) is not None:
            for answer in answers:
                self._refuse(answer, name, dropped)
        self.check()
        trees: Sequence[Tree] = proposals.trees
        promises: Sequence[Sequence[float] | None] = proposals.promises
        if not whole:
            lawful = self.constraining.lawful(answers, trees, promises)
            trees, promises = lawful.trees, lawful.promises
        if is_free:
            trees = self.planner.trim(name, ids, trees, promises, rows, whole=whole)
            self._outcomes.weigh(name, self.planner.decision(name), answers, proposals.trees, trees)
        source, fitting = self._sources[name], list(trees)
        for i, (answer, before, tree) in enumerate(zip(answers, used, trees, strict=True)):
            if tree.tokens:
                fitting[i] = self.room.tree(answer, before, tree)
                if source and fitting[i].tokens:
                    answer.copied = Copied(name, source, len(answer.tokens), fitting[i].tokens)
        if waits:
            self.planner.observe_wait(name, rows, time.perf_counter() - started)
        return fitting

    def _voice(self, name: str) -> DrafterGuard | Drafter:
        """Whom to call: a host drafter's guard, which takes care of its failures, or the device drafter itself."""
        return self.guards.get(name) or self.drafters[name]

    def _guarded(self, name: str, answers: Sequence[Answer], action: Callable[[], T]) -> T | None:
        """Call a drafter. One that raises is dropped for these requests, which go on undrafted."""
        try:
            return action()
        except Exception as error:
            self.drop(answers, name, error)
            return None

    def _refuse(self, answer: Answer, name: str, failure: Failure) -> None:
        """It drafts for this answer no more."""
        if name not in answer.refused:
            answer.refused[name] = failure.why
            answer.output.speculation.of(name).failures += 1
            self.totals[name].failures += 1
            self.drops[name][failure.reason] += 1

    def failure(self) -> DrafterError | None:
        """The error that `check` will raise in a strict engine. Waits for drafters that have threads of their own."""
        if self._log.strict:
            for guard in self.guards.values():
                guard.settle()
        self.raised = self._log.error or self.raised
        return self._log.error

    def forget_failure(self) -> None:
        """All requests that it could concern have failed."""
        self.failure()
        self._log.error = None

    def check(self) -> None:
        """Raise what a drafter did wrong since the last call, if the engine is strict."""
        if (error := self._log.error) is not None:
            self.raised, self._log.error = error, None
            raise error
