"""The values that planner and engine exchange."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

VERSION = 3
"""Version of the JSON form of `MeasuredCosts` and of the timing: costs of another version are measured again."""
_EXPENSIVE = 1.8  # a pass over two rows, relative to one row: 80% of single guesses would have to be right


def bucket_of(requests: int) -> int:
    """Round a batch size up to 1, 2, 4, 8, …"""
    return 1 << max(requests - 1, 0).bit_length()


# --- the step that is planned -----------------------------------------------------------------------------------------


class Load(NamedTuple):
    """The decoding requests of a step."""

    requests: int = 0  # 0: unknown
    context: int = 0  # tokens of all requests

    @property
    def each(self) -> float:
        return self.context / self.requests if self.requests else 0.0


class Levels(NamedTuple):
    """An allowed depth of a drafter's trees."""

    deep: int
    nodes: int  # most nodes of such a tree


@dataclass(frozen=True, slots=True)
class Offer:
    """A drafter whose guesses take time, with the requests that it may draft for."""

    drafter: str
    request_ids: Sequence[str]
    caps: Sequence[int]  # [B] most nodes of each request
    levels: Sequence[Levels] = ()  # depths of its trees, deepest last; (): it drafts chains
    lagging: Collection[str] = ()  # requests whose last tokens it must read before it can draft


class Budget(NamedTuple):
    """The size of a drafter's next drafts."""

    nodes: list[int]  # [B] for each request of its offer
    levels: int = 0  # of its trees


# --- results of a step ------------------------------------------------------------------------------------------------


class TreeSeen(NamedTuple):
    """A verified tree."""

    nodes: int
    path: Sequence[int]  # the accepted nodes by the drafter's rank; () if unknown


class Turn(NamedTuple):
    """A step's result for one request."""

    request_id: str
    drafted: int
    emitted: int
    drafters: tuple[str, ...] = ()  # whose guesses were verified


@dataclass(frozen=True, slots=True)
class StepSeen:
    """The time of a step, and its result."""

    load: Load
    turns: Sequence[Turn]
    total_s: float  # drafts, pass, host and waits, without other requests' prompts
    rows: int = 0  # of the target pass
    pass_s: float = 0.0  # 0: not timed separately
    is_tree: bool = False  # trees of device drafters were verified
    waited: Collection[str] = ()  # host drafters that the device waited for
    wait_s: float = 0.0  # the time of that wait
    read_s: float = 0.0  # the time of other requests' prompts
    expected_gain: float = 1.0  # as planned

    @property
    def drafters(self) -> frozenset[str]:
        return frozenset([name for turn in self.turns if turn.drafted for name in turn.drafters])


# --- reasons ----------------------------------------------------------------------------------------------------------

NO_TOKENS = "off: drafts may have 0 tokens (draft_tokens)"
NO_MEMORY = "off: drafts may take no memory (max_draft_memory)"


def little_memory(places: int, requests: int) -> str:
    return f"off: memory for {places} guesses is too little for {requests} requests (max_draft_memory)"


class Decision(NamedTuple):
    """The last plan for one drafter's guesses."""

    requests: int  # in the step
    nodes: int  # most for a request; of all requests where guesses are free; 0: none
    gain: float  # expected speed of the best draft relative to plain decoding
    guess: float = 0.0  # time of the guesses relative to a plain pass
    levels: int = 0  # of trees
    row: float = 0.0  # relative cost of one more row for each request
    is_others: bool = False  # the guesses were for other requests

    def for_others(self) -> Decision:
        """This decision as seen by a request without guesses."""
        return self._replace(is_others=True) if self.nodes else self

    def text(self, drafter: str, acceptance: str = "", min_gain: float = 1.0, *, shared: bool = True) -> str:
        """The reason in words. acceptance: observed accuracy in words. shared: name the batch size."""
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


@dataclass(slots=True)
class Gain:
    """Sums over a request's drafted steps, and their speed relative to plain steps."""

    drafts: int = 0
    tokens: float = 0.0
    plain: float = 0.0  # plain steps in the same time
    planned: float = 0.0  # sum of the gains that were planned

    @property
    def expected(self) -> float:
        return self.planned / self.drafts if self.drafts else 1.0

    @property
    def measured(self) -> float:
        return self.tokens / max(self.plain, self.drafts) if self.drafts else 1.0  # guesses shorten no step


# --- measured before the first request --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds by size: linear between measured sizes and beyond the last two, and never falling."""

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
    """The time of one drafter's guesses at one batch size."""

    requests: int
    curve: Curve  # by nodes; of trees, by levels


@dataclass(frozen=True, slots=True)
class MeasuredCosts:
    """The costs measured for one machine, model and precision, before the first request.

    key_s, row_key_s: the time that a token of context adds to a pass, for its request and for each row of it.
    """

    passes: Curve  # by rows, with little context
    key_s: float = 0.0
    row_key_s: float = 0.0
    drafts: Mapping[str, tuple[DraftSeen, ...]] = field(default_factory=dict)  # by drafter, fewest requests first
    is_steady: bool = field(default=True, compare=False)  # no other work disturbed the measurement
    spread: float = field(default=1.0, compare=False)  # slowest over fastest run of the same pass
    is_whole: bool = field(default=True, compare=False)  # False: time ran out

    def why_dear(self) -> str:
        """A line that says why drafts hardly pay at these costs; "" where a second row is cheap enough."""
        rows = np.arange(1, self.passes.sizes[-1] + 1)
        times = self.passes.at(rows.astype(np.float64)) / self.passes.seconds[0]  # relative to one row
        if len(rows) < 2 or times[1] < _EXPENSIVE:
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
        """None for another version or incomplete data."""
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
