"""What a round costs, between and beyond the sizes that were recorded."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from simulator.effects import ContextPrice, Slowdown, WaitPrice, load_of
from simulator.recording import Costs, PassSeen
from slipstream.core.errors import ConfigError
from slipstream.engine.measuring import ROWS, SIZES
from slipstream.plan import types as measured
from slipstream.plan.types import Load, MeasuredCosts

_FEW = 3
_NEAR, _ALIKE = 1.5, 1.1
"""Passes of a size that was seen more rarely are believed where others are alike, within the second factor, and make up
the number; or where no size that was seen often is near, or those that were took about as long, within the first. So an
accident among many of a kind does not count, and prompts do, whose lengths hardly ever come twice."""

_REACH, _OF_CURVES = 0.1, 0.1
"""How far passes speak for others, as a part of the rows, and how many passes the curves themselves count as. A request
with twice as many rows is one reach away."""


class Curve:
    """Seconds by size: straight lines between what was seen, on beyond it as in its upper half. Never less for more."""

    def __init__(self, points: Iterable[tuple[float, float, int]]) -> None:
        """points: size, seconds, and how often it was seen; of one size the mean counts."""
        seen: dict[float, list[tuple[float, int]]] = defaultdict(list)
        for size, seconds, count in points:
            seen[size].append((seconds, count))
        counts = {size: sum(c for _, c in parts) for size, parts in seen.items()}
        means = {
            n: float(np.average([s for s, _ in parts], weights=[c for _, c in parts])) for n, parts in seen.items()
        }
        chosen = sorted(_believed(counts, means))
        self._sizes = np.array(chosen, dtype=np.float64)  # [N]
        self._seconds = np.array(_rising([means[n] for n in chosen], [float(counts[n]) for n in chosen]))  # [N]
        self._known: dict[float, float] = {}

    def __bool__(self) -> bool:
        return bool(len(self._sizes))

    @property
    def smallest(self) -> float:
        return float(self._sizes[0])

    def believes(self, size: float) -> bool:
        """Whether passes of this very size make up the curve: accidents do not."""
        return size in self._sizes

    def knows(self, size: float) -> bool:
        """Whether sizes alike were seen: both a smaller and a larger one, or this."""
        below = bool(np.any((self._sizes <= size) & (self._sizes >= size / _ALIKE)))
        return below and bool(np.any((self._sizes >= size) & (self._sizes <= size * _ALIKE)))

    def at(self, size: float) -> float:
        found = self._known.get(size)
        if found is None:
            found = self._known[size] = self._at(size)
        return found

    def _at(self, size: float) -> float:
        if not len(self._sizes):
            return 0.0
        if size > self._sizes[-1] and len(self._sizes) > 1:
            # the slope of the whole upper half: that of the last two sizes alone would be noise
            low = len(self._sizes) // 2 if len(self._sizes) > 2 else 0
            low = min(low, len(self._sizes) - 2)
            slope = (self._seconds[-1] - self._seconds[low]) / (self._sizes[-1] - self._sizes[low])
            return float(self._seconds[-1] + slope * (size - self._sizes[-1]))
        return float(np.interp(size, self._sizes, self._seconds))


class Nearby:
    """How much longer than the curves say passes took that were about like one.

    A curve knows the rows of a pass, or how many there are in all where some are prompts'. Passes differ in more: the
    mix of both, and how many rows each request has. Those that are near in all of it tell what that comes to.
    """

    def __init__(self, passes: Iterable[tuple[PassSeen, float]]) -> None:
        """passes: each with what the curves say, in seconds."""
        parts = [
            (p.rows, p.read_rows, _doublings(p.rows, p.requests), p.count, p.seconds / told if told else 1.0)
            for p, told in passes
        ]
        self._rows, self._read, self._drafted, self._counts, factors = np.array(parts, dtype=np.float64).T  # [N] each
        self._factors = np.clip(factors, 1 / _NEAR, _NEAR)
        self._known: dict[tuple[int, int, int], float] = {}

    def factor(self, rows: int, read_rows: int, requests: int) -> float:
        """requests: of the decodes."""
        found = self._known.get((rows, read_rows, requests))
        if found is None:
            total = max(1, rows + read_rows)
            far = (abs(self._rows - rows) + abs(self._read - read_rows)) / (_REACH * total)  # [N]
            far += abs(self._drafted - _doublings(rows, requests)) * rows / total
            weights = self._counts * np.exp(-(far**2))
            found = (_OF_CURVES + float(weights @ self._factors)) / (_OF_CURVES + float(weights.sum()))
            self._known[rows, read_rows, requests] = found
        return found


def _doublings(rows: int, requests: int) -> float:
    """Rows of a request, as a power of two."""
    return math.log2(max(1, rows) / max(1, requests))


class RoundCosts:
    """Seconds of a round's parts.

    apart: prompts have passes of their own beside that of the decodes, as in queued rounds.
    """

    def __init__(self, costs: Costs, *, apart: bool) -> None:
        if not costs.passes:
            raise ConfigError("the recording has no passes: record a run that decodes something")
        self._apart = apart
        self._wake_price = Slowdown(costs.passes, lambda seen: seen.wake)
        self._along_price = Slowdown(costs.passes, lambda seen: seen.along)
        passes = self._along_price.bare(self._wake_price.bare(costs.passes))
        self._context = ContextPrice(passes)
        reading = [seen for seen in passes if seen.read_rows]
        decoding = [seen for seen in passes if not seen.read_rows]
        if apart and not decoding:
            raise ConfigError("the recording has no passes of decodes alone: record longer answers")
        self._pass = Curve((seen.rows, self._bare(seen), seen.count) for seen in decoding)
        # a prompt needs hardly any logits, and wide passes may be computed in another way: so they have their own curve
        self._by_row = 0.0 if apart else self._dearer_row(reading)
        self._read = Curve(
            (seen.read_rows + (0 if apart else seen.rows), self._reading_s(seen), seen.count) for seen in reading
        )
        self._host = Curve((seen.requests, seen.seconds, seen.count) for seen in costs.host)
        self._wait_price = WaitPrice(costs.waits)
        self._waits = Curve(
            (seen.requests, seen.seconds - self._wait_price.seconds(seen.rows, seen.newcomers), seen.count)
            for seen in costs.waits
        )
        self._drafts = _draft_curves(costs)
        if apart:
            prompts = [replace(seen, requests=0, rows=0, context=0, seconds=self._reading_s(seen)) for seen in reading]
            passes = [*decoding, *prompts]  # each is priced by itself
        told = [seen for seen in passes if self._believes(seen)]
        self._nearby = Nearby((seen, self._by_curves(seen.rows, seen.read_rows, load_of(seen))) for seen in told)

    def pass_s(
        self, rows: int, read_rows: int, load: Load, *, is_tree: bool = False, wake: float = 0.0, along: bool = False
    ) -> float:
        """load: of the decodes. is_tree: it checks trees of device drafters. What is recorded does not tell them
        apart. wake: what it feels of passes before it. along: drafters on the device read the prompts, too."""
        if not self._apart:
            return self._among_its_like(rows, read_rows, load) * self._wake_price.factor(wake)
        read_s = self._among_its_like(0, read_rows, Load()) * self._along_price.factor(along) if read_rows else 0.0
        return read_s + (self._among_its_like(rows, 0, load) if rows else 0.0)

    def _among_its_like(self, rows: int, read_rows: int, load: Load) -> float:
        return self._by_curves(rows, read_rows, load) * self._nearby.factor(rows, read_rows, load.requests)

    def _by_curves(self, rows: int, read_rows: int, load: Load) -> float:
        more = self._context.seconds(rows, load)
        if not self._apart:
            total = rows + read_rows
            if not self._read or (self._pass and not read_rows):
                return self._pass.at(total) + more
            read_s = self._read.at(total) + self._by_row * rows
            if total < self._read.smallest and self._pass:  # a prompt's last rows: no more than so many of decodes
                read_s = min(read_s, self._pass.at(total))
            return read_s + more
        return (self._pass.at(rows) + more if rows else 0.0) + (self._read.at(read_rows) if read_rows else 0.0)

    def _believes(self, seen: PassSeen) -> bool:
        if self._apart:
            parts = ((self._pass, seen.rows), (self._read, seen.read_rows))
            return all(not size or curve.believes(size) for curve, size in parts)
        return (self._read if seen.read_rows else self._pass).believes(seen.rows + seen.read_rows)

    def _reading_s(self, seen: PassSeen) -> float:
        """Of a pass with prompts: what they take; where all share it, what it would take for prompts alone."""
        decodes_s = self._pass.at(seen.rows) if self._apart and seen.rows else self._by_row * seen.rows
        return max(0.0, self._bare(seen) - decodes_s)

    def _dearer_row(self, reading: Sequence[PassSeen]) -> float:
        """Seconds that a row of a decode, of which all logits are asked for, takes more than one of a prompt beside it.

        By passes of decodes alone that have about as many rows in all.
        """
        alike = [seen for seen in reading if self._pass.knows(seen.rows + seen.read_rows)]
        more = [(self._pass.at(s.rows + s.read_rows) - self._bare(s)) / s.read_rows for s in alike]
        return _sure(more, [seen.read_rows * seen.count for seen in alike])

    def draft_s(self, drafter: str, requests: int, nodes: int) -> float:
        """0 for a drafter that was never seen to take time."""
        curves = self._drafts.get(drafter)
        if not curves:
            return 0.0

        def distance(seen: int) -> tuple[int, int]:
            return abs(seen - requests), seen

        near = min(curves, key=distance)
        seconds, least = curves[near].at(nodes), curves[near].smallest
        if nodes < least:  # as much less than the smallest as it was for others
            others = (curves[seen] for seen in sorted(curves, key=distance))
            smaller = next((curve for curve in others if curve.smallest <= nodes and curve.at(least)), None)
            seconds *= 1.0 if smaller is None else smaller.at(nodes) / smaller.at(least)
        # guesses for more requests than were seen at once take as much longer, at the most
        return seconds * max(1.0, requests / near if near == max(curves) else 1.0)

    def catch_up_s(self, drafter: str, requests: int) -> float:
        """What it takes a device drafter to read what it missed of so many: at least a guess for each."""
        return self.draft_s(drafter, requests, 1)

    def known(self, rows: int, sizes: Mapping[str, int]) -> MeasuredCosts:
        """About what an engine of such costs would measure when it starts, or soon see.

        rows: of a pass, at most. sizes: of device drafters, the nodes of their longest drafts, or levels of trees.
        """
        timed = [n for n in SIZES if n <= rows]
        passes = measured.Curve(tuple(timed), tuple(self.pass_s(n, 0, Load(-(-n // ROWS))) for n in timed))
        drafts = {}
        for name, most in sizes.items():
            crowds = sorted(self._drafts.get(name, ()))
            steps = sorted({1, -(-most // 2), most})
            seen = [
                measured.DraftSeen(
                    n, measured.Curve(tuple(steps), tuple(self.draft_s(name, n, step) for step in steps))
                )
                for n in dict.fromkeys(crowds[:1] + crowds[-1:])
            ]
            if seen and all(min(one.curve.seconds) > 0 for one in seen):
                drafts[name] = tuple(seen)
        return MeasuredCosts(passes, *self._context.each, drafts)

    def host_s(self, requests: int) -> float:
        return self._host.at(requests)

    def wait_s(self, requests: int, rows: int, newcomers: int = 0) -> float:
        """What the device waits where drafters on the host must know a round's result first; 0: it never did.

        newcomers: others that start, whose prompts those drafters read first.
        """
        return max(0.0, self._waits.at(requests) + self._wait_price.seconds(rows, newcomers))

    def _bare(self, seen: PassSeen) -> float:
        """Without what the length of the context adds."""
        return max(seen.seconds - self._context.seconds(seen.rows, load_of(seen)), 0.2 * seen.seconds)


def _believed(counts: Mapping[float, int], means: Mapping[float, float]) -> list[float]:
    """The sizes that count, by how often each was seen and how long it took."""
    often = sorted(size for size, count in counts.items() if count >= _FEW)
    groups: list[list[float]] = []  # of rare sizes that are alike
    for size in sorted(counts.keys() - set(often)):
        if groups and size <= _ALIKE * groups[-1][-1]:
            groups[-1].append(size)
        else:
            groups.append([size])

    def as_others(size: float) -> bool:
        if not any(size / _NEAR <= n <= size * _NEAR for n in often):
            return True
        usual = float(np.interp(size, often, [means[n] for n in often]))
        return usual / _NEAR <= means[size] <= usual * _NEAR

    rare = [size for group in groups for size in group if sum(counts[n] for n in group) >= _FEW or as_others(size)]
    return [*often, *rare]


def _draft_curves(costs: Costs) -> Mapping[str, Mapping[int, Curve]]:
    points: dict[str, dict[int, list[tuple[float, float, int]]]] = defaultdict(lambda: defaultdict(list))
    for seen in costs.drafts:
        if not seen.requests:  # all of them had ended
            continue
        points[seen.drafter][seen.requests].append((seen.nodes, seen.seconds, seen.count))
    return {name: {n: Curve(parts) for n, parts in by_requests.items()} for name, by_requests in points.items()}


def _sure(values: Sequence[float], weights: Sequence[float]) -> float:
    """The weighted mean as far as they are sure of it: less two standard errors, and 0 where nothing is left."""
    if len(values) < _FEW:
        return 0.0
    mean = float(np.average(values, weights=weights))
    error = float(np.average((np.array(values) - mean) ** 2, weights=weights)) / (len(values) - 1)
    return max(0.0, mean - 2 * math.sqrt(error))


def _rising(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The nearest values that never fall: neighbours that do are taken together."""
    blocks: list[tuple[float, float, int]] = []  # mean, weight, how many
    for value, weight in zip(values, weights, strict=True):
        blocks.append((float(value), weight, 1))
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            (a, wa, na), (b, wb, nb) = blocks.pop(-2), blocks.pop()
            blocks.append(((a * wa + b * wb) / (wa + wb), wa + wb, na + nb))
    return [mean for mean, _, count in blocks for _ in range(count)]
