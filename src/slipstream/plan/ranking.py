"""The nodes of a round, ranked by their chance, and the trees that the likeliest of them make.

Few of them are quickest in lists. A round of 64 requests with trees of 64 nodes has four thousand, and a plan must take
a small part of a round: those are ranked in arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain, compress
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from slipstream.core.draft import ROOT, Tree
from slipstream.plan.cutting import along_paths, cut, likeliest

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

MANY = 256
"""Nodes from which on arrays are quicker than lists."""

_NOTHING = Tree()


class Taken(NamedTuple):
    """What is kept of a round's trees."""

    trees: list[Tree]  # [B]
    promised: list[float]  # [B]: what the nodes of each promise together


class FewNodes:
    """The trees of a round's requests, node after node; a node's chance is at most that of its parent.

    promises: of each node, as its drafter says; factors: what its word is worth, by request.
    """

    def __init__(self, trees: Sequence[Tree], promises: Sequence[Sequence[float]], factors: Sequence[float]) -> None:
        self._trees = trees
        self._chances: list[float] = []  # [N]
        for tree, promise, factor in zip(trees, promises, factors, strict=True):
            if tree.tokens:
                said = along_paths(tree, promise)
                self._chances += said if factor == 1 else [factor * chance for chance in said]
        self._ranked = sorted(self._chances, reverse=True)

    def expected(self, rows: int) -> Sequence[float]:  # [N + 1]
        """Tokens of a pass with the 0, 1, … likeliest nodes."""
        return list(accumulate(self._ranked, initial=float(rows)))

    def take(self, count: int) -> Taken:
        """The trees cut to the `count` likeliest nodes of all."""
        chances = self._chances
        kept = [True] * count if count == len(chances) else likeliest(chances, count, self._ranked[count - 1])
        trees: list[Tree] = []
        promised: list[float] = []
        end = 0
        for tree in self._trees:
            begin, end = end, end + len(tree.tokens)
            trees.append(tree if count == len(chances) else cut(tree, kept[begin:end]))
            promised.append(sum(compress(chances[begin:end], kept[begin:end])))
        return Taken(trees, promised)


class ManyNodes:
    """The same in arrays: quicker from `MANY` nodes on."""

    def __init__(self, trees: Sequence[Tree], promises: Sequence[Sequence[float]], factors: Sequence[float]) -> None:
        self._trees = trees
        sizes = np.array([len(tree.tokens) for tree in trees])  # [B]
        self._ends = np.cumsum(sizes)
        every = chain.from_iterable([said for tree, said in zip(trees, promises, strict=True) if tree.tokens])
        flat = np.fromiter(every, np.float64, count=int(self._ends[-1]))
        self._chances: Floats = flat * np.repeat(factors, sizes)  # [N]
        self._check_parents(sizes)
        self._ranked: Floats = -np.sort(-self._chances)

    def _check_parents(self, sizes: NDArray[np.int64]) -> None:
        """Drafters promise whole paths, so nearly always there is nothing to do."""
        count, begins = len(self._chances), self._ends - sizes  # [B]
        if all(tree.is_chain for tree in self._trees):
            place = np.arange(-1, count - 1)  # of the parent
            place[begins[sizes > 0]] += 1  # the first node of each: its own
        else:
            above = np.fromiter(chain.from_iterable([tree.parents for tree in self._trees]), np.int64, count=count)
            place = np.where(above == ROOT, np.arange(count), above + np.repeat(begins, sizes))
        while True:
            bounded = np.minimum(self._chances, self._chances[place])
            if np.array_equal(bounded, self._chances):
                return
            self._chances = bounded

    def expected(self, rows: int) -> Floats:  # [N + 1]
        return np.concatenate(([float(rows)], rows + np.cumsum(self._ranked)))

    def take(self, count: int) -> Taken:
        bar = self._ranked[count - 1]
        kept: Bools = self._chances > bar
        ties = np.flatnonzero(self._chances == bar)[: count - int(kept.sum())]  # of equals the first: parents are
        kept[ties] = True
        ends = self._ends.tolist()
        taken = np.concatenate(([0], np.cumsum(kept)))[[0, *ends]]  # [B + 1]
        sums = np.concatenate(([0.0], np.cumsum(np.where(kept, self._chances, 0.0))))[[0, *ends]]
        counts, promised = np.diff(taken).tolist(), np.diff(sums).tolist()
        found: list[Tree] = []
        begin = 0
        for tree, end, nodes in zip(self._trees, ends, counts, strict=True):
            found.append(self._cut(tree, kept, begin, end, nodes))
            begin = end
        return Taken(found, promised)

    @staticmethod
    def _cut(tree: Tree, kept: Bools, begin: int, end: int, nodes: int) -> Tree:
        if nodes == end - begin:
            return tree
        if not nodes:
            return _NOTHING
        if tree.is_chain or kept[begin : begin + nodes].all():
            return Tree(tree.tokens[:nodes], tree.parents[:nodes])
        return cut(tree, kept[begin:end].tolist())
