"""Planners for tests, which say for each drafter how far it goes."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.plan.planner import Planner
from slipstream.plan.types import Budget, Load, Offer


class Scripted(Planner):
    """Asks `nodes` for each offer of each step."""

    def nodes(self, offer: Offer) -> list[int] | Budget:
        raise NotImplementedError

    def plan(self, offers: Sequence[Offer], load: Load) -> list[Budget]:
        found = [self.nodes(offer) for offer in offers]
        return [
            one if isinstance(one, Budget) else Budget(one, offer.levels[-1].deep if offer.levels else 0)
            for one, offer in zip(found, offers, strict=True)
        ]
