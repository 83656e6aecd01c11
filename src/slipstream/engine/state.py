"""A request inside the engine: a job is a prompt with its `n` answers, and the engine runs each answer by itself."""

from __future__ import annotations

import enum
import heapq
import itertools
import time
from collections.abc import Callable, Sequence
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
    constraint: Constraint | None = None  # its state in its grammar
    leader: Answer | None = None  # the sibling that computes the shared prompt
    id: str = field(init=False)  # always of job and sample: another job's id may look like an answer's
    params: SamplingParams = field(init=False)  # the job's
    tenant: str = field(init=False)
    prompt_length: int = field(init=False)

    # its place in the schedule
    phase: Phase = Phase.WAITING
    turn: int | None = None  # its number in the order of first admissions; None: not admitted yet
    charge: int = 0  # tokens charged to its tenant when it was taken from the line
    epoch: int = 0  # the number of times it was released: results of earlier epochs are ignored
    slot: int = -1
    table: PageTable | None = None
    page_names: tuple[bytes, ...] = ()  # of its prompt's pages that other requests may share
    found_pages: int = 0  # of its prompt: found in the cache
    kept_pages: int = 0  # of the named ones: computed, so others can find them

    # what is in flight
    queued: int = 0  # steps that were launched and not read
    coming: int = 0  # most tokens that these may add
    stride: int = RECENT  # most tokens that its last step may add; before any step, the most that matters
    guessers: tuple[str, ...] = ()  # the drafters of its last step
    closing: bool = False  # it has a token that probably ends it: no step is launched until that is certain
    plain_next: bool = False  # its last step gave no token beside a draft: the next one has no draft
    on_device: bool = False  # its lane on the device is up to date
    last_token_at: float | None = None  # by time.perf_counter

    # its drafters
    drafters: tuple[str, ...] = ()
    view: DraftRequest | None = None  # what the drafters see of it
    refused: dict[str, str] = field(default_factory=dict)  # by drafter that failed for it: the reason
    decided: dict[str, Decision | str] = field(default_factory=dict)
    """By drafter: the last decision on a draft that this answer could have had, or why there was none to decide on."""
    copied: Copied | None = None
    behind: dict[str, int] = field(default_factory=dict)  # by device drafter that stopped following it: tokens read
    missed: dict[str, int] = field(default_factory=dict)  # by one that follows it: the number of last tokens not read

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
        """Whether its next step computes one new token, rather than its prompt."""
        pending = len(self.tokens) if self.table is None else len(self.tokens) - self.table.length
        return pending == 1 or (pending == 0 and self.queued > 0)

    @property
    def will_end(self) -> bool:
        """Whether another step is probably useless. Each step in flight gives at least one token."""
        generated = len(self.tokens) - self.prompt_length
        return self.closing or generated + self.queued >= self.params.max_tokens

    @property
    def reach(self) -> int:
        """Most tokens that it may have before the next step, the last of them not in the cache."""
        return len(self.tokens) + self.coming

    def has_room(self, nodes: int) -> bool:
        """Whether its pages have room for its next token and `nodes` draft nodes behind it."""
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
        except Exception as broken:  # a tokenizer that cannot decode its own tokens; the ids are right
            self.output.error = self.output.error or f"the text is incomplete: {type(broken).__name__}: {broken}"
        self.output.text = self.text.visible
        if reason == "stop" and self.output.unenforced and self.constraint is not None:
            self.output.violation = self.constraint.fault(self.output.text)


@dataclass(slots=True)
class _Sent:
    """The part of an answer that its caller has: where the next delta begins."""

    tokens: int = 0
    characters: int = 0
    ended: bool = False  # the caller has its end: nothing more is sent before the whole job is over


@dataclass(eq=False, slots=True)
class Job:
    """A submitted request: a prompt, its parameters, and the sink of its outputs."""

    id: str
    prompt: str | None
    prompt_ids: Sequence[int]
    params: SamplingParams
    sink: Sink
    streaming: bool = False
    arrived: float = field(default_factory=time.perf_counter)
    answers: list[Answer] = field(default_factory=list)
    reported: bool = False  # the sink has its end
    holds: Callable[[Job, bool], bool] | None = None
    """Called before a delta is made, with whether it is urgent. True: wait until `report` is called again."""
    cached_tokens: int = 0  # of the prompt: found in the cache when its first answer started
    _shown_prompt: list[int] = field(init=False, default_factory=list)  # the caller's copy, one for all its outputs
    _sent: list[_Sent] = field(init=False, default_factory=list)  # by answer; only for deltas

    def report(self) -> None:
        """Send the job's state to the sink: every change if it is streamed, else only the end, once."""
        finished = all(answer.ended for answer in self.answers)
        kind = self.params.output_kind
        if self.reported or not (finished or (self.streaming and kind != "final_only")):
            return
        if kind == "delta" and self.holds is not None and self.holds(self, finished or self._is_urgent):
            return
        self.reported = finished
        if kind == "delta":
            self._sent = self._sent or [_Sent() for _ in self.answers]
            parts = zip(self.answers, self._sent, strict=True)
            outputs = [_delta(answer.output, sent) for answer, sent in parts if finished or not sent.ended]
        else:
            outputs = [answer.output if finished else _snapshot(answer.output) for answer in self.answers]
        self._shown_prompt = self._shown_prompt or list(self.prompt_ids)
        self.sink(RequestOutput(self.id, self.prompt, self._shown_prompt, outputs, finished, self.cached_tokens))

    def release(self) -> None:
        """Release a reported job: drop the references between it, its answers, their drafters and its listener.

        Without this, only the cyclic garbage collector would free them, and steps would wait for it.
        """
        if self.reported:
            self.sink = _discard
            released = Job("", None, (), _ANY_PARAMS, _discard, arrived=self.arrived)  # a listener may ask for the time
            for answer in self.answers:
                answer.job, answer.view = released, None

    @property
    def _is_urgent(self) -> bool:
        """Whether an answer has a first token or an end that its caller does not have."""
        if not self._sent:
            return True
        for answer, sent in zip(self.answers, self._sent, strict=True):
            if not sent.ended and (answer.ended or (answer.output.token_ids and not sent.tokens)):
                return True
        return False


_ANY_PARAMS = SamplingParams()


def _discard(output: RequestOutput) -> None:
    """The sink of a released job."""


def _all_of(kind: type[Any]) -> Callable[[Any], tuple[Any, ...]]:
    """A reader of all fields of such an object: `dataclasses.replace` takes four times as long to copy one."""
    return attrgetter(*(part.name for part in fields(kind)))


_OUTPUT, _TIMING, _STATS, _DRAFTER = map(_all_of, (CompletionOutput, Timing, SpeculationStats, DrafterStats))


def _delta(output: CompletionOutput, sent: _Sent) -> CompletionOutput:
    """The part of the output that the caller does not have. Its cost depends on that part alone.

    Counts and times are copied only with the end, since every stream has a delta in every step.
    """
    at, characters = sent.tokens, sent.characters
    sent.tokens, sent.characters = len(output.token_ids), len(output.text)
    if output.finish_reason is not None:
        sent.ended = True
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
    """A copy for the caller's thread, from these tokens and characters on: the engine continues to change its own."""
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


class Deadlines:
    """The deadlines of jobs. A step without an expired one costs one comparison.

    The entry of a job that ended earlier is dropped at its deadline, or when such entries are more than half of all.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Job]] = []
        self._order = itertools.count()  # jobs with the same deadline are not compared
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
        """Remove and return the jobs whose deadline has passed."""
        now, jobs = time.perf_counter() if self._heap else 0.0, []
        while self._heap and self._heap[0][0] <= now:
            jobs.append(heapq.heappop(self._heap)[2])
        return jobs
