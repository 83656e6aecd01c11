"""Drafts: trees of guessed tokens that hang from the last committed token.

On the host a draft of one request is a `Tree`; in a step all of them are one `Draft` of tensors, so that packing,
verification and commit run without Python per token. Node 0 is the first guess; parent -1 is the root (the last
committed token). A parent always stands before its children. A chain is a tree without branches. `merge_trees` joins
what several drafters guess for one request; `kernels/gpu/merge_trees.py` does the same on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from slipstream.core.errors import DrafterError

MAX_NODES = 63
"""A request brings at most 64 rows to a pass, its last committed token included: one 64-bit mask word a row."""

ROOT = -1
CUT = -2
"""Stands for a node of a merged tree that had no room."""

_CHAINS = tuple(tuple(range(-1, nodes - 1)) for nodes in range(MAX_NODES + 1))


def chain_parents(nodes: int) -> tuple[int, ...]:
    """The parents of a chain; up to `MAX_NODES` always the same tuple, so that comparing is cheap."""
    return _CHAINS[nodes] if nodes <= MAX_NODES else tuple(range(-1, nodes - 1))


@dataclass(frozen=True, slots=True)
class Tree:
    """One request's draft on the host."""

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()

    @staticmethod
    def chain(tokens: Sequence[int]) -> Tree:
        return Tree(tuple(tokens), chain_parents(len(tokens)))

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_chain(self) -> bool:
        return self.parents == chain_parents(len(self.parents))

    @property
    def depth(self) -> int:
        """Nodes of its longest path."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 + (depths[parent] if parent != ROOT else 0))
        return max(depths, default=0)

    def check(self, vocab_size: int, budget: int) -> None:
        """Raise `DrafterError` unless a step can verify this tree."""
        if len(self.tokens) != len(self.parents):
            raise DrafterError(f"{len(self.tokens)} tokens but {len(self.parents)} parents: must be the same number")
        if len(self.tokens) > min(budget, MAX_NODES):
            raise DrafterError(f"{len(self.tokens)} nodes: at most {min(budget, MAX_NODES)} were asked for")
        siblings: set[tuple[int, int]] = set()
        for node, (token, parent) in enumerate(zip(self.tokens, self.parents, strict=True)):
            if not 0 <= token < vocab_size:
                raise DrafterError(f"node {node}: token {token} is outside the vocabulary of {vocab_size}")
            if not ROOT <= parent < node:
                raise DrafterError(f"node {node}: parent {parent} must be -1 (the root) or an earlier node")
            if (parent, token) in siblings:
                raise DrafterError(f"node {node}: token {token} stands twice under parent {parent}")
            siblings.add((parent, token))


def cut(tree: Tree, kept: list[bool]) -> Tree:
    """The kept nodes of a tree. A kept node's parent must be kept."""
    count = sum(kept)
    if count == len(kept):
        return tree
    if not count:
        return Tree()
    if not any(kept[count:]):  # a prefix, as always of a chain
        return Tree(tree.tokens[:count], tree.parents[:count])
    new_index = [place - 1 for place in accumulate(kept)]
    nodes = [node for node, keep in enumerate(kept) if keep]
    parents = [tree.parents[node] for node in nodes]
    return Tree(
        tuple(tree.tokens[node] for node in nodes),
        tuple(ROOT if parent == ROOT else new_index[parent] for parent in parents),
    )


@dataclass(frozen=True, slots=True)
class Draft:
    """The drafts of all B requests of a step, K nodes at most. Columns from `counts[b]` on are padding."""

    tokens: Tensor  # [B, K] int64
    parents: Tensor  # [B, K] int64, -1 is the root
    counts: Tensor  # [B] int64
    is_chain: bool  # every tree in it is a chain: causal order is enough, no masks
    q: Tensor | None = None
    """[B, K, V]: the whole distribution that each node and its siblings were drawn from, with the sum 1; 0 where a node
    was not drawn. None: no node was. The rules for drafters that give it: `docs/rejection.md`."""

    @staticmethod
    def pack(trees: Sequence[Tree], device: torch.device) -> Draft:
        width = max((len(tree) for tree in trees), default=0)
        tokens = [list(t.tokens) + [0] * (width - len(t)) for t in trees]
        parents = [list(t.parents) + list(range(len(t) - 1, width - 1)) for t in trees]
        shape = (len(trees), width)
        return Draft(
            torch.tensor(tokens, dtype=torch.int64, device=device).view(shape),
            torch.tensor(parents, dtype=torch.int64, device=device).view(shape),
            torch.tensor([len(t) for t in trees], dtype=torch.int64, device=device),
            all(t.is_chain for t in trees),
        )

    @staticmethod
    def merge(parts: Sequence[tuple[Sequence[int], Draft]], requests: int, device: torch.device) -> Draft:
        """One draft of several drafters' drafts. parts: the requests of the rows, and the rows."""
        if len(parts) == 1 and list(parts[0][0]) == list(range(requests)):
            return parts[0][1]
        width = max((part.width for _, part in parts), default=0)
        tokens = torch.zeros((requests, width), dtype=torch.int64, device=device)
        parents = torch.arange(-1, width - 1, device=device).repeat(requests, 1)
        counts = torch.zeros(requests, dtype=torch.int64, device=device)
        for rows, part in parts:
            index = torch.tensor(rows, dtype=torch.int64, device=device)
            tokens[index, : part.width] = part.tokens
            parents[index, : part.width] = part.parents
            counts[index] = part.counts
        return Draft(tokens, parents, counts, all(p.is_chain for _, p in parts), _merged_q(parts, requests, width))

    def extended(self, more: int) -> Draft:
        """This draft with empty drafts for `more` further requests."""
        if not more:
            return self
        filler = torch.arange(-1, self.width - 1, device=self.tokens.device).repeat(more, 1)
        return Draft(
            torch.cat((self.tokens, torch.zeros_like(filler))),
            torch.cat((self.parents, filler)),
            torch.cat((self.counts, self.counts.new_zeros(more))),
            self.is_chain,
            None if self.q is None else torch.cat((self.q, self.q.new_zeros(more, *self.q.shape[1:]))),
        )

    def tree(self, request: int) -> Tree:
        """One request's draft on the host: waits for the device."""
        count = int(self.counts[request])
        return Tree(tuple(self.tokens[request, :count].tolist()), tuple(self.parents[request, :count].tolist()))

    def only(self, requests: Sequence[int]) -> Draft:
        """The drafts of some of the requests."""
        index = torch.tensor(requests, dtype=torch.int64, device=self.tokens.device)
        q = None if self.q is None else self.q[index]
        return Draft(self.tokens[index], self.parents[index], self.counts[index], self.is_chain, q)

    @property
    def width(self) -> int:
        return self.tokens.shape[1]


def _merged_q(parts: Sequence[tuple[Sequence[int], Draft]], requests: int, width: int) -> Tensor | None:
    """The parts' q [B, K, V] together; None where none of them has it."""
    told = [(rows, part.q) for rows, part in parts if part.q is not None]
    if not told:
        return None
    first = told[0][1]
    merged = first.new_zeros(requests, width, first.shape[2])
    for rows, q in told:
        merged[torch.tensor(rows, dtype=torch.int64, device=q.device), : q.shape[1]] = q
    return merged


@dataclass(frozen=True, slots=True)
class MergedTree:
    """One tree of several. `places[i][j]`: the node that node j of the i-th given tree became, or `CUT`."""

    tree: Tree
    places: tuple[tuple[int, ...], ...]

    @property
    def owners(self) -> tuple[int, ...]:
        """The drafters of each node: bit i stands for the i-th given tree."""
        words = [0] * len(self.tree)
        for i, places in enumerate(self.places):
            for node in places:
                if node != CUT:
                    words[node] |= 1 << i
        return tuple(words)


def merge_trees(trees: Sequence[Tree], budget: int) -> MergedTree:
    """The union of the trees' paths, of at most `budget` nodes: a node that two drafters propose is verified once.

    The trees are taken in turn, so nodes of the first keep their numbers. Where the budget ends, later trees are cut, a
    node always with its descendants.
    """
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
