"""What a long context adds to a pass: attention looks at every token of it.

Measured at the start, or else learned from passes of one size over contexts of different lengths. Without it the plan
would compare what a plain pass cost long ago, over a short text, with what a drafted one costs now over a long one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from slipstream.plan.measured import Load

_EVERY = 16
"""Passes between two looks at what was learned."""
_DECAY = 0.995
_CERTAIN = 4.0
"""A slope counts when it is so many times as large as the error that it may have."""


@dataclass(slots=True)
class _Means:
    work: float = 0.0
    seconds: float = 0.0
    weight: float = 0.0


@dataclass(slots=True)
class ContextCost:
    """Seconds that the context adds to a pass over n rows.

    per_row: where it is learned: does every row look at the context by itself, as on a CPU, or do those of a request
        share what is read, as on a GPU?
    """

    key_s: float = 0.0
    row_key_s: float = 0.0
    per_row: bool = True
    measured: bool = False
    _sizes: dict[int, _Means] = field(default_factory=dict)
    _sums: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)  # work², work · seconds, seconds², weight
    _passes: int = 0

    @property
    def matters(self) -> bool:
        return self.key_s > 0 or self.row_key_s > 0

    @property
    def rates(self) -> tuple[float, float]:
        return self.key_s, self.row_key_s

    def adopt(self, key_s: float, row_key_s: float) -> None:
        """It was measured: nothing is learned any more."""
        self.key_s, self.row_key_s, self.measured = key_s, row_key_s, True

    def line(self, load: Load) -> tuple[float, float]:
        """What is added for any number of rows, and for each row."""
        return self.key_s * load.context, self.row_key_s * load.each

    def seconds(self, rows: float, load: Load) -> float:
        fixed, each = self.line(load)
        return fixed + each * rows

    def learn(self, size: int, rows: int, seconds: float, load: Load) -> None:
        """A pass of about this size took so long.

        The slope is that within passes of a size, so that what rows cost is not taken for it.
        """
        if self.measured or not load.context:
            return
        work = rows * load.each if self.per_row else float(load.context)
        means = self._sizes.setdefault(size, _Means(work, seconds))
        seconds = min(seconds, 3 * means.seconds)  # a hiccup
        means.weight = means.weight * _DECAY + 1
        off, late = work - means.work, seconds - means.seconds
        means.work += off / means.weight
        means.seconds += late / means.weight
        xx, xy, yy, weight = (part * _DECAY for part in self._sums)
        rest, short = work - means.work, seconds - means.seconds
        self._sums = (xx + off * rest, xy + off * short, yy + late * short, weight + 1)
        self._passes += 1
        if self._passes % _EVERY == 0:
            self._judge()

    def _judge(self) -> None:
        xx, xy, yy, weight = self._sums
        slope = xy / xx if xx > 0 else 0.0
        error = (max(yy - slope * xy, 0.0) / weight / xx) ** 0.5 if xx > 0 else 0.0
        found = slope if slope > _CERTAIN * error else 0.0
        before = self.row_key_s if self.per_row else self.key_s
        if abs(found - before) <= 0.1 * before:
            return
        if self.per_row:
            self.row_key_s = found
        else:
            self.key_s = found
