"""A request inside the engine: one answer in the making, and the job (a prompt with its `n` answers) it belongs to."""

from __future__ import annotations

import enum
import heapq
import itertools
import time
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any, NamedTuple

from slipstream.constrain.matcher import Constraint
from slipstream.core.errors import RequestError
from slipstream.core.outputs import (
    CompletionOutput,
    DrafterStats,
    FinishReason,
    RequestOutput,
    SpeculationStats,
    Timing,
)
from slipstream.core.params import SamplingParams
from slipstream.drafters.base import DraftRequest
from slipstream.engine.text import TextStream
from slipstream.kernels.gpu.rows import RECENT
from slipstream.kv.pages import PageTable
from slipstream.plan.types import Decision

Sink = Callable[[RequestOutput], None]


class Phase(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"


class Copied(NamedTuple):
    """The last draft that a host drafter made for an answer."""

    drafter: str
    source: str  # `HostDrafter.source`
    length: int  # tokens of the answer, its prompt included, when it was made
    tokens: tuple[int, ...]


@dataclass(eq=False, slots=True)
class Answer:
    """One of a job's `n` answers.

    `tokens` is prompt and output. The cache holds the first `table.length` of them; the rest is pending: one token in
    steady decoding, more while the prompt (or, after a preemption, everything) is being computed.
    """

    job: Job
    sample: int
    seed: int
    tokens: list[int]
    text: TextStream
    output: CompletionOutput
    prediction: tuple[int, ...] = ()
    material: tuple[tuple[int, ...], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    end_ids: frozenset[int] = frozenset()
    constraint: Constraint | None = None  # where it stands in the grammar of its form
    leader: Answer | None = None  # the sibling that computes the shared prompt
    phase: Phase = Phase.WAITING
    table: PageTable | None = None
    slot: int = -1
    drafters: tuple[str, ...] = ()  # whose drafts it takes now
    doubted: bool = False  # its last round came to nothing beside a draft: the next one is plain
    refused: dict[str, str] = field(default_factory=dict)  # drafters that failed for it -> why
    view: DraftRequest | None = None
    copied: Copied | None = None
    decided: dict[str, Decision | str] = field(default_factory=dict)
    """By drafter: the last plan of guesses that this answer could have had, or why there was nothing to plan."""
    turn: int | None = None  # its place among those that were started; None: it never was
    last_token_at: float | None = None  # by time.perf_counter
    charge: int = 0  # tokens that its tenant was charged with when it was taken from the line
    queued: int = 0  # rounds in the making whose results the host has not seen
    coming: int = 0  # tokens that these may add at most
    stride: int = RECENT  # tokens that its last round may have added; as long as it had none, as many as may matter
    guessers: tuple[str, ...] = ()  # who guessed in its last round
    epoch: int = 0  # how often it gave everything back: results of an earlier life are of no use
    on_device: bool = False  # its lane on the device says where it stands
    closing: bool = False  # it got a token that ends it, most likely: no further round before that is certain
    names: tuple[bytes, ...] = ()  # of the pages of its prompt that others may have, where it computes them itself
    found: int = 0  # pages of its prompt that others had computed
    kept: int = 0  # of its named pages are computed
    behind: dict[str, int] = field(default_factory=dict)  # tokens read by device drafters that stopped following it
    missed: dict[str, int] = field(default_factory=dict)  # … and by others: how many of its last ones are not
    id: str = field(init=False)  # of job and sample always: a job may be named like another's second answer
    params: SamplingParams = field(init=False)  # the job's
    tenant: str = field(init=False)
    prompt_length: int = field(init=False)

    def __post_init__(self) -> None:
        self.id = f"{self.job.id}/{self.sample}"
        self.params = self.job.params
        self.tenant = self.params.speculation.tenant
        self.prompt_length = len(self.job.prompt_ids)

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def cached(self) -> int:
        return 0 if self.table is None else self.table.length

    @property
    def pending(self) -> int:
        return len(self.tokens) - self.cached

    @property
    def decoding(self) -> bool:
        """Is the next thing to compute the token behind its last one, seen by the host or not?"""
        pending = len(self.tokens) if self.table is None else len(self.tokens) - self.table.length
        return pending == 1 or (pending == 0 and self.queued > 0)

    @property
    def will_end(self) -> bool:
        """Is a further round most likely for nothing? Each one in the making gives a token at least."""
        generated = len(self.tokens) - self.prompt_length
        return self.closing or generated + self.queued >= self.params.max_tokens

    @property
    def reach(self) -> int:
        """Tokens that it may have before the next round, the last of them not in the cache."""
        return len(self.tokens) + self.coming

    def has_room(self, nodes: int) -> bool:
        """Do its pages hold its next token, and so many guesses behind it, as they are?"""
        return self.table is not None and self.reach + nodes <= self.table.capacity

    @property
    def ended(self) -> bool:
        return self.phase is Phase.ENDED

    def end(self, reason: FinishReason, *, stop: int | str | None = None, error: RequestError | None = None) -> None:
        """Close the answer. The scheduler frees what it holds."""
        self.phase = Phase.ENDED
        self.output.finish_reason = reason
        self.output.stop_reason = stop
        self.output.error = None if error is None else str(error)
        self.output.timing.total_s = time.perf_counter() - self.job.arrived
        try:
            self.text.finish()
        except Exception as broken:  # a tokenizer that cannot decode its own tokens: the ids are right all the same
            self.output.error = self.output.error or f"the text is incomplete: {type(broken).__name__}: {broken}"
        self.output.text = self.text.visible
        if reason == "stop" and self.output.unenforced and self.constraint is not None:
            self.output.violation = self.constraint.fault(self.output.text)


@dataclass(slots=True)
class _Told:
    """How much of an answer its caller has: what a delta begins behind."""

    tokens: int = 0
    characters: int = 0
    ended: bool = False  # it heard of the end: until all of the job is over there is nothing more to tell


@dataclass(eq=False, slots=True)
class Job:
    """What a caller submitted: a prompt, its parameters, and where the results go."""

    id: str
    prompt: str | None
    prompt_ids: Sequence[int]
    params: SamplingParams
    sink: Sink
    streaming: bool = False
    arrived: float = field(default_factory=time.perf_counter)
    answers: list[Answer] = field(default_factory=list)
    reported: bool = False
    holds: Callable[[Job, bool], bool] | None = None
    """Asked before news are made, and told whether they are urgent: are they to wait, until it reports again?"""
    cached_tokens: int = 0  # of the prompt that were in the cache when its first answer started
    _shown_prompt: list[int] = field(init=False, default_factory=list)  # the caller's copy, one for a whole stream
    _told: list[_Told] = field(init=False, default_factory=list)  # by answer; only where deltas are wanted

    def report(self) -> None:
        """Hand the caller where the job stands: every change when streaming, else only the end, once."""
        finished = all(answer.ended for answer in self.answers)
        kind = self.params.output_kind
        if self.reported or not (finished or (self.streaming and kind != "final_only")):
            return
        if kind == "delta" and self.holds is not None and self.holds(self, finished or self._is_urgent):
            return
        self.reported = finished
        if kind == "delta":
            self._told = self._told or [_Told() for _ in self.answers]
            parts = zip(self.answers, self._told, strict=True)
            outputs = [_news(answer.output, told) for answer, told in parts if finished or not told.ended]
        else:
            outputs = [answer.output if finished else _snapshot(answer.output) for answer in self.answers]
        self._shown_prompt = self._shown_prompt or list(self.prompt_ids)
        self.sink(RequestOutput(self.id, self.prompt, self._shown_prompt, outputs, finished, self.cached_tokens))

    def part(self) -> None:
        """All is over and told: its answers let go of it and of what drafters saw of them, and it of whoever listened.
        Else only a search through everything that is there would find that nobody needs them any more, and rounds would
        wait for that."""
        if self.reported:
            self.sink = _to_nobody
            over = copy(_OVER)
            over.arrived = self.arrived  # of which a listener may still ask
            for answer in self.answers:
                answer.job, answer.view = over, None

    @property
    def _is_urgent(self) -> bool:
        """Has an answer its first token to tell, or its end?"""
        if not self._told:
            return True
        for answer, told in zip(self.answers, self._told, strict=True):
            if not told.ended and (answer.ended or (answer.output.token_ids and not told.tokens)):
                return True
        return False


def _all_of(kind: type[Any]) -> Callable[[Any], tuple[Any, ...]]:
    """Reads all fields of such an object. Every stream is told of every round; `replace` takes four times as long."""
    return attrgetter(*(part.name for part in fields(kind)))


_OUTPUT, _TIMING, _STATS, _DRAFTER = map(_all_of, (CompletionOutput, Timing, SpeculationStats, DrafterStats))


def _news(output: CompletionOutput, told: _Told) -> CompletionOutput:
    """What the caller has not heard yet: it costs as much as is new, however long the answer.

    Every stream has one of these a round, so that counts and times are copied only with the end.
    """
    at, characters = told.tokens, told.characters
    told.tokens, told.characters = len(output.token_ids), len(output.text)
    if output.finish_reason is not None:
        told.ended = True
        return _snapshot(output, at, characters)
    return CompletionOutput(
        output.index,
        output.text[characters:],
        output.token_ids[at:],
        None if output.logprobs is None else output.logprobs[at:],
        timing=output.timing,
        speculation=output.speculation,
        origins=None if output.origins is None else output.origins[at:],
    )


def _snapshot(output: CompletionOutput, tokens: int = 0, characters: int = 0) -> CompletionOutput:
    """A copy from these places on, for the caller's thread: the engine goes on writing to its own."""
    copy = CompletionOutput(*_OUTPUT(output))
    copy.text = output.text[characters:]
    copy.token_ids = output.token_ids[tokens:]
    if output.logprobs is not None:
        copy.logprobs = output.logprobs[tokens:]
    if output.origins is not None:
        copy.origins = output.origins[tokens:]
    copy.timing = Timing(*_TIMING(output.timing))
    stats = copy.speculation = SpeculationStats(*_STATS(output.speculation))
    stats.by_drafter = {name: DrafterStats(*_DRAFTER(theirs)) for name, theirs in stats.by_drafter.items()}
    return copy


def _to_nobody(output: RequestOutput) -> None:
    """Where results go when all were given out."""


_OVER = Job("", None, (), SamplingParams(), _to_nobody)
"""Whose answers are that have ended."""


class Deadlines:
    """Jobs by when they must be over. A round that has none to end pays for one comparison.

    A job that ends in time is forgotten when its time comes, or when such jobs are more than half of all.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Job]] = []
        self._order = itertools.count()  # jobs with the same end are not compared
        self._tidy_at = 64

    def add(self, job: Job) -> None:
        if job.params.timeout_s is None:
            return
        heapq.heappush(self._heap, (job.arrived + job.params.timeout_s, next(self._order), job))
        if len(self._heap) > self._tidy_at:
            self._heap = [entry for entry in self._heap if not all(answer.ended for answer in entry[2].answers)]
            heapq.heapify(self._heap)
            self._tidy_at = 2 * len(self._heap) + 64

    def over(self) -> list[Job]:
        """Those whose time is over by now. They are told once."""
        if not self._heap or self._heap[0][0] > time.perf_counter():
            return []
        now, jobs = time.perf_counter(), []
        while self._heap and self._heap[0][0] <= now:
            jobs.append(heapq.heappop(self._heap)[2])
        return jobs
