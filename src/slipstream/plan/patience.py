"""Whoever stops must read what it misses before it guesses again: for 64 requests that takes as long as several rounds.

Texts are hard in stretches. The first tokens of answers are, and of many requests that come together those come
together. So a drafter whose guesses paid until now goes on with those that lose least, until they lost as much as it
had won, or as a part of what it would take to come back.
"""

from __future__ import annotations

from typing import NamedTuple

_PART = 0.3
"""Of what it takes to come back: where a text becomes hard for good, it is lost for nothing."""
_GAP = 4
"""Rounds from the last one in which it guessed, at the most: some go without, to compare with."""


class _Won(NamedTuple):
    """What guesses are expected to have won so far, less what they lost."""

    round: int  # the last
    before: float  # that round
    seconds: float  # with it


class Patience:
    """Of one planner, by drafter."""

    def __init__(self) -> None:
        self._won: dict[str, _Won] = {}

    def pays(self, drafter: str, won_s: float, now: int) -> None:
        """Its guesses are to win so much in this round."""
        self._won[drafter] = _Won(now, before := self._before(drafter, now), before + won_s)

    def lasts(self, drafter: str, lost_s: float, back_s: float, now: int) -> bool:
        """Does it go on in this round, though that is expected to lose so much, where to come back takes so long?"""
        before = min(self._before(drafter, now), _PART * back_s)
        if before <= max(lost_s, 0.0):
            return False
        self._won[drafter] = _Won(now, before, before - max(lost_s, 0.0))
        return True

    def _before(self, drafter: str, now: int) -> float:
        """What it has won before this round, which may be planned more than once."""
        last = self._won.get(drafter)
        if last is None or now - last.round > _GAP:
            return 0.0
        return last.before if last.round == now else last.seconds
