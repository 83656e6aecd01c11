"""What drafts brought, by what it would have taken without them."""

from __future__ import annotations

from dataclasses import dataclass

_DECAY = 0.97
"""The last 30 rounds or so with drafts of a kind speak for it: of many requests, one round is a single throw, in which
those that stand last are no better evidence than the others."""


@dataclass(slots=True)
class Gain:
    """Tokens of drafted rounds, and how many plain rounds their time would have been."""

    tokens: float = 0.0
    plain: float = 0.0
    drafts: float = 0.0
    hoped: float = 0.0  # the sum of what was expected of each
    scatter: float = 0.0  # the sum of squares of what each brought beyond plain ones: what may be chance

    @property
    def expected(self) -> float:
        return self.hoped / self.drafts if self.drafts else 1.0

    @property
    def measured(self) -> float:
        """How many times as fast as plain decoding; 1 before anything was drafted.

        Guesses to check make no round shorter: where rounds seem to be shorter than plain ones that is noise, and what
        they brought is the most that was gained.
        """
        return self.tokens / max(self.plain, self.drafts) if self.plain else 1.0

    def add(self, tokens: float, plain: float, expected: float) -> None:
        self.tokens += tokens
        self.plain += plain
        self.drafts += 1
        self.hoped += expected
        self.scatter += (tokens - plain) ** 2

    def join(self, later: Gain) -> None:
        """What came after it counts more."""
        self.tokens = self.tokens * _DECAY + later.tokens
        self.plain = self.plain * _DECAY + later.plain
        self.drafts = self.drafts * _DECAY + later.drafts
        self.hoped = self.hoped * _DECAY + later.hoped
        self.scatter = self.scatter * _DECAY**2 + later.scatter

    def lacks(self, least: float) -> bool:
        """Is it below so many times plain decoding, and hardly by chance?"""
        return bool(least * self.plain - self.tokens > 2 * self.scatter**0.5)
