"""The shape of Medusa's tree: which ranks of which heads are worth a row of the pass.

A node is one rank of one head under a path of ranks of the heads before it. How often each rank of each head is right
is a table, measured as it runs. The chance of a path is the product along it, and the tree takes the likeliest paths.
They are ordered by chance, so the first n nodes are the best tree of n nodes, for every n.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from slipstream.core.draft import MAX_NODES, ROOT
from slipstream.core.errors import ConfigError
from slipstream.core.verdict import Verdict

RANKS = 10
"""Guesses of a head that may become nodes."""

Table = tuple[tuple[float, ...], ...]
"""[heads][ranks]: how often the head's guess of that rank is the token, where the path to it was right."""

_PRIOR_WEIGHT = 64.0
"""So many tries the table that it began with counts for."""
_MEMORY = 4096.0
"""Tries of a rank after which the older ones count half: texts change."""


@dataclass(frozen=True, slots=True)
class StaticTree:
    """Nodes in the order of their chances; a parent stands before its children."""

    heads: tuple[int, ...]  # [K] which head guesses the node: its depth less one
    ranks: tuple[int, ...]  # [K] which of the head's guesses it is
    parents: tuple[int, ...]  # [K]
    chances: tuple[float, ...]  # [K] that the path down to it is accepted

    def __len__(self) -> int:
        return len(self.heads)


def best_tree(table: Table, nodes: int = MAX_NODES) -> StaticTree:
    """The tree of at most so many nodes with the likeliest paths; of equals the shallower and lower ranks first."""
    found: list[tuple[int, int, int, float]] = []  # head, rank, parent, chance
    # minus the chance, head, the parent's place, place of the rank among the head's: a path enters after its parent,
    # and after its sibling that is right more often
    waiting: list[tuple[float, int, int, int]] = []
    orders = [sorted(range(len(row)), key=row.__getitem__, reverse=True) for row in table]  # stable: lower ranks first

    def offer(head: int, parent: int, place: int, above: float) -> None:
        if head < len(table) and place < len(table[head]):
            heappush(waiting, (-above * table[head][orders[head][place]], head, parent, place))

    offer(0, ROOT, 0, 1.0)
    while waiting and len(found) < nodes:
        minus, head, parent, place = heappop(waiting)
        found.append((head, orders[head][place], parent, -minus))
        offer(head, parent, place + 1, 1.0 if parent == ROOT else found[parent][3])
        offer(head + 1, len(found) - 1, 0, -minus)
    heads, ranks, parents, chances = zip(*found, strict=True) if found else ((), (), (), ())
    return StaticTree(heads, ranks, parents, chances)


def chances_under(tree: StaticTree, table: Table) -> list[float]:
    """What the nodes' chances are by another table than the one that the tree was made from."""
    chances: list[float] = []
    for head, rank, parent in zip(tree.heads, tree.ranks, tree.parents, strict=True):
        chances.append(table[head][rank] * (1.0 if parent == ROOT else chances[parent]))
    return chances


def usual_table(heads: int) -> Table:
    """What to begin with where nothing was measured: about what trained heads of a 7B model were reported to reach."""
    first = [0.6 * 0.8**head for head in range(heads)]
    return tuple(tuple(top * 0.25 / rank if rank else top for rank in range(RANKS)) for top in first)


def check_table(table: Sequence[Sequence[float]], heads: int, name: str) -> Table:
    """The table as given, or `ConfigError` where it cannot be one."""
    if not isinstance(table, Sequence) or len(table) != heads:
        raise ConfigError(f"{name}: must have one row for each of the {heads} heads")
    rows = []
    for head, row in enumerate(table):
        numbers = isinstance(row, Sequence) and all(isinstance(p, int | float) and 0 <= p <= 1 for p in row)
        if not numbers or not 0 < len(row) <= RANKS:
            raise ConfigError(f"{name}[{head}]={row!r}: must be 1 to {RANKS} numbers from 0 to 1, one for each rank")
        rows.append(tuple(float(p) for p in row))
    return tuple(rows)


class HeadAcceptance:
    """How often each rank of each head was right, where it was offered under a right path."""

    def __init__(self, prior: Table) -> None:
        self._prior = prior
        self._tries = [[0.0] * len(row) for row in prior]
        self._hits = [[0.0] * len(row) for row in prior]

    def observe(self, tree: StaticTree, verdict: Verdict) -> None:
        """Learn from what became of the first nodes of `tree`."""
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(tree.parents[: verdict.drafted]):
            children.setdefault(parent, []).append(node)
        for parent, right in zip((ROOT, *verdict.path), (*verdict.path, None), strict=True):
            for node in children.get(parent, ()):
                self._note(tree.heads[node], tree.ranks[node], node == right)

    def _note(self, head: int, rank: int, right: bool) -> None:
        tries, hits = self._tries[head], self._hits[head]
        tries[rank] += 1
        hits[rank] += right
        if tries[rank] > _MEMORY:
            tries[rank] /= 2
            hits[rank] /= 2

    @property
    def table(self) -> Table:
        """What was measured, and what it began with where little was."""
        rows = zip(self._prior, self._hits, self._tries, strict=True)
        return tuple(
            tuple((hit + _PRIOR_WEIGHT * p) / (tried + _PRIOR_WEIGHT) for p, hit, tried in zip(*row, strict=True))
            for row in rows
        )
