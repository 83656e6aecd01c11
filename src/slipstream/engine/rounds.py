"""The captured step of the device, a round: draft, one target pass, verify, commit, over static tensors.

A round never looks at a value. On a GPU it is therefore captured once for its shape and launched as two graphs from
then on: the draft, and the rest. On a CPU, or with graphs turned off, the same code runs directly and gives the same
tokens. Sizes of shapes come in buckets, and a captured round may do the work of a smaller shape (`StandIns`), so few
rounds are captured.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipstream.constrain.matcher import mask_words
from slipstream.core.draft import MAX_NODES, Draft, Tree, chain_parents
from slipstream.drafters.base import DeviceDrafter
from slipstream.engine.draft_loops import DraftLoop, DraftLoops, Drafts, LoopShape
from slipstream.kernels.gpu.accept import PathMoves, VerdictTable, accept, compact
from slipstream.kernels.gpu.jit import has_kernels
from slipstream.kernels.gpu.merge_trees import Union, merge_guesses, prepare_merges
from slipstream.kernels.gpu.paged import SPLIT_KEYS
from slipstream.kernels.gpu.rows import RECENT, LaneState, PassRows, pack_rows
from slipstream.kv.cache import KVCache
from slipstream.models.graphs import captured, count_compiling
from slipstream.models.paths import Progress
from slipstream.models.runner import Runner
from slipstream.plan.cost import SIZES
from slipstream.sampling.choose import choose
from slipstream.sampling.rows import SampleRows
from slipstream.sampling.table import Features, SamplingTable, is_stale
from slipstream.verify.rejection import mixed_choices

_REQUESTS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
_WIDTHS = (0, 16, MAX_NODES)
"""Buckets of requests and of nodes; the buckets of rows are `plan.cost.SIZES`. Each combination is captured apart."""
_DRAWN_WIDTHS = (0, 2, 4, 6, 8, 12, 16, 24, 32, 48, MAX_NODES)
"""Buckets of nodes under rejection sampling, where each node costs work over the whole vocabulary."""
_CROWD = 16
"""Requests from which all contexts are rarely short: they have larger buckets of keys."""
_CHEAP_ROWS = 16
"""Rows up to which all passes take the same time: the tiles of products have this many."""
_OFTEN = 32
"""Uses of a larger round that cost about as much, in time lost, as capturing the right one."""
_OF_LATE = 1024
"""Uses of stand-ins after which earlier counts are halved."""
_MOST = 512
"""Captured rounds that are kept; the least recently used are dropped."""
_COPIES = 3
"""Host copies of a round's input and of its result: more than there are rounds in flight."""


class RoundShape(NamedTuple):
    """Everything that a captured round depends on, with sizes in buckets.

    A tuple, because one is made and looked up in every step while the device waits.
    """

    requests: int
    width: int  # most nodes of a request
    rows: int
    keys: int  # most keys that a row sees
    is_tree: bool
    features: Features
    version: int  # of the sampling table's tensors
    keeps_logits: bool  # log probabilities are read after it
    tells_choices: bool = False  # a drafter reads the choice at every row
    draws: bool = False  # a drafter reports the distributions that it draws from

    @staticmethod
    def of(
        counts: Sequence[int],
        longest: int,
        *,
        is_tree: bool,
        features: Features,
        version: int,
        keeps_logits: bool,
        tells_choices: bool = False,
        draws: bool = False,
        most_keys: int = 1 << 40,
    ) -> RoundShape:
        """The shape for requests with these numbers of nodes.

        longest: most tokens of a request before the step. most_keys: the most that any row can see.
        """
        requests = _bucket(len(counts), _REQUESTS)
        width = _bucket(max(counts), _DRAWN_WIDTHS if features.rejection else _WIDTHS)
        rows = _bucket(len(counts) + sum(counts), SIZES)
        keys = _keys(requests, longest + 1 + width, most_keys)
        return RoundShape(requests, width, rows, keys, is_tree, features, version, keeps_logits, tells_choices, draws)

    def does(self, other: RoundShape) -> bool:
        """Whether a round of this shape can do the work of the other in nearly the same time.

        It may have room for larger drafts, for trees instead of chains, and for up to twice the rows.
        """
        if self.features.rejection or not other.width or self.width < other.width or self.is_tree < other.is_tree:
            return False
        if not other.rows <= self.rows <= max(2 * other.rows, _CHEAP_ROWS):
            return False
        return other._replace(width=self.width, rows=self.rows, is_tree=self.is_tree) == self


def request_sizes(most: int) -> Iterator[int]:
    """The buckets of requests if at most `most` run at once."""
    last = _REQUESTS[-1]
    sizes = chain(_REQUESTS, range(2 * last, most + last, last))
    return (size for size in sizes if size <= _bucket(most, _REQUESTS))


def _keys(requests: int, seen: int, most: int) -> int:
    keys = SPLIT_KEYS if requests < _CROWD else 4 * SPLIT_KEYS
    while keys < seen:
        keys *= 4
    return min(keys, -(-most // SPLIT_KEYS) * SPLIT_KEYS)


def _bucket(size: int, sizes: Sequence[int]) -> int:
    """The smallest bucket that holds `size`; beyond the last, a multiple of it."""
    last = sizes[-1]
    return sizes[bisect_left(sizes, size)] if size <= last else -(-size // last) * last


class StandIns:
    """Chooses captured rounds to do the work of shapes that are not captured, until a shape has come often."""

    def __init__(self) -> None:
        self._came: dict[RoundShape, float] = {}  # uses by shape that is not captured
        self._known: dict[RoundShape, RoundShape] = {}  # by shape: its last stand-in, which saves a search
        self._times = 0

    def of(self, shape: RoundShape, available: Collection[RoundShape]) -> RoundShape | None:
        """The shape to use instead of this one; None: capture this one."""
        came = self._came.get(shape, 0.0) + 1
        other = self._known.get(shape) if came <= _OFTEN else None
        if came <= _OFTEN and (other is None or other not in available):
            fit = [other for other in available if other.does(shape)]
            other = min(fit, key=lambda other: (other.rows, other.is_tree, other.width), default=None)
        if other is None:
            self._came.pop(shape, None)
            return None
        self._came[shape], self._known[shape] = came, other
        self._times += 1
        if self._times % _OF_LATE == 0:
            self._fade(shape.version)
        return other

    def forget(self) -> None:
        """Another shape was captured: search again, since it may do the work faster."""
        self._known.clear()

    def _fade(self, version: int) -> None:
        halves = {shape: came / 2 for shape, came in self._came.items() if not is_stale(shape.version, version)}
        self._came = {shape: came for shape, came in halves.items() if came >= 1}


@dataclass(frozen=True, slots=True)
class Machine:
    """The parts of an engine that all its rounds work on."""

    target: Runner
    cache: KVCache
    sampling: SamplingTable
    state: LaneState
    page_size: int
    trash_slot: int

    @property
    def device(self) -> torch.device:
        return self.target.device


@dataclass(frozen=True, slots=True)
class _Staging:
    """A host copy of a round's input.

    It is written through a `memoryview`, a few numbers at a time: tensors and arrays are slow at that, and the device
    waits meanwhile.
    """

    tensor: Tensor  # [4 B + 2 B K] int64
    numbers: memoryview  # the same: lanes, nodes, bits of device drafters, room [4, B]; tokens, parents [2, B, K]

    @staticmethod
    def of(requests: int, chain: Sequence[int], *, pinned: bool) -> _Staging:
        tensor = torch.zeros(4 * requests + 2 * requests * len(chain), dtype=torch.int64, pin_memory=pinned)
        staged = _Staging(tensor, tensor.numpy().data)
        staged.write((4 + len(chain)) * requests, list(chain) * requests)
        return staged

    def write(self, at: int, values: Sequence[int]) -> None:
        self.numbers[at : at + len(values)] = array(self.numbers.format, values)


class Round:
    """The static tensors of one shape, and the operations of a step on them."""

    def __init__(self, shape: RoundShape, machine: Machine, drafters: Sequence[str], loops: DraftLoops) -> None:
        self.shape = shape
        self.numbers = {name: number for number, name in enumerate(drafters, 1)}
        """By device drafter: its bit in `owners`."""
        self.makes_trees = loops.makes_trees
        """The device drafters that make trees."""
        self._machine = machine
        self._loops = loops
        b, k, device = shape.requests, shape.width, machine.device
        self._inputs = torch.zeros(4 * b + 2 * b * k, dtype=torch.int64, device=device)
        self.lanes, self._counts, self._guessed, room = self._inputs[: 4 * b].view(4, b).unbind(0)
        self._tokens, self._parents = self._inputs[4 * b :].view(2, b, k).unbind(0)  # [B, K]
        owners = torch.zeros((b, k if shape.is_tree else 0), dtype=torch.int64, device=device)
        self._union = Union(self._tokens, self._parents, self._counts, owners, room)
        self._merges = False  # guesses of device drafters join trees of the host, or each other
        self._rows = PassRows.empty(b, k, shape.rows, tree=shape.is_tree, device=device)
        self._moves = PathMoves.empty(b, k, device) if shape.is_tree else None
        self.verdicts = VerdictTable.empty(b, k, device)
        self.logits: Tensor | None = None  # [N, V] of the last pass
        self._chosen: Tensor | None = None  # [N] of the last pass
        self._q = loops.node_q(b, k) if k and shape.draws else None
        self._allowed: Tensor | None = None  # [N, W] int32: masks of grammars
        if shape.features.grammar:
            words = mask_words(machine.sampling.vocab_size)
            self._allowed = torch.full((shape.rows, words), -1, dtype=torch.int32, device=device)
        pinned = device.type == "cuda"

        def copies(*size: int) -> list[Tensor]:
            return [torch.zeros(size, dtype=torch.int64, pin_memory=pinned) for _ in range(_COPIES)]

        self._chain = chain_parents(k)  # the parents of a device drafter's guesses, unless it makes trees
        self._staging = [_Staging.of(b, self._chain, pinned=pinned) for _ in range(_COPIES)]
        self._results, self._owners = copies(*self.verdicts.table.shape), copies(*owners.shape)
        self._choices = copies(shape.rows if shape.tells_choices else 0)
        self._staged = self._copied = 0  # numbers of the staging and of the result in use
        self._loaded: Any = None  # what was sent last
        self._verify_graph: Callable[[], None] | None = None

    def load(self, lanes: Sequence[int], trees: Sequence[Tree], shares: Sequence[Sequence[tuple[str, int]]]) -> None:
        """Send the requests of the step: their lanes, their trees of the host, and the nodes of device drafters.

        shares: by request, the most nodes of each device drafter. Sends nothing if nothing changed.
        """
        wanted = (list(lanes), list(trees), list(shares))
        if wanted == self._loaded:
            return
        self._loaded = wanted
        self._staged = (self._staged + 1) % _COPIES
        staged, width, is_tree = self._staging[self._staged], self.shape.width, self.shape.is_tree
        padding = [0] * (self.shape.requests - len(lanes))
        counts = [len(tree.tokens) for tree in trees]
        room = [count + sum([n for _, n in added]) for count, added in zip(counts, shares, strict=True)]
        self._merges = any(len(s) > 1 or (s and tree.tokens) for tree, s in zip(trees, shares, strict=True))
        heads = [*lanes, *([self._machine.state.trash] * len(padding)), *(counts if self._merges else room), *padding]
        if self.numbers:
            bits = [sum([1 << self.numbers[name] for name, _ in added]) for added in shares]
            heads += [*bits, *padding, *room, *padding]
        staged.write(0, heads)
        begin, parents = 4 * self.shape.requests, width * self.shape.requests
        for tree in trees:
            if tree.tokens:
                staged.write(begin, tree.tokens)
            if is_tree:  # also without a tree of the host: a device drafter may add a chain
                staged.write(begin + parents, tree.parents + self._chain[len(tree.tokens) :])
            begin += width
        self._inputs.copy_(staged.tensor, non_blocking=True)

    def draft(self, drafts: Drafts, recent: int = RECENT) -> None:
        """Run the device drafters. Raises `DraftFailed` if one raises. recent: as in `DraftRound`."""
        shape = self.shape
        features = replace(shape.features, grammar=False) if shape.features.grammar else shape.features
        loop = self._loops.of(LoopShape(shape.requests, shape.keys, features, shape.version, drafts, recent))
        loop.run(self.lanes)
        if self._merges:
            self._loaded = None  # the input changes on the device
        if self._q is not None:
            self._q.clear()
        parts = zip(drafts, loop.guesses, loop.parents, loop.q, strict=True)
        for i, ((name, nodes, _), guesses, parents, q) in enumerate(parts):
            number = self.numbers[name]
            if self._merges:
                merge_guesses(self._union, guesses, parents, self._guessed, number, nodes=nodes, first=i == 0)
                if self._q is not None and q is not None and parents is None:
                    self._q.take_merged(q, self._union.owners, number)
                continue
            mine = self._guessed[:, None] == 1 << number
            tokens = self._tokens[:, :nodes]
            torch.where(mine, guesses[:, :nodes], tokens, out=tokens)
            if parents is not None:
                above = self._parents[:, :nodes]
                torch.where(mine, parents[:, :nodes], above, out=above)
            if self._q is not None and q is not None:
                self._q.take(q[:, :nodes], mine)

    def drafted(self, requests: int) -> list[Tree]:
        """Read back the drafts of the first `requests` requests, after waiting for the device drafters."""
        b, k = self.shape.requests, self.shape.width
        read = self._inputs.cpu()
        counts = read[b : b + requests].tolist()
        tokens, parents = read[4 * b :].view(2, b, k)[:, :requests].tolist()
        return [Tree(tuple(t[:n]), tuple(p[:n])) for n, t, p in zip(counts, tokens, parents, strict=True)]

    def allow(self, masks: Tensor) -> None:
        """Set the masks [R, W] int32, on the device, of the first rows. The rows after them are padding."""
        assert self._allowed is not None
        self._allowed[: masks.shape[0]].copy_(masks)

    def verify(self) -> None:
        """Run the target pass, choose, accept and commit."""
        (self._verify_graph or self._verify)()

    def result(self, requests: int) -> NDArray[np.int64]:
        """A host copy of the first requests' verdicts, valid when the device has reached this point."""
        self._copied = (self._copied + 1) % _COPIES
        return _fetch(self.verdicts.table, self._results[self._copied])[:requests]

    def owners(self) -> NDArray[np.int64] | None:  # [B, K]
        """A host copy, valid with the `result` before it: for each node one bit for each drafter that proposed it.

        Bit 0 is the host's, the others are in `numbers`; 0: there is no node. None: each draft has one author.
        """
        return _fetch(self._union.owners, self._owners[self._copied]) if self._merges else None

    def choices(self) -> NDArray[np.int64] | None:  # [N]
        """A host copy, valid with the `result` before it, of the choice at every row; None if no drafter reads it."""
        return None if self._chosen is None else _fetch(self._chosen, self._choices[self._copied])

    def capture(self, pool: Any) -> None:
        """Capture everything after the draft as a graph."""
        self.load([], [], [])  # capturing runs it first, here without requests
        self._verify_graph = captured(self._verify, pool)

    @property
    def is_captured(self) -> bool:
        return self._verify_graph is not None

    def _verify(self) -> None:
        m, shape, rows = self._machine, self.shape, self._rows
        draft = Draft(self._tokens, self._parents, self._counts, not shape.is_tree)
        pack_rows(m.state, self.lanes, draft, rows, page_size=m.page_size, trash_slot=m.trash_slot)
        layout = rows.layout(m.state, self.lanes, m.page_size, shape.keys)
        logits = m.target.run(rows.ids, layout, m.cache)
        if shape.keeps_logits:
            self.logits = logits
        wanted = SampleRows(rows.lanes, rows.positions + 1, rows.generated, self._paths())
        chosen = choose(logits, wanted, m.sampling, shape.features, allowed=self._allowed)
        if shape.features.rejection:
            chosen = self._judged(chosen, logits, wanted, draft)
        if shape.tells_choices:
            self._chosen = chosen
        accept(chosen, draft, rows, m.state, self.verdicts, self._moves)
        if self._moves is not None:
            for planes in m.cache.planes:
                compact(planes, self._moves.src, self._moves.dst)
        m.sampling.commit(self.lanes, self.verdicts.tokens, self.verdicts.emitted, shape.features)

    def _judged(self, chosen: Tensor, logits: Tensor, wanted: SampleRows, draft: Draft) -> Tensor:  # [N]
        """The choices, replaced by those of rejection sampling for the requests that asked for it."""
        starts = self._rows.starts.long()
        counts = (starts[1:] - starts[:-1])[:, None]  # [B, 1]: rows, 0 for a padding request
        reach = torch.arange(self.shape.width + 1, device=chosen.device)
        row_of = torch.where(reach < counts, starts[:-1, None] + reach, 0)  # [B, K + 1]
        sampling, features, drawn = self._machine.sampling, self.shape.features, None
        if self._q is not None:
            draft = replace(draft, q=self._q.q)
            drawn = self._q.drawn & (self._guessed != 0)[:, None]  # without a device drafter it is stale
        found = mixed_choices(
            chosen[row_of], logits, wanted, row_of, draft, sampling, features, drawn, allowed=self._allowed
        )
        nowhere = torch.where(reach < counts, row_of, chosen.shape[0])  # padding is written after the last row
        return torch.cat((chosen, chosen[:1])).scatter(0, nowhere.flatten(), found.flatten())[:-1]

    def _paths(self) -> Tensor | None:  # [N, K]
        """The draft tokens before each row, for penalties and bad words."""
        if not self.shape.width or not (self.shape.features.penalties or self.shape.features.bad_words):
            return None
        rows = self._rows
        if rows.ancestors is not None:
            above = rows.ancestors[:, 1:].long()
            return torch.where(above >= 0, rows.ids[above.clamp_min(0)], -1)
        request = rows.requests.clamp_min(0).long()
        depth = torch.arange(rows.ids.shape[0], device=rows.ids.device) - rows.starts[request]
        inside = torch.arange(self.shape.width, device=rows.ids.device) < depth[:, None]
        return torch.where(inside & (rows.requests >= 0)[:, None], self._tokens[request], -1)


def _fetch(tensor: Tensor, copy: Tensor) -> NDArray[np.int64]:
    """Copy a tensor to the host without waiting."""
    copy.copy_(tensor, non_blocking=True)
    return copy.numpy()


class Rounds:
    """The rounds of an engine by shape, each made when its shape first comes, unless another stands in for it."""

    def __init__(
        self,
        machine: Machine,
        drafters: dict[str, DeviceDrafter],
        *,
        graphs: bool,
        progress: Progress | None = None,
        unrecorded: dict[str, int] | None = None,
    ) -> None:
        """unrecorded: counts, by drafter, the draft loops that could not be captured."""
        self._machine = machine
        self._drafters = tuple(drafters)
        self._graphs = graphs and has_kernels(machine.device)
        self._pool = torch.cuda.graph_pool_handle() if self._graphs else None
        count_compiling()
        if drafters:
            prepare_merges(machine.device, {drafter.makes_trees for drafter in drafters.values()})
        self._rounds: dict[RoundShape, Round] = {}
        self._stand_ins: StandIns | None = None
        self._latest: Round | None = None
        self._say = progress or (lambda _: None)
        self._made = 0
        vocab_size = machine.sampling.vocab_size
        self._loops = DraftLoops(machine.state, drafters, self._pool, self._note, vocab_size, unrecorded, self._say)

    @property
    def pool(self) -> Any:
        """The memory that all graphs share; None if nothing is captured."""
        return self._pool if self._graphs else None

    def __len__(self) -> int:
        """The number of rounds and draft loops that were ever made."""
        return self._made

    def of(self, shape: RoundShape, *, exactly: bool = False) -> Round:
        """A round of this shape, or a larger one that does its work (the round's own `shape` tells).

        exactly: only this shape, even if it must be captured first.
        """
        if self._latest is not None and self._latest.shape == shape:
            return self._latest
        if self._stand_ins is not None and self._graphs and not exactly and shape not in self._rounds:
            shape = self._stand_ins.of(shape, self._rounds) or shape
        found = self._rounds.pop(shape, None)
        if found is None:
            found = self._make(shape)
        self._rounds[shape] = self._latest = found  # the dictionary is ordered by last use
        return found

    def let_stand_in(self) -> None:
        """From now on captured rounds do the work of smaller shapes that come seldom, instead of capturing these."""
        self._stand_ins = StandIns()

    def draft_loop(self, shape: LoopShape) -> DraftLoop:
        """The device drafters' part of a round."""
        return self._loops.of(shape)

    def capture_again(self) -> bool:
        """Capture again after a failure, since later rounds may be smaller. Returns whether there was a failure."""
        failed = self._pool is not None and not self._graphs
        if failed:
            self._graphs, self._latest = True, None
            self._rounds = {shape: found for shape, found in self._rounds.items() if found.is_captured}
        return failed

    def _make(self, shape: RoundShape) -> Round:
        found = Round(shape, self._machine, self._drafters, self._loops)
        if self._graphs:
            self._say(f"capturing a round of {shape.requests} requests, {shape.rows} rows")
            try:
                found.capture(self._pool)
            except Exception as error:  # the model reads values on the host, or memory is full
                self._say(f"a round could not be captured, so none is ({type(error).__name__}: {error})")
                self._graphs = False
                found = self._make(shape)
        kept = [(s, r) for s, r in self._rounds.items() if not is_stale(s.version, shape.version)]
        self._rounds = dict(kept[1 - _MOST :])
        if self._stand_ins is not None:
            self._stand_ins.forget()  # the new one may do their work faster
        self._note()
        return found

    def _note(self) -> None:
        self._made += 1
