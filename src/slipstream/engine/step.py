"""The engine, and its step: plan, draft, one target pass, verify, commit.

`Engine.step` is the whole algorithm, for every device and every caller: the library, the server, `bench` and `audit`.
What differs between devices is behind `Backend`. One thread calls everything; `loop.py` has it.

Reading a result and delivering it are two stages. Reading takes tokens and lengths, and comes before the next launch if
that depends on them. Delivering makes texts, finds ends and reports to callers, some 25 us a request: it comes after
the launch, while the device works. Answers that end or begin are delivered first, because an answer that ends
leaves its place to another, and a first token is waited for.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch

from slipstream.core.errors import Aborted, InvalidRequest, NumericError, RequestError, TimedOut
from slipstream.core.outputs import FinishReason, Snapshot
from slipstream.core.verdict import Verdict
from slipstream.drafters.base import DeviceDrafter, Drafter, Services
from slipstream.engine.allowance import LONGEST_S, PromptAllowance
from slipstream.engine.backend import Backend, Parts
from slipstream.engine.config import EngineConfig
from slipstream.engine.counters import Counters, take_snapshot
from slipstream.engine.drafting import Drafting
from slipstream.engine.drafts import NO_PLAN, Plan
from slipstream.engine.emit import LogprobReader, emit
from slipstream.engine.flight import Flight, Member, StepTimes
from slipstream.engine.line import Admission
from slipstream.engine.memory import drafter_bytes
from slipstream.engine.requests import MemoryPlan
from slipstream.engine.schedule import Schedule, Scheduler
from slipstream.engine.state import Answer, Deadlines, Job, Phase
from slipstream.engine.text import Decoder
from slipstream.kernels.gpu.rows import RECENT
from slipstream.kv.pages import PageCopy, PagePool, PageTable
from slipstream.kv.prefix import PrefixStore
from slipstream.models.runner import Runner
from slipstream.models.taps import Taps, TapView
from slipstream.plan.types import Load
from slipstream.sampling.table import SamplingTable

FEW = 8
"""Requests of a step that are all delivered at once: the device hardly waits for so few."""

_FAILED = "the engine failed: {}: {}"
_NOTHING_USABLE = "the model gave no usable logits (NaN, or every token masked)"
_NOTHING_LEFT = (
    "structured_outputs: no token is left that the form and the other parameters allow (or the model gave NaN); change "
    "bad_words, or the form"
)


class StepListener(Protocol):
    """Hears of every step, on the engine's thread. Must be quick and change nothing."""

    def step(
        self, answers: Sequence[Answer], verdicts: Sequence[Verdict], kept: Sequence[int], times: StepTimes
    ) -> None:
        """A step was delivered. kept: tokens that each answer got before its end."""


@dataclass(frozen=True, slots=True)
class _Read:
    """A flight whose result the host has read: the members that still listen, and their verdicts."""

    flight: Flight
    members: tuple[Member, ...]
    verdicts: tuple[Verdict, ...]
    lasted_s: float  # by the host's clock, since the result of the step before it was there


@dataclass(frozen=True, slots=True)
class _Delivery:
    """A step of which some members are not delivered yet."""

    read: _Read
    kept: list[int]  # tokens that each member got
    left: tuple[int, ...]  # members that are not delivered, by number
    times: StepTimes


class Engine:
    """Runs requests to their end, several at a time. Not thread-safe: one thread calls everything."""

    def __init__(
        self,
        target: Runner,
        drafters: Mapping[str, Drafter],
        *,
        backend: type[Backend],
        default_drafter: str | None,
        auto: Sequence[str] = (),
        plan: MemoryPlan,
        config: EngineConfig,
        decoder: Decoder,
        **options: Any,
    ) -> None:
        """options: of the backend."""
        self.target, self.config, self.plan = target, config, plan
        self.pool = PagePool(plan.num_pages, config.page_size, _most_kept(plan.num_pages, target))
        self.prefixes = PrefixStore(self.pool) if config.prefix_caching and target.cuts_alike else None
        on_device = [drafter for drafter in drafters.values() if isinstance(drafter, DeviceDrafter)]
        target.tap(Taps.union([drafter.taps for drafter in on_device]))
        pages = plan.num_pages + backend.spare
        self.cache = target.new_cache(pages, config.page_size)
        self.sampling = SamplingTable(config.max_num_seqs + backend.spare, target.vocab_size, target.device)
        self.allowance = PromptAllowance(LONGEST_S[target.device.type])
        self.scheduler = Scheduler(
            self.pool,
            max_running=config.max_num_seqs,
            chunks=backend.chunk_rule(target, config),
            copy_pages=self._copy_pages,
            on_admit=self._admitted,
            on_release=self._released,
            prefixes=self.prefixes,
            allowance=self.allowance,
            ahead=max([drafter.reads_ahead for drafter in on_device], default=1),
        )
        self.drafting = Drafting(
            drafters,
            default_drafter,
            config.make_planner(target.device.type),
            vocab_size=target.vocab_size,
            device=target.device,
            draft_tokens=config.draft_tokens,
            max_rows=config.draft_rows,
            max_len=plan.max_model_len,
            reserve=self.scheduler.reserve_draft,
            auto=auto,
            places=plan.draft_places,
            decode=partial(decoder.decode, skip_special_tokens=False),
            strict=config.strict_drafter,
        )
        self.jobs: dict[str, Job] = {}
        self.tables: dict[str, PageTable] = {}
        self.counters = Counters()
        self.listener: StepListener | None = None
        self.admission = Admission(config.max_queue)
        self._deadlines = Deadlines()
        self._logprobs = LogprobReader(decoder)
        self._flights: deque[Flight] = deque()
        self._unfinished: _Delivery | None = None
        self._since = time.perf_counter()  # when the last result was there, or work began after a pause
        pass_tokens = config.pass_tokens(target.device.type)
        services = Services(self.pool, self.tables.__getitem__, self.sampling, pass_tokens, pages)
        features = self.cache.features
        for drafter in drafters.values():
            taps = drafter.taps if isinstance(drafter, DeviceDrafter) else None
            view = TapView.of(taps, target.taps, features) if taps and features is not None else None
            drafter.attach(replace(services, taps=view))
        self._drafter_bytes = {name: drafter_bytes(target, one, plan, config) for name, one in drafters.items()}
        self.backend = backend(
            Parts(
                target,
                self.cache,
                self.sampling,
                self.scheduler,
                self.drafting,
                self.prefixes,
                plan,
                config,
                self.counters,
            ),
            **options,
        )

    # --- what callers ask for

    @property
    def busy(self) -> bool:
        return bool(self.scheduler.running or self.scheduler.waiting or self._flights)

    def add(self, job: Job) -> None:
        """Take a job with its answers. Raises `InvalidRequest` if it can never run."""
        if job.id in self.jobs:
            raise InvalidRequest(f"request_id={job.id!r} is running already: choose another")
        self.plan.check_prompt(len(job.prompt_ids))
        self.jobs[job.id] = job
        for answer in job.answers:
            self.scheduler.add(answer)
        self._deadlines.add(job)

    def check_queue(self, coming: int) -> None:
        """Raise `QueueFull` if too many answers wait, `coming` included. Called from any thread."""
        scheduler = self.scheduler
        waiting = len(scheduler.waiting) + coming - scheduler.free_seats
        self.admission.check(waiting, len(scheduler.running))

    def snapshot(self) -> Snapshot:
        """State and counters. Called from any thread; nothing waits."""
        return take_snapshot(self.scheduler, self.drafting, self.counters, self.admission, self._drafter_bytes)

    def listen(self, listener: StepListener | None) -> None:
        """Report every step from now on to `listener`; None: to no one."""
        self._deliver_rest()  # a step belongs to the listener of its first part
        self.listener = listener

    def abort(self, job_id: str) -> None:
        """End a job now, also one that is in flight. Unknown ids are ended jobs: nothing to do."""
        job = self.jobs.get(job_id)
        if job is not None:
            self._end(job, "abort", Aborted("cancelled by its owner"))

    def expire(self) -> None:
        """End the jobs whose time is over. Every step begins with this."""
        for job in self._deadlines.over():
            if self.jobs.get(job.id) is job:
                limit = f"timeout_s={job.params.timeout_s:g}"
                self._end(job, "timeout", TimedOut(f"{limit}: its time was over before its answer was"))

    def fail_all(self, error: BaseException) -> None:
        """A step failed: end every job with this error, and be ready for new ones."""
        with suppress(Exception):  # that may be what failed
            self._deliver_rest()
        self._flights.clear()
        self.backend.recover()
        for job in list(self.jobs.values()):
            self._end(job, "error", RequestError(_FAILED.format(type(error).__name__, error)))
        self.drafting.forget_failure()
        if self.prefixes is not None:
            self.prefixes.clear()  # their pages may hold anything

    # --- the step

    @torch.inference_mode()
    def step(self) -> None:
        """Launch the next step, and deliver the last one (depth 1) or this one (depth 0)."""
        self.expire()
        if not self._flights:
            self.backend.rest()
            if not self.scheduler.running:
                self._since = time.perf_counter()
        drafts_wait, others_wait = self._must_wait()
        read = self._read_all() if drafts_wait or others_wait else []
        waiting_since = self._since if read and not others_wait else None
        if any(part.flight.reads_logits for part in read):
            read = self._deliver(read)  # the next pass overwrites the logits
        batch = self.scheduler.schedule()  # admit, preempt, take pieces of prompts
        if batch.refused:
            read = self._deliver(read)  # with all that their siblings got before
            self._report(batch.refused)
        if batch:
            plan, lagged = self._plan(batch)  # drafters, sizes, and the guesses of the host
            flight = self.backend.launch(batch, plan, lagged=lagged, waiting_since=waiting_since)
            self._flights.append(flight)  # draft, pass, choose, accept, commit
        self._deliver(read)
        while len(self._flights) > (self.backend.depth if batch else 0):
            self._deliver_first(self._read(self._flights.popleft()))
        if not self._flights:
            self._deliver_rest()

    def _must_wait(self) -> tuple[bool, bool]:
        """Whether the next step depends on what is in flight: for the guesses of host drafters, and for others."""
        running = [answer for answer in self.scheduler.running if answer.queued]
        drafts = self.drafting.waits(running)
        others = (
            self.pool.free_pages < len(running)  # near preemption: the exact state frees most
            or any(a.plain_next or a.reach >= self.plan.max_model_len or a.params.logprobs is not None for a in running)
            or any(a.constraint is not None for a in running)  # a mask depends on the tokens before it
        )
        return drafts, others

    def _plan(self, batch: Schedule) -> tuple[Plan, Mapping[str, Sequence[Answer]]]:
        """Plan the decodes of a step; also the requests, by device drafter, that it had to catch up on.

        What a drafter missed of a request is known on the host only: everything in flight is read first, and answers
        that have ended leave the batch.
        """
        decodes, following = batch.decodes, self.drafting.following
        if not decodes:
            return NO_PLAN, {}
        plan = self.drafting.plan(decodes, waits=not self.backend.depth)
        lagging = following.lagging(decodes, plan)
        if not lagging:
            return plan, {}
        self._deliver(self._read_all())
        alive = [i for i, answer in enumerate(decodes) if answer.phase is Phase.RUNNING]
        decodes[:], plan = [decodes[i] for i in alive], plan.only(alive)
        if not decodes:
            return NO_PLAN, {}
        lagging = following.lagging(decodes, plan)
        self.drafting.catch_up(lagging)
        for name in {name for answer in decodes for name in answer.drafters if name in answer.refused}:
            plan = plan.without(name)  # it failed to catch up
        return plan, lagging

    # --- reading

    def _read_all(self) -> list[_Read]:
        read = [self._read(flight) for flight in self._flights]
        self._flights.clear()
        return read

    def _read(self, flight: Flight) -> _Read:
        """Take a flight's tokens and lengths: all that the next step depends on."""
        self._deliver_rest()  # of the step before it
        flight.wait()
        now = time.perf_counter()
        lasted_s, self._since = now - self._since, now
        members: list[Member] = []
        verdicts: list[Verdict] = []
        longest = self.plan.max_model_len
        for member, verdict in zip(flight.members, flight.verdicts(), strict=True):
            if not member.listens:
                continue
            members.append(member)
            verdicts.append(verdict)
            answer, tokens, usable = member.answer, verdict.tokens, verdict.usable
            answer.queued -= 1
            answer.coming -= member.bound
            answer.tokens.extend(usable)
            if member.decodes:
                assert answer.table is not None
                answer.table.commit(len(tokens))
                answer.plain_next = not tokens
                self.backend.observe(answer, verdict)
            answer.closing = usable != tokens or not answer.end_ids.isdisjoint(usable) or len(answer.tokens) >= longest
        self.drafting.observe([member.answer for member in members], verdicts, flight.levels)
        return _Read(flight, tuple(members), tuple(verdicts), lasted_s)

    # --- delivering

    def _deliver(self, read: Sequence[_Read]) -> list[_Read]:
        """Deliver these steps to all members. Returns what is left: nothing."""
        for part in read:
            self._deliver_first(part)
            self._deliver_rest()
        return []

    def _deliver_first(self, read: _Read) -> None:
        """Deliver a step to the members that cannot wait."""
        assert self._unfinished is None, "an earlier step is not delivered"
        members = read.members
        at_once = len(members) <= FEW or read.flight.reads_logits or not self.backend.depth
        first: list[int] = []
        left: list[int] = []
        for number, member in enumerate(members):
            (first if at_once or _is_urgent(member) else left).append(number)
        delivery = _Delivery(read, [0] * len(members), tuple(left), self._observe_times(read))
        self._emit(read, first, delivery.kept)
        self._unfinished = delivery if left else None
        self._account(delivery, first)

    def _deliver_rest(self) -> None:
        """Deliver the step under way to the other members."""
        delivery, self._unfinished = self._unfinished, None
        if delivery is not None:
            self._emit(delivery.read, delivery.left, delivery.kept)
            self._account(delivery, delivery.left)

    def _emit(self, read: _Read, numbers: Sequence[int], kept: list[int]) -> None:
        """Append these members' tokens to their outputs, up to where each ends. Fills in `kept`."""
        members = [read.members[i] for i in numbers]
        verdicts = [read.verdicts[i] for i in numbers]
        logits = read.flight.logits()
        rows = read.flight.row_of(members) if logits is not None else None
        logprobs = self._logprobs.read([member.answer for member in members], verdicts, logits, rows)
        now = time.perf_counter()
        for number, member, verdict, entries in zip(numbers, members, verdicts, logprobs, strict=True):
            answer, usable = member.answer, verdict.usable
            before = answer.generated - len(usable)
            emit(answer, verdict, entries, self.plan.max_model_len)
            kept[number] = count = answer.generated - before
            if count:
                last, answer.last_token_at = answer.last_token_at, now
                self.counters.tokens(count, None if last is None else now - last)
            if usable != verdict.tokens and not answer.ended:
                self._end_unusable(answer)
            if answer.ended:
                timing = answer.output.timing
                self.admission.observe(timing.total_s - timing.queued_s)
                self.scheduler.release(answer)
            answer.closing = False

    def _end_unusable(self, answer: Answer) -> None:
        """The model gave no usable token: end the answer, and clear its pages, since 0 times NaN is NaN."""
        if answer.table is not None:
            if self.prefixes is not None:
                self.prefixes.forget(answer.table.pages)
            own = [p for p in answer.table.pages if self.pool.references(p) == 1]  # siblings share others
            self.cache.clear(own)
            self.drafting.clear_pages(own)
        held = answer.constraint
        why = _NOTHING_USABLE if held is None else held.failure or _NOTHING_LEFT
        answer.end("error", error=NumericError(why))

    def _observe_times(self, read: _Read) -> StepTimes:
        """What the step took, for the planner and for the share of prompts."""
        flight = read.flight
        times = self.backend.times(flight, read.lasted_s)
        if not flight.is_new:
            self.allowance.observe(flight.read_rows, times.total, times.read, bool(flight.decodes))
        if flight.steady:
            decodes = [i for i, member in enumerate(read.members) if member.decodes]
            self.drafting.observe_step(
                [read.members[i].answer for i in decodes],
                [read.verdicts[i] for i in decodes],
                times,
                Load(flight.decodes, sum([member.context for member in flight.members[: flight.decodes]])),
                waited=flight.hosts,
                is_tree=flight.is_tree,
            )
        self.counters.step(len(read.members), times)
        return times

    def _account(self, delivery: _Delivery, numbers: Sequence[int]) -> None:
        """Count these members' part of a step, and report to their callers."""
        read, times, kept = delivery.read, delivery.times, delivery.kept
        answers = [read.members[i].answer for i in numbers]
        totals, count = self.drafting.totals, max(1, len(read.members))
        share = times.draft / count, times.verify / count, times.host / count
        for i, answer in zip(numbers, answers, strict=True):
            self.counters.member(answer.output.speculation, read.verdicts[i], kept[i], share, totals)
        if self.listener is not None and delivery is not self._unfinished:
            whole = [member.answer for member in read.members]
            self.listener.step(whole, read.verdicts, kept, times)
        self._report(answers)

    def _report(self, answers: Sequence[Answer]) -> None:
        """Call the owners of these answers. Last of all: an output that is handed over must not change any more."""
        for job in dict.fromkeys([answer.job for answer in answers]):
            if all(answer.ended for answer in job.answers):
                self._close(job)
            else:
                job.report()

    # --- the life of a request

    def _end(self, job: Job, reason: FinishReason, error: RequestError) -> None:
        self._deliver_rest()
        for answer in job.answers:
            if not answer.ended:
                answer.end(reason, error=error)
            self.scheduler.release(answer)
        self._close(job)

    def _close(self, job: Job) -> None:
        self.jobs.pop(job.id, None)
        error = self.drafting.failure()
        for answer in job.answers:
            if error is not None and answer.output.finish_reason in ("stop", "length"):
                answer.end("error", error=RequestError(_FAILED.format(type(error).__name__, error)))
            self.counters.end(answer.output.finish_reason or "error")
        job.report()
        job.release()

    def _admitted(self, answer: Answer) -> None:
        assert answer.table is not None
        self.tables[answer.id] = answer.table
        if not answer.output.timing.queued_s:
            answer.output.timing.queued_s = time.perf_counter() - answer.job.arrived
            self.counters.prompt_tokens += answer.prompt_length
            if answer.leader is None:
                answer.job.cached_tokens = answer.found_pages * self.config.page_size
        self.sampling.add(
            answer.slot,
            answer.params,
            seed=answer.seed,
            sample=answer.sample,
            prompt=answer.job.prompt_ids,
            output=answer.tokens[answer.prompt_length :],
            end_ids=sorted(answer.end_ids),
            bad_words=answer.bad_words,
        )
        self.drafting.start(answer)
        self.backend.prefix_readers.resume(answer)

    def _released(self, answer: Answer) -> None:
        """The answer ended or was preempted: results of its flights are ignored from now on."""
        answer.epoch += 1
        answer.queued = answer.coming = 0
        answer.stride, answer.guessers = RECENT, ()
        answer.closing = answer.on_device = False
        self.backend.prefix_readers.note(answer)
        self.drafting.stop(answer)
        self.sampling.remove(answer.slot)
        self.tables.pop(answer.id, None)
        answer.behind.clear()
        answer.missed.clear()

    def _copy_pages(self, copies: list[PageCopy]) -> None:
        self.cache.copy_pages(copies)
        self.drafting.copy_pages(copies)


def _is_urgent(member: Member) -> bool:
    """Whether its answer may end with this step, or begins with it."""
    answer = member.answer
    params = answer.params
    return answer.closing or not member.decodes or bool(params.stop) or answer.generated >= params.max_tokens


def _most_kept(num_pages: int, target: Runner) -> int:
    """Pages kept for prompts to come. On a CPU, where a page takes no memory before it is written, not all of them."""
    return num_pages if target.device.type == "cuda" else num_pages // 4
