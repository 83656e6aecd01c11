"""What a caller gets back, in vLLM's shape where it has one; and the state and counts of an engine.

Counts only grow, so the difference of two snapshots is what happened between them. They are read while the engine
works: each is right by itself, and two of them may be a step apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "timeout", "error"]
_NO_DRAFTER = "it had no drafter: none was named, or speculation is switched off"


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token's log probability under the raw model; rank 1 is the likeliest."""

    logprob: float
    rank: int
    decoded_token: str


@dataclass(frozen=True, slots=True)
class Origin:
    """The origin of one token of an answer: the target's own choice, or an accepted guess."""

    round: int  # of this answer, from 1
    depth: int  # in the round's draft, from 1; 0: the target's own token
    drafters: tuple[str, ...]  # the drafters that guessed it; empty: the target's own token
    text_end: int  # characters of the answer's text with this token; one that ends inside a character adds none yet


@dataclass(slots=True)
class DrafterStats:
    """What one drafter did for one request."""

    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    failures: int = 0
    declined: int = 0  # steps without its guesses, because they were not expected to pay

    def add(self, more: DrafterStats) -> None:
        for key in ("drafts", "drafted", "accepted", "failures", "declined"):
            setattr(self, key, getattr(self, key) + getattr(more, key))

    @property
    def alpha(self) -> float:
        return self.accepted / self.drafted if self.drafted else 0.0


@dataclass(slots=True)
class SpeculationStats:
    """What speculation did for one request.

    tau: tokens per round, the target's own token included. alpha: the share of guesses that stood; in trees it is
    small, because branches exclude each other.
    """

    rounds: int = 0  # target passes that emitted for this request
    emitted: int = 0  # tokens they emitted
    drafted: int = 0
    accepted: int = 0
    draft_s: float = 0.0
    verify_s: float = 0.0
    host_s: float = 0.0
    by_drafter: dict[str, DrafterStats] = field(default_factory=dict)
    expected_gain: float | None = None  # speed of its drafted steps as a multiple of plain ones, as planned
    measured_gain: float | None = None  # … and as measured against plain steps of equal size; None: not measured
    plan: dict[str, str] = field(default_factory=dict)
    """By drafter: the last decision, and why. The last three are set when the answer ends, as is `caution`."""
    caution: str = ""  # why this model's answers may depend on drafts and on the batch; empty: they do not

    def of(self, drafter: str) -> DrafterStats:
        """One drafter's counts, made where there are none."""
        known = self.by_drafter.get(drafter)  # faster than `setdefault`, which would make an object every time
        if known is None:
            known = self.by_drafter[drafter] = DrafterStats()
        return known

    def add(self, more: SpeculationStats) -> None:
        """Add the counts and times of another answer."""
        for key in ("rounds", "emitted", "drafted", "accepted", "draft_s", "verify_s", "host_s"):
            setattr(self, key, getattr(self, key) + getattr(more, key))
        for name, stats in more.by_drafter.items():
            self.of(name).add(stats)

    @classmethod
    def total(cls, parts: Iterable[SpeculationStats]) -> SpeculationStats:
        """The counts and times of several answers together."""
        whole = cls()
        for part in parts:
            whole.add(part)
        return whole

    @property
    def alpha(self) -> float:
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def tau(self) -> float:
        return self.emitted / self.rounds if self.rounds else 0.0

    @property
    def why(self) -> str:
        """Why speculation was on or off: the planner's last decision for each drafter, in its words."""
        return "; ".join(filter(None, (self._why, self.caution)))

    @property
    def _why(self) -> str:
        counted = f"{self.accepted} of {self.drafted} guesses stood, {self.tau:.2f} tokens a pass"
        if not self.plan:  # no decision: drafts of a fixed size, no drafter, or no step to draft in
            ended = "the answer ended with its first token" if self.rounds <= 1 else _NO_DRAFTER
            return f"on: {counted}" if self.drafted else f"off: {ended}"
        alike = len({*self.plan.values()}) == 1 and self.plan.keys() >= self.by_drafter.keys()
        said = [text if alike or text.startswith(name) else f"{name} {text}" for name, text in self.plan.items()]
        return "; ".join([*dict.fromkeys(said), *([counted] if self.drafted else [])])


@dataclass(slots=True)
class Timing:
    """Seconds. `first_token_s` and `total_s` count from the request's arrival."""

    queued_s: float = 0.0
    first_token_s: float = 0.0
    total_s: float = 0.0

    def decode_tokens_per_s(self, tokens: int) -> float:
        """Rate after the first token; 0 where there was no second one."""
        return (tokens - 1) / (self.total_s - self.first_token_s) if self.total_s > self.first_token_s else 0.0


@dataclass(slots=True)
class CompletionOutput:
    """One of the `n` answers of a request.

    text, token_ids, logprobs and origins are all so far; in a stream of `output_kind="delta"` only what is new. timing
    and speculation change until the answer ends.
    unenforced: rules of its schema that a grammar cannot hold, with their places. violation: the one of them that the
    finished answer breaks.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Mapping[int, Logprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop string or token id that ended it
    error: str | None = None
    timing: Timing = field(default_factory=Timing)
    speculation: SpeculationStats = field(default_factory=SpeculationStats)
    origins: list[Origin] | None = None  # by token, where `SpeculationParams.origins` asks for them
    unenforced: Sequence[str] = ()
    violation: str | None = None


@dataclass(slots=True)
class RequestOutput:
    """A request with its answers so far; `finished` when all of them ended.

    num_cached_tokens: tokens of the prompt with K and V in the cache from an earlier request.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    num_cached_tokens: int = 0


def parting(left: Sequence[int], right: Sequence[int]) -> int | None:
    """The first index at which two answers differ; None if they are the same."""
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return None if len(left) == len(right) else min(len(left), len(right))


Undrafted = Literal["off", "plain", "declined", "no_guess", "limited", "no_pages", "late", "failed"]
"""Why a step went without a drafter's guesses for an answer; `docs/serving.md` has the same table.

off: the request has no drafter, or speculation is off. plain: the step was plain for comparison.
declined: drafting was not expected to pay, or lost lately. no_guess: the drafter had none. limited: the
request, the memory for drafts, the pass, the answer's or the context's end allows none. no_pages: no page was free.
late: the drafter was late. failed: it had failed before.
"""

GAP_BOUNDS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5)
"""Upper bounds of the histogram of times between tokens; longer ones have a class of their own."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state and counts of an engine: answers, pages, tokens, drafts and seconds. A request with `n` answers counts
    `n` times."""

    running: int
    waiting: int
    pages: int
    pages_used: int  # held by requests
    pages_cached: int  # held by no request, and kept for prompts that begin alike: free where room is needed
    prefix_queries: int  # prompt tokens that were looked up in the cache
    prefix_hits: int  # … and found
    preemptions: int
    refused: int  # requests turned away because too many waited
    finished: Mapping[str, int]  # answers that ended, by `FinishReason`
    prompt_tokens: int  # of requests that were admitted
    generated_tokens: int
    rounds: int
    turns: int  # steps by answer: a step counts once for each answer that it emitted for
    draft_s: float
    verify_s: float
    host_s: float
    drafts: int
    draft_tokens: int
    accepted_tokens: int
    accepted_by_position: tuple[int, ...]  # accepted first guesses of a draft, second ones, …
    drafters: Mapping[str, DrafterStats] = field(default_factory=dict)
    late: Mapping[str, int] = field(default_factory=dict)  # by host drafter: steps that did not wait for it
    unrecorded: Mapping[str, int] = field(default_factory=dict)
    """By device drafter: shapes of its drafts that run without a graph; the log says why."""
    dropped: Mapping[str, str] = field(default_factory=dict)  # host drafters that are asked no more, and why
    drops: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """By drafter and reason (raised, invalid, late, unread): answers that went on without it."""
    decisions: Mapping[str, int] = field(default_factory=dict)
    """By drafter: steps in which it drafted for an answer ("drafted"), or did not and why (`Undrafted`)."""
    token_gaps: tuple[int, ...] = ()
    """Times between a token and the one before it in its answer, by class. Of the tokens of one step, which come
    together, only the first counts."""
    token_gaps_s: float = 0.0  # their sum
    drafter_bytes: Mapping[str, int] = field(default_factory=dict)
    """By drafter: bytes that it holds on the device or the host: weights, its part of the cache, workspace, texts."""
    tenants: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """By tenant: answers that run and that wait."""
    plan: Mapping[str, str] = field(default_factory=dict)
    """By drafter: the last decision, in words."""
    gains: Mapping[str, float] = field(default_factory=dict)
    """By drafter and batch size: the measured speed of recent drafted steps as a multiple of plain ones."""

    @property
    def pages_free(self) -> int:
        """Pages that a request may have, cached ones included."""
        return self.pages - self.pages_used

    @property
    def rejected_tokens(self) -> int:
        """Rows that were rolled back."""
        return self.draft_tokens - self.accepted_tokens


@dataclass(frozen=True, slots=True)
class Pulse:
    """The engine's health. busy_s: seconds since it began its current task; 0: it is idle.

    why: the reason why it died for good; empty: it lives, or was closed.
    """

    alive: bool
    busy_s: float
    why: str = ""
