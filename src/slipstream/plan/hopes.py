"""Could guesses pay at all, by what passes and guesses cost? Where not even good ones could, nobody needs to try."""

from __future__ import annotations

import numpy as np

from slipstream.plan.cost import SIZES, PassCost
from slipstream.plan.measured import Floats

_GOOD = 0.9
"""The share of guesses that are right, at every depth, where they are as good as guesses of many requests get."""
_ROWS = SIZES[-1]
"""A pass has so many rows at the most, unless it is said."""


class Hopes:
    """Of one planner. What was found out for a number of requests holds for some rounds: costs change slowly."""

    HOLDS = 32
    RARELY = 8192
    """Rounds from one try to the next where there is no hope: what is known of the costs may be wrong, after all."""

    def __init__(self, cost: PassCost, margin: float) -> None:
        self.most_rows = _ROWS
        self._cost, self._margin = cost, margin
        self._found: dict[tuple[str, int], tuple[int, bool]] = {}  # by drafter and requests: when, and what

    def any(self, drafter: str, requests: int, guess_s: Floats, now: int) -> bool:
        """Could this one make rounds of so many requests faster? guess_s [K + 1]: what 0 to K guesses for each take."""
        seen = self._found.get((drafter, requests))
        if seen is None or now - seen[0] >= self.HOLDS:
            seen = self._found[drafter, requests] = now, self._could_pay(requests, guess_s)
        return seen[1]

    def _could_pay(self, requests: int, guess_s: Floats) -> bool:
        """The first guesses of all of them come first, then the second ones, …, and any number of them may be taken."""
        most = min((len(guess_s) - 1) * requests, max(self.most_rows - requests, 0))
        if not most or not self._cost.measured:  # what was not measured is only assumed
            return True
        depths = np.arange(requests - 1, requests + most) // requests  # [N + 1]: 0, and then `requests` of each
        tokens = np.concatenate(([0.0], _GOOD ** depths[1:])).cumsum() + requests
        rates = tokens / (self._cost.curve(requests, requests + most) + guess_s[depths])
        plain = requests / self._cost.seconds(requests)
        return bool(rates.max() > self._margin * plain)
