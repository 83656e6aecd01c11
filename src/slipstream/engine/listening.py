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
    """Seconds of one round. Verify is the target pass, sampling and commit; host is what is left.

    rows: of the target pass, those of prompts left out; read_rows: of prompts. hoped: how many times as fast as plain
    decoding the round was planned to be. ready: what the host took to queue it while another one was under way; 0: none
    was. waited: of the host's, how long the device had nothing to do since drafters on the host had to hear of the
    round before it; guesses that the planner counts by themselves (`costly`) are not part of it. read: of verify, what
    prompts took that had a pass of their own; 0: they had none, or that is not told apart. along: drafters on the
    device read these prompts, too.
    """

    host: float
    draft: float
    verify: float
    rows: int = 0
    read_rows: int = 0
    hoped: float = 1.0
    ready: float = 0.0
    waited: float = 0.0
    read: float = 0.0
    along: bool = False


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
