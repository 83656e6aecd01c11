"""Trees cut to their likeliest nodes: a node stays only with its parent."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from slipstream.core.draft import ROOT, Tree

_NOTHING = Tree()


def along_paths(tree: Tree, promise: Sequence[float]) -> list[float]:
    """A path is at most as likely as any path it goes on from."""
    if tree.is_chain:
        return list(accumulate(promise, min))
    chances: list[float] = []
    for parent, chance in zip(tree.parents, promise, strict=True):
        chances.append(chance if parent == ROOT else min(chance, chances[parent]))
    return chances


def likeliest(chances: list[float], count: int, bar: float) -> list[bool]:
    """Which nodes are the `count` likeliest, the last of them with chance `bar`; of equals the first: parents are."""
    kept = [chance > bar for chance in chances]
    node = -1
    for _ in range(count - sum(kept)):
        node = chances.index(bar, node + 1)
        kept[node] = True
    return kept


def cut(tree: Tree, kept: list[bool]) -> Tree:
    """The tree without the nodes that are not kept; a kept node's parent is kept."""
    count = sum(kept)
    if count == len(kept):
        return tree
    if not count:
        return _NOTHING
    if not any(kept[count:]):  # the first nodes, as always of a chain: their parents are among them
        return Tree(tree.tokens[:count], tree.parents[:count])
    new_index = [place - 1 for place in accumulate(kept)]
    nodes = [node for node, keep in enumerate(kept) if keep]
    parents = [tree.parents[node] for node in nodes]
    return Tree(
        tuple(tree.tokens[node] for node in nodes),
        tuple(ROOT if parent == ROOT else new_index[parent] for parent in parents),
    )


def shared_out(tree: Tree, alpha: float) -> list[float]:
    """The chance of each node, for a drafter that does not say: siblings share their parent's, the first of them most.

    alpha: the chance that a guess is right when everything before it was.
    """
    chances: list[float] = []
    left = {ROOT: 1.0}  # the chance that a node is accepted and none of its children so far is
    for node, parent in enumerate(tree.parents):
        chances.append(alpha * left[parent])
        left[parent] -= chances[node]
        left[node] = chances[node]
    return chances
