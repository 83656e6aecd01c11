"""What is known of one HTTP request: filled in on its way, read by the log, the metrics and the traces.

It never holds a prompt, an answer or a key.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from starlette.types import Scope, Send

from slipstream.core.outputs import DrafterStats, SpeculationStats, Timing

_PLACE = "slipstream.record"


@dataclass(slots=True)
class Record:
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    method: str = ""
    path: str = ""
    tenant: str = ""
    body_bytes: int = 0
    user: str = ""  # a hash of what the client calls its user
    status: int = 0  # 0: it went away before it was answered
    arrived: float = field(default_factory=time.perf_counter)
    answers: list[AnswerRecord] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompts, found in the cache
    streamed: bool = False
    disconnected: bool = False
    error: str | None = None
    asked_id: str = ""  # the client's own name for the request
    ignored: list[str] = field(default_factory=list)  # fields that nothing here knows
    unenforced: Sequence[str] = ()  # rules of a schema that its grammar does not hold
    send: Send | None = None
    """The server's own way to the client, for what a stream sends often: past those who only look at how it begins."""

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.arrived

    def note_user(self, user: str | None) -> None:
        """Enough to find a user's requests again, for who knows the name."""
        if user:
            self.user = hashlib.sha256(user.encode("utf-8", "replace")).hexdigest()[:12]

    @property
    def completion_tokens(self) -> int:
        return sum(answer.tokens for answer in self.answers)

    @property
    def speculation(self) -> SpeculationStats:
        """All answers together."""
        total = SpeculationStats()
        for answer in self.answers:
            add_stats(total, answer.speculation)
        return total

    @staticmethod
    def of(scope: Scope) -> Record:
        found = scope[_PLACE]
        assert isinstance(found, Record)
        return found

    def attach(self, scope: Scope) -> None:
        scope[_PLACE] = self


@dataclass(slots=True)
class AnswerRecord:
    """One answer: numbers only."""

    tokens: int = 0
    finish_reason: str | None = None
    timing: Timing = field(default_factory=Timing)
    speculation: SpeculationStats = field(default_factory=SpeculationStats)


def add_stats(total: SpeculationStats, more: SpeculationStats) -> None:
    for key in ("rounds", "emitted", "drafted", "accepted", "draft_s", "verify_s", "host_s"):
        setattr(total, key, getattr(total, key) + getattr(more, key))
    for name, theirs in more.by_drafter.items():
        mine = total.by_drafter.setdefault(name, DrafterStats())
        for key in ("drafts", "drafted", "accepted", "failures", "declined"):
            setattr(mine, key, getattr(mine, key) + getattr(theirs, key))
