"""The drafts of a step on the host: the trees of host drafters, the sizes that device drafters may add, and authors.

A request may have several drafters (`ngram+model`). The trees of host drafters are merged here; the guesses of device
drafters are merged with them by `Plan.joined` (depth 0) or on the device (depth 1).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.core.draft import MAX_NODES, Draft, Tree, merge_trees
from slipstream.core.verdict import NOBODY, Authors, author
from slipstream.engine.draft_loops import Drafts, DraftSize

_EMPTY = Tree()


class Share(NamedTuple):
    """How many nodes a device drafter may add to a request's draft."""

    drafter: str
    nodes: int


@dataclass(frozen=True)
class Plan:
    """For each decoding request of a step: the guesses of the host, and the sizes that device drafters add to them."""

    trees: tuple[Tree, ...]  # of the host drafters, merged
    shares: tuple[tuple[Share, ...], ...]  # of the device drafters that guess for the request
    authors: tuple[Authors, ...]  # of both; a device drafter beside others has no places yet
    hosts: tuple[str, ...] = ()  # host drafters that were asked
    levels: Mapping[str, int] = field(default_factory=dict)  # of the trees of device drafters
    seconds: float = 0.0  # that planning took, host drafters included
    guessed_s: float = 0.0  # … those alone that the planner times itself (`costly`)

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Most nodes of each request: guesses that others made as well take no room."""
        parts = zip(self.trees, self.shares, strict=True)
        return tuple([len(tree.tokens) + sum([share.nodes for share in shares]) for tree, shares in parts])

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Most guesses of each request that may stand: in whatever tree one is, all before it are in the same."""
        parts, levels = zip(self.trees, self.shares, strict=True), self.levels
        return tuple(
            [max([len(tree.tokens), *[min(n, levels.get(name, n)) for name, n in shares]]) for tree, shares in parts]
        )

    @cached_property
    def merges(self) -> bool:
        """Is there a request for which the device must join several drafts?"""
        return any(len(s) > 1 or (s and tree.tokens) for tree, s in zip(self.trees, self.shares, strict=True))

    @cached_property
    def drafts(self) -> Drafts:
        """The device drafters that have something to do, and how much."""
        most: dict[str, int] = {}
        for shares in self.shares:
            for name, nodes in shares:
                most[name] = max(nodes, most.get(name, 0))
        return tuple(DraftSize(name, most[name], self.levels.get(name, 0)) for name in sorted(most))

    def only(self, kept: Sequence[int]) -> Plan:
        """For some of the requests."""
        return Plan(
            tuple(self.trees[i] for i in kept),
            tuple(self.shares[i] for i in kept),
            tuple(self.authors[i] for i in kept),
            self.hosts,
            self.levels,
            self.seconds,
            self.guessed_s,
        )

    def without(self, failed: str) -> Plan:
        """The same, but for what a device drafter was to guess that has failed."""
        shares = tuple(tuple(share for share in shares if share.drafter != failed) for shares in self.shares)
        authors = tuple(_without(authors, failed) for authors in self.authors)
        return replace(self, shares=shares, authors=authors)

    def joined(self, guessed: Mapping[str, Guesses], device: torch.device) -> tuple[Draft, tuple[Authors, ...]]:
        """The whole drafts, with the guesses of device drafters. Waits for them if trees are merged."""
        merging = {i for i, shares in enumerate(self.shares) if len(shares) > 1 or (shares and self.trees[i].tokens)}
        whole = Gathered(len(self.trees))
        for i, (tree, authors) in enumerate(zip(self.trees, self.authors, strict=True)):
            whole.trees[i], whole.authors[i] = tree, authors
            if i in merging:
                whole.authors[i] = _of_hosts(authors, self.shares[i])
                for name, _ in self.shares[i]:
                    if (own := guessed[name].tree(i)) is not None:
                        whole.add(i, name, own)
        parts: list[tuple[Sequence[int], Draft]] = []
        for guesses in guessed.values():
            if (part := guesses.without(merging)) is not None:
                parts.append(part)
        if of_trees := [i for i, tree in enumerate(whole.trees) if tree.tokens]:
            packed = Draft.pack([whole.trees[i] for i in of_trees], device)
            q = _merged_q([whole.authors[i] for i in of_trees], of_trees, guessed, packed.width)
            parts.append((of_trees, replace(packed, q=q)))
        return Draft.merge(parts, len(self.trees), device), tuple(whole.authors)


NO_PLAN = Plan((), (), ())
"""The plan of a step that only reads prompts."""


class Gathered:
    """The drafts of a step as drafter after drafter gives its own: those on the host first."""

    def __init__(self, requests: int) -> None:
        self.trees = [_EMPTY] * requests  # of the host
        self.shares: list[tuple[Share, ...]] = [()] * requests
        self.hosts: list[str] = []
        self.levels: dict[str, int] = {}  # as in `Plan`
        self.authors = [NOBODY] * requests  # of the trees

    def used_by(self, requests: Sequence[int]) -> list[int]:
        """Nodes that each of these has or may get so far."""
        return [len(self.trees[i].tokens) + sum([share.nodes for share in self.shares[i]]) for i in requests]

    def add(self, request: int, name: str, tree: Tree) -> None:
        """A drafter's tree. Nodes that are there already become a credit to both."""
        if not tree.tokens:
            return
        before, authors = self.trees[request], self.authors[request]
        if not before.tokens:
            self.trees[request], self.authors[request] = tree, author(name)
            return
        merged = merge_trees((before, tree), MAX_NODES)
        places = authors.places or (merged.places[0],)  # the nodes that were there keep their numbers
        self.trees[request] = merged.tree
        self.authors[request] = Authors((*authors.names, name), (*places, merged.places[1]))

    def grant(self, request: int, name: str, nodes: int) -> None:
        """A device drafter may guess so many."""
        if nodes:
            self.shares[request] += (Share(name, nodes),)

    def plan(self, seconds: float = 0.0, guessed_s: float = 0.0) -> Plan:
        authors = [self._shared(i) if shares else self.authors[i] for i, shares in enumerate(self.shares)]
        hosts = tuple(self.hosts)
        return Plan(tuple(self.trees), tuple(self.shares), tuple(authors), hosts, self.levels, seconds, guessed_s)

    def _shared(self, request: int) -> Authors:
        """Of a request that device drafters guess for."""
        shares, tree, hosts = self.shares[request], self.trees[request], self.authors[request]
        if len(shares) == 1 and not tree.tokens:
            return author(shares[0].drafter)
        places = hosts.places or ((tuple(range(len(tree))),) if tree.tokens else ())
        return Authors((*hosts.names, *[share.drafter for share in shares]), places)


@dataclass(frozen=True, slots=True)
class Guesses:
    """The guesses of a device drafter at depth 0: a row of the draft for each of these requests. None: it failed."""

    requests: Sequence[int]
    draft: Draft | None

    def tree(self, request: int) -> Tree | None:
        return None if self.draft is None else self.draft.tree(self.requests.index(request))

    def q(self, request: int) -> Tensor | None:  # [K, V]
        """What the nodes of the request's draft were drawn from, where the drafter told it."""
        return None if self.draft is None or self.draft.q is None else self.draft.q[self.requests.index(request)]

    def without(self, others: set[int]) -> tuple[Sequence[int], Draft] | None:
        """What is drafted for requests that are not among `others`."""
        if self.draft is None or not self.draft.width:
            return None
        kept = [row for row, request in enumerate(self.requests) if request not in others]
        if len(kept) == len(self.requests):
            return self.requests, self.draft
        return ([self.requests[row] for row in kept], self.draft.only(kept)) if kept else None


def _of_hosts(authors: Authors, shares: Sequence[Share]) -> Authors:
    """The authors without device drafters, which are the last of a request that is merged."""
    return _named(authors.names[: len(authors.names) - len(shares)], authors)


def _merged_q(
    authors: Sequence[Authors], requests: Sequence[int], guessed: Mapping[str, Guesses], width: int
) -> Tensor | None:  # [B, K, V]
    """The distributions of the nodes of these requests' trees: each as its first author says."""
    merged: Tensor | None = None
    for row, (i, whose) in enumerate(zip(requests, authors, strict=True)):
        known: set[int] = set()
        for name, places in zip(whose.names, whose.places, strict=False):
            new = [(j, node) for j, node in enumerate(places) if node >= 0 and node not in known]
            known.update(places)
            told = guessed[name].q(i) if new and name in guessed else None  # [M, V]
            if told is not None:
                merged = told.new_zeros(len(requests), width, told.shape[1]) if merged is None else merged
                own, nodes = zip(*new, strict=True)
                merged[row, list(nodes)] = told[list(own)]
    return merged


def resolved(
    authors: Authors, owners: Sequence[int], numbers: Mapping[str, int], trees: frozenset[str] = frozenset()
) -> Authors:
    """With the places of the device drafters: `owners` has, node by node, a bit for each of them.

    They are in the order of the draft: of a chain its own order, but not of those that make `trees`.
    """
    hosts = len(authors.places)
    mixed = trees.intersection(authors.names[hosts:])
    return Authors(authors.names, (*authors.places, *_places(authors.names[hosts:], owners, numbers)), mixed)


def _places(names: Sequence[str], owners: Sequence[int], numbers: Mapping[str, int]) -> Iterator[tuple[int, ...]]:
    for name in names:
        bit = 1 << numbers[name]
        yield tuple([node for node, word in enumerate(owners) if word & bit])


def _without(authors: Authors, failed: str) -> Authors:
    if failed not in authors.names:
        return authors
    return _named(tuple(name for name in authors.names if name != failed), authors)


def _named(names: tuple[str, ...], authors: Authors) -> Authors:
    """These of the authors, with the places of the host drafters; one alone has none."""
    return NOBODY if not names else author(names[0]) if len(names) == 1 else Authors(names, authors.places)
