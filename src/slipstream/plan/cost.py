"""The cost of a step's parts: a table measured at the start, corrected by the time of later steps.

A correction is the median of the last measured ratios to the table at one size. Other sizes are interpolated.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from math import log
from typing import TypeVar

import numpy as np

from slipstream.core.draft import MAX_NODES
from slipstream.plan.types import Curve, Floats, Load, MeasuredCosts, bucket_of

RECENT = 9
"""Steps in a median: enough to ignore one outlier, few enough to follow a change of pace."""

SIZES = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""The row counts that queued passes are padded to; beyond the last, multiples of it."""
_NEXT = np.array([SIZES[np.searchsorted(SIZES, rows)] for rows in range(1, SIZES[-1] + 1)], dtype=np.int64)
_EDGES = np.array([1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512], dtype=np.float64)
_LOG_EDGES = np.log(_EDGES)
_MOST_SIZE = MAX_NODES
_NONE: Floats = np.zeros(0)
Rows = TypeVar("Rows", float, Floats)


def filled(rows: int) -> int:
    """Pad a number of rows as a queued pass does."""
    return int(_NEXT[rows - 1]) if rows <= len(_NEXT) else -(-rows // SIZES[-1]) * SIZES[-1]


def _edge(rows: int) -> int:
    """The size whose correction a pass shares."""
    return int(np.abs(_LOG_EDGES - log(max(rows, 1))).argmin())


class Medians:
    """Running medians by key."""

    def __init__(self) -> None:
        self._seen: dict[Hashable, deque[float]] = {}
        self._known: dict[Hashable, float] = {}

    def __contains__(self, key: Hashable) -> bool:
        return key in self._known

    def add(self, key: Hashable, value: float) -> None:
        seen = self._seen.setdefault(key, deque(maxlen=RECENT))
        seen.append(value)
        ordered = sorted(seen)
        self._known[key] = (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2

    def get(self, key: Hashable, default: float = 0.0) -> float:
        return self._known.get(key, default)

    def near(self, name: str, requests: int) -> float | None:
        """The median of the key (name, bucket) with the nearest bucket; None: no such key."""
        if (name, bucket_of(requests)) in self._known:
            return self._known[name, bucket_of(requests)]
        known = [key for key in self._known if isinstance(key, tuple) and key[0] == name]
        return self._known[min(known, key=lambda key: abs(log(key[1] / max(requests, 1))))] if known else None

    def clear(self) -> None:
        self._seen.clear()
        self._known.clear()


class Costs:
    """Seconds of passes, guesses, waits and catching up.

    slope: the relative cost of one more row, where nothing was measured.
    """

    def __init__(self, slope: float) -> None:
        self.measured: MeasuredCosts | None = None
        self.padded = False
        self.load = Load()  # of the planned step
        self._slope = slope
        self._passes: tuple[dict[int, float], dict[int, float]] = ({}, {})  # by edge: ratios of chains, of trees
        self._prior_s = _NONE  # by rows
        self._tables: dict[bool, tuple[Floats, Floats]] = {}  # by is_tree: cached until a ratio changes
        self._ratios = Medians()
        self._drafts = Medians()  # by drafter and bucket: ratios
        self._priors: dict[tuple[str, int], Floats] = {}  # by drafter and requests: uncorrected seconds by size
        self._waits = Medians()  # by drafter and bucket: seconds
        self.read_s = 0.0  # mean time of other requests' prompts in a step
        self._catch_ups = Medians()  # by drafter and bucket: seconds over `_catch_up_passes`

    def adopt(self, measured: MeasuredCosts) -> None:
        """Take measured costs, and forget earlier corrections."""
        self.measured = measured
        for part in self._passes:
            part.clear()
        self._ratios.clear()
        self._drafts.clear()
        self._priors.clear()
        self._tables.clear()
        self._prior_s = _NONE

    def pad_passes(self) -> None:
        """Assume passes padded to `SIZES`."""
        self.padded = True
        self._tables.clear()

    @property
    def observed(self) -> bool:
        """True once passes are known in seconds."""
        return self.measured is not None or bool(self._passes[0])

    # --- passes

    def _prior(self, rows: Floats) -> Floats:
        return 1 + self._slope * (rows - 1) if self.measured is None else self.measured.passes.at(rows)

    def _context(self, rows: Rows, load: Load) -> Rows:
        """Seconds that the context adds, for each request and for each row."""
        if self.measured is None:
            return 0 * rows
        return self.measured.key_s * load.context + self.measured.row_key_s * load.each * rows

    def observe_pass(self, rows: int, seconds: float, load: Load, *, is_tree: bool) -> None:
        """is_tree: the pass verified trees from a device, which take longer than chains of the same rows."""
        if seconds < 1e-9:  # the drafter took the whole step
            return
        at = filled(rows) if self.padded else rows
        if at > len(self._prior_s):
            self._prior_s = self._prior(np.arange(1, 2 * at + 1, dtype=np.float64))
        bare = max(seconds - self._context(at, load), 0.2 * seconds)  # bounded: the context's cost is never corrected
        is_tree = is_tree and self.padded and self.observed
        key = (is_tree, _edge(rows))
        self._ratios.add(key, bare / float(self._prior_s[at - 1]))
        if self._passes[is_tree].get(key[1]) != self._ratios.get(key):
            self._passes[is_tree][key[1]] = self._ratios.get(key)
            self._tables.clear()

    def passes(self, most: int, *, is_tree: bool = False) -> Floats:  # [most + 1]
        """Seconds of a pass over 0, 1, … rows, never falling."""
        rows, seconds = self._table(most, is_tree=is_tree and bool(self._passes[1]))
        if self.measured is not None:
            seconds = seconds + self._context(rows, self.load)
        return np.concatenate(([0.0], np.maximum.accumulate(seconds)))

    def _table(self, most: int, *, is_tree: bool) -> tuple[Floats, Floats]:  # [most] each
        """Padded rows, and seconds without the context's part."""
        rows, seconds = self._tables.get(is_tree, (_NONE, _NONE))
        if len(rows) < most:
            rows = np.arange(1, 2 * most + 1, dtype=np.float64)
            if self.padded:
                beyond = np.ceil(rows[len(_NEXT) :] / SIZES[-1]) * SIZES[-1]
                rows = np.concatenate((_NEXT[: 2 * most].astype(np.float64), beyond))
            prior, logs = self._prior(rows), np.log(rows)
            seconds = prior * _between(logs, self._passes[0])
            if is_tree:
                seconds[1:] = np.maximum(seconds, prior * _between(logs, self._passes[1]))[1:]
            self._tables[is_tree] = rows, seconds
        return rows[:most], seconds[:most]

    def row(self, requests: int) -> float:
        """The relative cost of one more row for each request."""
        pass_s = self.passes(2 * requests)
        return float(pass_s[2 * requests] / pass_s[requests]) - 1

    # --- guesses

    def observe_draft(self, drafter: str, size: int, seconds: float, requests: int) -> None:
        """size: nodes of a chain, levels of a tree."""
        prior = float(self._draft_prior(drafter, requests)[min(size, _MOST_SIZE)])
        self._drafts.add((drafter, bucket_of(requests)), seconds / max(prior, 1e-9))

    def knows_draft(self, drafter: str) -> bool:
        """True once the time of its guesses was measured."""
        measured = self.measured is not None and bool(self.measured.drafts.get(drafter))
        return measured or self._drafts.near(drafter, 1) is not None

    def drafts(self, drafter: str, sizes: Sequence[int], requests: int) -> Floats:  # [C]
        """Seconds of guesses of these sizes for each request; 0 where unknown."""
        if not (self.observed and self.knows_draft(drafter)):
            return np.zeros(len(sizes))
        ratio = self._drafts.near(drafter, requests)
        return self._draft_prior(drafter, requests)[list(sizes)] * (1.0 if ratio is None else ratio)

    def _draft_prior(self, drafter: str, requests: int) -> Floats:  # [_MOST_SIZE + 1]
        """Uncorrected seconds by size."""
        key = (drafter, requests)
        if key not in self._priors:
            sizes = np.arange(_MOST_SIZE + 1, dtype=np.float64)
            seen = () if self.measured is None else self.measured.drafts.get(drafter, ())
            found = sizes * (1 + self._slope * (requests - 1))
            if seen:
                crowds, by_size = tuple(one.requests for one in seen), np.stack([one.curve.at(sizes) for one in seen])
                at = np.array([float(requests)])
                columns = [Curve(crowds, tuple(column)) for column in by_size.T.tolist()]
                found = np.array([float(column.at(at)[0]) for column in columns])
            found[0] = 0.0
            self._priors[key] = found
        return self._priors[key]

    # --- the host

    def observe_wait(self, drafter: str, requests: int, seconds: float) -> None:
        """seconds: of a host drafter's guesses, or of the device's wait for them."""
        self._waits.add((drafter, bucket_of(requests)), seconds)

    def wait(self, drafter: str, requests: int) -> float | None:
        """The usual wait for a host drafter; None: unknown."""
        return self._waits.near(drafter, requests)

    def observe_read(self, seconds: float) -> None:
        """seconds: of other requests' prompts in one step; 0: none."""
        self.read_s += (seconds - self.read_s) / RECENT**2

    def observe_catch_up(self, drafter: str, requests: int, seconds: float) -> None:
        self._catch_ups.add((drafter, bucket_of(requests)), seconds / _catch_up_passes(requests))

    def catch_up(self, drafter: str, requests: int) -> float:
        """Seconds until a drafter has read the tokens that it missed."""
        if not requests:
            return 0.0
        seen = self._catch_ups.near(drafter, requests)
        return _catch_up_passes(requests) * (float(self.passes(1)[1]) if seen is None else seen)


def _catch_up_passes(requests: int) -> float:
    """The assumed length of catching up, in plain passes."""
    return 0.5 + requests / 12


def _between(logs: Floats, ratios: dict[int, float]) -> Floats:
    if not ratios:
        return np.ones_like(logs)
    edges = sorted(ratios)
    return np.asarray(np.interp(logs, _LOG_EDGES[edges], [ratios[edge] for edge in edges]))
