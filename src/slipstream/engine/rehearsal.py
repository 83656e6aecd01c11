"""Requests without an owner, on which an idle engine's passes and drafts are timed or recorded.

They leave behind what any request leaves: pages that their next owner writes before reading.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from slipstream.core.draft import MAX_NODES, Tree
from slipstream.core.params import SamplingParams
from slipstream.drafters.base import DeviceDrafter, DraftRequest
from slipstream.engine.draft_loops import DraftSize, LoopShape
from slipstream.engine.queued import QueuedBackend
from slipstream.engine.rounds import RoundShape
from slipstream.engine.step import Engine
from slipstream.kv.pages import PageTable
from slipstream.models.batch import PassBatch
from slipstream.sampling.table import Features

_GREEDY = SamplingParams(temperature=0.0)
_SPARE = 2 * (MAX_NODES + 1)
"""Places behind each request: for the rows of a draft, and for a drafter that goes on behind them."""

Work = Callable[[], object]


class Rehearsal(ABC):
    """Requests of one length in the engine's first slots."""

    def __init__(self, engine: Engine, tables: Sequence[PageTable], context: int) -> None:
        self.engine, self.tables, self.context = engine, tables, context
        self.requests = len(tables)

    @abstractmethod
    def rewind(self) -> None:
        """Put the requests back to their first length: a timed step advanced them."""

    @abstractmethod
    def target_pass(self, rows: int) -> Work:
        """A repeatable forward pass over `rows` rows, including sampling."""

    @abstractmethod
    def draft(self, size: DraftSize) -> Work:
        """A repeatable draft of a device drafter for all requests."""

    @abstractmethod
    def close(self) -> None:
        """Remove the requests from the backend and the drafters."""

    def read(self, rows: int, *, wide: bool) -> None:
        """A pass over the first `rows` tokens of a prompt."""
        target = self.engine.target
        ids = torch.ones(rows, dtype=torch.int64, device=target.device)
        batch = PassBatch.behind(self.tables[:1], [0], [rows], ids, target.device)
        target.forward(replace(batch, wide=wide), self.engine.cache)

    def _drafter(self, name: str) -> DeviceDrafter:
        drafter = self.engine.drafting.drafters[name]
        assert isinstance(drafter, DeviceDrafter)
        return drafter

    def _shared_out(self, rows: int) -> list[int]:
        few, more = divmod(rows, self.requests)
        return [few + (i < more) for i in range(self.requests)]


class _Eager(Rehearsal):
    def rewind(self) -> None:
        self.close()
        for drafter in self._on_device():
            for i in range(self.requests):
                drafter.start(self._view(i))
                drafter.resume(_name(i), self.context)

    def target_pass(self, rows: int) -> Work:
        target, cache = self.engine.target, self.engine.cache
        ids = torch.ones(rows, dtype=torch.int64, device=target.device)
        counts = self._shared_out(rows)
        batch = PassBatch.behind(self.tables, [self.context] * self.requests, counts, ids, target.device)
        batch = replace(batch, logit_rows=None)  # every row of a draft chooses
        return lambda: target.forward(batch, cache).argmax(1)

    def draft(self, size: DraftSize) -> Work:
        drafter, views = self._drafter(size.drafter), [self._view(i) for i in range(self.requests)]
        budget = [size.nodes] * len(views)
        if size.levels:
            return lambda: drafter.propose_trees(views, budget, size.levels)
        return lambda: drafter.propose(views, budget)

    def close(self) -> None:
        for drafter in self._on_device():
            for i in range(self.requests):
                drafter.stop(_name(i))

    def _on_device(self) -> list[DeviceDrafter]:
        return [one for one in self.engine.drafting.drafters.values() if isinstance(one, DeviceDrafter)]

    def _view(self, request: int) -> DraftRequest:
        return DraftRequest(_name(request), [1] * (self.context + 1), self.context, _GREEDY, request)


class _Queued(Rehearsal):
    def __init__(self, engine: Engine, tables: Sequence[PageTable], context: int, backend: QueuedBackend) -> None:
        super().__init__(engine, tables, context)
        self._backend = backend

    def rewind(self) -> None:
        self._backend.lanes.occupy([table.pages for table in self.tables], self.context)

    def target_pass(self, rows: int) -> Work:
        nodes = [count - 1 for count in self._shared_out(rows)]
        run = self._backend.rounds.of(self._shape(nodes), exactly=True)
        run.load(range(self.requests), [Tree.chain([1] * count) for count in nodes], [()] * self.requests)
        return run.verify

    def draft(self, size: DraftSize) -> Work:
        shape = self._shape([size.nodes] * self.requests)
        recent = self._drafter(size.drafter).unread(1 + size.depth)  # as if the step before had guessed as much
        wanted = LoopShape(shape.requests, shape.keys, shape.features, shape.version, (size,), recent)
        loop = self._backend.rounds.draft_loop(wanted)
        device = self.engine.target.device
        lanes = torch.full((shape.requests,), self._backend.lanes.state.trash, dtype=torch.int64, device=device)
        lanes[: self.requests] = torch.arange(self.requests, device=device)
        return lambda: loop.run(lanes)

    def close(self) -> None:
        self._backend.lanes.clear(self.requests)

    def _shape(self, nodes: Sequence[int]) -> RoundShape:
        return usual_shape(self.engine, nodes, self.context, self.engine.sampling.features(range(self.requests)))


def usual_shape(
    engine: Engine, nodes: Sequence[int], context: int, features: Features, *, is_tree: bool = False
) -> RoundShape:
    """The shape of rounds of ordinary requests with these numbers of nodes: what is captured for it is used later."""
    version = engine.sampling.version_of(features)
    most_keys = engine.plan.most_keys
    return RoundShape.of(
        nodes, context, is_tree=is_tree, features=features, version=version, keeps_logits=False, most_keys=most_keys
    )


def most_context(engine: Engine, requests: int) -> int:
    """The longest context that these requests may have; below 1 if they do not fit."""
    pages = engine.pool.free_pages // requests
    return min(engine.plan.max_model_len, pages * engine.config.page_size) - _SPARE


@contextmanager
def rehearse(engine: Engine, requests: int, context: int) -> Iterator[Rehearsal]:
    """Requests of this length in an engine without others."""
    tables = [PageTable(engine.pool) for _ in range(requests)]
    scene: Rehearsal | None = None
    try:
        for slot, table in enumerate(tables):
            table.reserve(context + _SPARE)
            table.commit(context)
            engine.tables[_name(slot)] = table
            engine.sampling.add(slot, _GREEDY, seed=0)
        if isinstance(engine.backend, QueuedBackend):
            scene = _Queued(engine, tables, context, engine.backend)
        else:
            scene = _Eager(engine, tables, context)
        scene.rewind()
        yield scene
    finally:
        if scene is not None:
            scene.close()
        for slot, table in enumerate(tables):
            engine.tables.pop(_name(slot), None)
            engine.sampling.remove(slot)
            table.release()


def _name(slot: int) -> str:
    return f"rehearsal/{slot}"
