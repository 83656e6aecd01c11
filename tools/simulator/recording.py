"""What a simulation needs of real runs, as a file: what passes and drafts cost, and what became of offered guesses.

The file is one JSON object without spaces: a few kilobytes of costs, and for every request where its drafter was asked,
how likely it said its nodes to be, and which of them the answer then walked along.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import chain
from pathlib import Path
from typing import Any

from slipstream.core.draft import MAX_NODES
from slipstream.core.errors import ConfigError, read_named

VERSION = 4


@dataclass(frozen=True, slots=True)
class PassSeen:
    """Passes of one size, about one context and one wake: `requests` of decodes in `rows` rows, beside `read_rows` of
    prompts; or where prompts have passes of their own, of either."""

    requests: int
    rows: int
    read_rows: int
    context: int  # tokens in the cache of all of them together, at the median
    seconds: float  # the mean
    count: int
    wake: float = 0.0  # how much wider passes shortly before were, in doublings: the mean; not told of queued rounds
    along: bool = False  # drafters on the device read the prompts, too


@dataclass(frozen=True, slots=True)
class DraftSeen:
    """Drafts of one drafter, `nodes` deep, for so many requests at once; of trees that grow, the levels."""

    drafter: str
    requests: int
    nodes: int
    seconds: float
    count: int


@dataclass(frozen=True, slots=True)
class HostSeen:
    """What rounds of so many requests took beside pass and drafts."""

    requests: int
    seconds: float
    count: int


@dataclass(frozen=True, slots=True)
class WaitSeen:
    """How long queued rounds waited for drafts of the host, free ones themselves included: rounds of so many requests
    in so many rows, before which so many others started."""

    requests: int
    rows: int
    newcomers: int
    seconds: float
    count: int


@dataclass(frozen=True, slots=True)
class Costs:
    passes: tuple[PassSeen, ...] = ()
    drafts: tuple[DraftSeen, ...] = ()
    host: tuple[HostSeen, ...] = ()
    waits: tuple[WaitSeen, ...] = ()

    def packed(self) -> dict[str, list[list[Any]]]:
        """Without the names of their parts, of which there are many."""
        return {part.name: [list(asdict(one).values()) for one in getattr(self, part.name)] for part in fields(self)}

    @staticmethod
    def unpacked(packed: Mapping[str, Sequence[Sequence[Any]]]) -> Costs:
        return Costs(
            tuple(PassSeen(*one) for one in packed["passes"]),
            tuple(DraftSeen(*one) for one in packed["drafts"]),
            tuple(HostSeen(*one) for one in packed["host"]),
            tuple(WaitSeen(*one) for one in packed["waits"]),
        )


@dataclass(frozen=True, slots=True)
class Offer:
    """A drafter's guesses at one place of an answer.

    path: the nodes that the answer walked along, from the root on, numbered as the drafter ranked them: all of a
    chain's first ones.
    promises: of each node, that its whole path stands; None: the drafter did not say.
    parents: None for a chain, or where only the path is known.
    """

    position: int  # tokens of the answer before it
    nodes: int
    path: tuple[int, ...]
    promises: tuple[float, ...] | None = None
    parents: tuple[int, ...] | None = None

    @property
    def right(self) -> int:
        return len(self.path)


@dataclass(frozen=True, slots=True)
class Trace:
    """One request as it was. Seconds of `arrived` count from the first of the recording."""

    prompt_tokens: int
    output_tokens: int
    arrived: float
    first_token_s: float
    total_s: float
    drafters: tuple[str, ...] = ()
    offers: Mapping[str, tuple[Offer, ...]] = field(default_factory=dict)
    temperature: float = 0.0
    overlap: float = 0.0  # the part of its prompt that repeats itself
    spare: int = 0  # tokens that it might have said behind its end, as far as guesses go: nobody knew of that before


@dataclass(frozen=True, slots=True)
class DrafterKind:
    """What the engine's rules ask of a drafter."""

    name: str
    device: bool
    default_draft_tokens: int
    costly: bool = False
    whole: bool = False
    levels: int = 0  # of the trees that it makes on the device
    most_nodes: int = 63
    width: int = 0  # of trees that grow level by level: rows that are gone on from
    planned_draft_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Machine:
    """The limits of the engine that was recorded."""

    num_pages: int
    page_size: int
    max_model_len: int
    max_num_seqs: int
    batch_tokens: int
    draft_rows: int
    draft_tokens: int | None
    row_slope: float  # what one more row is taken to add before anything was seen
    queued: bool  # passes come in a few sizes, and prompts have passes of their own


@dataclass(frozen=True, slots=True)
class Made:
    """How the recording was made."""

    planner: str = "fixed"
    busy: bool = False  # whether others had the machine work before it
    ranks: bool = True  # whether the paths of all trees whose nodes are not kept have their ranks
    alone_s: tuple[float, ...] = ()  # what one answer alone took, at several times, if that was asked


@dataclass(frozen=True, slots=True)
class Planning:
    """What the adaptive planner takes of a round that waits for the host, beside what fixed rules take: so much, and
    for each request more. Waits that were recorded with fixed drafts lack it; others have it already."""

    round_s: float = 0.0
    request_s: float = 0.0

    def seconds(self, requests: int) -> float:
        return max(0.0, self.round_s + self.request_s * requests)


@dataclass(frozen=True, slots=True)
class Recording:
    model: str
    machine: Machine
    drafters: tuple[DrafterKind, ...]
    costs: Costs
    traces: tuple[Trace, ...]
    made: Made = Made()
    planning: Planning = Planning()

    def save(self, path: Path) -> None:
        traces = [packed(trace) for trace in self.traces]
        whole = {"slipstream_recording": VERSION, **asdict(self), "costs": self.costs.packed(), "traces": traces}
        path.write_text(json.dumps(whole, separators=(",", ":")) + "\n", encoding="utf-8")

    @staticmethod
    def load(path: Path) -> Recording:
        try:
            whole = json.loads(read_named(path, "--simulate", "make one with `slipstream bench --record FILE`"))
        except json.JSONDecodeError as error:
            raise ConfigError(
                f"--simulate {path}: is no recording, which is JSON ({error}); make one with "
                "`slipstream bench --record FILE`"
            ) from error
        version = whole.get("slipstream_recording") if isinstance(whole, dict) else None
        if not isinstance(version, int):
            raise ConfigError(f"--simulate {path}: is no recording; make one with `slipstream bench --record FILE`")
        if version != VERSION:
            other = "an older" if version < VERSION else "a newer"
            raise ConfigError(
                f"--simulate {path}: was recorded by {other} slipstream (version {version}, this one reads {VERSION}); "
                "record it again with this one"
            )
        try:
            recording = Recording(
                whole["model"],
                Machine(**whole["machine"]),
                tuple(DrafterKind(**kind) for kind in whole["drafters"]),
                Costs.unpacked(whole["costs"]),
                tuple(unpacked(trace) for trace in whole["traces"]),
                Made(**whole["made"] | {"alone_s": tuple(map(float, whole["made"]["alone_s"]))}),
                Planning(**whole["planning"]),
            )
            _check(recording)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(f"--simulate {path}: the recording is damaged ({error!r}); record it again") from error
        return recording


def _check(recording: Recording) -> None:
    """Raises `ValueError` where numbers are none, or none that could have been recorded."""
    for name in ("num_pages", "page_size", "max_model_len", "max_num_seqs", "batch_tokens", "draft_rows"):
        _check_number(name, getattr(recording.machine, name), 1)
    costs = recording.costs
    all_seen: list[PassSeen | DraftSeen | HostSeen | WaitSeen]
    all_seen = [*costs.passes, *costs.drafts, *costs.host, *costs.waits]
    for seen in all_seen:
        for name, value in asdict(seen).items():
            if name != "drafter":
                _check_number(name, value, 0)
    for name, value in asdict(recording.planning).items():
        _check_number(name, value, -sys.float_info.max)
    for trace in recording.traces:
        for name, value in (("prompt_tokens", trace.prompt_tokens), ("output_tokens", trace.output_tokens)):
            _check_number(name, value, 1)
        for offer in chain(*trace.offers.values()):
            _check_number("position", offer.position, 0)
            _check_number("nodes", offer.nodes, 0, MAX_NODES)
            for node in offer.path:
                _check_number("path", node, 0, offer.nodes - 1)


def _check_number(name: str, value: object, least: float, most: float = sys.float_info.max) -> None:
    if not isinstance(value, int | float) or not least <= value <= most:
        raise ValueError(f"{name}={value!r}")


def packed(trace: Trace) -> dict[str, Any]:
    return {
        "request": [
            trace.prompt_tokens,
            trace.output_tokens,
            round(trace.arrived, 5),
            round(trace.first_token_s, 5),
            round(trace.total_s, 5),
            trace.temperature,
            trace.overlap,
            trace.spare,
        ],
        "drafters": trace.drafters,
        "offers": {name: [_packed_offer(offer) for offer in offers] for name, offers in trace.offers.items()},
    }


def _packed_offer(offer: Offer) -> Sequence[Any]:
    """Where the path is the first nodes, as a chain's is, their number is enough."""
    path = offer.right if offer.path == tuple(range(offer.right)) else offer.path
    whole = [offer.position, offer.nodes, path, offer.promises, offer.parents]
    while whole[-1] is None:
        whole.pop()
    return whole


def unpacked(packed: Mapping[str, Any]) -> Trace:
    offers = {name: tuple(_offer(*offer) for offer in given) for name, given in packed["offers"].items()}
    # what is kept of texts for tools/play.py may lack the last one
    prompt, output, arrived, first_token_s, total_s, temperature, overlap, *spare = packed["request"]
    drafters = tuple(packed["drafters"])
    return Trace(prompt, output, arrived, first_token_s, total_s, drafters, offers, temperature, overlap, *spare)


def _offer(
    position: int,
    nodes: int,
    path: int | Sequence[int],
    promises: Sequence[float] | None = None,
    parents: Sequence[int] | None = None,
) -> Offer:
    walked = tuple(range(path)) if isinstance(path, int) else tuple(path)
    said = None if promises is None else tuple(promises)
    return Offer(position, nodes, walked, said, None if parents is None else tuple(parents))
