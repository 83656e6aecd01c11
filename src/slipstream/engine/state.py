"""A request inside the engine: one answer in the making, and the job (a prompt with its `n` answers) it belongs to."""

from __future__ import annotations

import enum
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from slipstream.core.errors import RequestError
from slipstream.core.outputs import CompletionOutput, FinishReason, RequestOutput
from slipstream.core.params import SamplingParams
from slipstream.drafters.base import DraftRequest
from slipstream.engine.text import TextStream
from slipstream.kv.pages import PageTable

_arrivals = itertools.count()

Sink = Callable[[RequestOutput], None]


class Phase(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"


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
    bad_words: tuple[tuple[int, ...], ...] = ()
    end_ids: frozenset[int] = frozenset()
    leader: Answer | None = None  # the sibling that computes the shared prompt
    phase: Phase = Phase.WAITING
    table: PageTable | None = None
    slot: int = -1
    drafter: str | None = None  # whose drafts it takes now
    doubted: bool = False  # its last round came to nothing beside a draft: the next one is plain
    refused: dict[str, str] = field(default_factory=dict)  # drafters that failed for it -> why
    view: DraftRequest | None = None
    arrival: int = field(default_factory=lambda: next(_arrivals))

    @property
    def id(self) -> str:
        return f"{self.job.id}/{self.sample}"  # always both: a job may be named like another's second answer

    @property
    def params(self) -> SamplingParams:
        return self.job.params

    @property
    def prompt_length(self) -> int:
        return len(self.job.prompt_ids)

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

    def report(self) -> None:
        """Hand the caller where the job stands: every change when streaming, else only the end, once."""
        finished = all(answer.ended for answer in self.answers)
        if self.reported or not (finished or self.streaming):
            return
        self.reported = finished
        outputs = [_snapshot(answer) if not finished else answer.output for answer in self.answers]
        self.sink(RequestOutput(self.id, self.prompt, list(self.prompt_ids), outputs, finished))


def _snapshot(answer: Answer) -> CompletionOutput:
    """A copy for the caller's thread: the engine goes on writing to its own."""
    out = answer.output
    by_drafter = {name: replace(stats) for name, stats in out.speculation.by_drafter.items()}
    return CompletionOutput(
        index=out.index,
        text=out.text,
        token_ids=list(out.token_ids),
        logprobs=None if out.logprobs is None else list(out.logprobs),
        finish_reason=out.finish_reason,
        stop_reason=out.stop_reason,
        error=out.error,
        timing=replace(out.timing),
        speculation=replace(out.speculation, by_drafter=by_drafter),
    )
