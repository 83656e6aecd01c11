"""The draft loops of device drafters, captured apart from the passes that verify them.

A loop is many launches, so capturing it takes longer than capturing a pass. It does not depend on the number of rows of
the pass, which changes from step to step, so one loop serves all steps with as many requests.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slipstream.core.draft import MAX_NODES
from slipstream.drafters.base import DeviceDrafter, DeviceTree, Drafter, DraftRound
from slipstream.engine.caps import judged_nodes, made_for
from slipstream.kernels.gpu.rows import RECENT, LaneState
from slipstream.models.graphs import captured
from slipstream.sampling.table import Features, is_stale

_TREE_SIZES = (4, 8, 16, 32, MAX_NODES)
"""Nodes of captured trees; a step uses the first ones. Trees that grow by levels have the most nodes, since it is their
levels that cost time."""
_CROWD = 8
"""Requests from which the rows of trees cost time: small trees are then captured as such, and no tokens are reread
without need."""
_SMALL_TREE = 4
_MOST = 128
"""Loops that are kept; the least recently used are dropped."""

_log = logging.getLogger(__name__)


class DraftSize(NamedTuple):
    """The size of a device drafter's drafts in a step."""

    drafter: str
    nodes: int  # most for one request
    levels: int = 0  # of trees, at most; 0: chains

    @property
    def depth(self) -> int:
        """Most guesses in a row."""
        return min(self.nodes, self.levels or self.nodes)


Drafts = tuple[DraftSize, ...]


class DraftFailed(Exception):
    """A device drafter raised. The message is its name, the cause is what it raised."""


class LoopShape(NamedTuple):
    """What a captured loop depends on."""

    requests: int
    keys: int  # most keys that a row sees
    features: Features
    version: int  # of the sampling table's tensors
    drafts: Drafts
    recent: int = RECENT  # most last tokens of a request that are reread


class QBuffer:
    """Memory for distributions, shared by all steps, since these follow one another.

    It grows when a part is asked for. A part stays valid for its owner: graphs captured over a smaller buffer keep it.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._rows = torch.zeros(0, vocab_size, device=device)

    def part(self, requests: int, nodes: int) -> Tensor:  # [B, K, V] fp32
        if self._rows.shape[0] < requests * nodes:
            self._rows = self._rows.new_zeros(max(requests * nodes, 2 * self._rows.shape[0]), self._rows.shape[1])
        return self._rows[: requests * nodes].view(requests, nodes, -1)


class NodeQ(NamedTuple):
    """The distributions that a step's nodes were drawn from, for rejection sampling, in static tensors."""

    q: Tensor  # [B, K, V] fp32: valid if drawn
    drawn: Tensor  # [B, K] bool: False for nodes of drafters that report none, which count as certain (q = 1)

    @staticmethod
    def empty(q: Tensor) -> NodeQ:
        return NodeQ(q, torch.zeros(q.shape[:2], dtype=torch.bool, device=q.device))

    def clear(self) -> None:
        self.drawn.zero_()

    def take(self, q: Tensor, mine: Tensor) -> None:
        """Take a drafter's distributions [B, M, V] for the requests that it drafts for alone (mine [B, 1])."""
        nodes = q.shape[1]
        own, drawn = self.q[:, :nodes], self.drawn[:, :nodes]
        torch.where(mine[:, :, None], q, own, out=own)
        drawn.logical_or_(mine)

    def take_merged(self, q: Tensor, owners: Tensor, number: int) -> None:
        """Take the distributions [B, M, V] of a chain that was just merged; owners [B, K]: as in `Union`.

        A node that another drafter proposed before keeps its distribution, since the later one is not tried. A chain's
        nodes stand in the union in the chain's own order.
        """
        place = ((owners >> number) & 1).cumsum(1).sub_(1).clamp_(0, q.shape[1] - 1)  # [B, K]: the chain's node
        new = owners == 1 << number  # [B, K]
        told = q.gather(1, place[:, :, None].expand(-1, -1, q.shape[2]))
        torch.where(new[:, :, None], told, self.q, out=self.q)
        self.drawn.logical_or_(new)


def q_bytes(drafters: Sequence[Drafter], draft_tokens: int | None, requests: int, vocab_size: int) -> int:
    """The most memory for distributions: by drafter, and once more by node."""
    telling = [drafter for drafter in drafters if drafter.needs.probabilities]
    nodes = judged_nodes(drafters, draft_tokens)
    drawn = sum(nodes if draft_tokens is not None else made_for(drafter) for drafter in telling)
    return (nodes + drawn) * requests * vocab_size * 4 if telling else 0


class DraftLoop:
    """The static tensors of one shape, and the guesses in them."""

    def __init__(
        self, shape: LoopShape, state: LaneState, drafters: dict[str, DeviceDrafter], buffers: Mapping[str, QBuffer]
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
        asked = buffers if shape.features.rejection else {}
        self.q = [asked[name].part(shape.requests, nodes) if name in asked else None for name, nodes, _ in shape.drafts]
        self.shape = shape
        self._state, self._drafters = state, drafters
        self._replay: Callable[[], None] = self._work

    def run(self, lanes: Tensor) -> None:
        """Guess for these requests [B]; `guesses` and `parents` have one tensor for each drafter."""
        self._lanes.copy_(lanes)
        self._replay()

    def record(self, pool: Any) -> Exception | None:
        """Capture the loop as a graph. Returns why it could not be captured: it then runs launch by launch."""
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
    """An engine's draft loops by shape. Each is made when its shape first comes.

    note: called for each new loop. pool: memory of the graphs; None: nothing is captured. unrecorded: counts loops that
    could not be captured, by drafter. say: told of the first one.
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
        self._buffers = {name: QBuffer(vocab_size, state.length.device) for name in telling}
        self._nodes_buffer = QBuffer(vocab_size, state.length.device)
        self._loops: dict[LoopShape, DraftLoop] = {}
        self._unrecorded = {} if unrecorded is None else unrecorded
        self._say = say
        self.makes_trees = frozenset(name for name, drafter in drafters.items() if drafter.makes_trees)

    def node_q(self, requests: int, nodes: int) -> NodeQ | None:
        """Tensors for the distributions of a step's nodes; None if no drafter reports any."""
        return NodeQ.empty(self._nodes_buffer.part(requests, nodes)) if self._buffers else None

    def of(self, shape: LoopShape) -> DraftLoop:
        """The loop of this shape; its trees may have more nodes. Raises `DraftFailed` if a drafter fails."""
        shape = self._captured_shape(shape)
        found = self._loops.pop(shape, None)
        if found is None:
            found = DraftLoop(shape, self._state, self._drafters, self._buffers)
            if self._pool is not None and (why := found.record(self._pool)) is not None:
                self._warn([size.drafter for size in shape.drafts], why)
            self._note()
            kept = [(s, loop) for s, loop in self._loops.items() if not is_stale(s.version, shape.version)]
            self._loops = dict(kept[1 - _MOST :])
        self._loops[shape] = found  # the most recently used is last
        return found

    def _captured_shape(self, shape: LoopShape) -> LoopShape:
        """The shape that serves this one: numbers of reread tokens and sizes of trees are rounded up."""
        crowd = shape.requests >= _CROWD
        drafters = [self._drafters[size.drafter] for size in shape.drafts]
        fewer = {count for drafter in drafters if crowd or not drafter.grows for count in drafter.fewer_rereads}
        recent = min([count for count in fewer if count >= shape.recent], default=RECENT)
        drafts = shape.drafts
        if any(size.levels for size in drafts):
            drafts = tuple(self._captured_size(size, crowd) for size in drafts)
        return shape._replace(drafts=drafts, recent=recent)

    def _captured_size(self, size: DraftSize, crowd: bool) -> DraftSize:
        drafter = self._drafters[size.drafter]
        if not drafter.makes_trees:
            return size
        most = drafter.most_at(size.levels)
        if drafter.grows:
            return size._replace(nodes=min(_SMALL_TREE, most) if crowd and size.nodes <= _SMALL_TREE else most)
        return size._replace(nodes=min(next(nodes for nodes in _TREE_SIZES if nodes >= size.nodes), most))

    def _warn(self, names: list[str], why: Exception) -> None:
        """Count a loop that runs launch by launch, and say so the first time: it is slower."""
        is_known = all(name in self._unrecorded for name in names)
        for name in names:
            self._unrecorded[name] = self._unrecorded.get(name, 0) + 1
        if not is_known:
            slow = f"drafts of {' + '.join(names)} are not recorded as a graph, so they take longer"
            text = f"{slow} ({type(why).__name__}: {why})"
            _log.warning("%s", text)
            self._say(text)
