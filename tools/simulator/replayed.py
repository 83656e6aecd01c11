"""Drafters that guess what was recorded, for a simulated engine: the rules of the real one apply to them.

In a simulation the token at place p of an answer is p itself. A node that was right in the recording is that token, all
others are tokens that never come: so drafts can be merged, cut and judged as real ones are.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from simulator.recording import DrafterKind, Offer, Trace
from slipstream.core.draft import MAX_NODES, ROOT, Draft, Tree, chain_parents
from slipstream.drafters.base import DeviceDrafter, Drafter, DraftRequest, HostDrafter, Needs
from slipstream.drafters.model import ModelDrafter

NEVER = 1 << 40
_WRONG = NEVER + 2 * MAX_NODES
"""Tokens from here on never come; of device drafters, whose wrong guesses are no host drafter's."""
_BELOW, _GOES_ON = 0.3, 0.6
"""Of nodes that a tree ranks behind one of them, the part that stands below it; and how often a tree that begins inside
a right stretch is right beyond its end. With these, trees of 3 to 63 nodes that are known in each round of the largest
ones only bring as much as trees known at every place do, within 3%: fitted to one EAGLE-3 head on Spec-Bench, sampled
or not, and to nothing else."""


@dataclass(slots=True)
class Walk:
    """One simulated answer, along a recorded one. A longer answer begins the recorded one again.

    alphas: by drafter, the chance that a guess behind the last that was tried is right.
    """

    trace: Trace
    alphas: Mapping[str, float]
    dice: random.Random
    begin: int = 0  # where in the recorded one it begins
    _places: dict[str, list[int]] = field(default_factory=dict)

    def offer(self, drafter: str, position: int) -> Offer | None:
        """What the drafter offers behind so many tokens; None: nothing.

        Inside a stretch that the recorded round had right, what was left of that round's offer.
        """
        offer, _, passed = self._offers(drafter, position)
        return offer if offer is None or not passed else _rest(offer, passed)

    def ranks(self, drafter: str, position: int) -> list[int]:
        """Which nodes of a tree are right, where only these are known of recorded ones, or it begins inside of one.

        Inside a right stretch, those of them that are left, and often what came behind: a tree that begins there knows
        more than one that began before it. How much more was seen where trees were recorded at every place.
        """
        offer, behind, passed = self._offers(drafter, position)
        if offer is None or passed > offer.right:
            return []
        if not passed:
            return list(offer.path)
        above, path = offer.path[passed - 1], list[int]()
        for node in offer.path[passed:]:
            path.append(max(path[-1] + 1 if path else 0, int(_BELOW * (node - above - 1))))
        if self.dice.random() < _GOES_ON:
            end = path[-1] + 1 if path else 0
            path.append(end)
            if behind is not None and behind.position == offer.position + offer.right + 1:
                path += [end + 1 + node for node in behind.path]
        return path

    def _offers(self, drafter: str, position: int) -> tuple[Offer | None, Offer | None, int]:
        """The last offer before a place and the one behind it, and how far the place is behind the first."""
        offers = self.trace.offers.get(drafter, ())
        position = (self.begin + position) % max(1, self.trace.output_tokens)
        if drafter not in self._places:
            self._places[drafter] = [offer.position for offer in offers]
        last = bisect_right(self._places[drafter], position) - 1
        if last < 0:
            return None, None, 0
        behind = offers[last + 1] if last + 1 < len(offers) else None
        return offers[last], behind, position - offers[last].position

    def depth(self, drafter: str, position: int, nodes: int) -> int:
        """How deep a device drafter's chain of so many nodes is right."""
        offer = self.offer(drafter, position)
        alpha = self.alphas.get(drafter, 0.0)
        right, tried = (0, 0) if offer is None else (offer.right, offer.nodes)
        while right == tried < nodes and self.dice.random() < alpha:  # beyond what was tried
            right, tried = right + 1, tried + 1
        return min(right, nodes)


def _rest(offer: Offer, passed: int) -> Offer | None:
    """The part of an offer below a node of its right path."""
    if passed > offer.right:
        return None
    above = offer.path[passed - 1]
    if offer.parents is not None:  # of a tree the path alone is worth following
        kept: Sequence[int] = offer.path[passed:]
    else:
        kept = range(passed, offer.nodes)
    if not kept:
        return None
    promises = None
    if offer.promises is not None:
        base = max(offer.promises[above], 1e-6)
        promises = tuple(min(1.0, offer.promises[node] / base) for node in kept)
    return Offer(offer.position + passed, len(kept), tuple(range(offer.right - passed)), promises)


def made_prompt(length: int, overlap: float) -> list[int]:
    """Tokens that never come, of which about such a part came before."""
    fresh = length - int(overlap * length)
    return [NEVER + place % max(1, fresh) for place in range(length)]


class Walks:
    """The walks of the answers that run, by the engine's name for them."""

    def __init__(self) -> None:
        self._walks: dict[str, Walk] = {}
        self.unheard: dict[str, int] = {}
        """By answer: tokens of the round under way. A drafter on the host that is only looked at does not know them."""

    def begin(self, answer_id: str, walk: Walk) -> None:
        self._walks[answer_id] = walk

    def end(self, answer_id: str) -> None:
        self._walks.pop(answer_id, None)

    def of(self, answer_id: str) -> Walk:
        return self._walks[answer_id]


class ReplayedHost(HostDrafter):
    """Offers what a drafter on the host was recorded to offer."""

    name: ClassVar[str] = "replayed"
    bounded: ClassVar[bool] = True

    def __init__(self, kind: DrafterKind, walks: Walks) -> None:
        self.name = kind.name  # type: ignore[misc]  # every instance stands for another class
        self.default_draft_tokens = kind.default_draft_tokens  # type: ignore[misc]
        self.costly, self.whole = kind.costly, kind.whole  # type: ignore[misc]
        self._walks = walks
        self._said: dict[str, tuple[float, ...] | None] = {}

    def propose(self, requests: Sequence[DraftRequest], budget: Sequence[int]) -> Sequence[Tree]:
        self._said.clear()
        return [self._one(request, most) for request, most in zip(requests, budget, strict=True)]

    def promise(self, request_id: str) -> Sequence[float] | None:
        return self._said.get(request_id)

    def _one(self, request: DraftRequest, most: int) -> Tree:
        position = len(request.tokens) - request.prompt_length - self._walks.unheard.get(request.id, 0)
        offer = self._walks.of(request.id).offer(self.name, position)
        nodes = 0 if offer is None else min(most, offer.nodes)
        if offer is None or not nodes:
            return Tree()
        depth = {node: step for step, node in enumerate(offer.path)}
        tokens = tuple(position + depth[n] if n in depth else NEVER + n for n in range(nodes))
        self._said[request.id] = None if offer.promises is None else offer.promises[:nodes]
        return Tree(tokens, chain_parents(nodes) if offer.parents is None else offer.parents[:nodes])


class ReplayedDevice(DeviceDrafter):
    """Stands for a drafter on the device: the engine's rules ask what it is, the simulation knows what it guesses."""

    name: ClassVar[str] = "replayed"
    needs: ClassVar[Needs] = Needs(device=True, own_cache=True)

    def __init__(self, kind: DrafterKind, walks: Walks) -> None:
        self.name = kind.name  # type: ignore[misc]
        self.default_draft_tokens = kind.default_draft_tokens  # type: ignore[misc]
        self.planned_draft_tokens = kind.planned_draft_tokens  # type: ignore[misc]
        self.makes_trees, self.depth = bool(kind.levels), kind.levels
        self.grows, self.width = kind.width > 1, kind.width
        self.most_nodes = min(kind.most_nodes, MAX_NODES)
        self.rereads = self.depth + 1 if self.grows else ModelDrafter.rereads
        self._walks = walks

    def reaches(self, requests: int) -> int:
        return self.rereads if self.grows else ModelDrafter.reaches(requests)

    def most_at(self, levels: int) -> int:
        return min(self.most_nodes, self.width + (levels - 1) * self.width**2) if self.grows else self.most_nodes

    def guess(self, answer_id: str, position: int, nodes: int, levels: int = 0) -> Tree:
        """The surest nodes of a recorded tree, so many levels deep; or a chain, right as deep as the recorded one."""
        walk = self._walks.of(answer_id)
        if not self.makes_trees:
            right = walk.depth(self.name, position, nodes)
            tokens = tuple(position + step if step < right else _WRONG + step for step in range(nodes))
            return Tree(tokens, chain_parents(nodes))
        offer = walk.offer(self.name, position)
        if offer is not None and offer.parents is not None:
            return _surest(offer, position, nodes, levels or self.depth)
        return _ranked(walk.ranks(self.name, position)[: levels or self.depth], position, nodes)

    def propose(self, requests: Sequence[DraftRequest], budget: Sequence[int]) -> Draft:
        raise NotImplementedError("a simulation asks `guess`: it has no device")


def _ranked(path: Sequence[int], position: int, nodes: int) -> Tree:
    """A tree of which only the right nodes are known, numbered by rank as all of them: the others hang side by side
    below the root, where they cost rows and bring nothing."""
    tokens, parents = [_WRONG + node for node in range(nodes)], [ROOT] * nodes
    above = ROOT
    for depth, node in enumerate(path):
        if node >= nodes:
            break
        tokens[node], parents[node], above = position + depth, above, node
    return Tree(tuple(tokens), tuple(parents))


def _surest(offer: Offer, position: int, nodes: int, levels: int) -> Tree:
    """The first nodes of a tree of so many levels; what it lacks to their number is wrong."""
    assert offer.parents is not None
    right = {node: depth for depth, node in enumerate(offer.path)}
    depths: list[int] = []
    places: dict[int, int] = {ROOT: ROOT}  # by recorded node: which it is here
    tokens: list[int] = []
    parents: list[int] = []
    for node, parent in enumerate(offer.parents):
        depths.append(0 if parent == ROOT else depths[parent] + 1)
        if depths[node] < levels and len(tokens) < nodes:
            places[node] = len(tokens)
            tokens.append(position + right[node] if node in right else _WRONG + node)
            parents.append(places[parent])
    lacking = range(len(tokens), nodes)
    return Tree((*tokens, *[_WRONG + MAX_NODES + n for n in lacking]), (*parents, *[ROOT for _ in lacking]))


def replayed(kind: DrafterKind, walks: Walks) -> Drafter:
    return (ReplayedDevice if kind.device else ReplayedHost)(kind, walks)


def chances(traces: Sequence[Trace]) -> Mapping[str, float]:
    """By drafter: how often a guess was right that was put to the test."""
    right: dict[str, int] = {}
    tried: dict[str, int] = {}
    for trace in traces:
        for name, offers in trace.offers.items():
            for offer in offers:
                right[name] = right.get(name, 0) + offer.right
                tried[name] = tried.get(name, 0) + offer.right + (offer.right < offer.nodes)
    return {name: right[name] / tried[name] for name in tried if tried[name]}
