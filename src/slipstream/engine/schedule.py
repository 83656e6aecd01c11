"""The batch of each step: admission by memory, prompts in chunks beside decodes, preemption when pages run out.

Requests join and leave between steps. Only the scheduler takes and returns what a request holds: pages, and a slot of
the sampling table.
"""

from __future__ import annotations

import heapq
import itertools
from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from slipstream.core.errors import RequestError, device_failed
from slipstream.engine.allowance import PromptAllowance
from slipstream.engine.chunks import Chunk, ChunkRule
from slipstream.engine.line import WaitingLine, turn_of
from slipstream.engine.state import Answer, Phase
from slipstream.kv.pages import OutOfPages, PageCopy, PagePool, PageTable
from slipstream.kv.prefix import PrefixStore


@dataclass(slots=True)
class Schedule:
    """The batch of one step."""

    decodes: list[Answer] = field(default_factory=list)  # each gets a token, and may have a draft
    chunks: list[Chunk] = field(default_factory=list)
    refused: list[Answer] = field(default_factory=list)  # failed to start: ended with an error

    def __bool__(self) -> bool:
        return bool(self.decodes or self.chunks)


class Scheduler:
    """Owns the waiting line, the running requests, the pages and the slots.

    on_admit: called when an answer has its pages and slot. on_release: called before it loses them. allowance: limits
    the time of prompts beside decodes; None: only the room of a pass limits them. ahead: a drafter's cache entry
    depends on this many tokens after its own.
    """

    def __init__(
        self,
        pool: PagePool,
        *,
        max_running: int,
        chunks: ChunkRule,
        copy_pages: Callable[[list[PageCopy]], None],
        on_admit: Callable[[Answer], None],
        on_release: Callable[[Answer], None],
        prefixes: PrefixStore | None = None,
        allowance: PromptAllowance | None = None,
        ahead: int = 1,
    ) -> None:
        self.pool = pool
        self.prefixes = prefixes
        self.waiting = WaitingLine()
        self.running: list[Answer] = []  # ordered by their first admission
        self.preemptions = 0
        self.allowance = allowance
        self._lacks_pages = False  # the last admission stopped for lack of pages
        self._max_running = max_running
        self._slots = list(range(max_running))  # a heap of free slots
        self._turns = itertools.count()
        self._chunks = chunks
        self._skipped_oldest = False  # the last step left the oldest prompt out, since one piece of it fills a step
        self._ahead = ahead
        self._copy_pages = copy_pages
        self._on_admit = on_admit
        self._on_release = on_release

    def add(self, answer: Answer) -> None:
        """Put the answer in the waiting line."""
        self.waiting.add(answer)

    @property
    def free_seats(self) -> int:
        """The number of waiting answers that could start at once: 0 if pages are missing."""
        return 0 if self._lacks_pages else len(self._slots)

    @property
    def pages_short(self) -> bool:
        """Whether an answer waits for pages, or the running ones (each fills a page in a few steps) soon need more."""
        return self._lacks_pages or self.pool.free_pages < len(self.running)

    def schedule(self) -> Schedule:
        """Choose the next batch. Every decode in it has room for its next token."""
        batch = Schedule()
        prompts: list[Answer] = []
        for answer in list(self.running):
            if answer.phase is not Phase.RUNNING:  # preempted by an earlier one of this loop
                continue
            if answer.decoding:
                if not answer.will_end and (answer.has_room(0) or self._make_room(answer)):
                    batch.decodes.append(answer)
            elif answer.pending > 1:
                prompts.append(answer)
        batch.decodes = [answer for answer in batch.decodes if answer.phase is Phase.RUNNING]
        prompts = [answer for answer in prompts if answer.phase is Phase.RUNNING]
        room = self._chunks.room(len(batch.decodes))
        if self.allowance is not None and batch.decodes:
            may_read = self.allowance.may_read(batch.decodes)
            room = min(room, self.allowance.rows(self._chunks.least)) if may_read else 0
        if room > 0:
            self._share(batch, prompts, room)
        return batch

    def reserve_draft(self, answer: Answer, nodes: int) -> int:
        """Reserve room for a draft behind the next token; returns the number of nodes that fit. Never preempts.

        If pages are short, a draft has only what its answer holds already.
        """
        if answer.has_room(nodes):
            return nodes
        assert answer.table is not None
        if self.pages_short:
            nodes = min(nodes, max(0, answer.table.capacity - answer.reach))
        try:
            answer.table.reserve(answer.reach + nodes)
            return nodes
        except OutOfPages:
            free = self.pool.free_pages * self.pool.page_size + answer.table.capacity
            fits = max(0, min(nodes, free - answer.reach))
            answer.table.reserve(answer.reach + fits)
            return fits

    def commit(self, chunk: Chunk) -> None:
        """The rows of a chunk are computed or queued: later requests may find the pages that it filled."""
        answer, table = chunk.answer, chunk.answer.table
        assert table is not None
        table.commit(chunk.rows)
        if self.prefixes is not None and answer.kept_pages < len(answer.page_names):
            full = min(table.length // self.pool.page_size, len(answer.page_names))
            pages = table.pages
            for page in range(answer.kept_pages, full):
                self.prefixes.keep(pages[page], answer.page_names[page])
            answer.kept_pages = max(full, answer.kept_pages)

    def release(self, answer: Answer) -> None:
        """Take back everything that an ended answer holds, or its place in the waiting line."""
        if answer in self.running:
            self.running.remove(answer)
            self._take_back(answer)
        elif answer in self.waiting:
            self.waiting.remove(answer)
        else:
            return
        if answer.turn is not None:
            self.waiting.settle(answer)

    def check_integrity(self) -> None:
        """Raise `AssertionError` if a page or a slot was lost. Cheap enough for every idle moment."""
        self.pool.check_integrity([answer.table.pages for answer in self.running if answer.table is not None])
        if self.prefixes is not None:
            self.prefixes.check_integrity()
        slots = sorted([*self._slots, *(answer.slot for answer in self.running)])
        assert slots == list(range(self._max_running)), f"slots {slots}: each must be free or held, once"
        idle = all(answer.table is None and answer.slot == -1 for answer in self.waiting)
        assert idle, "a waiting request holds pages or a slot"

    # --- prompts of a step

    def _share(self, batch: Schedule, prompts: Sequence[Answer], room: int) -> None:
        """Divide the room of a step among prompts: a long one neither delays the others nor waits for them.

        The oldest continues in every step: to its end if that fits, else with half of the room and what the others
        leave. If one piece of it fills the step, it leaves every second step to the others. Next come the prompts that
        will be complete, shortest first, then waiting ones, then pieces of the rest.
        """
        oldest, others = prompts[:1], prompts[1:]
        kept = self._chunks.first(oldest[0], room) if oldest else 0
        fills = room <= kept < oldest[0].pending if oldest else False
        self._skipped_oldest = fills and bool(others or self.waiting) and not self._skipped_oldest
        if self._skipped_oldest:
            kept = 0
        room -= kept
        for answer in sorted(others, key=lambda answer: answer.pending):
            if answer.pending <= room:
                room -= self._take(batch, answer, room)
        room = self._admit(batch, room)
        served = {chunk.answer for chunk in batch.chunks}
        for answer in (*oldest, *(other for other in others if other not in served)):
            room += kept  # only the oldest, which comes first, has any
            room -= self._take(batch, answer, room)
            kept = 0

    def _take(self, batch: Schedule, answer: Answer, room: int) -> int:
        """Add a chunk of the answer's prompt to the batch; returns its rows."""
        rows = self._chunks.rows(answer, room)
        if rows:
            batch.chunks.append(Chunk(answer, rows))
            if self.allowance is not None:
                self.allowance.borrow(rows, answer, batch.decodes)
        return rows

    # --- admission

    def _admit(self, batch: Schedule, room: int) -> int:
        """Start waiting answers while there are slots, pages and room in the pass. Returns the room that is left."""
        self._lacks_pages = False
        passed_over: list[Answer] = []
        while self.waiting and self._slots and room > 0:
            answer = self.waiting.take()
            if answer.leader is not None and answer.leader.phase is Phase.RUNNING and not answer.generated:
                if answer.leader.cached < answer.prompt_length:
                    passed_over.append(answer)  # its sibling is computing their prompt
                    continue
                admitted = self._fork(answer, answer.leader)
            else:
                admitted = self._start(answer)
            if not admitted:
                self._lacks_pages = True
                passed_over.append(answer)
                break
            answer.phase = Phase.RUNNING
            answer.slot = heapq.heappop(self._slots)
            if answer.turn is None:
                answer.turn = next(self._turns)
            insort(self.running, answer, key=turn_of)
            try:
                self._on_admit(answer)
            except Exception as error:  # its parameters or its drafter: only this answer fails
                if device_failed(error):
                    raise
                self.release(answer)
                answer.end("error", error=RequestError(f"it could not start: {type(error).__name__}: {error}"))
                batch.refused.append(answer)
                continue
            room -= self._take(batch, answer, room)
        for answer in reversed(passed_over):
            self.waiting.put_back(answer)
        return room

    def _start(self, answer: Answer) -> bool:
        """Reserve the answer's pages, cached ones included. False: too few are free."""
        table = PageTable(self.pool)
        found = self._find_prefix(answer)
        table.adopt(found)
        # one page more beside other requests: room to grow before one must be preempted
        if not self._has_pages(self.pool.pages_for(len(answer.tokens) + 1) - len(found) + (1 if self.running else 0)):
            table.release()
            return False
        table.reserve(len(answer.tokens) + 1)
        answer.table = table
        answer.found_pages, answer.kept_pages = len(found), 0
        if self.prefixes is not None:
            self.prefixes.queries += answer.prompt_length
            self.prefixes.hits += table.length
        return True

    def _fork(self, answer: Answer, leader: Answer) -> bool:
        """Share the leader's prompt pages, and compute only the last prompt token again. False: too few are free."""
        assert leader.table is not None
        shared, apart = answer.prompt_length - 1, self._ahead - 1
        shared_pages = max(0, shared - apart) // self.pool.page_size
        if not self._has_pages(self.pool.pages_for(answer.prompt_length + 1) - shared_pages):
            return False
        answer.table, copies = leader.table.fork(shared, apart)
        answer.table.reserve(answer.prompt_length + 1)
        answer.found_pages = 0
        self._copy_pages(copies)
        return True

    def _find_prefix(self, answer: Answer) -> list[int]:
        """Cached pages with the beginning of its prompt, up to a place where computing can resume exactly."""
        if self.prefixes is None:
            return []
        size, length = self.pool.page_size, answer.prompt_length
        if not answer.page_names:
            kinds: list[int] = []
            for end in range(size, length - self._ahead + 1, size):
                if (kind := self._chunks.kind(length, end)) is None:
                    break
                kinds.append(kind)
            owner = (answer.params.speculation.tenant, answer.params.cache_salt)
            answer.page_names = self.prefixes.names(owner, answer.tokens, kinds, self._ahead)
        pages = self.prefixes.find(answer.page_names)
        while pages and not self._chunks.resumes(length, len(pages) * size):
            pages.pop()
        return pages

    # --- pages

    def _has_pages(self, needed: int) -> bool:
        """Whether this many pages are free, once past drafts have given theirs back."""
        if needed > self.pool.free_pages:
            self._trim_drafts()
        return needed <= self.pool.free_pages

    def _make_room(self, answer: Answer) -> bool:
        """Reserve one more token, if necessary by preempting the youngest. False: this answer was preempted."""
        assert answer.table is not None
        while True:
            try:
                answer.table.reserve(answer.reach)
                return True
            except OutOfPages:
                if self._trim_drafts():
                    continue
                youngest = self.running[-1]
                self._preempt(youngest)
                if youngest is answer:
                    return False

    def _trim_drafts(self) -> bool:
        """Free the empty pages that were reserved for past drafts. Returns whether there were any."""
        before = self.pool.free_pages
        for answer in self.running:
            if answer.table is not None and answer.decoding:  # others need all their pages for their prompts
                answer.table.trim(answer.reach)
        return self.pool.free_pages > before

    def _preempt(self, answer: Answer) -> None:
        """Take the answer's pages; it computes its tokens again later. The keyed rule makes them the same."""
        self.running.remove(answer)
        self._take_back(answer)
        answer.phase = Phase.WAITING
        self.waiting.add(answer)
        self.preemptions += 1

    def _take_back(self, answer: Answer) -> None:
        assert answer.table is not None
        try:
            self._on_release(answer)
        finally:
            answer.table.release()
            answer.table = None
            heapq.heappush(self._slots, answer.slot)
            answer.slot = -1
