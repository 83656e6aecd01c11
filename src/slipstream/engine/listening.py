"""Who wants to know every round as it was: what was offered, what stood, how long it took. Nobody, as a rule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from slipstream.core.draft import Tree
from slipstream.core.verdict import Verdict
from slipstream.engine.state import Answer


@dataclass(frozen=True, slots=True)
class RoundTimes:
    """Seconds of one round, and what they depend on."""

    host: float  # what is left beside drafts and verifying
    draft: float
    verify: float  # the target pass, sampling and commit
    rows: int = 0  # of the target pass, without those of prompts
    read_rows: int = 0  # of prompts
    hoped: float = 1.0  # how many times as fast as plain decoding it was planned to be
    waited: float = 0.0
    """Of the host's: the device had nothing to do, since drafters on the host had to hear of the round before it.
    Guesses that the planner counts by themselves (`costly`) are not part of it."""
    read: float = 0.0  # of verify: what prompts took that had a pass of their own; 0: they had none, or nobody knows
    along: bool = False  # drafters on the device read these prompts, too
    newcomers: int = 0  # requests that started just before it, of queued rounds: drafters on the host read them first


@dataclass(frozen=True, slots=True)
class Offered:
    """What a drafter on the host guessed for these requests, before the planner took what pays."""

    drafter: str
    answers: Sequence[Answer]
    caps: Sequence[int]  # most nodes that each of them could have
    trees: Sequence[Tree]
    promises: Sequence[Sequence[float] | None]
    seconds: float


class RoundListener(Protocol):
    """Is called on the engine's thread, and must be quick. It changes nothing of what it is shown."""

    def offered(self, offer: Offered) -> None:
        """A drafter on the host guessed this."""

    def drew(self, drafter: str, nodes: int, seconds: float) -> None:
        """A drafter on the device took so long to guess so many nodes, or levels, for each of a round's requests."""

    def round(
        self, answers: Sequence[Answer], verdicts: Sequence[Verdict], kept: Sequence[int], times: RoundTimes
    ) -> None:
        """A round is over. The tokens are the answers' already; kept: how many of them each got."""
