"""The engine of a GPU: rounds are queued without waiting, and the host reads their results one round behind.

The device knows where every request stands (`lanes.py`), so the next round can be queued before the host has seen what
the last one gave. What the host needs to know first makes it wait: drafts made on the host, and log probabilities. A
request that turns out to have ended is in one round too many; what that round says of it is not listened to. Pages
that it gives back may be written by that round still, but whoever gets them writes to them later in the same queue.
Where nothing but drafts of the host keep the device waiting, its own drafts are begun meanwhile (`draft_ahead.py`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from slipstream.core.draft import Tree
from slipstream.core.verdict import NOBODY, Verdict
from slipstream.drafters.base import DeviceDrafter
from slipstream.engine.chunks import Chunk, ChunkRule, OwnChunks, piece_rows
from slipstream.engine.config import EngineConfig
from slipstream.engine.draft_ahead import DraftAhead
from slipstream.engine.draft_loops import DraftFailed, Drafts
from slipstream.engine.followers import QueuedFollowers
from slipstream.engine.lanes import Lanes
from slipstream.engine.listening import RoundTimes
from slipstream.engine.marks import Marks
from slipstream.engine.packing import FirstTokens, pack_chunks
from slipstream.engine.plans import Plan
from slipstream.engine.round_shape import RoundShape
from slipstream.engine.rounds import Machine, Round, Rounds
from slipstream.engine.scheduler import Schedule
from slipstream.engine.state import Answer, Crowd, Phase
from slipstream.engine.telling import TellingEngine
from slipstream.engine.tickets import CaughtUp, Guessed, Heard, Member, Ticket
from slipstream.kernels.gpu.rows import RECENT
from slipstream.models.batch import fetched
from slipstream.models.gpu import SHARED_ROWS, WIDE_ROWS, WIDE_SIZES
from slipstream.models.graphs import recorded
from slipstream.plan.types import Load
from slipstream.sampling.choose import choose
from slipstream.sampling.table import Features
from slipstream.verify.rejection import undrafted_choices


class QueuedEngine(TellingEngine):
    """An `Engine` whose decoding rounds run from static tensors on the device, one ahead of the host."""

    follow = QueuedFollowers
    spare = 1  # a lane and a page for what belongs to nobody

    def __init__(self, *args: Any, graphs: bool = True, progress: Any = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        max_pages = self.pool.pages_for(self.plan.max_model_len + 1)
        self.lanes = Lanes(self.config.max_num_seqs, max_pages, self.pool.num_pages, self.target.device)
        self._trash_slot = self.pool.num_pages * self.config.page_size
        machine = Machine(
            self.target, self.cache, self.sampling, self.lanes.state, self.config.page_size, self._trash_slot
        )
        drafters = {n: d for n, d in self.drafting.drafters.items() if isinstance(d, DeviceDrafter)}
        self.rounds = Rounds(machine, drafters, graphs=graphs, progress=progress, unrecorded=self.counters.unrecorded)
        if self.rounds.pool is not None:
            self.target.capture_prompts(self.cache, machine.trash_slot, self.rounds.pool)
            for drafter in drafters.values():
                drafter.capture_prompts(machine.trash_slot, self.rounds.pool)
        self._tickets: deque[Ticket] = deque()
        self._crowd = Crowd([], Features(), reads_logits=False)
        self._marks = Marks(has_clock=self.target.device.type == "cuda")
        self._heard_at: float | None = None  # since when the device waits for the host
        self._waits_for_drafts = False  # … and for nothing but drafts
        self._ahead = DraftAhead(
            self.drafting,
            self.lanes,
            self.scheduler.reserve_draft,
            self._marks.put,
            self.plan,
            self.counters,
        )
        self.drafting.planner.pad_passes()
        self._idle_since = time.perf_counter()

    @property
    def busy(self) -> bool:
        return super().busy or bool(self._tickets)

    def fail_all(self, error: BaseException) -> None:
        self._tickets.clear()  # nobody is left to hear
        self._marks.rest()
        self._ahead.drop()
        if self.target.device.type == "cuda":
            with suppress(RuntimeError):  # it may be the device that failed
                torch.cuda.synchronize()
        super().fail_all(error)

    @torch.inference_mode()
    def step(self) -> None:
        """Queue a round, and finish the one before it.

        Where the host must know a round's result to queue the next one, it reads it first and gives it out last, while
        the device is at work again.
        """
        self.expire()
        waits = self._must_wait()
        if waits and self._waits_for_drafts:
            self._draft_ahead()
        heard = self._hear_all() if waits else []
        self._heard_at = self._idle_since if heard else None
        if any(part.ticket.reads_logits for part in heard):
            self._tell(heard)  # the next round overwrites the logits
            heard = []
        schedule = self.scheduler.schedule()
        if schedule.refused:  # with all that they got before
            self._tell_rest()
            self._tell(heard)
            heard = []
            self._report(schedule.refused)
        if schedule:
            if not (self._tickets or waits):
                self._marks.rest()
                self._idle_since = time.perf_counter()
            self._tickets.append(self._queue(schedule))
        self._marks.give_back(self._ahead.drop())
        self._tell(heard)
        while len(self._tickets) > (1 if schedule else 0):
            self._tell_first(self._hear(self._tickets.popleft()))
        if not self._tickets:
            self._tell_rest()

    def _must_wait(self) -> bool:
        """Does the next round depend on something that the host has not read yet?"""
        running = [a for a in self.scheduler.running if a.queued]
        drafts = self.drafting.waits(running)
        others = (
            self.pool.free_pages < len(running)  # near preemption: the exact state frees most
            or any(a.doubted or a.reach >= self.plan.max_model_len or a.params.logprobs is not None for a in running)
            or any(a.constraint is not None for a in running)  # what it may choose depends on what it chose
        )
        self._waits_for_drafts = drafts and not others
        return bool(running) and (drafts or others)

    def _draft_ahead(self) -> None:
        """Let the device guess on behind the round under way, if those in it will most likely go on together."""
        run, members = self._tickets[-1].round, self._tickets[-1].members[: self._tickets[-1].decodes]
        decodes = [answer for answer in self.scheduler.running if answer.decoding and not answer.will_end]
        if run is not None and decodes == [m.answer for m in members] and all(m.listens for m in members):
            self._ahead.begin(run, decodes)

    def _hear_all(self) -> list[Heard]:
        heard = [self._hear(ticket) for ticket in self._tickets]
        self._tickets.clear()
        return heard

    def _queue(self, schedule: Schedule) -> Ticket:
        """Everything of a round that the device does, in order. Only prompts make it wait for what is queued."""
        members: list[Member] = []
        told = run = chosen = owners = None
        rows = 0
        drafts: Drafts = ()
        hosts, caught_up = tuple[str, ...](), tuple[CaughtUp, ...]()
        waited_s = None
        known = len(self.rounds), recorded.seconds
        ahead = None
        drafting = self._draft(schedule.decodes) if schedule.decodes else None
        begun = drafted = self._marks.put() if drafting is None else drafting.begun
        if drafting is not None:
            plan, run, caught_up, _, ahead = drafting
            drafted = self._marks.put()
            if self._heard_at is not None and self._waits_for_drafts:
                waited_s = time.perf_counter() - self._heard_at
            if run.shape.features.grammar:
                run.allow(self._allowed_rows(schedule.decodes, plan, run))
            run.verify()
            counts, drafts, hosts = plan.counts, plan.drafts, plan.hosts
            told = run.result(len(counts))
            chosen, owners = run.choices(), run.owners()
            rows = run.shape.rows  # with those that fill it up: they cost as much
            for answer, authors, count, deep in zip(schedule.decodes, plan.authors, counts, plan.depths, strict=True):
                members.append(Member.of(answer, authors, count, decodes=True))
                answer.stride, answer.guessers = 1 + deep, authors.names
        along = bool(self.drafting.reading_along(schedule.chunks))
        read = verified = self._marks.put()
        first, logits = self._read_prompts(schedule.chunks, members) if schedule.chunks else (None, None)
        if schedule.chunks:
            read = self._marks.put()
        marks = (begun, drafted, verified, read) if begun is not None else ()
        is_new = (len(self.rounds), recorded.seconds) != known
        is_timed = bool(schedule.decodes) and not is_new and (self._marks.has_clock or not schedule.chunks)
        return Ticket(
            tuple(members),
            len(schedule.decodes),
            told,
            first,
            run,
            rows,
            logits,
            marks,
            any(member.answer.params.logprobs is not None for member in members),
            is_timed and not caught_up,
            drafts,
            hosts,
            waited_s,
            chosen,
            owners,
            self.drafting.guessed_s if drafting is not None else 0.0,
            sum(chunk.rows for chunk in schedule.chunks),
            ahead=ahead,
            caught_up=() if schedule.chunks or is_new else caught_up,
            along=along,
            newcomers=schedule.newcomers,
            is_new=is_new,
            hoped=self.drafting.planner.expected_gain if drafting is not None else 1.0,
        )

    def _draft(self, decodes: list[Answer]) -> Guessed | None:
        """Guess on the host, then on the device. A drafter that raises there is dropped, and the round goes without.

        Takes those out of `decodes` of which it learns that they ended; None: all of them have.
        """
        self.lanes.place(decodes)
        plan = self.drafting.plan(decodes)
        following = self.drafting.following
        lagging = following.lagging(decodes, plan)
        if lagging:
            self._tell(self._hear_all())  # what their drafter missed, the host must know
            alive = [i for i, answer in enumerate(decodes) if answer.phase is Phase.RUNNING]
            decodes[:], plan = [decodes[i] for i in alive], plan.only(alive)
            if not decodes:
                return None
            lagging = following.lagging(decodes, plan)
            self.drafting.catch_up(lagging)
            for name in {name for answer in decodes for name in answer.drafters if name in answer.refused}:
                plan = plan.without(name)  # it could not
        self.lanes.send_pages(decodes)
        crowd, slots = self._crowd_of(decodes), [answer.slot for answer in decodes]
        longest = max([len(answer.tokens) + answer.coming for answer in decodes])
        is_tree = plan.merges or any(tree.tokens and not tree.is_chain for tree in plan.trees)
        is_tree = is_tree or self.drafting.makes_trees(plan.drafts)
        in_hand = self._ahead.loop_for(() if lagging else decodes)
        recent = following.recent(decodes, plan.drafts)
        while True:
            following.follows(decodes, plan)
            drafts = plan.drafts
            shape = RoundShape.of(
                plan.counts,
                longest,
                is_tree=is_tree,
                features=crowd.features,
                version=self.sampling.version_of(crowd.features),
                keeps_logits=crowd.reads_logits,
                tells_choices=self.drafting.read_choices(decodes),
                draws=crowd.features.rejection and self.drafting.tells_q(drafts),
                most_keys=self.plan.most_keys,
            )
            run = self.rounds.of(shape)
            run.load(slots, plan.trees, plan.shares)
            begun = self._marks.put()
            try:
                loop = run.draft(drafts, in_hand, recent) if drafts else None
            except DraftFailed as failed:
                self.drafting.fail(decodes, failed)
                plan = plan.without(str(failed))  # what the others guess stands
            else:
                caught_up = tuple([CaughtUp(name, len(theirs)) for name, theirs in lagging.items()])
                return Guessed(plan, run, caught_up, begun, self._ahead.settle(loop, plan.trees))

    def _allowed_rows(self, decodes: Sequence[Answer], plan: Plan, run: Round) -> Tensor:  # [R, W]
        """What each row may choose. Guesses of device drafters are read back first: the host follows grammars."""
        trees = run.drafted(len(decodes)) if plan.drafts else plan.trees
        return self.drafting.constraining.allowed(decodes, [len(tree) for tree in trees], trees.__getitem__)

    def _crowd_of(self, answers: list[Answer]) -> Crowd:
        if answers != self._crowd.answers:
            features = self.sampling.features([answer.slot for answer in answers])
            reads = any(answer.params.logprobs is not None for answer in answers)
            self._crowd = Crowd(list(answers), features, reads)
        return self._crowd

    def _chunk_rule(self, config: EngineConfig) -> ChunkRule:
        most = config.pass_tokens(self.target.device.type)
        shared = min(most, WIDE_SIZES[-1]) if self.target.shares_wide else 0
        self._own_chunks = OwnChunks(
            piece_rows(self.target.row_flops, most),
            WIDE_ROWS,
            SHARED_ROWS,
            shared,
            self.target.wide_grain,
            config.step_tokens(self.target.device.type),
        )
        return self._own_chunks

    def _read_prompts(self, chunks: Sequence[Chunk], members: list[Member]) -> tuple[Tensor | None, Tensor | None]:
        """Compute pending tokens, and choose the first token of those that have no more of them."""
        passes = self._own_chunks.passes(chunks)
        done = [read for part in passes if (read := self._read_chunks(part, members)) is not None]
        if not done:
            return None, None
        if len(done) == 1:
            return fetched(done[0].chosen), done[0].logits
        return fetched(torch.cat([part.chosen for part in done])), torch.cat([part.logits for part in done])

    def _read_chunks(self, chunks: Sequence[Chunk], members: list[Member]) -> FirstTokens | None:
        """One pass over pending tokens."""
        wide = self._own_chunks.is_wide(chunks)
        sizes = WIDE_SIZES if self._own_chunks.shares(chunks) else ()
        packed = pack_chunks(chunks, self.target.device, wide=wide, sizes=sizes, trash_slot=self._trash_slot)
        logits = self.target.forward(packed.batch, self.cache)
        self.drafting.read(chunks, packed.batch)
        for chunk in chunks:
            self.scheduler.commit(chunk)
            self.followers.note(chunk.answer)
        if not packed.completing:
            return None
        features = self.sampling.features([answer.slot for answer in packed.completing])
        masks = None
        if features.grammar:
            nothing = [0] * len(packed.completing)
            masks = self.drafting.constraining.allowed(packed.completing, nothing, lambda _: Tree())
        chosen = choose(logits, packed.rows, self.sampling, features, allowed=masks)
        if features.rejection:
            chosen = undrafted_choices(chosen, logits, packed.rows, self.sampling, features, masks)
        self.lanes.begin(packed.completing, chosen)
        self.sampling.commit(packed.rows.slots, chosen[:, None], torch.ones_like(chosen), features)
        members += [Member.of(answer, NOBODY, 0, decodes=False) for answer in packed.completing]
        return FirstTokens(chosen, logits)

    def _hear(self, ticket: Ticket) -> Heard:
        """Read a round's result, and let everybody know who needs it for the next round."""
        self._tell_rest()  # of the one before it
        ticket.wait()
        now = time.perf_counter()
        members: list[Member] = []
        verdicts: list[Verdict] = []
        longest = self.plan.max_model_len
        for member, verdict in zip(ticket.members, ticket.verdicts(), strict=True):
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
                answer.doubted = not tokens
                self.drafting.following.falls_behind(answer, verdict)
            answer.closing = usable != tokens or not answer.end_ids.isdisjoint(usable) or len(answer.tokens) >= longest
        lasted_s, self._idle_since = now - self._idle_since, now
        grown = {size.drafter: size.levels for size in ticket.drafts if size.levels}
        self.drafting.observe([member.answer for member in members], verdicts, grown)
        return Heard(ticket, tuple(members), tuple(verdicts), lasted_s)

    def _times(self, heard: Heard) -> RoundTimes:
        """How long the round took, for the planner too. Not while the device waits: the next plan does without."""
        ticket, lasted_s = heard.ticket, heard.lasted_s
        idle_s = ticket.idle_s if self._marks.has_clock else None  # elsewhere a round waits for its own pass anyway
        waited_s = 0.0 if idle_s is None else max(0.0, idle_s - ticket.guessed_s)
        waited_s = waited_s if ticket.hosts else 0.0
        shape = ticket.rows, ticket.read_rows, ticket.hoped, waited_s
        read_s = ticket.read_s
        if ticket.marks:
            draft_s, verify_s = ticket.draft_s, ticket.seconds(1) + ticket.seconds(2)
            lasted_s = self._marks.close(ticket)
            host_s = max(0.0, lasted_s - draft_s - verify_s)
            times = RoundTimes(
                host_s, draft_s, verify_s, *shape, read=read_s, along=ticket.along, newcomers=ticket.newcomers
            )
            self.drafting.observe_catch_up(ticket.caught_up, host_s)
        else:
            verify_s = max(0.0, lasted_s - ticket.guessed_s)
            times = RoundTimes(0.0, ticket.guessed_s, verify_s, *shape)
        timed_read_s = read_s if ticket.marks else None
        if not ticket.is_new:
            self.allowance.observe(ticket.read_rows, lasted_s, timed_read_s, bool(ticket.decodes))
        load = Load(ticket.decodes, sum([member.context for member in ticket.members[: ticket.decodes]]))
        if ticket.steady:
            self.drafting.observe_step(
                [member.answer for member in heard.members][: ticket.decodes],
                heard.verdicts[: ticket.decodes],
                times,
                load,
                lasted_s - read_s,
                waited=ticket.hosts,
                wait_s=waited_s,
                is_tree=self.drafting.makes_trees(ticket.drafts),
            )
            for name in ticket.hosts if idle_s is not None else ():
                self.drafting.planner.observe_wait(name, ticket.decodes, waited_s)
            for size in ticket.drafts:
                self.drafting.observe_draft(size, times.draft / len(ticket.drafts), ticket.decodes)
        return times

    def _released(self, answer: Answer) -> None:
        answer.epoch += 1
        answer.queued = answer.coming = 0
        answer.stride, answer.guessers = RECENT, ()
        answer.closing = answer.on_device = False
        super()._released(answer)
        answer.behind.clear()
        answer.missed.clear()
