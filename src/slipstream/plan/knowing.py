"""What a planner knows, of costs and of chances, and what it says of itself: gains that were measured, decisions."""

from __future__ import annotations

from slipstream.plan.acceptance import Acceptance
from slipstream.plan.catching_up import CatchUps
from slipstream.plan.cost import PassCost
from slipstream.plan.costs import Costs
from slipstream.plan.decisions import Decision
from slipstream.plan.gain import Gain
from slipstream.plan.hosts import HostPlans
from slipstream.plan.investment import Investment
from slipstream.plan.measured import Load, MeasuredCosts
from slipstream.plan.ranks import NodeRanks
from slipstream.plan.reads import PromptReads
from slipstream.plan.traits import Traits


class KnowingPlanner(HostPlans):
    """The part of a planner that is told of costs, and that others read. Any thread may ask what it says."""

    def __init__(self, cost: PassCost, min_gain: float = 1.0) -> None:
        super().__init__(cost, min_gain)
        self.costs = Costs(cost)
        self._catch_ups = CatchUps()
        self._reads = PromptReads()
        self._guessed_s = 0.0  # what guesses took in this round, of drafters that take time
        self._traits: dict[str, Traits] = {}
        self._acceptance: dict[str, Acceptance] = {}
        self._heads: list[Acceptance] = []  # … of those whose guesses take time
        self._ranks: dict[str, NodeRanks] = {}  # of those that make trees

    def adopt(self, measured: MeasuredCosts) -> None:
        self.costs.adopt(measured)

    def observe_pass(self, rows: int, seconds: float, load: Load | None = None, *, is_tree: bool = False) -> None:
        if seconds > 0:  # else the guesses of a slow drafter took all of the round, and nothing is known of its pass
            self.costs.observe_pass(rows, seconds, load, is_tree=is_tree)

    def observe_reads(self, requests: int, tokens: int, seconds: float) -> None:
        if self._cost.observed:  # what a long prompt takes beyond a pass is its own, however few rounds there are
            self._reads.observe(requests, tokens, min(seconds, self._cost.seconds(1)))

    def observe_draft(
        self, drafter: str, size: int, seconds: float, requests: int = 1, *, is_tree: bool = False
    ) -> None:
        self.costs.observe_draft(drafter, size, requests, seconds)
        self._guessed_s += seconds

    def observe_catch_up(self, drafter: str, requests: int, seconds: float) -> None:
        self._catch_ups.observe(drafter, requests, seconds)

    def gain(self, request_id: str) -> Gain:
        return self._gains.of(request_id)

    def gains(self) -> dict[str, float]:
        return {str(kind): gain.measured for kind, gain in self._gains.kinds().items() if gain.drafts}

    def resting(self) -> list[str]:
        return self._gains.resting()

    def why(self, request_id: str, drafter: str | None = None) -> str | None:
        return self._gains.off(request_id, drafter)

    def reasons(self) -> dict[str, str]:
        decided = list(self._decided.items())
        return {name: self.words(name, decision) for name, decision in decided}

    def decision(self, drafter: str) -> Decision | None:
        return self._decided.get(drafter)

    def words(self, drafter: str, decision: Decision, *, shared: bool = True) -> str:
        estimate = self._acceptance.get(drafter) if shared else None
        acceptance = "" if estimate is None else estimate.told()
        return decision.text(drafter, self._cost, acceptance, self._min_gain, shared=shared)

    def assume(self, drafter: str, chances: Acceptance) -> None:
        """Take these to be the chances of its guesses."""
        self._acceptance[drafter] = chances

    def assume_brought(self, drafter: str, tokens: float) -> None:
        """Take so many to be what its drafts bring, which are taken whole."""
        self._investments[drafter] = Investment(tokens)

    def _estimate(self, drafter: str, *, takes_time: bool = False) -> Acceptance:
        """takes_time: its guesses do. What is easy for one of those is for the others."""
        if drafter not in self._acceptance:
            self._acceptance[drafter] = Acceptance(self._traits)
        found = self._acceptance[drafter]
        if takes_time and not found.peers:
            self._heads.append(found)
            found.peers = self._heads
        return found

    def _ranks_of(self, drafter: str) -> NodeRanks:
        if drafter not in self._ranks:
            self._ranks[drafter] = NodeRanks()
        return self._ranks[drafter]
