"""What an engine tells those who watch it: where it stands, and what it has done since it began.

Counts only ever grow, so that whoever asks twice knows what happened in between. They are read while the engine works
on: each is right by itself, and two of them may be a round apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from slipstream.core.outputs import DrafterStats

Undrafted = Literal["off", "plain", "declined", "no_guess", "limited", "no_pages", "late", "failed"]
"""Why a step went without a drafter's guesses for an answer: the request has no drafter, or all are switched off; the
step was plain to compare others with it; drafting was not expected to pay, or lost lately; it had none; the request,
the memory for drafts or the pass allows none, or the answer or a context ends here; no page was free; it was late; it
had failed before. `docs/serving.md` has a table of them."""


GAP_BOUNDS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5)
"""Upper bounds of the classes in which times between tokens are counted; longer ones have a class of their own."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Answers, pages, tokens, drafts and seconds. One request with `n` answers counts `n` times."""

    running: int
    waiting: int
    pages: int
    pages_used: int  # held by requests
    pages_cached: int  # held by nobody, and kept for prompts that begin alike: they are free for whoever needs room
    prefix_queries: int  # prompt tokens that were looked for in the cache
    prefix_hits: int  # … and found
    preemptions: int
    refused: int  # requests turned away, because too many waited
    finished: Mapping[str, int]  # answers that ended, by `FinishReason`
    prompt_tokens: int  # of requests that were admitted
    generated_tokens: int
    rounds: int
    turns: int  # rounds by answer: each counts once for every answer that it emitted for
    draft_s: float
    verify_s: float
    host_s: float
    drafts: int
    draft_tokens: int
    accepted_tokens: int
    accepted_by_position: tuple[int, ...]  # how often the first guess of a draft was accepted, the second, …
    drafters: Mapping[str, DrafterStats] = field(default_factory=dict)
    late: Mapping[str, int] = field(default_factory=dict)  # by host drafter: rounds that did not wait for it
    unrecorded: Mapping[str, int] = field(default_factory=dict)
    """By device drafter: shapes of its drafts that are no graph, and take longer; the log says why."""
    ahead_taken: int = 0  # drafts that the device began before their round was planned, and that it then had
    ahead_wasted: int = 0  # … and that it did not want after all
    dropped: Mapping[str, str] = field(default_factory=dict)  # host drafters that nobody asks any more, and why
    drops: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """By drafter and reason (raised, invalid, late, unread): answers that went on without it."""
    decisions: Mapping[str, int] = field(default_factory=dict)
    """By drafter and round: how often it drafted for an answer ("drafted"), and why it did not (`Undrafted`)."""

    token_gaps: tuple[int, ...] = ()
    """Times between a token and the one before it in its answer, by class. Tokens of one round come together: of those
    only the first has waited."""
    token_gaps_s: float = 0.0  # all of them together
    drafter_bytes: Mapping[str, int] = field(default_factory=dict)
    """By drafter: memory that it holds, of the device or the host: weights, its part of the cache, workspace, texts."""
    tenants: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """By tenant: answers that run and that wait."""
    plan: Mapping[str, str] = field(default_factory=dict)
    """By drafter: what was decided last, in words."""
    gains: Mapping[str, float] = field(default_factory=dict)
    """By drafter and batch size: how many times as fast as plain steps drafted ones were lately, as measured."""

    @property
    def pages_free(self) -> int:
        """Pages that a request may have, those included that are kept for the time being."""
        return self.pages - self.pages_used

    @property
    def rejected_tokens(self) -> int:
        """Rows that were rolled back."""
        return self.draft_tokens - self.accepted_tokens


@dataclass(frozen=True, slots=True)
class Pulse:
    """Whether the engine lives, and for how long it has been at one and the same thing; 0: it has nothing to do.

    why: it does not, and cannot be had again; empty: it lives, or was closed.
    """

    alive: bool
    busy_s: float
    why: str = ""
