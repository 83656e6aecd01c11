"""What device drafters do in a round, recorded by itself: the same for all rounds of as many requests.

A draft loop is many launches, so recording one takes longer than a round. It knows nothing of the pass that follows it:
how many rows that has changes from round to round, and must not make the loop be recorded again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slipstream.core.draft import MAX_NODES
from slipstream.drafters.base import DeviceDrafter, DeviceTree, DraftRound
from slipstream.engine.odds import Odds, OddsRoom
from slipstream.kernels.gpu.rows import RECENT, LaneState
from slipstream.models.graphs import captured
from slipstream.sampling.table import Features, is_stale

_TREES = (4, 8, 16, 32, MAX_NODES)
"""Nodes of trees that are made: a round takes the first of them. Few, since each size is recorded by itself. Trees that
grow by levels have as many as they can: it is their levels that cost time."""
_CROWD = 8
"""From so many requests on it is their rows: trees of few nodes are made as such, and no more is read again than must
be."""
_FEW = 4

_log = logging.getLogger(__name__)

_MOST = 128
"""Loops that are kept; those that were not used for longest are let go."""


class DraftSize(NamedTuple):
    """A device drafter that guesses in a round, and how many nodes it may give a request."""

    drafter: str
    nodes: int
    levels: int = 0  # of trees, at most; 0: chains

    @property
    def depth(self) -> int:
        """Most guesses in a row."""
        return min(self.nodes, self.levels or self.nodes)


Drafts = tuple[DraftSize, ...]


class DraftFailed(Exception):
    """A device drafter raised; the message is its name, and the cause what it raised."""


class LoopShape(NamedTuple):
    """What a recorded loop depends on."""

    requests: int
    keys: int  # keys that a row sees at most
    features: Features
    version: int  # of the sampling table's tensors
    drafts: Drafts
    recent: int = RECENT  # last tokens of one of them that may have to be read


class DraftLoop:
    """One shape's static tensors, and the guesses that are made in them."""

    def __init__(
        self, shape: LoopShape, state: LaneState, drafters: dict[str, DeviceDrafter], rooms: Mapping[str, OddsRoom]
    ) -> None:
        device = state.length.device
        self._lanes = torch.full((shape.requests,), state.trash, dtype=torch.int64, device=device)
        self.guesses = [
            torch.zeros((shape.requests, size.nodes), dtype=torch.int64, device=device) for size in shape.drafts
        ]  # [B, K] each
        self.parents = [
            tokens.clone() if drafters[size.drafter].makes_trees else None
            for size, tokens in zip(shape.drafts, self.guesses, strict=True)
        ]  # None: chains
        asked = rooms if shape.features.rejection else {}
        self.q = [asked[name].part(shape.requests, nodes) if name in asked else None for name, nodes, _ in shape.drafts]
        self.shape = shape
        self._state, self._drafters = state, drafters
        self._replay: Callable[[], None] = self._work

    def run(self, lanes: Tensor) -> None:
        """Guess for these requests [B]; `guesses` and `parents` have one tensor a drafter."""
        self._lanes.copy_(lanes)
        self._replay()

    def serves(self, shape: LoopShape) -> bool:
        """Are its guesses those of this shape as well? More keys, or more to be read, change nothing."""
        enough = self.shape.keys >= shape.keys and self.shape.recent >= shape.recent
        return enough and self.shape._replace(keys=shape.keys, recent=shape.recent) == shape

    def record(self, pool: Any) -> Exception | None:
        """As one launch from now on; as it stands where a drafter looks at values on the host, say: returns why."""
        try:
            self._replay = captured(self._work, pool)
        except DraftFailed:
            raise
        except Exception as error:
            self._replay = self._work
            return error
        return None

    def _work(self) -> None:
        shape = self.shape
        parts = zip(shape.drafts, self.guesses, self.parents, self.q, strict=True)
        for size, guesses, parents, q in parts:
            drafter = self._drafters[size.drafter]
            wanted = DraftRound(
                self._state, self._lanes, size.depth, shape.keys, shape.features, size.nodes, shape.recent, q
            )
            try:
                guessed = drafter.draft(wanted)
                if isinstance(guessed, DeviceTree):
                    assert parents is not None, f"{size.drafter} gave trees, but makes_trees is False"
                    parents.copy_(guessed.parents)
                    guessed = guessed.tokens
                guesses.copy_(guessed)
            except Exception as error:
                raise DraftFailed(drafter.name) from error


class DraftLoops:
    """An engine's draft loops by shape, recorded when a shape comes for the first time.

    note: hears when one is made. pool: memory that graphs share; None: nothing is recorded. vocab_size: of the target.
    unrecorded: counts, by drafter, the loops that could not be recorded. say: is told of the first one.
    """

    def __init__(
        self,
        state: LaneState,
        drafters: dict[str, DeviceDrafter],
        pool: Any,
        note: Callable[[], None],
        vocab_size: int = 0,
        unrecorded: dict[str, int] | None = None,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._state, self._drafters, self._pool, self._note = state, drafters, pool, note
        telling = [name for name, drafter in drafters.items() if drafter.needs.probabilities]
        self._rooms = {name: OddsRoom(vocab_size, state.length.device) for name in telling}
        self._room = OddsRoom(vocab_size, state.length.device)  # of whole rounds, whoever drafted
        self._loops: dict[LoopShape, DraftLoop] = {}
        self._unrecorded = {} if unrecorded is None else unrecorded
        self._say = say
        self.makes_trees = frozenset(name for name, drafter in drafters.items() if drafter.makes_trees)

    def odds(self, requests: int, nodes: int) -> Odds | None:
        """What the nodes of a round were drawn from; None: there is no drafter that tells it."""
        return Odds.empty(self._room.part(requests, nodes)) if self._rooms else None

    def of(self, shape: LoopShape) -> DraftLoop:
        """Raises `DraftFailed` where a drafter cannot. Trees may have more nodes than was asked for."""
        shape = self.made(shape)
        found = self._loops.pop(shape, None)
        if found is None:
            found = DraftLoop(shape, self._state, self._drafters, self._rooms)
            if self._pool is not None and (why := found.record(self._pool)) is not None:
                self._complain([size.drafter for size in shape.drafts], why)
            self._note()
            kept = [(s, loop) for s, loop in self._loops.items() if not is_stale(s.version, shape.version)]
            self._loops = dict(kept[1 - _MOST :])
        self._loops[shape] = found  # the last is the one used last
        return found

    def find(self, shape: LoopShape) -> DraftLoop | None:
        """The same where it was made before. It is used, too, and so kept: a draft begun ahead asks for no other."""
        shape = self.made(shape)
        found = self._loops.pop(shape, None)
        if found is not None:
            self._loops[shape] = found
        return found

    def made(self, shape: LoopShape) -> LoopShape:
        """The shape of the loop that serves this one: trees come in few sizes."""
        crowd = shape.requests >= _CROWD
        drafters = [self._drafters[size.drafter] for size in shape.drafts]
        fewer = {count for drafter in drafters if crowd or not drafter.grows for count in drafter.fewer_rereads}
        recent = min([count for count in fewer if count >= shape.recent], default=RECENT)
        drafts = shape.drafts
        if any(size.levels for size in drafts):
            drafts = tuple(self._made(size, crowd) for size in drafts)
        return shape._replace(drafts=drafts, recent=recent)

    def _complain(self, names: list[str], why: Exception) -> None:
        """They draft on, launch by launch: slower, which nobody would understand who is not told. Once is enough."""
        is_known = all(name in self._unrecorded for name in names)
        for name in names:
            self._unrecorded[name] = self._unrecorded.get(name, 0) + 1
        if not is_known:
            slow = f"drafts of {' + '.join(names)} are not recorded as a graph, so they take longer"
            text = f"{slow} ({type(why).__name__}: {why})"
            _log.warning("%s", text)
            self._say(text)

    def _made(self, size: DraftSize, crowd: bool) -> DraftSize:
        drafter = self._drafters[size.drafter]
        if not drafter.makes_trees:
            return size
        most = drafter.most_at(size.levels)
        if drafter.grows:
            return size._replace(nodes=min(_FEW, most) if crowd and size.nodes <= _FEW else most)
        return size._replace(nodes=min(next(nodes for nodes in _TREES if nodes >= size.nodes), most))
