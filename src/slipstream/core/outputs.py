"""What a caller gets back, in vLLM's shape where it has one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    """Where one token of an answer comes from: the target itself chose it, or it had been guessed and stood."""

    round: int  # of this answer, from 1
    depth: int  # in the round's draft, from 1; 0: the target's own token
    drafters: tuple[str, ...]  # who guessed it; nobody: the target's own token
    text_end: int  # characters of the answer's text with this token; one that ends inside a character adds none yet


@dataclass(slots=True)
class DrafterStats:
    """What one drafter did for one request."""

    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    failures: int = 0
    declined: int = 0  # rounds that went without its guesses, because they were not expected to pay

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
    expected_gain: float | None = None  # how many times as fast as plain ones its drafted rounds were to be
    measured_gain: float | None = None  # … and were, against undrafted rounds of as many; None: that was not measured
    plan: dict[str, str] = field(default_factory=dict)
    """By drafter: what was decided last, and why. These four are there when the answer has ended."""
    caution: str = ""  # why this model's answers may depend on drafts and company; empty: they do not

    def of(self, drafter: str) -> DrafterStats:
        """One drafter's part, from now on."""
        known = self.by_drafter.get(drafter)  # which it is, round after round
        if known is None:
            known = self.by_drafter[drafter] = DrafterStats()
        return known

    @property
    def alpha(self) -> float:
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def tau(self) -> float:
        return self.emitted / self.rounds if self.rounds else 0.0

    @property
    def why(self) -> str:
        """Why it was on or off: what was decided last for each drafter, in the planner's own words."""
        return "; ".join(filter(None, (self._why, self.caution)))

    @property
    def _why(self) -> str:
        counted = f"{self.accepted} of {self.drafted} guesses stood, {self.tau:.2f} tokens a pass"
        if not self.plan:  # nothing was weighed: drafts of a fixed size, or nobody to draft, or no round to draft in
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

    text, token_ids, logprobs and origins are all so far; in a stream of `output_kind="delta"` only what is new, and
    timing and speculation, which go on changing until then, are those of the answer when it has ended.
    unenforced: rules of its schema that a grammar cannot hold, with their places. violation: what the finished
    answer breaks of them.
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

    num_cached_tokens: of the prompt, whose K and V were there already from a request before.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    num_cached_tokens: int = 0


def parting(left: Sequence[int], right: Sequence[int]) -> int | None:
    """Where two answers part; None if they are the same."""
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return None if len(left) == len(right) else min(len(left), len(right))
