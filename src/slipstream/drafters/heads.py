"""Drafting with a head that continues from the target's hidden states: EAGLE, multi-token prediction, chained Medusa.

The head of a `FeatureDrafter` reads along with the target, one row a token, then runs ahead of it: each guess is read
with the head's own hidden state in place of the target's. A draft first rereads the last tokens, up to the number that
the step before can have committed: guessed ones were read with the head's states and now have the target's. So no
device needs to know how many were accepted. Chains stand behind the text, on its pages; rows of trees in slots apart.

A head's row pairs the token at q with the target's hidden states at q - 1, and is kept at position q - 1 of the
target's pages: the slot of its K and V is also the slot of the states that it reads. The first token of a text has no
row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeVar
from urllib.parse import parse_qsl

import numpy as np
import torch
from torch import Tensor

from slipstream.core.draft import MAX_NODES, Draft
from slipstream.core.errors import ConfigError
from slipstream.drafters.base import DeviceDrafter, DeviceTree, DraftRequest, DraftRound, Needs, Services
from slipstream.kernels.gpu.grow_tree import Growth, Level, candidates
from slipstream.kernels.gpu.jit import has_kernels
from slipstream.kernels.gpu.layout import RowLayout
from slipstream.kernels.gpu.rows import RECENT, LaneState, LastRows, last_rows, ring
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
    """Chains of B requests, one row a step, with the position of each guess."""

    guesses: Tensor  # [depth, B] int64, filled step by step
    positions: Tensor  # [depth, B] int64
    generated: Tensor  # [depth, B] int64: tokens emitted before each

    @staticmethod
    def behind(rows: LastRows, depth: int) -> Chains:
        ahead = torch.arange(depth, device=rows.last.device)[:, None]
        guesses = torch.zeros((depth, rows.last.shape[0]), dtype=torch.int64, device=rows.last.device)
        return Chains(guesses, rows.positions + ahead, rows.generated + ahead)


class FeatureDrafter(DeviceDrafter):
    """Drafts chains with a head, or with `width` above 1 trees that grow where the head is confident.

    depth: length of chains, levels of trees. width: guesses that each row of a tree offers, and rows of each level that
    are continued. nodes: largest tree, which takes the likeliest of all guesses offered.
    """

    needs: ClassVar[Needs] = Needs(device=True, own_cache=True)
    default_draft_tokens: ClassVar[int] = MAX_NODES  # limited by `most_nodes`
    _services: Services  # set by `attach`, as the next one
    _cache: KVCache

    def __init__(self, head: Head, *, depth: int, width: int = 1, nodes: int = MAX_NODES) -> None:
        if not 1 <= depth < RECENT:
            raise ConfigError(f"depth={depth}: must be 1 to {RECENT - 1}")
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
        self._guests = torch.empty(0, dtype=torch.int64)
        self._graphs: PromptGraphs | None = None
        self._firsts: dict[int, Tensor] = {}  # by rows per request: each request's first row
        self._known: dict[str, int] = {}  # tokens that the head has read, by request; used without queued steps

    def most_at(self, levels: int) -> int:
        return min(self.most_nodes, candidates(self.width, levels)) if self.makes_trees else levels

    def unread(self, committed: int) -> int:
        return min(committed, self.rereads)  # its guesses were read with the head's states

    def page_bytes(self, page_size: int) -> int:
        return KVCache.bytes_per_page(self.head.layers, page_size, self.head.dtype)

    def workspace_bytes(self, requests: int) -> int:
        slots = requests * self._guests_each if self.makes_trees else 0
        return (slots + 1) * KVCache.bytes_per_page(self.head.layers, 1, self.head.dtype)

    @property
    def _guests_each(self) -> int:
        """Tree rows of one request that the head reads; the last level's are not read."""
        return self.width * (self.depth - 1)

    def attach(self, services: Services) -> None:
        assert services.taps is not None, "the target must keep hidden states for it"
        device, size = services.taps.plane.device, services.pool.page_size
        slots = services.sampling.num_slots * self._guests_each if self.makes_trees else 0
        pages = services.cache_pages + 1 + -(-slots // size)  # one page for padding, then those of trees
        self._services = services
        self._cache = KVCache(self.head.layers, pages, size, self.head.dtype, device)
        self._trash_page = services.cache_pages
        self._guests = (services.cache_pages + 1) * size + torch.arange(max(slots, 1), device=device)
        every = torch.arange(2 * services.sampling.num_slots + 1, dtype=torch.int32, device=device)  # with padding
        self._firsts = {rows: every * rows for rows in range(1, max(self.width, self.depth + 1) + 1)}

    def copy_pages(self, copies: Sequence[PageCopy]) -> None:
        self._cache.copy_pages(copies)

    def clear_pages(self, pages: Sequence[int]) -> None:
        """Slots of trees belong to no request between drafts: clear all of them."""
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
        """Run beside the target, after it has written its hidden states of these rows."""
        own = read_along(batch, self._cache.page_size, self.head.max_positions)
        if own is not None:
            self._read(own)

    def capture_prompts(self, trash_slot: int, pool: Any) -> None:
        self._graphs = PromptGraphs(self._read_rows, self._cache, trash_slot, pool)

    def catch_up(self, requests: Sequence[DraftRequest], known: Sequence[int]) -> None:
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
        given = sent(np.array(ids, dtype=np.int64), self._cache.device)
        self._read(head_batch(stretches, given, self._cache.page_size))

    def _read(self, batch: PassBatch) -> None:
        if self._graphs is None or self._graphs.run(batch, layout_of(batch, self._cache.page_size)) is None:
            self._run(batch, self._features(batch.slots), 0)

    def _read_rows(self, ids: Tensor, positions: Tensor, layout: RowLayout, cache: KVCache, rows: Tensor) -> Tensor:
        """A pass laid out on the device, without looking at values."""
        states = self.head.run(ids, self._features(layout.slots), DevicePass(layout, cache), positions, 0, wanted=rows)
        return states.read

    def _run(self, batch: PassBatch, features: Tensor, step: int) -> HeadStates:
        """A pass laid out by the host."""
        context = PassContext(batch, self._cache)
        if has_kernels(self._cache.device):
            context = DevicePass(layout_of(batch, self._cache.page_size), self._cache, wide=batch.num_rows > WIDE_ROWS)
        return self.head.run(batch.input_ids, features, context, batch.positions, step)

    def _features(self, slots: Tensor) -> Tensor:  # [N] -> [N, H]
        return self.head.combine(self._services.hidden(slots))

    def propose(self, requests: Sequence[DraftRequest], budget: Sequence[int]) -> Draft:
        """The same as `draft`, from the host's view of the requests."""
        return self.propose_trees(requests, budget, self.depth)

    def propose_trees(self, requests: Sequence[DraftRequest], budget: Sequence[int], levels: int) -> Draft:
        views = [request for request, nodes in zip(requests, budget, strict=True) if nodes]
        behind = [view for view in views if self._known[view.id] < len(view.tokens) - self.rereads]
        self.catch_up(behind, [self._known[view.id] for view in behind])
        self._known.update({view.id: len(view.tokens) for view in views})
        device = self._cache.device
        return host_draft(self.draft, self._services, requests, budget, levels, device, self.depth, self._trash_page)

    def draft(self, round: DraftRound) -> Tensor | DeviceTree:
        """Read the last tokens and continue from the head's state behind the last one."""
        count = min(self.depth + 1, round.recent) if self.makes_trees else self.depth + 1
        rows = self._last_rows(round, count)
        context = self._context(round, rows.places, rows.slots, self._starts(round.lanes, count))
        last = self.head.run(rows.ids, self._features(rows.seen), context, rows.places, 0, wanted=rows.last)
        return self._tree(round, rows, last) if self.makes_trees else self._chain(round, rows, last)

    def _last_rows(self, round: DraftRound, count: int) -> LastRows:
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
        """Each request's first row, for equal numbers of rows."""
        every = self._firsts[rows]
        assert lanes.shape[0] < every.shape[0], f"{lanes.shape[0]} requests, and slots for half of {every.shape[0]}"
        return every[: lanes.shape[0] + 1]

    def _chain(self, round: DraftRound, rows: LastRows, last: HeadStates) -> Tensor:  # [B, depth]
        chains = Chains.behind(rows, round.depth)
        self._guess(round, chains, 0, last.read)
        self._go_on(round, chains, 1, last.features)
        return chains.guesses.T

    def _guess(self, round: DraftRound, chains: Chains, step: int, read: Tensor) -> None:
        """Choose the guesses of this step, from the LM head's input [B, H]."""
        path = chains.guesses[:step].T if step and wants_path(round.features) else None
        rows = SampleRows(round.lanes, chains.positions[step], chains.generated[step], path)
        chains.guesses[step] = self._best(self.head.logits(read), rows, round.features)

    def _go_on(self, round: DraftRound, chains: Chains, known: int, features: Tensor) -> None:
        """Continue after `known` guesses, each step a pass of one row a request, behind the text."""
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
        """Grow trees. A tree of n nodes needs a width of n at most: the rest would rank below n likelier ones."""
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
            # noise apart from the text's: a tree's first nodes depend on what its last ones are
            table = self._services.sampling.apart(self.name, round.features)
            return rank(self.head.logits(states.read), rows, table, round.features, width, self.head.vocab)

        roots = SampleRows(round.lanes, last_rows.positions, last_rows.generated)
        return grow_trees(round, growth, roots, states, go_on, offer)

    def _context(
        self, round: DraftRound, positions: Tensor, slots: Tensor, starts: Tensor, ancestors: Tensor | None = None
    ) -> DevicePass:
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
        """The last position to write; a request that has reached it is not drafted for."""
        return min(self.head.max_positions, round.state.pages.shape[1] * self._cache.page_size) - 1

    def _best(self, logits: Tensor, rows: SampleRows, features: Features) -> Tensor:  # [R]
        """The guess of each row. The target rejects nonsense."""
        table, vocab = self._services.sampling.apart(self.name, features), self.head.vocab
        if vocab is None and logits.shape[1] == table.vocab_size:
            return choose(logits, rows, table, features).clamp_min(0)
        return rank(logits, rows, table, features, 1, vocab).tokens[:, 0]


@dataclass(frozen=True, slots=True)
class Stretch:
    """Consecutive rows of one request: the tokens from `first` to `end`."""

    pages: Sequence[int]
    first: int  # at least 1
    end: int

    @property
    def rows(self) -> int:
        return self.end - self.first


def head_batch(stretches: Sequence[Stretch], ids: Tensor, page_size: int) -> PassBatch:
    """A head's pass over these rows, with tokens `ids` [N]. Its one logit row is a placeholder."""
    starts = np.cumsum([0, *(part.rows for part in stretches)])
    places = np.concatenate([np.arange(part.first, part.end) - 1 for part in stretches])  # [N]
    slots = np.concatenate(
        [
            np.asarray(part.pages, dtype=np.int64)[at // page_size] * page_size + at % page_size
            for part in stretches
            for at in (np.arange(part.first, part.end) - 1,)
        ]
    )
    both = sent(np.stack((places, slots)).astype(np.int64), ids.device)
    return PassBatch(
        input_ids=ids,
        positions=both[0],
        slots=both[1],
        row_starts=tuple(starts.tolist()),
        prefix_lengths=tuple(part.first - 1 for part in stretches),
        pages=tuple(tuple(part.pages) for part in stretches),
        is_tree=(False,) * len(stretches),
        masks=None,
        logit_rows=both.new_zeros(1),
    )


def read_along(batch: PassBatch, page_size: int, longest: int) -> PassBatch | None:
    """The head's rows beside the target's; None if there are none.

    longest: requests with longer texts are left out.
    """
    stretches: list[Stretch] = []
    rows: list[int] = []  # indices in the target's batch
    for i, prefix in enumerate(batch.prefix_lengths):
        start, end = batch.row_starts[i], batch.row_starts[i + 1]
        skipped = 1 if prefix == 0 else 0  # the first token has no row
        if end - start > skipped and prefix + end - start <= longest:
            stretches.append(Stretch(batch.pages[i], prefix + skipped, prefix + end - start))
            rows += range(start + skipped, end)
    if not stretches:
        return None
    index = sent(np.array(rows, dtype=np.int64), batch.input_ids.device)
    return head_batch(stretches, batch.input_ids[index], page_size)


@dataclass(frozen=True, slots=True)
class Standing:
    """The host's view of one request."""

    lane: int
    tokens: Sequence[int]  # the last one is not in the cache yet
    generated: int
    pages: Sequence[int]


def lane_state(
    standing: Sequence[Standing], lanes: int, reach: int, padding_page: int, device: torch.device
) -> LaneState:
    """The device's state of these requests, built by the host.

    lanes: number of lanes. reach: pages that a request may touch; those behind its own are the page `padding_page`.
    """
    columns = np.zeros((4, lanes + 1), dtype=np.int64)
    recent = np.zeros((lanes + 1, RECENT), dtype=np.int64)
    pages = np.full((lanes + 1, reach), padding_page, dtype=np.int32)
    for one in standing:
        length = len(one.tokens) - 1
        columns[:, one.lane] = one.tokens[-1], one.tokens[-2] if length else 0, length, one.generated
        recent[one.lane] = ring(one.tokens)
        pages[one.lane, : len(one.pages)] = one.pages
    columns[2, lanes] = 1  # the padding lane has one token
    last, previous, length_of, generated = sent(columns, device).unbind(0)
    return LaneState(last, previous, length_of, generated, sent(pages, device), sent(recent, device))


def slots_before_last(state: LaneState, lanes: Tensor, page_size: int) -> Tensor:  # [B]
    """Slots of the target's hidden states that chose the last token of each of these lanes [B]."""
    at = (state.length[lanes] - 1).clamp_min(0)
    return state.pages[lanes, at // page_size].long() * page_size + at % page_size


SIZES = ("depth", "width", "nodes")
_MOST_OFFERED = 8192  # guesses ranked for one tree, by one program of the device

States = TypeVar("States")


class Asked(NamedTuple):
    """The options after a drafter's path."""

    sizes: dict[str, int]  # the named ones of depth, width and nodes
    others: dict[str, str]


def parse_sizes(text: str, others: Sequence[str] = ()) -> Asked:
    """Parse `depth=6&width=8&nodes=32`. others: further allowed names."""
    found = Asked({}, {})
    for key, value in parse_qsl(text, keep_blank_values=True):
        if key in others:
            found.others[key] = value
            continue
        if key not in SIZES:
            raise ConfigError(f"PATH?{text}: {key!r} is unknown: must be one of {', '.join((*SIZES, *others))}")
        if not value.isdecimal() or int(value) < 1:
            raise ConfigError(f"PATH?{text}: {key}={value!r}: must be a whole number of at least 1")
        found.sizes[key] = int(value)
    return found


def check_sizes(depth: int, width: int, nodes: int) -> int:
    """Raise `ConfigError` if no such tree can be grown. Returns the number of tokens offered for one."""
    if not (1 <= width <= MAX_NODES and 1 <= nodes <= MAX_NODES):
        raise ConfigError(f"width={width}, nodes={nodes}: each must be 1 to {MAX_NODES}")
    offered = candidates(width, depth)
    if offered > _MOST_OFFERED:
        raise ConfigError(
            f"width={width}, depth={depth}: the tree offers {offered} tokens, at most {_MOST_OFFERED} can be "
            "ranked; lower one of them"
        )
    return offered


def wants_path(features: Features) -> bool:
    """True if a row's choice depends on the guesses before it."""
    return features.penalties or features.bad_words


def grow_trees(
    round: DraftRound,
    growth: Growth,
    roots: SampleRows,
    states: States,
    go_on: Callable[[Level, States, int], States],
    offer: Callable[[States, SampleRows, int], Ranked],
) -> DeviceTree:
    """Grow trees level by level, each a pass of `width` rows a request, and keep the likeliest nodes offered.

    states: the states behind the roots. go_on: computes a level's states from those of the level above. offer: returns
    the best tokens after these states. Both get the level's number; the roots' is 0.
    """
    path = torch.empty((round.lanes.shape[0], 0), dtype=torch.int64, device=round.lanes.device)
    level = growth.grow(*offer(states, roots, 0), None)
    step = 0
    while level is not None:
        step += 1
        states = go_on(level, states, step)
        if wants_path(round.features):
            path = torch.cat((path[level.rows], level.tokens[:, None]), dim=1)
        rows = SampleRows(level.lanes, level.positions, level.generated, path if path.shape[1] else None)
        level = growth.grow(*offer(states, rows, step), level)
    return DeviceTree(*growth.tree(round.nodes))


def host_draft(
    draft: Callable[[DraftRound], Tensor | DeviceTree],
    services: Services,
    requests: Sequence[DraftRequest],
    budget: Sequence[int],
    levels: int,
    device: torch.device,
    ahead: int = 0,
    padding_page: int = 0,
) -> Draft:
    """Run `draft` on a round made from the host's view of the requests; those without a budget get an empty draft.

    ahead: positions behind a text that are written to. padding_page: the page of padding.
    """
    asked = [i for i, nodes in enumerate(budget) if nodes]
    views, nodes = [requests[i] for i in asked], max(budget)
    tables = [services.page_table(view.id).pages for view in views]
    standing = [
        Standing(view.slot, view.tokens, len(view.tokens) - view.prompt_length, pages)
        for view, pages in zip(views, tables, strict=True)
    ]
    slots = [view.slot for view in views]
    keys = max(len(view.tokens) for view in views) + ahead
    reach = max(services.pool.pages_for(keys), *[len(pages) for pages in tables])
    made = draft(
        DraftRound(
            state=lane_state(standing, services.sampling.num_slots, reach, padding_page, device),
            lanes=torch.tensor(slots, dtype=torch.int64, device=device),
            depth=min(nodes, levels),
            keys=keys,
            features=services.sampling.features(slots),
            nodes=nodes,
        )
    )
    tree = made if isinstance(made, DeviceTree) else None
    guesses = made.tokens if isinstance(made, DeviceTree) else made
    width, index = guesses.shape[1], torch.tensor(asked, device=device)
    tokens = torch.zeros((len(budget), width), dtype=torch.int64, device=device)
    parents = torch.arange(-1, width - 1, device=device).repeat(len(budget), 1)
    tokens[index] = guesses
    if tree is not None:
        parents[index] = tree.parents
    return Draft(tokens, parents, torch.tensor(budget, dtype=torch.int64, device=device), tree is None)
