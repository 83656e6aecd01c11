"""Which recorded round does the work of one that is not recorded.

To record a round takes as long as ten of them, and everybody in it waits. A larger one does the same work a little
slower. So a shape is recorded once it has come often, and those that come now and then never are.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Protocol

from slipstream.engine.round_shape import RoundShape

_OFTEN = 32
"""What a larger round costs more, so many times, is about what it takes to record the right one."""


class Shapes(Iterable[RoundShape], Container[RoundShape], Protocol):
    """Those that are recorded."""


class StandIns:
    """Counts shapes that come without being recorded."""

    def __init__(self) -> None:
        self._came: dict[RoundShape, int] = {}
        self._known: dict[RoundShape, RoundShape] = {}  # who stood in for whom: a round must not be looked for long
        self._version = 0

    def of(self, shape: RoundShape, recorded: Shapes) -> RoundShape | None:
        """The shape that is to do this one's work this time; None: this one is to be recorded."""
        if shape.version != self._version:  # those before are over tensors that are gone
            self._came.clear()
            self._known.clear()
            self._version = shape.version
        came = self._came[shape] = self._came.get(shape, 0) + 1
        other = self._known.get(shape)
        if came <= _OFTEN and (other is None or other not in recorded):
            fit = [other for other in recorded if other.does(shape)]
            other = min(fit, key=lambda other: (other.rows, other.is_tree, other.width), default=None)
        if came > _OFTEN or other is None:
            del self._came[shape]
            self._known.pop(shape, None)
            return None
        self._known[shape] = other
        return other
