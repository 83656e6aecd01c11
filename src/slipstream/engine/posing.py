"""Placeholder requests in an idle engine's cache, over which passes and drafts are timed.

They leave only pages behind, and the next owner of a page writes it before reading it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from slipstream.core.draft import MAX_NODES, Tree
from slipstream.core.params import SamplingParams
from slipstream.drafters.base import DeviceDrafter, DraftRequest
from slipstream.engine.draft_loops import DraftSize, LoopShape
from slipstream.engine.engine import Engine
from slipstream.engine.queued import QueuedEngine
from slipstream.engine.round_shape import RoundShape
from slipstream.kv.pages import PageTable
from slipstream.models.batch import PassBatch
from slipstream.sampling.table import Features

_GREEDY = SamplingParams(temperature=0.0)
_SPARE = 2 * (MAX_NODES + 1)
"""Cache slots after the context of each request: for the rows of a draft, and for the drafter's own rows after them."""

Work = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Posed:
    """Placeholder requests with `context` tokens each, in the engine's first slots."""

    engine: Engine
    tables: tuple[PageTable, ...]
    context: int

    @property
    def requests(self) -> int:
        return len(self.tables)

    def rewind(self) -> None:
        """Reset the requests, and the drafters' state of them, to `context` tokens after a timed pass or draft."""
        if isinstance(self.engine, QueuedEngine):
            self.engine.lanes.rewind(self.requests, self.context)
            return
        for drafter in _on_device(self.engine):
            for i in range(self.requests):
                drafter.stop(_name(i))
                drafter.start(self._view(i))
                drafter.resume(_name(i), self.context)

    def target_pass(self, rows: int) -> Work:
        """A repeatable forward pass over `rows` rows, including sampling."""
        few, more = divmod(rows, self.requests)
        counts = [few + (i < more) for i in range(self.requests)]
        if isinstance(self.engine, QueuedEngine):
            return self._round(self.engine, [count - 1 for count in counts])
        target, cache = self.engine.target, self.engine.cache
        ids = torch.ones(rows, dtype=torch.int64, device=target.device)
        batch = PassBatch.behind(self.tables, [self.context] * self.requests, counts, ids, target.device)
        batch = replace(batch, logit_rows=None)  # every row of a draft chooses
        return lambda: target.forward(batch, cache).argmax(1)

    def read(self, rows: int, *, wide: bool) -> None:
        """A pass over the first `rows` tokens of the first request's prompt."""
        target = self.engine.target
        ids = torch.ones(rows, dtype=torch.int64, device=target.device)
        batch = PassBatch.behind(self.tables[:1], [0], [rows], ids, target.device)
        target.forward(replace(batch, wide=wide), self.engine.cache)

    def draft(self, size: DraftSize) -> Work:
        """A repeatable draft of a device drafter for all requests."""
        drafter = self.engine.drafting.drafters[size.drafter]
        assert isinstance(drafter, DeviceDrafter)
        if isinstance(self.engine, QueuedEngine):
            return self._loop(self.engine, size)
        views = [self._view(i) for i in range(self.requests)]
        budget = [size.nodes] * len(views)
        if size.levels:
            return lambda: drafter.propose_trees(views, budget, size.levels)
        return lambda: drafter.propose(views, budget)

    def _view(self, request: int) -> DraftRequest:
        tokens = [1] * (self.context + 1)
        return DraftRequest(_name(request), tokens, self.context, _GREEDY, request)

    def _round(self, engine: QueuedEngine, nodes: Sequence[int]) -> Work:
        run = engine.rounds.of(self._shape(engine, nodes), exactly=True)
        trees = [Tree.chain([1] * count) for count in nodes]
        run.load(range(self.requests), trees, [()] * self.requests)
        return run.verify

    def _loop(self, engine: QueuedEngine, size: DraftSize) -> Work:
        shape = self._shape(engine, [size.nodes] * self.requests)
        drafter = engine.drafting.drafters[size.drafter]
        assert isinstance(drafter, DeviceDrafter)
        recent = drafter.unread(1 + size.depth)  # as after a step with a draft of this depth
        wanted = LoopShape(shape.requests, shape.keys, shape.features, shape.version, (size,), recent)
        loop = engine.rounds.draft_loop(wanted)
        device = engine.target.device
        lanes = torch.full((shape.requests,), engine.lanes.state.trash, dtype=torch.int64, device=device)
        lanes[: self.requests] = torch.arange(self.requests, device=device)
        return lambda: loop.run(lanes)

    def _shape(self, engine: QueuedEngine, nodes: Sequence[int]) -> RoundShape:
        return usual_shape(engine, nodes, self.context, engine.sampling.features(range(self.requests)))


def usual_shape(
    engine: QueuedEngine, nodes: Sequence[int], context: int, features: Features, *, is_tree: bool = False
) -> RoundShape:
    """The shape of a step with these requests, so that a graph captured for it is used again."""
    version = engine.sampling.version_of(features)
    most_keys = engine.plan.most_keys
    return RoundShape.of(
        nodes, context, is_tree=is_tree, features=features, version=version, keeps_logits=False, most_keys=most_keys
    )


def most_context(engine: Engine, requests: int) -> int:
    """The longest context for this number of requests; below 1 if they do not fit."""
    pages = engine.pool.free_pages // requests
    return min(engine.plan.max_model_len, pages * engine.config.page_size) - _SPARE


@contextmanager
def posed(engine: Engine, requests: int, context: int) -> Iterator[Posed]:
    """Hold placeholder requests in the engine, which must have no others."""
    tables = tuple(PageTable(engine.pool) for _ in range(requests))
    try:
        for slot, table in enumerate(tables):
            table.reserve(context + _SPARE)
            table.commit(context)
            engine.tables[_name(slot)] = table
            engine.sampling.add(slot, _GREEDY, seed=0)
        scene = Posed(engine, tables, context)
        if isinstance(engine, QueuedEngine):
            engine.lanes.pose([table.pages for table in tables], context)
        scene.rewind()
        yield scene
    finally:
        if isinstance(engine, QueuedEngine):
            engine.lanes.clear(requests)
        for slot, table in enumerate(tables):
            if not isinstance(engine, QueuedEngine):
                for drafter in _on_device(engine):
                    drafter.stop(_name(slot))
            engine.tables.pop(_name(slot), None)
            engine.sampling.remove(slot)
            table.release()


def _on_device(engine: Engine) -> list[DeviceDrafter]:
    return [drafter for drafter in engine.drafting.drafters.values() if isinstance(drafter, DeviceDrafter)]


def _name(slot: int) -> str:
    return f"posing/{slot}"
