"""Decisions in words: what was drafted or not, and by which figures. Put together only when somebody asks."""

from __future__ import annotations

from typing import NamedTuple

from slipstream.plan.cost import PassCost
from slipstream.plan.sizes import MARGIN

_DEAR = 0.5
"""A row that adds such a part of what a request costs in the pass can hardly pay: the arithmetic is used up."""


_NO_GAIN = 0.005
"""What is not seen of a gain that is shown."""

_SLOW = 0.3
"""Guesses that take such a part of a plain pass are slow."""


NO_TOKENS = "off: drafts may have 0 tokens (draft_tokens)"
NO_MEMORY = "off: drafts may take no memory (max_draft_memory)"


def little_memory(places: int, requests: int) -> str:
    return f"off: memory for {places} guesses is too little for {requests} requests (max_draft_memory)"


class Decision(NamedTuple):
    """The last plan of one drafter's guesses."""

    requests: int  # that decoded in the round
    nodes: int  # most for a request where it is asked beforehand, of all where its guesses were there; 0: none
    gain: float  # tokens a second by those of plain decoding, as expected of the best that could be drafted
    guess: float = 0.0  # what the guesses take, as a part of a plain pass
    levels: int = 0  # of trees
    waits: bool = False  # one would pay, and yet more would be lost than may be if it were wrong
    is_others: bool = False  # there are nodes, but none for the one who asks

    def for_others(self) -> Decision:
        """The same, for a request that got nothing of it."""
        return self._replace(is_others=True) if self.nodes else self

    def text(
        self, drafter: str, cost: PassCost, acceptance: str = "", min_gain: float = 1.0, *, shared: bool = True
    ) -> str:
        """In words. acceptance: how often its guesses are right, in words as well. shared: with how many requests the
        round had."""
        if self.nodes and self.is_others:
            return f"off: guesses for others were worth more ({self.gain:.2f}x expected)"
        if self.nodes:
            deep = f" in {self.levels} levels" if self.levels else ""
            return f"{drafter} {self.nodes}{deep}: {self.gain:.2f}x expected"
        if self.waits:
            return f"off: {self.gain:.2f}x expected, but more could be lost than was won of late; tried again later"
        if MARGIN < self.gain <= min_gain:
            return f"off: {self.gain:.2f}x expected of the best draft, and min_gain asks for {min_gain:g}"
        share = acceptance and f", {acceptance}"
        best = f"{self.gain:.2f}x expected of the best draft"
        if abs(self.gain - 1) < _NO_GAIN:  # none was the best
            best = "no draft is expected to be faster"
        two = cost.about(2 * self.requests) / cost.about(self.requests) - 1
        if self.guess > _SLOW and (self.guess >= two or two <= _DEAR):
            return f"off: its guesses take {self.guess:.0%} of a pass, {best}{share}"
        if two > _DEAR:
            if self.requests == 1:
                return f"off: a pass has no spare arithmetic here (a second row costs {two:.0%} more{share})"
            batch = f"batch {self.requests}" if shared else "the batch"
            return f"off: {batch} leaves no spare arithmetic (a row more each costs {two:.0%} more{share})"
        return f"off: {best}{share}"
