"""Who is in the next pass: admission by memory, prompts in chunks beside decodes, preemption when pages run out.

Requests join and leave between rounds. Everything a request holds (pages, a slot of the sampling table) is taken and
given back here and nowhere else.
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

_SOON = 1
"""Free pages for each running request below which guesses get none: it fills one in a few rounds."""


@dataclass(slots=True)
class Schedule:
    """One pass: who decodes (and may draft), who computes a chunk."""

    decodes: list[Answer] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    refused: list[Answer] = field(default_factory=list)  # could not start, and ended with an error
    newcomers: int = 0  # how many started

    def __bool__(self) -> bool:
        return bool(self.decodes or self.chunks)


class Scheduler:
    """Owns the queues, the pages and the slots.

    on_admit and on_release tell the engine that an answer got its pages and slot, or is about to lose them.
    allowance: bounds the time that prompts take beside decodes; None: only the room of a pass bounds them.
    ahead: what a place holds for drafters depends on so many tokens behind it.
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
        self.running: list[Answer] = []  # in the order of their first turns
        self.preemptions = 0
        self._short = False  # the last time somebody was to start, there were not enough pages
        self._max_running = max_running
        self._slots = list(range(max_running))  # a heap
        self._turns = itertools.count()
        self._chunks = chunks
        self.allowance = allowance
        self._yielded = False  # the oldest prompt left the last step to others, since a piece of it fills a step
        self._ahead = ahead
        self._copy_pages = copy_pages
        self._on_admit = on_admit
        self._on_release = on_release

    def add(self, answer: Answer) -> None:
        """Put it in the queue."""
        self.waiting.add(answer)

    @property
    def free_seats(self) -> int:
        """How many of those who wait could start at once: none where it is pages that are missing."""
        return 0 if self._short else len(self._slots)

    def load(self) -> int:
        """Requests that run, with those that could start at once."""
        return len(self.running) + min(len(self.waiting), self.free_seats)

    @property
    def pages_short(self) -> bool:
        """Does somebody wait for pages, or will those who run soon want more than there are?"""
        return self._short or self.pool.free_pages < _SOON * len(self.running)

    def schedule(self) -> Schedule:
        """Choose the next pass. Every decode in it has room for its next token."""
        plan = Schedule()
        reading: list[Answer] = []  # whose prompts are not computed yet
        before = self.preemptions
        for answer in list(self.running):
            if answer.phase is not Phase.RUNNING:
                continue
            if answer.decoding:
                if not answer.will_end and (answer.has_room(0) or self._make_room(answer)):
                    plan.decodes.append(answer)
            elif answer.pending > 1:
                reading.append(answer)
        if self.preemptions > before:
            plan.decodes = [answer for answer in plan.decodes if answer.phase is Phase.RUNNING]
        reading = [answer for answer in reading if answer.phase is Phase.RUNNING]
        room = self._chunks.room(len(plan.decodes))
        if self.allowance is not None and plan.decodes:
            room = min(room, self.allowance.rows(self._chunks.least)) if self.allowance.may_read(plan.decodes) else 0
        self._share(plan, reading, room)
        return plan

    def _share(self, plan: Schedule, reading: Sequence[Answer], room: int) -> None:
        """Divide the room of a step among prompts, so that a long one neither delays the others nor waits for them.

        The oldest goes on in every step: to its end if there is room for that, else with half of the room and what the
        others leave. Where one piece of it fills the step, it leaves every second step to the others. Of these come
        first those that will be done, the shortest before the others, and then the waiting ones.
        """
        if room <= 0:
            return
        oldest, others = reading[:1], reading[1:]
        kept = self._chunks.first(oldest[0], room) if oldest else 0
        self._yielded = bool(room <= kept < oldest[0].pending and (others or self.waiting)) and not self._yielded
        if self._yielded:
            kept = 0
        room -= kept
        for answer in sorted(others, key=lambda answer: answer.pending):
            if answer.pending <= room:
                room -= self._take(plan, answer, room)
        room = self._admit(plan, room)
        served = {chunk.answer for chunk in plan.chunks}
        for answer in (*oldest, *(other for other in others if other not in served)):
            room += kept  # the oldest's, who is the first
            room -= self._take(plan, answer, room)
            kept = 0

    def _take(self, plan: Schedule, answer: Answer, room: int) -> int:
        rows = self._chunks.rows(answer, room)
        if rows:
            plan.chunks.append(Chunk(answer, rows))
            if self.allowance is not None:
                self.allowance.borrow(rows, answer, plan.decodes)
        return rows

    def reserve_draft(self, answer: Answer, nodes: int) -> int:
        """Room for a draft behind the next token; returns how many nodes fit. Never preempts anyone for a guess.

        Where pages are short it has what the answer holds anyway: what others will need soon is not for guesses.
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

    def release(self, answer: Answer) -> None:
        """The answer ended, or is aborted while it waited: give back everything it holds."""
        if answer in self.running:
            self.running.remove(answer)
            self._give_back(answer)
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

    def _admit(self, plan: Schedule, room: int) -> int:
        """Start those who wait, while there are seats, pages and room in the pass. Returns the room that is left."""
        self._short = False
        passed_over: list[Answer] = []
        while self.waiting and self._slots and room > 0:
            answer = self.waiting.take()
            if answer.leader is not None and answer.leader.phase is Phase.RUNNING and not answer.generated:
                if answer.leader.cached < answer.prompt_length:
                    passed_over.append(answer)  # its prompt is being computed by its sibling
                    continue
                admitted = self._fork(answer, answer.leader)
            else:
                admitted = self._start(answer)
            if not admitted:
                self._short = True
                passed_over.append(answer)
                break
            answer.phase = Phase.RUNNING
            answer.slot = heapq.heappop(self._slots)
            if answer.turn is None:
                answer.turn = next(self._turns)
            insort(self.running, answer, key=turn_of)
            try:
                self._on_admit(answer)
            except Exception as error:  # its own parameters or its drafter: nobody else is to suffer for it
                if device_failed(error):
                    raise
                self.release(answer)
                answer.end("error", error=RequestError(f"it could not start: {type(error).__name__}: {error}"))
                plan.refused.append(answer)
                continue
            plan.newcomers += 1
            room -= self._take(plan, answer, room)
        for answer in reversed(passed_over):
            self.waiting.put_back(answer)
        return room

    def _start(self, answer: Answer) -> bool:
        table = PageTable(self.pool)
        found = self._found(answer)
        table.adopt(found)
        # one page beyond what it needs, while others run: room to grow before anybody must be preempted
        needed = self.pool.pages_for(len(answer.tokens) + 1) - len(found) + (1 if self.running else 0)
        if needed > self.pool.free_pages:
            self._take_back_guesses()
        if needed > self.pool.free_pages:
            table.release()
            return False
        table.reserve(len(answer.tokens) + 1)
        answer.table = table
        answer.found, answer.kept = len(found), 0
        if self.prefixes is not None:
            self.prefixes.queries += answer.prompt_length
            self.prefixes.hits += table.length
        return True

    def _found(self, answer: Answer) -> list[int]:
        """Pages with the beginning of its prompt, up to where computing it can go on with the same result."""
        if self.prefixes is None:
            return []
        size, length = self.pool.page_size, answer.prompt_length
        if not answer.names:
            kinds = [self._chunks.kind(length, end) for end in range(size, length - self._ahead + 1, size)]
            known = kinds[: kinds.index(None)] if None in kinds else kinds
            owner = (answer.params.speculation.tenant, answer.params.cache_salt)
            kinds_known = [kind for kind in known if kind is not None]
            answer.names = self.prefixes.names(owner, answer.tokens, kinds_known, self._ahead)
        pages = self.prefixes.find(answer.names)
        while pages and not self._chunks.resumes(length, len(pages) * size):
            pages.pop()
        return pages

    def commit(self, chunk: Chunk) -> None:
        """The rows of a chunk are computed. From now on others may find the pages that it filled."""
        answer, table = chunk.answer, chunk.answer.table
        assert table is not None
        table.commit(chunk.rows)
        if self.prefixes is not None and answer.kept < len(answer.names):
            full = min(table.length // self.pool.page_size, len(answer.names))
            pages = table.pages
            for page in range(answer.kept, full):
                self.prefixes.keep(pages[page], answer.names[page])
            answer.kept = max(full, answer.kept)

    def _fork(self, answer: Answer, leader: Answer) -> bool:
        """Share the leader's prompt pages; only the last prompt token is computed again, to choose from."""
        assert leader.table is not None
        shared, apart = answer.prompt_length - 1, self._ahead - 1
        needed = self.pool.pages_for(answer.prompt_length + 1) - max(0, shared - apart) // self.pool.page_size
        if needed > self.pool.free_pages:
            self._take_back_guesses()
        if needed > self.pool.free_pages:
            return False
        answer.table, copies = leader.table.fork(shared, apart)
        answer.table.reserve(answer.prompt_length + 1)
        answer.found = 0
        self._copy_pages(copies)
        return True

    def _make_room(self, answer: Answer) -> bool:
        """Room for one more token, if need be at the expense of the youngest. False: it was itself preempted."""
        assert answer.table is not None
        while True:
            try:
                answer.table.reserve(answer.reach)
                return True
            except OutOfPages:
                if self._take_back_guesses():
                    continue
                youngest = self.running[-1]
                self._preempt(youngest)
                if youngest is answer:
                    return False

    def _take_back_guesses(self) -> bool:
        """Free the pages that past drafts were reserved and that nothing is in. Says whether there were any."""
        before = self.pool.free_pages
        for answer in self.running:
            if answer.table is not None and answer.decoding:  # others need all their pages for their prompts
                answer.table.trim(answer.reach)
        return self.pool.free_pages > before

    def _preempt(self, answer: Answer) -> None:
        """Take its pages; it computes its tokens again when there is room. The keyed rule makes them the same."""
        self.running.remove(answer)
        self._give_back(answer)
        answer.phase = Phase.WAITING
        self.waiting.add(answer)
        self.preemptions += 1

    def _give_back(self, answer: Answer) -> None:
        assert answer.table is not None
        try:
            self._on_release(answer)
        finally:
            answer.table.release()
            answer.table = None
            heapq.heappush(self._slots, answer.slot)
            answer.slot = -1
