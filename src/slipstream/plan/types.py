"""What planner and engine tell each other: plain values."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

VERSION = 3
"""Of the JSON form of `MeasuredCosts` and of how things are timed: files of another version are measured again."""
_DEAR_ROW = 1.8
"""A pass over two rows, by one over one row: four guesses of five would have to be right."""


def bucket_of(requests: int) -> int:
    """The batch sizes that are told apart: 1, 2, 4, 8, …"""
    return 1 << max(requests - 1, 0).bit_length()


# --- the step that is planned -----------------------------------------------------------------------------------------


class Load(NamedTuple):
    """The requests that decode in a step, and how many tokens they have in all."""

    requests: int = 0  # 0: not known
    context: int = 0

    @property
    def each(self) -> float:
        return self.context / self.requests if self.requests else 0.0


class Levels(NamedTuple):
    """A number of levels that a drafter's trees may have, and the most nodes of such a tree."""

    deep: int
    nodes: int


@dataclass(frozen=True, slots=True)
class Offer:
    """A drafter whose guesses take time, and the requests that it may guess for."""

    drafter: str
    request_ids: Sequence[str]
    caps: Sequence[int]  # [B] most nodes of each request
    levels: Sequence[Levels] = ()  # that its trees may have, the most last; (): it guesses chains
    lagging: Collection[str] = ()  # requests whose last tokens it has to read before it can guess


class Budget(NamedTuple):
    """How far a drafter is to go."""

    nodes: list[int]  # [B] for each request of its offer
    levels: int = 0  # of its trees


# --- what became of it ------------------------------------------------------------------------------------------------


class TreeSeen(NamedTuple):
    """A tree that was verified."""

    nodes: int
    path: Sequence[int]  # the accepted nodes, numbered as the drafter ranked them; () where that is not known


class Turn(NamedTuple):
    """What a step was for one request."""

    request_id: str
    drafted: int
    emitted: int
    drafters: tuple[str, ...] = ()  # whose guesses it verified


@dataclass(frozen=True, slots=True)
class StepSeen:
    """What a step took, in seconds, and what it brought."""

    load: Load
    turns: Sequence[Turn]
    total_s: float  # drafts, pass, host and waits; prompts of other requests are left out
    rows: int = 0  # of the target pass
    pass_s: float = 0.0  # 0: not timed by itself
    is_tree: bool = False  # it verified trees of device drafters
    waited: Collection[str] = ()  # host drafters that the device waited for
    wait_s: float = 0.0  # … and for how long
    read_s: float = 0.0  # prompts of other requests took so long besides
    expected_gain: float = 1.0  # as planned

    @property
    def drafters(self) -> frozenset[str]:
        return frozenset([name for turn in self.turns if turn.drafted for name in turn.drafters])


# --- why --------------------------------------------------------------------------------------------------------------

NO_TOKENS = "off: drafts may have 0 tokens (draft_tokens)"
NO_MEMORY = "off: drafts may take no memory (max_draft_memory)"


def little_memory(places: int, requests: int) -> str:
    return f"off: memory for {places} guesses is too little for {requests} requests (max_draft_memory)"


class Decision(NamedTuple):
    """The last plan for one drafter's guesses."""

    requests: int  # that decoded in the step
    nodes: int  # most for a request where its guesses take time, of all requests where they are free; 0: none
    gain: float  # tokens a second by those of plain decoding, as expected of the best draft
    guess: float = 0.0  # what the guesses take, as a part of a plain pass
    levels: int = 0  # of trees
    row: float = 0.0  # what one more row for each request adds to a pass, as a part of it
    is_others: bool = False  # the guesses were for other requests

    def for_others(self) -> Decision:
        """The same, for a request that got nothing of it."""
        return self._replace(is_others=True) if self.nodes else self

    def text(self, drafter: str, acceptance: str = "", min_gain: float = 1.0, *, shared: bool = True) -> str:
        """In words. acceptance: how often its guesses are right. shared: name the number of requests."""
        if self.nodes and self.is_others:
            return f"off: guesses for others were worth more ({self.gain:.2f}x expected)"
        if self.nodes:
            deep = f" in {self.levels} levels" if self.levels else ""
            return f"{drafter} {self.nodes}{deep}: {self.gain:.2f}x expected"
        if 1.02 < self.gain <= min_gain:
            return f"off: {self.gain:.2f}x expected of the best draft, and min_gain asks for {min_gain:g}"
        share = acceptance and f", {acceptance}"
        best = (
            f"{self.gain:.2f}x expected of the best draft" if self.gain > 1.005 else "no draft is expected to be faster"
        )
        if self.guess > 0.3 and (self.guess >= self.row or self.row <= 0.5):
            return f"off: its guesses take {self.guess:.0%} of a pass, {best}{share}"
        if self.row > 0.5:
            if self.requests == 1:
                return f"off: a pass has no spare arithmetic here (a second row costs {self.row:.0%} more{share})"
            batch = f"batch {self.requests}" if shared else "the batch"
            return f"off: {batch} leaves no spare arithmetic (a row more each costs {self.row:.0%} more{share})"
        return f"off: {best}{share}"


@dataclass(frozen=True, slots=True)
class Gain:
    """What a request's drafted steps brought: times as fast as plain steps, as expected and as measured."""

    drafts: int = 0
    expected: float = 1.0
    measured: float = 1.0


# --- measured before the first request --------------------------------------------------------------------------------


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
    """One drafter's guesses for a number of requests at once."""

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
        if len(rows) < 2 or times[1] < _DEAR_ROW:
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
