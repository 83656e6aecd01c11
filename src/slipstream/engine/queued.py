"""The backend of a GPU: steps are queued without waiting, and the host reads their results one step behind.

The device knows where every request stands (`lanes.py`), so the next step can be queued before the host has read the
last one. A request that turns out to have ended is in one step too many, whose result for it is ignored. Pages that it
gives back may still be written by that step, but their next owner writes to them later in the same queue.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipstream.core.draft import MAX_NODES, Tree
from slipstream.core.verdict import NOBODY, Authors, Verdict
from slipstream.drafters.base import DeviceDrafter
from slipstream.engine.backend import Backend, Parts
from slipstream.engine.chunks import Chunk, OwnChunks, piece_rows
from slipstream.engine.config import EngineConfig
from slipstream.engine.draft_loops import DraftFailed
from slipstream.engine.drafts import Plan, resolved
from slipstream.engine.flight import Flight, Member, StepTimes
from slipstream.engine.lanes import Lanes
from slipstream.engine.packing import pack_chunks
from slipstream.engine.prefix_readers import QueuedPrefixReaders
from slipstream.engine.rounds import Machine, Round, Rounds, RoundShape
from slipstream.engine.schedule import Schedule
from slipstream.engine.state import Answer
from slipstream.models.batch import fetched
from slipstream.models.gpu import SHARED_ROWS, WIDE_ROWS, WIDE_SIZES
from slipstream.models.graphs import recorded
from slipstream.models.runner import Runner
from slipstream.sampling.choose import choose
from slipstream.sampling.table import Features
from slipstream.verify.rejection import undrafted_choices

_PATHS = tuple(tuple(range(nodes)) for nodes in range(MAX_NODES + 1))
"""The accepted nodes of chains."""


class Marks:
    """Events of the device's clock, which are used again and again. has_clock: False on a CPU, which has none."""

    def __init__(self, *, has_clock: bool) -> None:
        self.has_clock = has_clock
        self._free: list[Any] = []
        self._ended: Any = None  # behind the step that was timed last; None: the device was idle since

    def put(self) -> Any:
        """An event behind all that is queued; None without a clock."""
        if not self.has_clock:
            return None
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def lasted(self, marks: Sequence[Any]) -> float:
        """Seconds of a step with these events, since the step before it or, after a pause, since its own start.

        Called once for each step, in order. The events may be used again afterwards.
        """
        before, end = marks[0] if self._ended is None else self._ended, marks[-1]
        lasted_s = float(before.elapsed_time(end)) / 1e3
        self.rest()
        self._ended = end
        self._free += [mark for mark in _distinct(marks) if mark is not end]
        return lasted_s

    def rest(self) -> None:
        """The device is idle: the next step starts by itself."""
        if self._ended is not None:
            self._free.append(self._ended)
            self._ended = None


@dataclass(slots=True, kw_only=True)
class QueuedFlight(Flight):
    """A queued step: where its results will lie on the host."""

    round: Round | None  # None: only prompts are read
    told: NDArray[np.int64] | None  # [D, …] of the decodes, as in `VerdictTable`
    owners: NDArray[np.int64] | None  # [D, K]: drafters of each node, where drafts were merged on the device
    chosen: NDArray[np.int64] | None  # [N]: tokens chosen at every row of the decodes, where a drafter reads them
    first: Tensor | None  # [C] on the host: first tokens of the other members
    first_logits: Tensor | None  # [C, V]
    marks: tuple[Any, ...]  # events: begun, drafted, verified, prompts read; () without a clock
    waited_s: float | None  # how long the device waited for host drafters; None: it did not
    guessed_s: float  # the part of it that the planner times itself
    caught_up: Mapping[str, int]  # requests that device drafters caught up on before it

    def wait(self) -> None:
        if self.marks:
            self.marks[-1].synchronize()

    def logits(self) -> Tensor | None:
        if not self.reads_logits:
            return None
        decoded = None if self.round is None else self.round.logits
        return torch.cat([part for part in (decoded, self.first_logits) if part is not None])

    def verdicts(self) -> list[Verdict]:
        verdicts: list[Verdict] = []
        if self.told is not None and self.round is not None:
            is_tree, behind = self.round.shape.is_tree, 3 + self.round.shape.width
            chosen = [] if self.chosen is None else self.chosen.tolist()
            counts = self._counts()
            most = max(counts[: self.decodes])  # the round's shape may have room for far larger drafts
            paths = self.told[:, behind : behind + most].tolist() if is_tree else []
            row = 0
            for i, (member, line) in enumerate(zip(self.members, self.told[:, : 3 + most].tolist(), strict=False)):
                emitted, accepted = line[0], line[1]
                path = tuple(paths[i][:accepted]) if is_tree else _PATHS[accepted]
                begin, row = row, row + 1 + counts[i]
                choices = tuple(chosen[begin:row]) if emitted else ()
                tokens = tuple(line[2 : 2 + emitted])
                authors = self._authors(i, counts[i])
                verdicts.append(Verdict(member.answer.id, tokens, counts[i], accepted, path, choices, authors))
        if self.first is not None:
            for member, token in zip(self.members[self.decodes :], self.first.tolist(), strict=True):
                verdicts.append(Verdict(member.answer.id, (token,), 0, 0, ()))
        return verdicts

    def row_of(self, members: Sequence[Member]) -> Tensor:
        starts: dict[int, int] = {}
        before, counts = 0, self._counts()
        for index, member in enumerate(self.members):
            if self.round is not None and index == self.decodes:
                # the decodes' logits end with padding; without a request among them that asked they are not kept
                before = self.round.shape.rows if self.round.logits is not None else 0
            starts[id(member)] = before
            before += 1 + counts[index]
        first = torch.tensor([starts[id(member)] for member in members], dtype=torch.int64)
        return first[:, None] + torch.arange(max(counts, default=0) + 1)

    def seconds(self, part: int) -> float:
        """Between two neighbouring marks."""
        return self.marks[part].elapsed_time(self.marks[part + 1]) / 1e3 if self.marks else 0.0

    def _counts(self) -> list[int]:
        """Nodes of each member's draft, after `wait`."""
        if self.owners is None:
            return [member.drafted for member in self.members]
        decoded = np.count_nonzero(self.owners[: self.decodes], axis=1).tolist()
        return [*decoded, *[member.drafted for member in self.members[self.decodes :]]]

    def _authors(self, member: int, nodes: int) -> Authors:
        authors = self.members[member].authors
        if self.owners is None or self.round is None or len(authors.names) < 2:
            return authors
        return resolved(authors, self.owners[member, :nodes].tolist(), self.round.numbers, self.round.makes_trees)


class _Decoding(NamedTuple):
    """The decoding part of a step, as it was queued."""

    plan: Plan
    round: Round
    begun: Any  # a mark before the device's own draft
    drafted: Any  # a mark behind it
    waited_s: float | None


class _Reading(NamedTuple):
    """The prompts of a step, as their passes were queued."""

    chosen: Tensor  # [C] int64: the first tokens of those that are complete
    logits: Tensor  # [C, V]


class _Crowd(NamedTuple):
    """What requests that decode together ask for; found out again only if one joins or leaves."""

    answers: list[Answer]
    features: Features
    reads_logits: bool


class QueuedBackend(Backend):
    """graphs: capture rounds as CUDA graphs."""

    depth = 1
    spare = 1

    def __init__(self, parts: Parts, *, graphs: bool = True, progress: Any = None) -> None:
        self._parts = parts
        pool, target, config = parts.scheduler.pool, parts.target, parts.config
        max_pages = pool.pages_for(parts.plan.max_model_len + 1)
        self.lanes = Lanes(config.max_num_seqs, max_pages, pool.num_pages, target.device)
        self._trash_slot = pool.num_pages * config.page_size
        machine = Machine(target, parts.cache, parts.sampling, self.lanes.state, config.page_size, self._trash_slot)
        drafters = {n: d for n, d in parts.drafting.drafters.items() if isinstance(d, DeviceDrafter)}
        self.rounds = Rounds(machine, drafters, graphs=graphs, progress=progress, unrecorded=parts.counters.unrecorded)
        if self.rounds.pool is not None:
            target.capture_prompts(parts.cache, self._trash_slot, self.rounds.pool)
            for drafter in drafters.values():
                drafter.capture_prompts(self._trash_slot, self.rounds.pool)
        self.prefix_readers = QueuedPrefixReaders(parts.drafting, parts.prefixes)
        self._chunks = self.chunk_rule(target, config)
        self._crowd = _Crowd([], Features(), reads_logits=False)
        self._marks = Marks(has_clock=target.device.type == "cuda")
        self._captured = self._captures()
        parts.drafting.planner.pad_passes()

    @staticmethod
    def chunk_rule(target: Runner, config: EngineConfig) -> OwnChunks:
        most = config.pass_tokens(target.device.type)
        return OwnChunks(
            piece_rows(target.row_flops, most),
            WIDE_ROWS,
            SHARED_ROWS,
            min(most, WIDE_SIZES[-1]) if target.shares_wide else 0,
            target.wide_grain,
            config.step_tokens(target.device.type),
        )

    def rest(self) -> None:
        self._marks.rest()
        self._captured = self._captures()

    def _captures(self) -> tuple[int, float]:
        """Changes if something is captured or compiled."""
        return len(self.rounds), recorded.seconds

    def recover(self) -> None:
        self.rest()
        if self._parts.target.device.type == "cuda":
            with suppress(RuntimeError):  # it may be the device that failed
                torch.cuda.synchronize()

    def observe(self, answer: Answer, verdict: Verdict) -> None:
        self._parts.drafting.following.falls_behind(answer, verdict)

    def launch(
        self,
        batch: Schedule,
        plan: Plan,
        *,
        lagged: Mapping[str, Sequence[Answer]],
        waiting_since: float | None,
    ) -> QueuedFlight:
        drafting, decodes = self._parts.drafting, batch.decodes
        members: list[Member] = []
        told = chosen = owners = decoding = None
        if not decodes:
            begun = drafted = self._marks.put()
        else:
            decoding = self._draft(decodes, plan, waiting_since)
            plan, run, begun, drafted, _ = decoding
            if run.shape.features.grammar:
                run.allow(self._allowed(decodes, plan, run))
            run.verify()
            told, chosen, owners = run.result(len(decodes)), run.choices(), run.owners()
            for answer, authors, count, deep in zip(decodes, plan.authors, plan.counts, plan.depths, strict=True):
                members.append(Member.of(answer, authors, count, decodes=True))
                answer.stride, answer.guessers = 1 + deep, authors.names
        verified = read = self._marks.put()
        first, first_logits = None, None
        if batch.chunks:
            if (reading := self._read_prompts(batch.chunks, members)) is not None:
                first, first_logits = fetched(reading.chosen), reading.logits
            read = self._marks.put()  # behind every copy to the host: `wait` waits for this mark
        before, self._captured = self._captured, self._captures()
        is_new = self._captured != before  # since the last launch: also while it was planned or caught up on
        return QueuedFlight(
            members=tuple(members),
            decodes=len(decodes),
            drafts=plan.drafts,
            hosts=plan.hosts,
            rows=0 if decoding is None else decoding.round.shape.rows,  # padding costs as much as other rows
            read_rows=sum(chunk.rows for chunk in batch.chunks),
            expected_gain=drafting.planner.expected_gain if decodes else 1.0,
            steady=bool(decodes and not is_new and not lagged and (self._marks.has_clock or not batch.chunks)),
            is_new=is_new,
            is_tree=drafting.makes_trees(plan.drafts),
            reads_logits=any(member.answer.params.logprobs is not None for member in members),
            round=None if decoding is None else decoding.round,
            told=told,
            owners=owners,
            chosen=chosen,
            first=first,
            first_logits=first_logits,
            marks=() if begun is None else (begun, drafted, verified, read),
            waited_s=None if decoding is None else decoding.waited_s,
            guessed_s=plan.guessed_s,
            caught_up={} if batch.chunks or is_new else {name: len(theirs) for name, theirs in lagged.items()},
        )

    def _draft(self, decodes: Sequence[Answer], plan: Plan, waiting_since: float | None) -> _Decoding:
        """Bring the host's drafts to the device, and let device drafters guess there.

        One that raises is dropped, and the drafts of the others stand.
        """
        drafting, sampling = self._parts.drafting, self._parts.sampling
        self.lanes.place(decodes)
        self.lanes.send_pages(decodes)
        crowd, slots = self._crowd_of(decodes), [answer.slot for answer in decodes]
        longest = max([len(answer.tokens) + answer.coming for answer in decodes])
        is_tree = plan.merges or any(tree.tokens and not tree.is_chain for tree in plan.trees)
        is_tree = is_tree or drafting.makes_trees(plan.drafts)
        recent = drafting.following.recent(decodes, plan.drafts)
        while True:
            drafting.following.follows(decodes, plan)
            shape = RoundShape.of(
                plan.counts,
                longest,
                is_tree=is_tree,
                features=crowd.features,
                version=sampling.version_of(crowd.features),
                keeps_logits=crowd.reads_logits,
                tells_choices=drafting.read_choices(decodes),
                draws=crowd.features.rejection and drafting.tells_q(plan.drafts),
                most_keys=self._parts.plan.most_keys,
            )
            run = self.rounds.of(shape)
            run.load(slots, plan.trees, plan.shares)
            begun = self._marks.put()
            try:
                if plan.drafts:
                    run.draft(plan.drafts, recent)
            except DraftFailed as failed:
                drafting.fail(decodes, failed)
                plan = plan.without(str(failed))
            else:
                drafted = self._marks.put()
                waited_s = None if waiting_since is None else time.perf_counter() - waiting_since
                return _Decoding(plan, run, begun, drafted, waited_s)

    def _allowed(self, decodes: Sequence[Answer], plan: Plan, run: Round) -> Tensor:  # [R, W]
        """The tokens that grammars allow at each row. Reads the guesses of device drafters back first."""
        trees = run.drafted(len(decodes)) if plan.drafts else plan.trees
        return self._parts.drafting.constraining.allowed(decodes, [len(tree) for tree in trees], trees.__getitem__)

    def _crowd_of(self, answers: Sequence[Answer]) -> _Crowd:
        if list(answers) != self._crowd.answers:
            features = self._parts.sampling.features([answer.slot for answer in answers])
            reads = any(answer.params.logprobs is not None for answer in answers)
            self._crowd = _Crowd(list(answers), features, reads)
        return self._crowd

    def _read_prompts(self, chunks: Sequence[Chunk], members: list[Member]) -> _Reading | None:
        """Compute pending tokens, and choose the first token of each prompt that ends here; None: none does."""
        done = [read for part in self._chunks.passes(chunks) if (read := self._read_chunks(part, members)) is not None]
        if len(done) < 2:
            return done[0] if done else None
        return _Reading(torch.cat([part.chosen for part in done]), torch.cat([part.logits for part in done]))

    def _read_chunks(self, chunks: Sequence[Chunk], members: list[Member]) -> _Reading | None:
        """One pass over pending tokens."""
        parts = self._parts
        wide = self._chunks.is_wide(chunks)
        sizes = WIDE_SIZES if self._chunks.shares(chunks) else ()
        packed = pack_chunks(chunks, parts.target.device, wide=wide, sizes=sizes, trash_slot=self._trash_slot)
        logits = parts.target.forward(packed.batch, parts.cache)
        parts.drafting.read(chunks, packed.batch)
        for chunk in chunks:
            parts.scheduler.commit(chunk)
            self.prefix_readers.note(chunk.answer)
        if not packed.completing:
            return None
        features = parts.sampling.features([answer.slot for answer in packed.completing])
        masks = None
        if features.grammar:
            nothing = [0] * len(packed.completing)
            masks = parts.drafting.constraining.allowed(packed.completing, nothing, lambda _: Tree())
        chosen = choose(logits, packed.rows, parts.sampling, features, allowed=masks)
        if features.rejection:
            chosen = undrafted_choices(chosen, logits, packed.rows, parts.sampling, features, masks)
        self.lanes.begin(packed.completing, chosen)
        parts.sampling.commit(packed.rows.slots, chosen[:, None], torch.ones_like(chosen), features)
        members += [Member.of(answer, NOBODY, 0, decodes=False) for answer in packed.completing]
        return _Reading(chosen, logits)

    def times(self, flight: Flight, lasted_s: float) -> StepTimes:
        assert isinstance(flight, QueuedFlight)
        drafting, has_clock = self._parts.drafting, bool(flight.marks)
        waited_s = 0.0
        if has_clock and flight.waited_s is not None and flight.hosts:
            waited_s = max(0.0, flight.waited_s - flight.guessed_s)
        if has_clock:
            draft_s, verify_s = flight.seconds(0), flight.seconds(1) + flight.seconds(2)
            read_s = flight.seconds(2) if flight.read_rows else 0.0
            host_s = max(0.0, self._marks.lasted(flight.marks) - draft_s - verify_s)
            flight.marks = ()
            for name, requests in flight.caught_up.items():
                drafting.planner.observe_catch_up(name, requests, host_s)
        else:
            draft_s, verify_s = flight.guessed_s, max(0.0, lasted_s - flight.guessed_s)
            read_s, host_s = None, 0.0
        if flight.steady:
            if has_clock and flight.waited_s is not None:
                for name in flight.hosts:
                    drafting.planner.observe_wait(name, flight.decodes, waited_s)
            for size in flight.drafts:
                drafting.observe_draft(size, draft_s / len(flight.drafts), flight.decodes)
        shape = flight.rows, flight.read_rows, flight.expected_gain
        return StepTimes(host_s, draft_s, verify_s, *shape, waited_s, read_s)


def _distinct(marks: Iterable[Any]) -> list[Any]:
    return list({id(mark): mark for mark in marks}.values())
