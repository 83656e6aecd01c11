"""What an engine counts of its own work, for `Engine.snapshot`: additions of numbers, and nothing else in a round."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate

from slipstream.core.draft import MAX_NODES
from slipstream.core.outputs import GAP_BOUNDS_S


class Counters:
    """Written by the engine's thread alone; any thread may read, since Python reads and writes a number whole."""

    def __init__(self) -> None:
        self.finished: dict[str, int] = {}
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self.rounds = 0
        self.turns = 0
        self.draft_s = 0.0
        self.verify_s = 0.0
        self.host_s = 0.0
        self.draft_tokens = 0
        self.unrecorded: dict[str, int] = {}  # by device drafter: loops of it that are no graphs
        self.ahead_taken = self.ahead_wasted = 0  # drafts begun before their round was planned
        self.gaps, self.gaps_s = [0] * (len(GAP_BOUNDS_S) + 1), 0.0  # as in `Snapshot.token_gaps`
        self._accepted = [0] * (MAX_NODES + 1)  # drafts of which so many nodes were accepted

    def draft(self, drafted: int, accepted: int) -> None:
        """What became of one draft."""
        self.draft_tokens += drafted
        self._accepted[accepted] += 1

    def tokens(self, count: int, waited_s: float | None) -> None:
        """So many tokens of an answer came together; waited_s: since those before them, None: they are its first."""
        if waited_s is not None:
            self.gaps[bisect_left(GAP_BOUNDS_S, waited_s)] += 1
            self.gaps_s += waited_s
        self.gaps[0] += count - 1

    def end(self, reason: str) -> None:
        self.finished[reason] = self.finished.get(reason, 0) + 1

    @property
    def accepted(self) -> tuple[int, ...]:
        """How many drafts there were, and of how many the first, the second, … node was accepted."""
        at_least = list(accumulate(reversed(self._accepted)))[::-1]
        while len(at_least) > 1 and not at_least[-1]:
            at_least.pop()
        return tuple(at_least)
