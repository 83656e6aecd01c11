"""What a pass of the target costs by its rows and its context: measured at the start, corrected by the passes."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from slipstream.plan.context import ContextCost
from slipstream.plan.measured import Curve, Floats, Load

_EDGES = np.array([1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512], dtype=np.float64)
_LOG_EDGES = np.log(_EDGES)
_EDGE_OF = [int(np.abs(_LOG_EDGES - np.log(rows)).argmin()) for rows in range(1, int(_EDGES[-1]))]
"""The nearest edge of each size. Looked up every round: logarithms would take as long as the whole plan."""
SIZES = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512)
_NEXT = np.array([SIZES[np.searchsorted(SIZES, rows)] for rows in range(1, SIZES[-1] + 1)], dtype=np.int64)
"""The rows of queued rounds, and what 1, 2, … rows are filled up to; beyond the last, a multiple of it."""
_REMEMBER = 9
"""Recent passes kept for each size: their median forgets a hiccup and follows a growing context."""
_ASSUMED = 3
"""Passes of a size, at least, that are looked at where a device may be seen to be late: what was measured fills up."""
_STALE = 512
"""Passes after which a size that did not come again is forgotten: what made it dear may be long over."""
_ANOTHER_PACE = 1.25
"""Where a size takes so many times as long as when another was seen last, or as short, what was seen of that one says
nothing any more: the machine has more or less to do besides, and on a busy one rows are dearer, too."""
_FINE = 8
"""Contexts are told apart by such a part of a doubling: what they add is not reckoned anew for every token."""
_FAR = 2.0
"""Texts that are so many times as long are another thing, as long as it is not known what length adds."""
_BARE = 0.2
"""Of a pass, such a part at least is not the context's doing, whatever was measured."""
_NOTICED = 0.01
"""Passes that take such a part more or less than was thought change nothing: they are not known any better."""
_ANY = 16
"""Nodes that are thought of when it is asked whether any number of them can pay."""
_FLAT = 1.05
"""Where the largest pass costs no more than so many of the smallest, what those between cost is of no interest."""


@dataclass(frozen=True, slots=True)
class Steps:
    """What passes cost, without the sizes that nobody would choose: between two steps, rows cost as at the larger."""

    rows: list[int]  # the first is what was asked for, whatever it is filled up to
    seconds: list[float]


class _Pass(NamedTuple):
    seconds: float
    rows: int
    load: Load


class PassCost:
    """Seconds of a pass over n rows. Sizes not seen lately follow their neighbours along a prior.

    slope: how much one more row adds, as a part of the first one, before anything was seen or measured.
    curve: what was measured, with hardly any context. context: what the context adds.
    learns: may it be learned from what is seen here?
    """

    def __init__(
        self, slope: float, curve: Curve | None = None, context: ContextCost | None = None, *, learns: bool = True
    ) -> None:
        self._slope = slope
        self._measured = curve
        self._learns = learns
        self.context = ContextCost() if context is None else context
        self.padded = False  # passes are filled up to one of `SIZES`: rows up to there cost nothing more
        self.late = False  # what is seen may have waited for the host: a device is never faster than it is
        self._seen: dict[int, deque[_Pass]] = {}  # by edge
        self._shares: dict[int, deque[float]] = {}  # edge -> what these took without context, by the prior
        self._typical: dict[int, float] = {}  # edge -> the median of seconds without context, by those of the prior
        self._then: dict[int, dict[int, float]] = {}  # edge -> what was typical of all of them when it was last seen
        self._left_out = self.context.rates  # what was taken for the context's doing in these
        self._priors: Floats = np.empty(0)  # the prior for 1, 2, … rows
        self._table: Floats = np.empty(0)  # seconds for 1, 2, … rows, as many as were asked for
        self._is_old = False  # something else is known by now than the table says
        self._last: dict[int, int] = {}  # edge -> the pass that was last seen there
        self._passes = 0
        self._load = Load()  # of the passes that are asked about
        self._steps: dict[int, Steps] = {}  # by their first rows, as far as the table goes
        self._least: dict[int, float] = {}  # by rows: the least chance that a node may have

    @property
    def slope(self) -> float:
        return self._slope

    @property
    def observed(self) -> bool:
        """Is it in seconds by now?"""
        return bool(self._seen) or self._measured is not None

    @property
    def measured(self) -> bool:
        return self._measured is not None

    def adopt(self, curve: Curve) -> None:
        """Passes were measured: from now on this is what unseen sizes follow."""
        self._measured, self._priors = curve, np.empty(0)
        self._see_anew()
        self._renew()

    def at(self, load: Load) -> None:
        """From now on it is asked about passes of so many requests with so much context, or nearly so."""
        if self._relearned():
            self._renew()
        if not self.context.matters:
            self._forget_far(load)
            return
        near = Load(load.requests, int(2 ** (round(_FINE * math.log2(load.context)) / _FINE))) if load.context else load
        if near != self._load:
            self._load = near
            self._renew()

    def _forget_far(self, load: Load) -> None:
        """What passes cost over texts of quite another length says little, as long as nobody knows what length adds."""
        if self.context.measured or not load.context or _near(load, self._load):
            return
        self._load = load
        far = [edge for edge, seen in self._seen.items() if seen[-1].load.context and not _near(seen[-1].load, load)]
        if self._learns and len(far) == len(self._seen):
            far.sort(key=self._last.__getitem__)
            far = far[:-1]  # in seconds it must stay
        for edge in far:
            self._forget(edge)
        if far:
            self._renew()

    def observe(self, rows: int, seconds: float, load: Load | None = None) -> None:
        load = self._load if load is None else load
        edge = self.edge(rows)
        self._passes += 1
        self._last[edge] = self._passes
        if edge not in self._seen:
            self._seen[edge], self._shares[edge] = deque(maxlen=_REMEMBER), deque(maxlen=_REMEMBER)
        seen = _Pass(seconds, rows, load)
        self._seen[edge].append(seen)
        self._shares[edge].append(self._share(seen))
        if self._learns and not self.context.measured:
            self.context.learn(edge, rows, seconds, load)
        changed = self._relearned()
        typical, before = self._usual(self._shares[edge]), self._typical.get(edge, 0.0)
        if abs(typical - before) > _NOTICED * before:
            self._typical[edge], changed = typical, True
        for old in [e for e, last in self._last.items() if self._passes - last > _STALE]:
            self._forget(old)
            changed = True
        if self._learns:  # else: rounds of one number of requests may be slow for other reasons than those of another
            self._then[edge] = dict(self._typical)
        if changed:
            self._renew()

    def _relearned(self) -> bool:
        """Where something else is known of the context by now, also by another's passes, see all of them anew."""
        if self._left_out == self.context.rates:
            return False
        self._left_out = self.context.rates
        self._see_anew()
        return True

    def _see_anew(self) -> None:
        """Context or prior are others now."""
        self._shares = {e: deque(map(self._share, seen), maxlen=_REMEMBER) for e, seen in self._seen.items()}
        self._typical = {edge: self._usual(shares) for edge, shares in self._shares.items()}
        self._then = {}

    def forget(self, rows: int) -> None:
        """What was seen of passes of about so many rows: they are others now."""
        if (edge := self.edge(rows)) in self._seen:
            self._forget(edge)
            self._renew()

    def _forget(self, edge: int) -> None:
        del self._last[edge], self._seen[edge], self._shares[edge]
        self._then.pop(edge, None)
        self._typical.pop(edge, None)  # a pass that took no time at all left none

    def _share(self, seen: _Pass) -> float:
        """What a pass took by the prior, its context left out."""
        seconds, rows, load = seen
        bare = max(seconds - self.context.seconds(rows, load), _BARE * seconds) if self.context.matters else seconds
        return bare / self._prior(rows)

    def _usual(self, shares: Collection[float]) -> float:
        """What passes of a size took, by the prior: their median; of a device that may be late, the lower part."""
        if not self.late:
            return _median(shares)
        assumed = [1.0] * max(0, _ASSUMED - len(shares)) if self._measured is not None else []
        ordered = sorted([*shares, *assumed])
        return ordered[(len(ordered) - 1) // 3]

    def _prior(self, rows: int) -> float:
        if rows > len(self._priors):
            sizes = np.arange(1, max(rows, 2 * len(self._priors)) + 1, dtype=np.float64)
            self._priors = self._prior_of(sizes)
        return float(self._priors[rows - 1])

    def _prior_of(self, rows: Floats) -> Floats:
        return 1 + self._slope * (rows - 1) if self._measured is None else self._measured.at(rows)

    def _renew(self) -> None:
        """Where a device waits for plans: now. Elsewhere when somebody asks, for in most rounds nobody does."""
        self._is_old = True
        if self.padded:
            self._reckon()

    def _reckon(self) -> None:
        self._is_old = False
        self._table = self._interpolated(len(self._table))
        self._least.clear()
        known, self._steps = list(self._steps)[-1:], {}
        for low in known:
            self.steps(low, len(self._table))

    def seen(self, rows: int) -> bool:
        """Was a pass of about this size seen lately, or measured before?"""
        if self._measured is not None:
            return True
        return self.edge(self.filled(rows) if self.padded else rows) in self._seen

    def unseen(self, low: int, high: int) -> int | None:
        """The largest size for `low` rows or more, but below that of `high`, of which it would be good to know more."""
        if self._measured is not None:
            return None
        if self.edge(self.filled(low)) in self._seen and self.seconds(high) <= _FLAT * self.seconds(low):
            return None  # nothing to be won
        between = [size for size in SIZES if self.filled(low) <= size < self.filled(high)]
        return next((size for size in reversed(between) if self.edge(size) not in self._seen), None)

    def seconds(self, rows: int) -> float:
        return float(self._grown(rows)[rows - 1])

    def about(self, rows: int) -> float:
        """The same, or what was reckoned last: where nearly is enough. Any thread may ask: nothing changes by it."""
        table = self._table
        return float((table if rows <= len(table) else self._interpolated(rows))[rows - 1])

    def steps(self, low: int, high: int) -> Steps:
        """Sizes from `low` on, up to `high` rows and perhaps further: `curve` without what is not worth comparing."""
        if self._is_old:
            self._reckon()
        found = self._steps.get(low)
        if found is None or found.rows[-1] < high:
            top = max(self.filled(high), len(self._table))
            costs = self.curve(low, top)
            rows = list(range(low, top + 1))
            if self.padded:
                last = SIZES[-1]
                beyond = range((max(low, last) // last + 1) * last, top + 1, last)
                rows = [low, *(n for n in SIZES if low < n <= top), *beyond]
            found = self._steps[low] = Steps(rows, [float(costs[n - low]) for n in rows])
        return found

    def least_chance(self, rows: int, margin: float, extra_s: float) -> float:
        """Nodes that are less likely cannot pay in a pass of so many requests, whatever their number.

        By half of what the curve says: what is known of chances is not sure, either.
        """
        if self._is_old:
            self._reckon()
        found = self._least.get(rows)
        if found is None:
            costs = self.curve(rows, rows + _ANY)  # n nodes of chance c bring rows + n c tokens
            nodes = np.arange(1, _ANY + 1)
            chances = rows * (margin * (costs[1:] + extra_s) / costs[0] - 1) / nodes
            found = self._least[rows] = max(0.0, float(chances.min()) / 2)
        return found

    def curve(self, low: int, high: int) -> Floats:
        """Seconds for low, low + 1, … high rows; in an arbitrary unit before the first observation."""
        part = self._grown(high)[low - 1 : high]
        # more rows never cost less: what says so is noise
        return np.maximum.accumulate(part) if self.observed else part.copy()

    def _grown(self, high: int) -> Floats:
        if self._is_old:
            self._reckon()
        if high > len(self._table):
            self._table = self._interpolated(high)
        return self._table

    def _interpolated(self, high: int) -> Floats:  # [high]
        rows = np.arange(1, high + 1, dtype=np.float64)
        if not self.observed:
            return self._prior_of(rows)
        if self.padded:
            rows[: len(_NEXT)] = _NEXT[:high]
            rows[len(_NEXT) :] = np.ceil(rows[len(_NEXT) :] / SIZES[-1]) * SIZES[-1]
        fixed, each = self.context.line(self._load)
        found = self._prior_of(rows)
        if typical := dict(self._typical):  # any thread may ask
            newest = max(typical, key=lambda edge: self._last.get(edge, 0))
            edges = sorted([edge for edge in typical if self._holds(edge, newest, typical[newest])])
            found = found * np.interp(np.log(rows), _LOG_EDGES[edges], [typical[edge] for edge in edges])
        return np.asarray(found + fixed + each * rows, dtype=np.float64)

    def _holds(self, edge: int, newest: int, typical: float) -> bool:
        """Is the machine as quick as when passes of this size were last seen, by those that were seen last?"""
        then = self._then.get(edge, {}).get(newest, typical)
        return then <= 0 or 1 / _ANOTHER_PACE < typical / then < _ANOTHER_PACE

    @staticmethod
    def filled(rows: int) -> int:
        """The rows of a queued round's pass with so many."""
        return int(_NEXT[rows - 1]) if rows <= len(_NEXT) else -(-rows // SIZES[-1]) * SIZES[-1]

    @staticmethod
    def edge(rows: int) -> int:
        """Passes of so many rows are taken to be alike that have the same."""
        return _EDGE_OF[max(rows, 1) - 1] if rows < _EDGES[-1] else len(_EDGES) - 1


def _near(one: Load, other: Load) -> bool:
    return one.each <= _FAR * other.each and other.each <= _FAR * one.each


def _median(values: Iterable[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
