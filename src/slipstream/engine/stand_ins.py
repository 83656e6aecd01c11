"""Which recorded round does the work of one that is not recorded.

To record a round takes as long as ten of them, and everybody in it waits. A larger one does the same work a little
slower. So a shape is recorded once it has come often of late, and those that come now and then never are.
"""

from __future__ import annotations

from collections.abc import Collection

from slipstream.engine.round_shape import RoundShape
from slipstream.sampling.table import is_stale

_OFTEN = 32
"""What a larger round costs more, so many times, is about what it takes to record the right one."""
_OF_LATE = 1024
"""Stand-ins after which what came before counts half."""


class StandIns:
    """Counts shapes that come without being recorded."""

    def __init__(self) -> None:
        self._came: dict[RoundShape, float] = {}
        self._known: dict[RoundShape, RoundShape] = {}  # who stood in for whom: a round must not be looked for long
        self._times = 0

    def of(self, shape: RoundShape, recorded: Collection[RoundShape]) -> RoundShape | None:
        """The shape that is to do this one's work this time; None: this one is to be recorded."""
        came = self._came.get(shape, 0.0) + 1
        other = self._known.get(shape) if came <= _OFTEN else None
        if came <= _OFTEN and (other is None or other not in recorded):
            fit = [other for other in recorded if other.does(shape)]
            other = min(fit, key=lambda other: (other.rows, other.is_tree, other.width), default=None)
        if other is None:
            self._came.pop(shape, None)
            return None
        self._came[shape], self._known[shape] = came, other
        self._times += 1
        if self._times % _OF_LATE == 0:
            self._fade(shape.version)
        return other

    def forget(self) -> None:
        """Who stood in for whom: another shape was recorded, which may do it better."""
        self._known.clear()

    def _fade(self, version: int) -> None:
        halves = {shape: came / 2 for shape, came in self._came.items() if not is_stale(shape.version, version)}
        self._came = {shape: came for shape, came in halves.items() if came >= 1}
