"""What makes a pass dearer beside its rows: the length of the context, what ran before it, and who reads along.

All are told from recorded passes alike in all else, as far as these are sure of it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from slipstream.bench.recording import PassSeen, WaitSeen
from slipstream.plan.measured import Load

Array = NDArray[np.float64]

_CLEARLY = 0.95
"""Of what one way leaves unexplained, what the other one leaves at most where it is the better one."""

_FEW = 3
"""Passes beyond those that a price could be fitted to exactly: with fewer chance alone may be one."""

_FADES_S = 0.02
"""After so long about a third is left of what a pass does to those behind it."""


class ContextPrice:
    """What a longer context adds to a pass, by passes alike in all else, as far as they are sure of it.

    So much for each token and row that looks at it, unless so much for each token tells passes clearly better apart.
    Contexts of one recording differ little, and a stall would count for thousands of tokens that come later: so of the
    slope that fits best two standard errors are taken off; 0 where nothing is left.
    """

    def __init__(self, passes: Sequence[PassSeen]) -> None:
        groups: dict[tuple[int, int], list[PassSeen]] = defaultdict(list)
        for seen in passes:
            if seen.rows and not seen.read_rows:
                groups[seen.requests, seen.rows].append(seen)
        told = [
            [
                (s.count, s.seconds, *(_looked_at(s.rows, load_of(s), by_row=way) for way in (False, True)))
                for s in group
            ]
            for group in groups.values()
        ]
        weights, seconds, *ways = _by_distance(told, columns=4)  # [N] each
        fits = [_slope(weights, way, seconds, free=len(weights) - len(groups) - 1) for way in ways]
        self._by_row = fits[0].left >= _CLEARLY * fits[1].left
        self._slope = fits[self._by_row].slope

    @property
    def each(self) -> tuple[float, float]:
        """Of a token of context, once for its request and once for each row of it."""
        return (0.0, self._slope) if self._by_row else (self._slope, 0.0)

    def seconds(self, rows: int, load: Load) -> float:
        return self._slope * _looked_at(rows, load, by_row=self._by_row)


@dataclass(slots=True)
class Wake:
    """How wide the passes of late were, in doublings of a row.

    A processor that has computed many rows at once is slower for some hundredths of a second: wide arithmetic has it
    lower its clock, and its caches hold what that needed. So small passes behind large ones cost more than among
    themselves.
    """

    _width: float = 0.0
    _ended: float = -math.inf

    def felt(self, rows: int, begins: float) -> float:
        """By a pass of so many rows that begins then: how much wider those before it were, or 0."""
        return max(0.0, self._width * _left(begins - self._ended) - math.log2(max(1, rows)))

    def passed(self, rows: int, seconds: float, ended: float) -> None:
        width = self._width * _left(ended - seconds - self._ended)
        own = math.log2(max(1, rows))
        self._width, self._ended = own + (width - own) * _left(seconds), ended


def _left(seconds: float) -> float:
    return math.exp(-max(0.0, seconds) / _FADES_S)


class Slowdown:
    """How many times as long passes take that feel something: so many times for each unit of it.

    Such as for each doubling of what a wake is wider, or once for drafters that read the prompts, too. Less two
    standard errors; once where nothing is left, as where a device is as fast at all times. Nothing is believed beyond
    what was seen.
    """

    def __init__(self, passes: Sequence[PassSeen], feels: Callable[[PassSeen], float]) -> None:
        self._feels = feels
        groups: dict[tuple[int, int, int], list[PassSeen]] = defaultdict(list)
        for seen in passes:
            groups[seen.requests, seen.rows, seen.read_rows].append(seen)
        told = [[(s.count, math.log(max(s.seconds, 1e-9)), feels(s)) for s in group] for group in groups.values()]
        weights, seconds, felt = _by_distance(told, columns=3)  # [N] each
        free = len(weights) - len(groups) - 1
        self._slope = _slope(weights, felt, seconds, free).slope if free >= _FEW else 0.0
        self._most = max(map(feels, passes), default=0.0)

    def factor(self, felt: float) -> float:
        return math.exp(self._slope * min(felt, self._most))

    def bare(self, passes: Sequence[PassSeen]) -> list[PassSeen]:
        """The same, as they would have been without."""
        return [replace(seen, seconds=seen.seconds / self.factor(self._feels(seen))) for seen in passes]


def _by_distance(groups: Sequence[Sequence[tuple[float, ...]]], columns: int) -> Array:  # [columns, N]
    """Rows of a weight and values, as columns: the values by their distance from the mean of their group."""
    parts = []
    for group in groups:
        told = np.array(group, dtype=np.float64)  # [G, 1 + V]
        parts.append(np.column_stack([told[:, 0], told[:, 1:] - np.average(told[:, 1:], axis=0, weights=told[:, 0])]))
    return np.concatenate(parts).T if parts else np.zeros((columns, 0))


class WaitPrice:
    """What it takes longer to wait for drafters on the host where requests begin, whose prompts they read, and for each
    row that the host has to prepare: by waits of as many requests, as far as they are sure of it."""

    def __init__(self, waits: Sequence[WaitSeen]) -> None:
        groups: dict[int, list[WaitSeen]] = defaultdict(list)
        for seen in waits:
            groups[seen.requests].append(seen)
        told = [[(s.count, s.seconds, s.begun, s.rows) for s in group] for group in groups.values()]
        weights, seconds, begun, rows = _by_distance(told, columns=4)  # [N] each
        free = len(weights) - len(groups) - 1
        self._by_begun = _slope(weights, begun, seconds, free).slope if free >= _FEW else 0.0
        left = seconds - self._by_begun * begun
        self._by_row = _slope(weights, rows, left, free).slope if free >= _FEW else 0.0

    def seconds(self, rows: int, begun: int) -> float:
        return self._by_begun * begun + self._by_row * rows


def load_of(seen: PassSeen) -> Load:
    return Load(seen.requests, seen.context)


def _looked_at(rows: int, load: Load, *, by_row: bool) -> float:
    """Tokens of context: all of them, or for every row those of its request."""
    return rows * load.each if by_row else load.context


class _Fit(NamedTuple):
    slope: float
    left: float  # of the squares, that the slope does not explain


def _slope(weights: Array, way: Array, seconds: Array, free: int) -> _Fit:
    """Of seconds by a way, both by their distance from a mean. free: how many of them say more than the means."""
    below = float((weights * way**2).sum())
    if not below or free < 1:
        return _Fit(0.0, math.inf)
    slope = max(0.0, float((weights * way * seconds).sum()) / below)
    left = float((weights * (seconds - slope * way) ** 2).sum())
    return _Fit(max(0.0, slope - 2 * math.sqrt(left / free / below)), left)
