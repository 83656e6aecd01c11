"""Drafts with nodes from which their drafter learns: they cost rows now, and bring tokens later.

The chance of such a node says nothing about its worth. So a draft is taken whole or not at all, by what the drafter's
drafts brought of late, a round, against what so many rows cost. Where it does not pay it is tried again for a stretch
of rounds, for one round teaches nothing; the dearer the stretch, the more rarely.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_PRIOR = 0.8
_PRIOR_WEIGHT = 8.0
_DECAY = 0.95
_SHARED_DECAY = 0.99
"""Tokens that a draft brings before anything was seen, the rounds that this is worth, and how observations fade."""
_STRETCH = 24
"""Rounds of a trial: guesses must ripen, and what they bring comes in bursts."""
_WASTE = 0.01
_SHORTEST_REST = 16
"""What trials may cost of the time, and the fewest rounds between two of them."""


@dataclass(slots=True)
class _Mean:
    total: float
    weight: float

    @property
    def value(self) -> float:
        return self.total / self.weight

    def add(self, value: float, decay: float) -> None:
        self.total = self.total * decay + value
        self.weight = self.weight * decay + 1


class Investment:
    """What the drafts of one drafter bring, and whether they are worth their rows."""

    def __init__(self, brings: float = _PRIOR) -> None:
        """brings: tokens of a draft, before anything was seen."""
        self._shared = _Mean(brings * _PRIOR_WEIGHT, _PRIOR_WEIGHT)
        self._requests: dict[str, _Mean] = {}
        self._idle = 0.0  # rounds without a draft
        self._trial = 0  # rounds that are still to be drafted, whatever the estimates say

    def gain(self, request_id: str) -> float:
        """Tokens that a round brings beyond its own one. Newcomers start from everybody's record."""
        return self._requests.get(request_id, self._shared).value

    def observe(self, request_id: str, accepted: int) -> None:
        start = _Mean(self._shared.value * _PRIOR_WEIGHT, _PRIOR_WEIGHT)
        self._requests.setdefault(request_id, start).add(accepted, _DECAY)
        self._shared.add(accepted, _SHARED_DECAY)

    def forget(self, request_id: str) -> None:
        self._requests.pop(request_id, None)

    def tries(self, pays: bool, dearer: float) -> bool:
        """Is it drafted all the same? Called once a round; dearer: what a pass with it costs beyond one without, as a
        part of the latter."""
        if pays:
            self._idle, self._trial = 0.0, 0
            return True
        if self._trial:
            self._trial -= 1
            return True
        self._idle += 1
        if self._idle < max(_SHORTEST_REST, _STRETCH * dearer / _WASTE):
            return False
        self._idle, self._trial = 0.0, _STRETCH - 1
        return True


def most_worth(gains: Sequence[float], sizes: Sequence[int]) -> list[int]:
    """The requests with a draft, by what they bring for a row."""
    drafting = [i for i, size in enumerate(sizes) if size]
    return sorted(drafting, key=lambda i: -gains[i] / sizes[i])
