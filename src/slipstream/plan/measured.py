"""What was measured before the first request: passes by rows and context, drafts by size and number of requests.

The first rounds of an engine are planned by this; what they then take themselves corrects it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_DEAR = 1.8
"""A pass over two rows, by one over one: few guesses are right four times of five."""

VERSION = 3
"""Of the JSON form and of how things are timed: files of another version are measured again."""


class Load(NamedTuple):
    """Of a round: how many requests decode in it, and how many tokens they have in all."""

    requests: int = 0  # 0: not said
    context: int = 0

    @property
    def each(self) -> float:
        return self.context / self.requests if self.requests else 0.0


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds by size: straight lines between what was measured, and on beyond the last two. Never less for more."""

    sizes: tuple[int, ...]
    seconds: tuple[float, ...]

    def at(self, sizes: Floats) -> Floats:
        known, rising = np.array(self.sizes, dtype=np.float64), np.maximum.accumulate(np.array(self.seconds))
        found = np.interp(sizes, known, rising)
        if len(known) > 1:
            slope = (rising[-1] - rising[-2]) / (known[-1] - known[-2])
            found = found + np.maximum(sizes - known[-1], 0) * slope
        return np.asarray(found, dtype=np.float64)


@dataclass(frozen=True, slots=True)
class DraftSeen:
    """One drafter's guesses for so many requests at once."""

    requests: int
    curve: Curve  # by nodes; of trees, by levels


@dataclass(frozen=True, slots=True)
class MeasuredCosts:
    """Of one machine, model and precision.

    key_s, row_key_s: what a token of context adds to a pass, once for its request and once for each row of it.
    """

    passes: Curve  # by rows, with hardly any context
    key_s: float = 0.0
    row_key_s: float = 0.0
    drafts: Mapping[str, tuple[DraftSeen, ...]] = field(default_factory=dict)  # by drafter, fewest requests first
    is_steady: bool = field(default=True, compare=False)  # the machine was not busy with other things meanwhile
    spread: float = field(default=1.0, compare=False)  # the slowest by the fastest of the same pass, timed some times
    is_whole: bool = field(default=True, compare=False)  # there was time for all of it

    def why_dear(self) -> str:
        """Why guesses hardly pay by these costs, in a line; nothing where a row beside the first is cheap enough.

        A pass brings at most as many tokens as it has rows, and so many only where all guesses are right.
        """
        rows = np.arange(1, self.passes.sizes[-1] + 1)
        times = self.passes.at(rows.astype(np.float64)) / self.passes.seconds[0]  # by a pass over one row
        if len(rows) < 2 or times[1] < _DEAR:
            return ""
        paying = rows[times < rows]
        if not len(paying):
            so = "no guesses can pay, however right they are"
        elif paying[0] == 2:
            so = f"a single guess must be right {times[1] - 1:.0%} of the time to pay"
        else:
            so = f"drafts pay from {paying[0] - 1} guesses on, if nearly all of them are right"
        return (
            f"Rows are dear on this machine: a pass over two takes {times[1]:.1f} times as long as over one, so {so}."
        )

    def as_json(self) -> dict[str, Any]:
        return {
            "version": VERSION,
            "passes": _pairs(self.passes),
            "key_s": self.key_s,
            "row_key_s": self.row_key_s,
            "drafts": {
                name: [{"requests": one.requests, "nodes": _pairs(one.curve)} for one in seen]
                for name, seen in self.drafts.items()
            },
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> MeasuredCosts | None:
        """None where it is of another version, or not whole."""
        try:
            if data["version"] != VERSION:
                return None
            drafts = {
                str(name): tuple(DraftSeen(int(one["requests"]), _curve(one["nodes"])) for one in seen)
                for name, seen in data["drafts"].items()
            }
            return MeasuredCosts(_curve(data["passes"]), float(data["key_s"]), float(data["row_key_s"]), drafts)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError):
            return None


def _pairs(curve: Curve) -> list[list[float]]:
    return [list(pair) for pair in zip(curve.sizes, curve.seconds, strict=True)]


def _curve(pairs: Sequence[Sequence[float]]) -> Curve:
    sizes, seconds = tuple(int(pair[0]) for pair in pairs), tuple(float(pair[1]) for pair in pairs)
    if not sizes or list(sizes) != sorted(set(sizes)) or min(sizes) < 1 or min(seconds) <= 0:
        raise ValueError("sizes must rise from 1 on, and take time")
    return Curve(sizes, seconds)
