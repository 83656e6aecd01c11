"""Drafters whose head goes on from the target's hidden states: EAGLE, and native multi-token prediction.

The head reads along with the target, a row a token (`head_rows.py`), and then goes ahead of it: each guess is read with
the head's own hidden state in place of the target's. A draft begins with the last tokens again, as many as the round
before can have committed: those that were guessed had the head's own states, and now have the target's. So nobody has
to know how many were right. Chains stand behind the text, on its pages; the rows of trees in places of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from slipstream.core.draft import MAX_NODES, Draft
from slipstream.core.errors import ConfigError
from slipstream.drafters.base import DeviceDrafter, DeviceTree, DraftRequest, DraftRound, Needs, Services
from slipstream.drafters.growing import answer_of, check_sizes, grow_trees, host_round, wants_path
from slipstream.drafters.head_rows import Stretch, head_batch, read_along
from slipstream.kernels.gpu.grow_tree import Growth, Level, candidates
from slipstream.kernels.gpu.jit import has_kernels
from slipstream.kernels.gpu.layout import RowLayout
from slipstream.kernels.gpu.rows import RECENT, LastRows, last_rows
from slipstream.kv.cache import KVCache
from slipstream.kv.pages import PageCopy
from slipstream.models.attention import PassContext
from slipstream.models.batch import PassBatch, sent
from slipstream.models.gpu import WIDE_ROWS, DevicePass, layout_of
from slipstream.models.graphs import PromptGraphs
from slipstream.models.heads.base import Head, HeadStates
from slipstream.sampling.choose import choose
from slipstream.sampling.rank import Ranked, rank
from slipstream.sampling.rows import SampleRows
from slipstream.sampling.table import Features


@dataclass(frozen=True, slots=True)
class Chains:
    """The guesses of B requests, a row a step, and where each stands in its text."""

    guesses: Tensor  # [depth, B] int64, filled in step by step
    positions: Tensor  # [depth, B] int64
    generated: Tensor  # [depth, B] int64: tokens emitted before each

    @staticmethod
    def behind(rows: LastRows, depth: int) -> Chains:
        ahead = torch.arange(depth, device=rows.last.device)[:, None]
        guesses = torch.zeros((depth, rows.last.shape[0]), dtype=torch.int64, device=rows.last.device)
        return Chains(guesses, rows.positions + ahead, rows.generated + ahead)


class FeatureDrafter(DeviceDrafter):
    """Drafts with a head: chains, or with `width` above 1 trees that grow where the head is sure of itself.

    depth: guesses in a row, levels of a tree. width: guesses that each row of a tree offers, and rows of each level
    that are gone on from. nodes: of a tree at most, the surest of all that were offered.
    """

    needs: ClassVar[Needs] = Needs(device=True, own_cache=True)
    default_draft_tokens: ClassVar[int] = MAX_NODES  # as many as `most_nodes` says

    def __init__(self, head: Head, *, depth: int, width: int = 1, nodes: int = MAX_NODES) -> None:
        if not 1 <= depth < RECENT:
            raise ConfigError(f"depth={depth}: a head guesses 1 to {RECENT - 1} tokens in a row")
        offered = check_sizes(depth, width, nodes)
        self.head = head
        self.taps = head.taps
        self.max_positions = head.max_positions
        self.weights_bytes = head.weights_bytes
        self.depth, self.width = depth, width
        self.rereads = depth + 1
        self.makes_trees = self.grows = width > 1
        self.fewer_rereads = (4, 8) if self.grows else ()
        self.most_nodes = min(nodes, offered) if self.makes_trees else depth
        self._services: Services | None = None
        self._cache: KVCache | None = None
        self._guests = torch.empty(0, dtype=torch.int64)
        self._graphs: PromptGraphs | None = None
        self._firsts: dict[int, Tensor] = {}  # by rows of a request: the first row of each, where all have as many
        self._known: dict[str, int] = {}  # by request: tokens that the head has read, where the host asks for drafts

    def most_at(self, levels: int) -> int:
        return min(self.most_nodes, candidates(self.width, levels)) if self.makes_trees else levels

    def unread(self, committed: int) -> int:
        return min(committed, self.rereads)  # its own guesses had the head's states

    def page_bytes(self, page_size: int) -> int:
        return KVCache.bytes_per_page(self.head.layers, page_size, self.head.dtype)

    def workspace_bytes(self, requests: int) -> int:
        slots = requests * self._guests_each if self.makes_trees else 0
        return (slots + 1) * KVCache.bytes_per_page(self.head.layers, 1, self.head.dtype)

    @property
    def _guests_each(self) -> int:
        """Rows of a request's tree that the head reads: the last level's are only offered."""
        return self.width * (self.depth - 1)

    def attach(self, services: Services) -> None:
        assert services.taps is not None, "the target keeps no hidden states for it"
        device, size = services.taps.plane.device, services.pool.page_size
        slots = services.sampling.num_slots * self._guests_each if self.makes_trees else 0
        pages = services.cache_pages + 1 + -(-slots // size)  # one for nobody, and then those of trees
        self._services = services
        self._cache = KVCache(self.head.layers, pages, size, self.head.dtype, device)
        self._trash_page = services.cache_pages
        self._guests = (services.cache_pages + 1) * size + torch.arange(max(slots, 1), device=device)
        every = torch.arange(2 * services.sampling.num_slots + 1, dtype=torch.int32, device=device)  # with padding
        self._firsts = {rows: every * rows for rows in range(1, max(self.width, self.depth + 1) + 1)}

    def copy_pages(self, copies: Sequence[PageCopy]) -> None:
        assert self._cache is not None
        self._cache.copy_pages(copies)

    def clear_pages(self, pages: Sequence[int]) -> None:
        """Places of trees are nobody's own between two drafts: all of them are cleared."""
        assert self._cache is not None
        self._cache.clear([*pages, *range(self._trash_page, self._cache.num_pages)])

    def start(self, request: DraftRequest) -> None:
        self._known[request.id] = 1

    def resume(self, request_id: str, known: int) -> None:
        self._known[request_id] = max(1, known)

    def has_read(self, request_id: str) -> int:
        return self._known[request_id]

    def stop(self, request_id: str) -> None:
        self._known.pop(request_id, None)

    def read(self, batch: PassBatch) -> None:
        """Beside the target, whose hidden states of these rows are in the cache by now."""
        assert self._cache is not None
        own = read_along(batch, self._cache.page_size, self.head.max_positions)
        if own is not None:
            self._read(own)

    def capture_prompts(self, trash_slot: int, pool: Any) -> None:
        assert self._cache is not None
        self._graphs = PromptGraphs(self._read_rows, self._cache, trash_slot, pool)

    def catch_up(self, requests: Sequence[DraftRequest], known: Sequence[int]) -> None:
        assert self._services is not None
        assert self._cache is not None
        most = self._services.max_rows
        stretches: list[Stretch] = []
        ids: list[int] = []
        for request, first in zip(requests, known, strict=True):
            pages = self._services.page_table(request.id).pages
            at, end = max(1, first), min(len(request.tokens) - 1, self.head.max_positions)
            while at < end:
                rows = min(end - at, most - len(ids))
                stretches.append(Stretch(pages, at, at + rows))
                ids += request.tokens[at : at + rows]
                at += rows
                if len(ids) == most:
                    self._read_missed(stretches, ids)
                    stretches, ids = [], []
        if ids:
            self._read_missed(stretches, ids)

    def _read_missed(self, stretches: Sequence[Stretch], ids: Sequence[int]) -> None:
        assert self._cache is not None
        given = sent(np.array(ids, dtype=np.int64), self._cache.device)
        self._read(head_batch(stretches, given, self._cache.page_size))

    def _read(self, batch: PassBatch) -> None:
        assert self._cache is not None
        if self._graphs is None or self._graphs.run(batch, layout_of(batch, self._cache.page_size)) is None:
            self._run(batch, self._features(batch.slots), 0)

    def _read_rows(self, ids: Tensor, positions: Tensor, layout: RowLayout, cache: KVCache, rows: Tensor) -> Tensor:
        """A pass that was laid out on the device: nothing here looks at a value."""
        states = self.head.run(ids, self._features(layout.slots), DevicePass(layout, cache), positions, 0, wanted=rows)
        return states.read

    def _run(self, batch: PassBatch, features: Tensor, step: int) -> HeadStates:
        """A pass over rows that the host laid out."""
        assert self._cache is not None
        context = PassContext(batch, self._cache)
        if has_kernels(self._cache.device):
            context = DevicePass(layout_of(batch, self._cache.page_size), self._cache, wide=batch.num_rows > WIDE_ROWS)
        return self.head.run(batch.input_ids, features, context, batch.positions, step)

    def _features(self, slots: Tensor) -> Tensor:  # [N] -> [N, H]
        assert self._services is not None
        assert self._services.taps is not None
        return self.head.combine(self._services.taps.at(slots))

    def propose(self, requests: Sequence[DraftRequest], budget: Sequence[int]) -> Draft:
        """The same as inside a queued round, from what the host knows."""
        return self.propose_trees(requests, budget, self.depth)

    def propose_trees(self, requests: Sequence[DraftRequest], budget: Sequence[int], levels: int) -> Draft:
        assert self._services is not None
        assert self._cache is not None
        device = self._cache.device
        asked = [i for i, nodes in enumerate(budget) if nodes]
        views = [requests[i] for i in asked]
        behind = [view for view in views if self._known[view.id] < len(view.tokens) - self.rereads]
        self.catch_up(behind, [self._known[view.id] for view in behind])
        self._known.update({view.id: len(view.tokens) for view in views})
        made = self.draft(host_round(self._services, views, max(budget), levels, device, self.depth, self._trash_page))
        return answer_of(made, asked, budget)

    def draft(self, round: DraftRound) -> Tensor | DeviceTree:
        """Read the last tokens, and go on from the head's hidden state behind the last one."""
        count = min(self.depth + 1, round.recent) if self.makes_trees else self.depth + 1
        rows = self._last_rows(round, count)
        context = self._context(round, rows.places, rows.slots, self._starts(round.lanes, count))
        last = self.head.run(rows.ids, self._features(rows.seen), context, rows.places, 0, wanted=rows.last)
        return self._tree(round, rows, last) if self.makes_trees else self._chain(round, rows, last)

    def _last_rows(self, round: DraftRound, count: int) -> LastRows:
        assert self._cache is not None
        size = self._cache.page_size
        return last_rows(
            round.state,
            round.lanes,
            count,
            page_size=size,
            trash_slot=self._trash_page * size,
            last_place=self._last_place(round),
        )

    def _starts(self, lanes: Tensor, rows: int) -> Tensor:  # [B + 1] int32
        """The first row of each request, where all have as many."""
        every = self._firsts[rows]
        assert lanes.shape[0] < every.shape[0], f"{lanes.shape[0]} requests, and slots for half of {every.shape[0]}"
        return every[: lanes.shape[0] + 1]

    def _chain(self, round: DraftRound, rows: LastRows, last: HeadStates) -> Tensor:  # [B, depth]
        chains = Chains.behind(rows, round.depth)
        self._guess(round, chains, 0, last.read)
        self._go_on(round, chains, 1, last.features)
        return chains.guesses.T

    def _guess(self, round: DraftRound, chains: Chains, step: int, read: Tensor) -> None:
        """Write the guess of this step, from what the LM head reads [B, H]."""
        path = chains.guesses[:step].T if step and wants_path(round.features) else None
        rows = SampleRows(round.lanes, chains.positions[step], chains.generated[step], path)
        chains.guesses[step] = self._best(self.head.logits(read), rows, round.features)

    def _go_on(self, round: DraftRound, chains: Chains, known: int, features: Tensor) -> None:
        """Behind so many guesses one by one, each a pass of one row a request, behind the text."""
        assert self._cache is not None
        lanes, size = round.lanes, self._cache.page_size
        starts = self._starts(lanes, 1)
        places = (chains.positions[: max(0, round.depth - known)] - 1).clamp_(0, self._last_place(round))
        slots = round.state.pages[lanes, places // size].long() * size + places % size  # [depth - known, B]
        for step in range(known, round.depth):
            at = places[step - known]
            context = self._context(round, at, slots[step - known], starts)
            states = self.head.run(chains.guesses[step - 1], features, context, at, step)
            features = states.features
            self._guess(round, chains, step, states.read)

    def _tree(self, round: DraftRound, last_rows: LastRows, states: HeadStates) -> DeviceTree:
        """A tree of few nodes is as narrow: what a wider one would go on from is behind as many that are surer."""
        width = min(self.width, round.nodes)
        growth = Growth(
            round.state,
            round.lanes,
            width,
            round.depth,
            last_place=self._last_place(round),
            guests=self._guests,
            each=self._guests_each,
        )
        starts = self._starts(round.lanes, width)

        def go_on(level: Level, states: HeadStates, step: int) -> HeadStates:
            context = self._context(round, level.places, level.slots, starts, level.ancestors)
            return self.head.run(level.tokens, states.features, context, level.places, step, behind=level.rows)

        def offer(states: HeadStates, rows: SampleRows, step: int) -> Ranked:
            assert self._services is not None
            # a tree's first nodes depend on its last ones'
            table = self._services.sampling.apart(self.name, round.features)
            return rank(self.head.logits(states.read), rows, table, round.features, width, self.head.vocab)

        roots = SampleRows(round.lanes, last_rows.positions, last_rows.generated)
        return grow_trees(round, growth, roots, states, go_on, offer)

    def _context(
        self, round: DraftRound, positions: Tensor, slots: Tensor, starts: Tensor, ancestors: Tensor | None = None
    ) -> DevicePass:
        assert self._cache is not None
        layout = RowLayout(
            positions=positions,
            slots=slots,
            starts=starts,
            lanes=round.lanes,
            lengths=round.state.length,
            pages=round.state.pages,
            ancestors=ancestors,
            page_size=self._cache.page_size,
            max_keys=round.keys,
            guests=None if ancestors is None else self._guests,
        )
        return DevicePass(layout, self._cache)

    def _last_place(self, round: DraftRound) -> int:
        """Who is there is not drafted for."""
        assert self._cache is not None
        return min(self.head.max_positions, round.state.pages.shape[1] * self._cache.page_size) - 1

    def _best(self, logits: Tensor, rows: SampleRows, features: Features) -> Tensor:  # [R]
        """The guess of each row; nonsense is found out by the target."""
        assert self._services is not None
        table, vocab = self._services.sampling.apart(self.name, features), self.head.vocab
        if vocab is None and logits.shape[1] == table.vocab_size:
            return choose(logits, rows, table, features).clamp_min(0)
        return rank(logits, rows, table, features, 1, vocab).tokens[:, 0]
