"""The planner's choice for a given batch size and share of right guesses, for `slipstream explain`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from slipstream.core.draft import Tree
from slipstream.plan.acceptance import Acceptance, Ease
from slipstream.plan.planner import AdaptivePlanner
from slipstream.plan.types import (
    NO_MEMORY,
    NO_TOKENS,
    Floats,
    Levels,
    Load,
    MeasuredCosts,
    Offer,
    little_memory,
)


@dataclass(frozen=True, slots=True)
class Guesser:
    """The properties of a drafter that a plan depends on."""

    name: str
    nodes: int  # most guesses for a request
    levels: tuple[Levels, ...] = ()  # depths of its trees; (): chains
    is_free: bool = True  # its guesses take no time worth counting
    whole: bool = False  # its drafts are verified whole or not at all


@dataclass(frozen=True, slots=True)
class Engine:
    """The properties of an engine that a plan depends on."""

    costs: MeasuredCosts
    slope: float
    is_padded: bool
    rows: int  # most rows of a pass
    context: int  # tokens of each request
    min_gain: float = 1.0
    places: int | None = None  # most cache places of guesses, over all requests; None: no limit

    def nodes(self, requests: int) -> int:
        """Most nodes of each request."""
        share = self.rows // requests - 1
        return max(0, share if self.places is None else min(share, self.places // requests))

    def why_none(self, requests: int) -> str:
        """The reason where `nodes` is 0."""
        if self.places == 0:
            return NO_MEMORY
        if self.places is not None and self.places < requests:
            return little_memory(self.places, requests)
        return f"off: a pass has {self.rows} rows, and they are taken"


@dataclass(frozen=True, slots=True)
class Choice:
    """The plan for a batch size and a share `alpha` of right guesses."""

    drafter: str
    requests: int
    alpha: float
    nodes: float  # for each request; 0: none
    gain: float  # expected speed of the best draft relative to plain decoding
    why: str
    levels: int = 0  # of trees


class _Assumed(Acceptance):
    """A share `alpha` of all guesses is right."""

    def __init__(self, alpha: float) -> None:
        super().__init__(Ease())
        self._alpha = alpha

    def told(self) -> str:
        return ""  # the reader gave the share

    def paths(self, request_ids: Sequence[str], depth: int) -> Floats:  # [depth, B]
        return np.repeat((self._alpha ** np.arange(1, depth + 1))[:, None], len(request_ids), axis=1)


def forecast(engine: Engine, guesser: Guesser, requests: int, alpha: float) -> Choice:
    """Plan one step of new, equal requests."""
    planner = AdaptivePlanner(engine.slope, min_gain=engine.min_gain)
    if engine.is_padded:
        planner.pad_passes()
    planner.adopt(engine.costs)
    planner.assume(guesser.name, _Assumed(alpha))
    name, load = guesser.name, Load(requests, requests * engine.context)
    planner.costs.load = load
    ids, most = [str(i) for i in range(requests)], min(guesser.nodes, engine.nodes(requests))
    if not most:
        why = engine.why_none(requests) if guesser.nodes else NO_TOKENS
        return Choice(name, requests, alpha, 0, 1.0, why)
    if guesser.is_free:
        promises = [[alpha ** (depth + 1) for depth in range(most)]] * requests
        chains = [Tree.chain([1] * most)] * requests
        sizes = [len(tree) for tree in planner.trim(name, ids, chains, promises, requests, whole=guesser.whole)]
    else:
        (budget,) = planner.plan([Offer(name, ids, [most] * requests, guesser.levels)], load)
        sizes = budget.nodes
    decision, why = planner.decision(name), planner.reasons().get(name, "")
    gain, levels = (1.0, 0) if decision is None else (decision.gain, decision.levels)
    return Choice(name, requests, alpha, sum(sizes) / requests, gain, why, levels)
