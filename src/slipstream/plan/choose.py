"""The draft with the most expected tokens per second: functions over arrays, without state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from slipstream.core.draft import MAX_NODES, ROOT, Tree, cut
from slipstream.plan.acceptance import DEPTHS, EDGES
from slipstream.plan.types import Budget, Floats, Levels, Load, Offer

Ints = NDArray[np.int64]

_LEVELS = (1, 2, 4, 6, 8, 10, 16, 24, 32, 48)


def level_choices(depth: int) -> tuple[int, ...]:
    """The depths allowed for trees of at most `depth` levels: few, since each is captured as its own graph."""
    return (*[levels for levels in _LEVELS if levels < depth], depth)


@cache
def sizes_up_to(most: int) -> list[int]:
    """The draft sizes that are compared: few, since each is captured as its own graph."""
    return [*[size for size in EDGES if size < most], *[most] * (most > 0)]


@cache
def _trees_up_to(most: int, levels: tuple[Levels, ...]) -> tuple[list[int], list[int]]:
    """Nodes and levels of the trees that are compared."""
    pairs: list[tuple[int, int]] = []
    above = 0
    for deep, nodes in levels:  # each size at its smallest depth
        pairs += [(size, deep) for size in sizes_up_to(min(most, nodes)) if size > above]
        above = deep
    pairs = pairs or [(most, levels[0].deep)]
    return [size for size, _ in pairs], [deep for _, deep in pairs]


# --- guesses that take time -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sizes:
    """The draft sizes of an offer that are compared, smallest first."""

    nodes: list[int]  # [C] most of a request
    levels: list[int]  # [C] of trees; 0: a chain
    gained: Floats  # [C, B] tokens
    drafted: Ints  # [C, B] rows

    @property
    def steps(self) -> list[int]:  # [C]
        """The number that the time of the guesses depends on."""
        return [levels or nodes for nodes, levels in zip(self.nodes, self.levels, strict=True)]


def chain_sizes(caps: Sequence[int], chances: Floats, free: Floats) -> Sizes:
    """chances [K, B]: of a chain being right to each depth; free: as in `tree_sizes`."""
    nodes = sizes_up_to(len(chances))
    drafted = np.minimum(np.array(nodes)[:, None], np.array(caps))  # [C, B]
    added = np.maximum(chances - free, 0.0)
    brought = np.concatenate((np.zeros((1, len(caps))), added.cumsum(0)))  # [K + 1, B]
    return Sizes(nodes, [0] * len(nodes), np.take_along_axis(brought, drafted, 0), drafted)


def tree_sizes(caps: Sequence[int], levels: Sequence[Levels], chances: Floats, kept: Floats, free: Floats) -> Sizes:
    """chances [L, B]: of a whole tree being right to each depth; kept [D, MAX_NODES + 1]: see `NodeRanks.kept`.

    free [L, B]: of free guesses being right, which are verified in any case.
    """
    nodes, deep = _trees_up_to(max(caps), tuple(levels))  # [C]
    drafted = np.minimum(np.array(nodes)[:, None], np.array(caps))  # [C, B]
    depths = np.arange(len(chances))  # [L]
    parts = kept[np.minimum(depths, DEPTHS - 1)][:, np.minimum(drafted, MAX_NODES)]  # [L, C, B]
    added = np.maximum(chances[:, None, :] * parts - free[:, None, :], 0.0)
    right = np.where((depths[:, None] < np.array(deep))[:, :, None], added, 0.0)
    return Sizes(nodes, deep, right.sum(0), drafted)


@dataclass(frozen=True, slots=True)
class Candidate:
    """One drafter's guesses for some of its requests."""

    offer: Offer
    nodes: int
    levels: int
    members: Ints  # indices of the offer's requests
    tokens: float  # expected of the whole step
    seconds: float  # of the whole step
    guess_s: float = 0.0

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds

    def budget(self, members: Sequence[int]) -> Budget:
        """The offer's budget where only `members` draft."""
        nodes = [0] * len(self.offer.caps)
        for i in members:
            nodes[i] = min(self.nodes, self.offer.caps[i])
        return Budget(nodes, self.levels)


NO_OFFER = Offer("", (), ())
UNDRAFTED = Candidate(NO_OFFER, 0, 0, np.zeros(0, np.int64), 1.0, 1.0)


@dataclass(frozen=True, slots=True)
class Step:
    """The planned step."""

    load: Load
    passes: Mapping[bool, Floats]  # by is_tree: seconds by rows
    free_nodes: int = 0  # of guesses that exist already and are verified in any case, over all requests
    free: Mapping[str, Sequence[float]] = field(default_factory=dict)  # by request: their chances to depth 1, 2, …

    @property
    def plain_tokens(self) -> float:
        """Expected tokens with free guesses only."""
        return self.load.requests + sum(map(sum, self.free.values()))

    def free_chances(self, request_ids: Sequence[str], depth: int) -> Floats:  # [depth, B]
        found = np.zeros((depth, len(request_ids)))
        for i, request_id in enumerate(request_ids):
            if chances := self.free.get(request_id):
                found[: len(chances), i] = chances[:depth]
        return found

    def seconds(self, rows: float, *, is_tree: bool) -> float:
        table = self.passes[is_tree]
        return float(table[min(round(rows), len(table) - 1)])

    @property
    def undrafted(self) -> Candidate:
        """The step with free guesses only."""
        seconds = self.seconds(self.load.requests + self.free_nodes, is_tree=False)
        return Candidate(NO_OFFER, 0, 0, np.zeros(0, np.int64), self.plain_tokens, seconds)

    def best_size(
        self, offer: Offer, sizes: Sizes, draft_s: Floats, late_s: Floats, last: tuple[int, int], margin: float
    ) -> Candidate:
        """The size with the highest rate, for the requests with the highest expectations, as long as each one pays.

        draft_s [C]: seconds of the guesses. late_s [B + 1]: seconds added where 0, 1, … requests must be caught up on.
        last: nodes and levels to keep unless others are better by the margin.
        """
        table = self.passes[bool(offer.levels)]
        order = np.argsort(-sizes.gained[-1], kind="stable")  # [B]
        tokens = self.plain_tokens + sizes.gained[:, order].cumsum(1)  # [C, B]: for the first 1, 2, …
        rows = self.load.requests + self.free_nodes + sizes.drafted[:, order].cumsum(1)
        seconds = table[np.minimum(rows, len(table) - 1)] + draft_s[:, None]
        if offer.lagging:
            lags = np.array([offer.request_ids[i] in offer.lagging for i in order.tolist()])
            seconds += late_s[lags.cumsum()]
        rates = tokens / seconds
        counts = rates.argmax(1)  # [C]
        by_size = rates[np.arange(len(counts)), counts]
        best = int(by_size.argmax())
        for i, pair in enumerate(zip(sizes.nodes, sizes.levels, strict=True)):
            if pair == last and by_size[i] * margin > by_size[best]:
                best = i
        count = int(counts[best])
        found = float(tokens[best, count]), float(seconds[best, count]), float(draft_s[best])
        return Candidate(offer, sizes.nodes[best], sizes.levels[best], order[: count + 1], *found)

    def loss(self, chosen: Candidate, other: Candidate, members: Sequence[int]) -> float:
        """Seconds lost if `other` drafts for these requests in place of `chosen`."""
        plain, count = self.plain_tokens, len(members)
        stays = max(0.0, 1 - count / max(len(chosen.members), 1))
        tokens = plain + stays * (chosen.tokens - plain) + count / len(other.members) * (other.tokens - plain)
        rows = self.load.requests + self.free_nodes + count * other.nodes
        rows += round(stays * sum(chosen.budget(chosen.members.tolist()).nodes))
        seconds = self.seconds(rows, is_tree=bool(other.offer.levels)) + other.guess_s + chosen.guess_s * (stays > 0)
        return seconds - tokens / chosen.rate


# --- free guesses -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Beside:
    """The guesses of another drafter that are expected in the same step."""

    chances: Floats | None = None  # [D, B] of their being right to each depth; None: there are none
    tokens: float = 0.0  # that they bring, over all requests
    rows: int = 0
    seconds: float = 0.0  # of guessing
    is_tree: bool = False


class Ranked:
    """The nodes of a step's trees. A node's chance is at most its parent's."""

    def __init__(self, trees: Sequence[Tree], chances: Sequence[Sequence[float]]) -> None:
        """chances: by tree and node, of its whole path being right."""
        self._trees = trees
        self._sizes = np.array([len(tree.tokens) for tree in trees])  # [B]
        self._ends = np.cumsum(self._sizes)  # [B]
        count, begins = int(self._ends[-1]), self._ends - self._sizes
        flat = np.fromiter(chain.from_iterable(chances), np.float64, count=count)  # [N]
        if all(tree.is_chain for tree in trees):
            above = np.arange(-1, count - 1)
            above[begins[self._sizes > 0]] += 1  # a first node stands for its own parent
        else:
            parents = np.fromiter(chain.from_iterable([tree.parents for tree in trees]), np.int64, count=count)
            above = np.where(parents == ROOT, np.arange(count), parents + np.repeat(begins, self._sizes))
        while not np.array_equal(bounded := np.minimum(flat, flat[above]), flat):
            flat = bounded
        self._chances, self._above = flat, above

    def added(self, beside: Beside) -> Floats:  # [N]
        """The tokens that each node is expected to add: a part of its tree's, which the other drafter does not bring.

        What is easy for one drafter is easy for another: at each depth the better one counts, and not both.
        """
        if beside.chances is None:
            return self._chances
        depths, higher, requests = (
            (self._above != np.arange(len(self._above))).astype(np.int64),
            self._above,
            len(self._sizes),
        )
        while (more := depths[higher]).any():  # twice as far up each time
            depths, higher = depths + more, higher[higher]
        owners, deep = np.repeat(np.arange(requests), self._sizes), max(int(depths.max()) + 1, len(beside.chances))
        sums = np.bincount(depths * requests + owners, self._chances, deep * requests)
        brought: Floats = np.asarray(sums, np.float64).reshape(deep, requests)  # [D, B]
        left = brought.copy()
        left[: len(beside.chances)] -= beside.chances
        shares = np.maximum(left, 0.0).sum(0) / np.maximum(brought.sum(0), 1e-9)
        return np.asarray(self._chances * shares[owners])

    def take(self, count: int, added: Floats) -> tuple[list[Tree], list[list[float]]]:
        """The trees cut to the `count` nodes that add most, and the chances of those."""
        bar = np.sort(added)[-count]
        kept = added > bar
        kept[np.flatnonzero(added == bar)[: count - int(kept.sum())]] = True  # on ties parents come first
        marks, chances = kept.tolist(), self._chances.tolist()
        trees, left = list[Tree](), list[list[float]]()
        begin = 0
        for tree, end in zip(self._trees, self._ends.tolist(), strict=True):
            trees.append(cut(tree, marks[begin:end]))
            left.append([chances[node] for node in range(begin, end) if marks[node]])
            begin = end
        return trees, left


def shared_out(tree: Tree, chance: float) -> list[float]:
    """The chance of each node where the drafter states none: siblings share their parent's, most to the first.

    chance: of a guess when everything before it was right.
    """
    chances: list[float] = []
    left = {ROOT: 1.0}  # the chance that a node is accepted and none of its children so far
    for node, parent in enumerate(tree.parents):
        chances.append(chance * left[parent])
        left[parent] -= chances[node]
        left[node] = chances[node]
    return chances


def by_depth(tree: Tree, chances: Sequence[float]) -> list[float]:
    """The chances that the tree is right to depth 1, 2, …; siblings exclude each other."""
    found: list[float] = []
    depths: list[int] = []
    for parent, chance in zip(tree.parents, chances, strict=True):
        depth = 0 if parent == ROOT else depths[parent] + 1
        depths.append(depth)
        if depth == len(found):
            found.append(0.0)
        found[depth] = min(found[depth] + chance, 1.0)
    return found
