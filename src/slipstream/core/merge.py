"""Merged trees: what several drafters guess for one request as one tree, each node remembering who proposed it.

Equal paths become one: a node that two drafters propose is verified once. The trees are taken in turn, so the nodes of
the first keep their numbers; where the budget ends, what is left of the later ones is cut, a node never without its
descendants. `kernels/gpu/merge_trees.py` does the same on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.core.draft import ROOT, Tree

CUT = -2
"""Stands for a node that had no room."""


@dataclass(frozen=True, slots=True)
class MergedTree:
    """One tree of several. `places[i][j]`: which of its nodes is node j of the tree that was given i-th, or `CUT`."""

    tree: Tree
    places: tuple[tuple[int, ...], ...]

    @property
    def owners(self) -> tuple[int, ...]:
        """Of each node, who proposed it: bit i for the tree that was given i-th."""
        words = [0] * len(self.tree)
        for i, places in enumerate(self.places):
            for node in places:
                if node != CUT:
                    words[node] |= 1 << i
        return tuple(words)


def merge_trees(trees: Sequence[Tree], budget: int) -> MergedTree:
    """The union of the trees' paths, of at most `budget` nodes."""
    tokens: list[int] = []
    parents: list[int] = []
    known: dict[tuple[int, int], int] = {}  # (parent, token) -> node
    places: list[tuple[int, ...]] = []
    for tree in trees:
        place: list[int] = []
        for token, parent in zip(tree.tokens, tree.parents, strict=True):
            above = ROOT if parent == ROOT else place[parent]
            node = CUT if above == CUT else known.get((above, token), CUT)
            if node == CUT and above != CUT and len(tokens) < budget:
                node = known[above, token] = len(tokens)
                tokens.append(token)
                parents.append(above)
            place.append(node)
        places.append(tuple(place))
    return MergedTree(Tree(tuple(tokens), tuple(parents)), tuple(places))
