"""What the planner would choose for any number of requests and any share of right guesses: for `slipstream explain`."""

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
    """A drafter, as far as a plan depends on it."""

    name: str
    nodes: int  # that it guesses for a request at most
    levels: tuple[Levels, ...] = ()  # that its trees may have; (): chains
    is_free: bool = True  # its guesses take no time worth counting
    whole: bool = False  # its drafts are taken whole or not at all, by what they brought


@dataclass(frozen=True, slots=True)
class Engine:
    """What else a plan depends on. rows: of a pass, over all requests; context: tokens of each request; places: that
    guesses may take of the cache, over all requests; None: any number."""

    costs: MeasuredCosts
    slope: float
    is_padded: bool
    rows: int
    context: int
    min_gain: float = 1.0
    places: int | None = None

    def nodes(self, requests: int) -> int:
        """Most that each of so many may have."""
        share = self.rows // requests - 1
        return max(0, share if self.places is None else min(share, self.places // requests))

    def why_none(self, requests: int) -> str:
        """Why that is 0, in words."""
        if self.places == 0:
            return NO_MEMORY
        if self.places is not None and self.places < requests:
            return little_memory(self.places, requests)
        return f"off: a pass has {self.rows} rows, and they are taken"


@dataclass(frozen=True, slots=True)
class Choice:
    """The plan for so many requests, of whose guesses such a part is right."""

    drafter: str
    requests: int
    alpha: float
    nodes: float  # for each request; 0: none
    gain: float  # tokens a second by those of plain decoding, as expected of the best that could be drafted
    why: str
    levels: int = 0  # of trees


class _Assumed(Acceptance):
    """Such a part of all guesses is right."""

    def __init__(self, alpha: float) -> None:
        super().__init__(Ease())
        self._alpha = alpha

    def told(self) -> str:
        return ""  # the reader of a forecast gave the share

    def paths(self, request_ids: Sequence[str], depth: int) -> Floats:  # [depth, B]
        return np.repeat((self._alpha ** np.arange(1, depth + 1))[:, None], len(request_ids), axis=1)


def forecast(engine: Engine, guesser: Guesser, requests: int, alpha: float) -> Choice:
    """What is chosen when all requests are alike and nothing was seen of them."""
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
