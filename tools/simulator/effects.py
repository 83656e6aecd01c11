"""What makes passes longer beside their rows, such as the context, what ran before and who reads along; and waits.

All are told from recorded ones alike in all else, as far as these are sure of it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simulator.recording import PassSeen, WaitSeen
from slipstream.plan.types import Load

Array = NDArray[np.float64]

_CLEARLY = 0.95
"""Of what one way leaves unexplained, what the other one leaves at most where it is the better one."""

_FEW = 3
"""Passes beyond those that a price could be fitted to exactly: with fewer chance alone may be one."""

_SAME = 1e-6
"""Differences that are none: of rows, tokens or doublings; and of how far two ways go together."""

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
        fits = [_fit(weights, way[None], seconds, groups=len(groups)) for way in ways]
        self._by_row = fits[0].left >= _CLEARLY * fits[1].left
        (self._slope,) = fits[self._by_row].slopes

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
        (self._slope,) = _fit(weights, felt[None], seconds, groups=len(groups), least=_FEW).slopes
        self._most = max(map(feels, passes), default=0.0)

    def factor(self, felt: float) -> float:
        return math.exp(self._slope * min(felt, self._most))

    def bare(self, passes: Sequence[PassSeen]) -> list[PassSeen]:
        """The same, as they would have been without."""
        return [replace(seen, seconds=seen.seconds / self.factor(self._feels(seen))) for seen in passes]


class WaitPrice:
    """What it takes longer to wait for drafters on the host where requests begin, whose prompts they read, and for each
    row that the host has to prepare: by waits of as many requests, as far as they are sure of it."""

    def __init__(self, waits: Sequence[WaitSeen]) -> None:
        groups: dict[int, list[WaitSeen]] = defaultdict(list)
        for seen in waits:
            groups[seen.requests].append(seen)
        told = [[(s.count, s.seconds, s.newcomers, s.rows) for s in group] for group in groups.values()]
        weights, seconds, *ways = _by_distance(told, columns=4)  # [N] each
        self._by_newcomers, self._by_row = _fit(weights, np.stack(ways), seconds, groups=len(groups), least=_FEW).slopes

    def seconds(self, rows: int, newcomers: int) -> float:
        return self._by_newcomers * newcomers + self._by_row * rows


def _by_distance(groups: Sequence[Sequence[tuple[float, ...]]], columns: int) -> Array:  # [columns, N]
    """Rows of a weight and values, as columns: the values by their distance from the mean of their group."""
    parts = []
    for group in groups:
        told = np.array(group, dtype=np.float64)  # [G, 1 + V]
        parts.append(np.column_stack([told[:, 0], told[:, 1:] - np.average(told[:, 1:], axis=0, weights=told[:, 0])]))
    return np.concatenate(parts).T if parts else np.zeros((columns, 0))


def load_of(seen: PassSeen) -> Load:
    return Load(seen.requests, seen.context)


def _looked_at(rows: int, load: Load, *, by_row: bool) -> float:
    """Tokens of context: all of them, or for every row those of its request."""
    return rows * load.each if by_row else load.context


class _Fit(NamedTuple):
    slopes: Sequence[float]
    left: float  # of the squares, that the slopes do not explain


def _fit(weights: Array, ways: Array, seconds: Array, *, groups: int, least: int = 1) -> _Fit:
    """Slopes of seconds by ways [K, N], all by their distance from the means of so many groups: as much of each as is
    sure; nothing where fewer than `least` passes say more than means and slopes, or where ways differ together."""
    free = len(weights) - groups - len(ways)
    if free < least:
        return _Fit([0.0] * len(ways), math.inf)
    sizes = np.sqrt((weights * ways**2).sum(axis=1))  # [K]
    kept = np.flatnonzero(sizes > _SAME * math.sqrt(weights.sum()))
    slopes, unsure = np.zeros(len(ways)), np.zeros(len(ways))
    while len(kept):
        own = ways[kept] / sizes[kept, None]
        square = (weights * own) @ own.T
        if np.linalg.matrix_rank(square, tol=_SAME, hermitian=True) < len(kept):
            break
        inverse = np.linalg.inv(square)
        found = inverse @ (weights * own) @ seconds
        if np.all(found >= 0):
            slopes[kept], unsure[kept] = found / sizes[kept], np.sqrt(np.diag(inverse)) / sizes[kept]
            break
        kept = kept[found >= 0]  # nothing is quicker for more
    left = float(weights @ (seconds - slopes @ ways) ** 2)
    return _Fit(np.maximum(0.0, slopes - 2 * math.sqrt(left / free) * unsure).tolist(), left)
