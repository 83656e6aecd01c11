"""The engine: rounds of plan, draft, one target pass, verify, commit.

`Engine.step` is one round, and the whole algorithm. It is driven by one thread; `loop.py` lends it one.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from slipstream.core.draft import Draft
from slipstream.core.errors import Aborted, InvalidRequest, NumericError, RequestError, TimedOut
from slipstream.core.outputs import FinishReason, Snapshot
from slipstream.core.verdict import Verdict, Verdicts
from slipstream.drafters.base import DeviceDrafter, Drafter, Services
from slipstream.engine.admission import Admission
from slipstream.engine.allowance import LONGEST_S, PromptAllowance
from slipstream.engine.chunks import ChunkRule
from slipstream.engine.config import EngineConfig
from slipstream.engine.counters import Counters
from slipstream.engine.deadlines import Deadlines
from slipstream.engine.drafting import Drafting
from slipstream.engine.emit import emit
from slipstream.engine.followers import Followers
from slipstream.engine.listening import RoundListener, RoundTimes
from slipstream.engine.logprobs import Emitting, LogprobReader
from slipstream.engine.memory import drafter_bytes
from slipstream.engine.packing import PackedPass, pack
from slipstream.engine.requests import MemoryPlan
from slipstream.engine.scheduler import Schedule, Scheduler
from slipstream.engine.snapshots import take_snapshot
from slipstream.engine.state import Answer, Job
from slipstream.engine.text import Decoder
from slipstream.kv.cache import compaction
from slipstream.kv.pages import PageCopy, PagePool, PageTable
from slipstream.kv.prefix import PrefixStore
from slipstream.models.runner import Runner
from slipstream.models.taps import Taps, TapView
from slipstream.plan.types import Load
from slipstream.sampling.choose import choose
from slipstream.sampling.table import SamplingTable
from slipstream.verify.exact import verify_exact
from slipstream.verify.rejection import mixed_choices

_FAILED = "the engine failed: {}: {}"
_NOTHING_USABLE = "the model gave no usable logits (NaN, or every token masked)"
_NOTHING_LEFT = (
    "structured_outputs: no token is left that the form and the other parameters allow (or the model gave NaN); change "
    "bad_words, or the form"
)


class Engine:
    """Runs requests to their end, several at a time. Not thread-safe: one thread calls everything."""

    follow: type[Followers] = Followers
    spare = 0  # slots and pages beyond what requests can have

    def __init__(
        self,
        target: Runner,
        drafters: Mapping[str, Drafter],
        *,
        default_drafter: str | None,
        auto: Sequence[str] = (),
        plan: MemoryPlan,
        config: EngineConfig,
        decoder: Decoder,
    ) -> None:
        self.target = target
        self.config = config
        self.plan = plan
        self.pool = PagePool(plan.num_pages, config.page_size, _most_kept(plan.num_pages, target))
        self.prefixes = PrefixStore(self.pool) if config.prefix_caching and target.cuts_alike else None
        on_device = [drafter for drafter in drafters.values() if isinstance(drafter, DeviceDrafter)]
        target.tap(Taps.union([drafter.taps for drafter in on_device]))
        self.cache = target.new_cache(plan.num_pages + self.spare, config.page_size)
        self.sampling = SamplingTable(config.max_num_seqs + self.spare, target.vocab_size, target.device)
        self.allowance = PromptAllowance(LONGEST_S[target.device.type])
        self.scheduler = Scheduler(
            self.pool,
            max_running=config.max_num_seqs,
            chunks=self._chunk_rule(config),
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
        self.followers = self.follow(self.drafting, self.prefixes)
        self.jobs: dict[str, Job] = {}
        self._deadlines = Deadlines()
        self.counters = Counters()
        self.listener: RoundListener | None = None
        self.admission = Admission(config.max_queue)
        self.tables: dict[str, PageTable] = {}
        self._logprobs = LogprobReader(decoder)
        services = Services(
            self.pool,
            self.tables.__getitem__,
            self.sampling,
            config.pass_tokens(target.device.type),
            plan.num_pages + self.spare,
        )
        features = self.cache.features
        for drafter in drafters.values():
            taps = drafter.taps if isinstance(drafter, DeviceDrafter) else None
            view = TapView.of(taps, target.taps, features) if taps and features is not None else None
            drafter.attach(replace(services, taps=view))
        self._drafter_bytes = {name: drafter_bytes(target, one, plan, config) for name, one in drafters.items()}

    def _chunk_rule(self, config: EngineConfig) -> ChunkRule:
        return ChunkRule(config.pass_tokens(self.target.device.type))

    @property
    def busy(self) -> bool:
        return bool(self.scheduler.running or self.scheduler.waiting)

    def add(self, job: Job) -> None:
        """Take a job whose answers are made. Raises `InvalidRequest` where it can never run."""
        if job.id in self.jobs:
            raise InvalidRequest(f"request_id={job.id!r} is running already: choose another")
        self.plan.check_prompt(len(job.prompt_ids))
        self.jobs[job.id] = job
        for answer in job.answers:
            self.scheduler.add(answer)
        self._deadlines.add(job)

    def listen(self, listener: RoundListener | None, *, all_guesses: bool = False) -> None:
        """Tell this one of every round from now on; None: nobody. all_guesses: also those that cannot pay, which takes
        time that is else saved."""
        self.listener = self.drafting.listener = listener
        self.drafting.records = all_guesses

    def check_queue(self, coming: int) -> None:
        """Raise `QueueFull` where too many wait, with these who are on their way. Any thread may ask."""
        scheduler = self.scheduler
        waiting = len(scheduler.waiting) + coming - scheduler.free_seats
        self.admission.check(waiting, len(scheduler.running))

    def snapshot(self) -> Snapshot:
        """Where it stands, and what it has done so far. Any thread may ask, while the engine works on."""
        return take_snapshot(self.scheduler, self.drafting, self.counters, self.admission, self._drafter_bytes)

    def abort(self, job_id: str) -> None:
        """End a job now, wherever it stands. Unknown ids are ended jobs: nothing to do."""
        job = self.jobs.get(job_id)
        if job is not None:
            self._end(job, "abort", Aborted("cancelled by its owner"))

    def expire(self) -> None:
        """End the jobs whose time is over. Every round begins with this."""
        for job in self._deadlines.over():
            if self.jobs.get(job.id) is job:
                limit = f"timeout_s={job.params.timeout_s:g}"
                self._end(job, "timeout", TimedOut(f"{limit}: its time was over before its answer was"))

    def _end(self, job: Job, reason: FinishReason, error: RequestError) -> None:
        for answer in job.answers:
            if not answer.ended:
                answer.end(reason, error=error)
            self.scheduler.release(answer)
        self._close(job)

    def fail_all(self, error: BaseException) -> None:
        """Something broke that is no request's fault: end everything, and be ready for what comes next."""
        for job in list(self.jobs.values()):
            self._end(job, "error", RequestError(_FAILED.format(type(error).__name__, error)))
        self.drafting.forget_failure()
        if self.prefixes is not None:
            self.prefixes.clear()  # who knows what is in them

    @torch.inference_mode()
    def step(self) -> None:
        """One round."""
        self.expire()
        started = time.perf_counter()
        schedule = self.scheduler.schedule()
        self._report(schedule.refused)
        if not schedule:
            return
        planned = time.perf_counter()
        drafted = self.drafting.propose(schedule.decodes)
        proposed = time.perf_counter()
        features = self.sampling.features([a.slot for a in schedule.decodes] + [c.answer.slot for c in schedule.chunks])
        packed = pack(schedule.decodes, schedule.chunks, drafted.draft, paths=features.penalties or features.bad_words)
        logits = self.target.forward(packed.batch, self.cache)
        draft = drafted.draft.extended(len(packed.emitting) - len(schedule.decodes))
        allowed = self._allowed(packed, draft) if features.grammar else None
        chosen = choose(logits, packed.rows, self.sampling, features, allowed=allowed)
        choices = packed.choices(chosen)
        if features.rejection:
            choices = mixed_choices(
                choices, logits, packed.rows, packed.row_of, draft, self.sampling, features, allowed=allowed
            )
        verdicts = verify_exact(draft, choices)
        wanted = choices if self.drafting.read_choices(schedule.decodes) else None
        told = self._commit(schedule, packed, draft, verdicts, wanted)
        told[: len(schedule.decodes)] = map(Verdict.by, told, drafted.authors)
        verified = time.perf_counter()
        for answer, verdict in zip(packed.emitting, told, strict=True):
            answer.tokens.extend(verdict.usable)
        kept = self._emit(packed, told, logits)
        host = planned - started + time.perf_counter() - verified
        read_rows = sum(chunk.rows for chunk in schedule.chunks)
        rows = packed.batch.num_rows - read_rows
        hoped = self.drafting.planner.expected_gain
        times = RoundTimes(host, proposed - planned, verified - proposed, rows, read_rows, hoped)
        self.allowance.observe(read_rows, times.draft + times.verify + times.host, None, bool(schedule.decodes))
        self._account(schedule, packed, told, kept, times)
        self._report(packed.emitting)

    def _allowed(self, packed: PackedPass, draft: Draft) -> Tensor:  # [R, W]
        """What each row may choose, by the grammars of those that have one."""
        return self.drafting.constraining.allowed(packed.emitting, draft.counts.tolist(), draft.tree)

    def _commit(
        self,
        schedule: Schedule,
        packed: PackedPass,
        draft: Draft,
        verdicts: Verdicts,
        choices: Tensor | None,
    ) -> list[Verdict]:
        """Keep the accepted rows in the cache; tell the host and the drafters."""
        if not draft.is_chain:
            moves = compaction(packed.slot_of_row, verdicts.path, verdicts.accepted)
            self.cache.move(moves.src, moves.dst)
        told = verdicts.told([answer.id for answer in packed.emitting], draft.counts, choices)
        emitted = [(a.slot, len(v.tokens)) for a, v in zip(packed.emitting, told, strict=True)]
        state = torch.tensor(emitted, dtype=torch.int64)  # of none, too
        slots, lengths = state.view(-1, 2).to(verdicts.tokens.device).unbind(1)
        self.sampling.commit(slots, verdicts.tokens, lengths)
        for answer, verdict in zip(schedule.decodes, told, strict=False):
            assert answer.table is not None
            answer.table.commit(1 + verdict.accepted if verdict.tokens else 0)
            answer.doubted = not verdict.tokens
        for chunk in schedule.chunks:
            self.scheduler.commit(chunk)
        return told

    def _emit(self, packed: Emitting, told: Sequence[Verdict], logits: Tensor | None) -> list[int]:
        """Give out what each answer got, up to where it ends; how many tokens each of them kept."""
        logprobs = self._logprobs.read(packed, told, logits)
        kept: list[int] = []
        now = time.perf_counter()
        for answer, verdict, rows in zip(packed.emitting, told, logprobs, strict=True):
            usable = verdict.usable
            before = answer.generated - len(usable)
            emit(answer, verdict, rows, self.plan.max_model_len)
            count = answer.generated - before
            kept.append(count)
            if count:
                last, answer.last_token_at = answer.last_token_at, now
                self.counters.tokens(count, None if last is None else now - last)
            if usable != verdict.tokens and not answer.ended:
                if answer.table is not None:  # siblings share some of its pages
                    if self.prefixes is not None:
                        self.prefixes.forget(answer.table.pages)
                    own = [p for p in answer.table.pages if self.pool.references(p) == 1]
                    self.cache.clear(own)
                    self.drafting.clear_pages(own)
                held = answer.constraint
                why = _NOTHING_USABLE if held is None else held.failure or _NOTHING_LEFT
                answer.end("error", error=NumericError(why))
            if answer.ended:
                timing = answer.output.timing
                self.admission.observe(timing.total_s - timing.queued_s)
                self.scheduler.release(answer)
        return kept

    def _report(self, answers: Sequence[Answer]) -> None:
        """Tell the callers. Last of all: an output that is handed over must not change any more."""
        for job in dict.fromkeys([answer.job for answer in answers]):
            if all(answer.ended for answer in job.answers):
                self._close(job)
            else:
                job.report()

    def _account(
        self,
        schedule: Schedule,
        packed: PackedPass,
        told: Sequence[Verdict],
        kept: Sequence[int],
        times: RoundTimes,
    ) -> None:
        """Time and acceptance, for the requests, the planner and the drafters."""
        if not schedule.chunks:
            load = Load(len(packed.emitting), sum([len(answer.tokens) for answer in packed.emitting]))
            lasted_s = times.draft + times.verify + times.host
            self.drafting.observe_step(packed.emitting, told, times, load, lasted_s)
        self._tell_listener(packed.emitting, told, kept, times)
        self._count_round(len(told), times)
        self._share_out(packed.emitting, told, kept, times, len(told))
        heard = [part for part in zip(packed.emitting, told, strict=True) if not part[0].ended]
        self.drafting.observe([answer for answer, _ in heard], [verdict for _, verdict in heard])

    def _count_round(self, requests: int, times: RoundTimes) -> None:
        """A round of so many is over."""
        counters = self.counters
        counters.rounds += 1
        counters.turns += requests
        counters.draft_s += times.draft
        counters.verify_s += times.verify
        counters.host_s += times.host

    def _tell_listener(
        self, answers: Sequence[Answer], told: Sequence[Verdict], kept: Sequence[int], times: RoundTimes
    ) -> None:
        if self.listener is not None:
            self.listener.round(answers, told, kept, times)

    def _share_out(
        self,
        answers: Sequence[Answer],
        told: Sequence[Verdict],
        kept: Sequence[int],
        times: RoundTimes,
        requests: int,
    ) -> None:
        """A round's share of time and acceptance for each of these, of so many requests that were in it."""
        counters, totals = self.counters, self.drafting.totals
        draft_s, verify_s, host_s = (seconds / max(requests, 1) for seconds in (times.draft, times.verify, times.host))
        for answer, verdict, count in zip(answers, told, kept, strict=True):
            stats = answer.output.speculation
            counters.generated_tokens += count
            stats.rounds += 1
            stats.emitted += count
            stats.draft_s += draft_s
            stats.verify_s += verify_s
            stats.host_s += host_s
            if not verdict.drafted:
                continue
            accepted = min(verdict.accepted, count)  # what a stop cut off was of no use
            stats.drafted += verdict.drafted
            stats.accepted += accepted
            counters.draft(verdict.drafted, accepted)
            for name in verdict.authors.names:
                drafted, right = verdict.counts(name)
                if drafted:
                    for theirs in (stats.of(name), totals[name]):
                        theirs.drafts += 1
                        theirs.drafted += drafted
                        theirs.accepted += min(right, count)

    def _close(self, job: Job) -> None:
        self.jobs.pop(job.id, None)
        error = self.drafting.failure()
        for answer in job.answers:
            if error is not None and answer.output.finish_reason in ("stop", "length"):
                answer.end("error", error=RequestError(_FAILED.format(type(error).__name__, error)))
            self.counters.end(answer.output.finish_reason or "error")
        job.report()
        job.part()

    def _admitted(self, answer: Answer) -> None:
        assert answer.table is not None
        self.tables[answer.id] = answer.table
        if not answer.output.timing.queued_s:
            answer.output.timing.queued_s = time.perf_counter() - answer.job.arrived
            self.counters.prompt_tokens += answer.prompt_length
            if answer.leader is None:
                answer.job.cached_tokens = answer.found * self.config.page_size
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
        self.followers.resume(answer)

    def _released(self, answer: Answer) -> None:
        self.followers.note(answer)
        self.drafting.stop(answer)
        self.sampling.remove(answer.slot)
        self.tables.pop(answer.id, None)

    def _copy_pages(self, copies: list[PageCopy]) -> None:
        self.cache.copy_pages(copies)
        self.drafting.copy_pages(copies)


def _most_kept(num_pages: int, target: Runner) -> int:
    """Pages kept for prompts to come. On a CPU a page takes no memory before it is written: so not all of them."""
    return num_pages if target.device.type == "cuda" else num_pages // 4
