"""What the parts of a step cost: a table that was measured at the start, corrected by what steps took.

A correction is a ratio: the median of the last few of a size, by what the table says. Sizes between and beyond those
that were seen follow their neighbours.
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
"""Steps of a size whose median is its cost: enough to forget a hiccup, few enough to follow a change of pace."""

SIZES = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""The rows that queued passes are filled up to; beyond the last, multiples of it."""
_NEXT = np.array([SIZES[np.searchsorted(SIZES, rows)] for rows in range(1, SIZES[-1] + 1)], dtype=np.int64)
_EDGES = np.array([1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512], dtype=np.float64)
_LOG_EDGES = np.log(_EDGES)
_MOST_SIZE = MAX_NODES
_NONE: Floats = np.zeros(0)
Rows = TypeVar("Rows", float, Floats)


def filled(rows: int) -> int:
    """The rows of a queued pass that needs so many."""
    return int(_NEXT[rows - 1]) if rows <= len(_NEXT) else -(-rows // SIZES[-1]) * SIZES[-1]


def _edge(rows: int) -> int:
    """Passes with the same edge are corrected together."""
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
        """Of keys (name, bucket), that of the nearest bucket; None: there is none."""
        if (name, bucket_of(requests)) in self._known:
            return self._known[name, bucket_of(requests)]
        known = [key for key in self._known if isinstance(key, tuple) and key[0] == name]
        return self._known[min(known, key=lambda key: abs(log(key[1] / max(requests, 1))))] if known else None

    def clear(self) -> None:
        self._seen.clear()
        self._known.clear()


class Costs:
    """Seconds of passes, guesses, waits and catching up.

    slope: what one more row adds to a pass, as a part of the first one, where nothing was measured.
    """

    def __init__(self, slope: float) -> None:
        self.measured: MeasuredCosts | None = None
        self.padded = False
        self.load = Load()  # of the step that is planned
        self._slope = slope
        self._passes: tuple[dict[int, float], dict[int, float]] = ({}, {})  # by edge: ratios of chains, of trees
        self._prior_s = _NONE  # by rows
        self._tables: dict[bool, tuple[Floats, Floats]] = {}  # by is_tree, as long as nothing else was seen
        self._ratios = Medians()
        self._drafts = Medians()  # by drafter and bucket: ratios
        self._priors: dict[tuple[str, int], Floats] = {}  # by drafter and requests: seconds by size, before them
        self._waits = Medians()  # by drafter and bucket: seconds
        self.read_s = 0.0  # that prompts of other requests take in a step, in the mean
        self._catch_ups = Medians()  # by drafter and bucket: seconds by `_catch_up_passes`

    def adopt(self, measured: MeasuredCosts) -> None:
        """These were measured before the first request. What was seen until then is forgotten."""
        self.measured = measured
        for part in self._passes:
            part.clear()
        self._ratios.clear()
        self._drafts.clear()
        self._priors.clear()
        self._tables.clear()
        self._prior_s = _NONE

    def pad_passes(self) -> None:
        """Passes are filled up to one of `SIZES`."""
        self.padded = True
        self._tables.clear()

    @property
    def observed(self) -> bool:
        """Are passes known in seconds?"""
        return self.measured is not None or bool(self._passes[0])

    # --- passes

    def _prior(self, rows: Floats) -> Floats:
        return 1 + self._slope * (rows - 1) if self.measured is None else self.measured.passes.at(rows)

    def _context(self, rows: Rows, load: Load) -> Rows:
        """What the context adds: once for each request, and for each row."""
        if self.measured is None:
            return 0 * rows
        return self.measured.key_s * load.context + self.measured.row_key_s * load.each * rows

    def observe_pass(self, rows: int, seconds: float, load: Load, *, is_tree: bool) -> None:
        """is_tree: it verified trees that grew on a device, which take longer than chains of as many rows."""
        if seconds < 1e-9:  # a drafter took all of the step
            return
        at = filled(rows) if self.padded else rows
        if at > len(self._prior_s):
            self._prior_s = self._prior(np.arange(1, 2 * at + 1, dtype=np.float64))
        bare = max(seconds - self._context(at, load), 0.2 * seconds)  # the context was measured once only
        is_tree = is_tree and self.padded and self.observed
        key = (is_tree, _edge(rows))
        self._ratios.add(key, bare / float(self._prior_s[at - 1]))
        if self._passes[is_tree].get(key[1]) != self._ratios.get(key):
            self._passes[is_tree][key[1]] = self._ratios.get(key)
            self._tables.clear()

    def passes(self, most: int, *, is_tree: bool = False) -> Floats:  # [most + 1]
        """Seconds of a pass over 0, 1, … rows. More rows never cost less: what says so is noise."""
        rows, seconds = self._table(most, is_tree=is_tree and bool(self._passes[1]))
        if self.measured is not None:
            seconds = seconds + self._context(rows, self.load)
        return np.concatenate(([0.0], np.maximum.accumulate(seconds)))

    def _table(self, most: int, *, is_tree: bool) -> tuple[Floats, Floats]:  # [most] each
        """Rows as they are filled up, and seconds without what the context adds."""
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
        """What one more row for each of these requests adds, as a part of their pass."""
        pass_s = self.passes(2 * requests)
        return float(pass_s[2 * requests] / pass_s[requests]) - 1

    # --- guesses

    def observe_draft(self, drafter: str, size: int, seconds: float, requests: int) -> None:
        """size: nodes of a chain, levels of a tree."""
        prior = float(self._draft_prior(drafter, requests)[min(size, _MOST_SIZE)])
        self._drafts.add((drafter, bucket_of(requests)), seconds / max(prior, 1e-9))

    def knows_draft(self, drafter: str) -> bool:
        """Was it seen or measured how long its guesses take?"""
        return self._drafts.near(drafter, 1) is not None or self.was_measured(drafter)

    def was_measured(self, drafter: str) -> bool:
        return self.measured is not None and bool(self.measured.drafts.get(drafter))

    def drafts(self, drafter: str, sizes: Sequence[int], requests: int) -> Floats:  # [C]
        """Seconds of guesses of these sizes for each of some requests; 0 where nothing is known."""
        if not (self.observed and self.knows_draft(drafter)):
            return np.zeros(len(sizes))
        ratio = self._drafts.near(drafter, requests)
        return self._draft_prior(drafter, requests)[list(sizes)] * (1.0 if ratio is None else ratio)

    def _draft_prior(self, drafter: str, requests: int) -> Floats:  # [_MOST_SIZE + 1]
        """By size, before any correction."""
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
        """To ask a host drafter took so long: its own time, or that of a device that had nothing to do meanwhile."""
        self._waits.add((drafter, bucket_of(requests)), seconds)

    def wait(self, drafter: str, requests: int) -> float | None:
        """None: it was never asked."""
        return self._waits.near(drafter, requests)

    def observe_read(self, seconds: float) -> None:
        """Prompts of other requests took so long in a step; 0: there were none."""
        self.read_s += (seconds - self.read_s) / RECENT**2

    def observe_catch_up(self, drafter: str, requests: int, seconds: float) -> None:
        self._catch_ups.add((drafter, bucket_of(requests)), seconds / _catch_up_passes(requests))

    def catch_up(self, drafter: str, requests: int) -> float:
        """Seconds until a drafter has read what it missed of so many requests."""
        if not requests:
            return 0.0
        seen = self._catch_ups.near(drafter, requests)
        return _catch_up_passes(requests) * (float(self.passes(1)[1]) if seen is None else seen)


def _catch_up_passes(requests: int) -> float:
    """Plain passes that catching up is taken to last where it was not seen."""
    return 0.5 + requests / 12


def _between(logs: Floats, ratios: dict[int, float]) -> Floats:
    if not ratios:
        return np.ones_like(logs)
    edges = sorted(ratios)
    return np.asarray(np.interp(logs, _LOG_EDGES[edges], [ratios[edge] for edge in edges]))
