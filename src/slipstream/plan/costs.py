"""Everything that is known of costs: the target's passes, and each drafter's guesses."""

from __future__ import annotations

import numpy as np

from slipstream.plan.cost import PassCost
from slipstream.plan.draft_cost import DraftCost
from slipstream.plan.measured import Floats, Load, MeasuredCosts


class Costs:
    """Costs of an engine. Before anything was seen or measured, passes and drafts are in different units."""

    def __init__(self, passes: PassCost) -> None:
        self.passes = passes
        self._of_trees = PassCost(passes.slope, context=passes.context, learns=False)
        self._knows_trees = False  # were any seen?
        self.measured: MeasuredCosts | None = None
        self._drafts: dict[str, DraftCost] = {}
        self._spent: dict[str, float] = {}  # seconds that the guesses took which are to be trimmed now

    def adopt(self, measured: MeasuredCosts) -> None:
        """These were measured before the first request. What drafters were seen to take so far is forgotten."""
        self.measured = measured
        if measured.key_s or measured.row_key_s:  # else there was no room for a long one: it is learned
            self.passes.context.adopt(measured.key_s, measured.row_key_s)
        self.passes.adopt(measured.passes)
        self._of_trees.adopt(measured.passes)
        self._drafts.clear()

    def at(self, load: Load) -> None:
        """The rounds that are asked about have such a load."""
        self.passes.at(load)
        if self._knows_trees:
            self._of_trees.at(load)

    def pad_passes(self) -> None:
        """Passes are filled up, and what is seen of them may have waited for the host."""
        for one in (self.passes, self._of_trees):
            one.padded = one.late = True

    def observe_pass(self, rows: int, seconds: float, load: Load | None, *, is_tree: bool) -> None:
        """is_tree: it checked trees that grew on a device. As many rows of a chain take a little less there; those of
        host drafters are planned by what is known of chains, and count there."""
        if is_tree and self.passes.padded and self.passes.observed:
            self._knows_trees = True
            self._of_trees.observe(rows, seconds, load)
        else:
            self.passes.observe(rows, seconds, load)

    def tree_curve(self, low: int, high: int) -> Floats:  # [high - low + 1]
        """As `PassCost.curve`, of passes that check trees; the first of them checks nothing. Never below chains."""
        found = self.passes.curve(low, high)
        if self._knows_trees:
            found[1:] = np.maximum(found[1:], self._of_trees.curve(low, high)[1:])
        return found

    def observe_draft(self, drafter: str, size: int, requests: int, seconds: float) -> None:
        """size: nodes; of trees levels, all of which are computed, whatever is taken of them."""
        self._of(drafter).observe(size, requests, seconds)
        if self.passes.observed:  # else the two have different units
            self._spent[drafter] = seconds

    def spent(self, drafter: str) -> float:
        """What this round's guesses took that are to be trimmed now; told once."""
        return self._spent.pop(drafter, 0.0)

    def knows(self, drafter: str) -> bool:
        """Was it seen or measured how long its guesses take?"""
        if drafter in self._drafts:
            return self._drafts[drafter].observed
        return self.measured_for(drafter)

    def measured_for(self, drafter: str) -> bool:
        """Was it measured before the first request how long its guesses take?"""
        return self.measured is not None and bool(self.measured.drafts.get(drafter))

    def guess_curve(self, drafter: str, most: int, requests: int) -> Floats:  # [most]
        """What drafts of 1, 2, … nodes or levels take; 0 as long as nobody knows."""
        cost = self._of(drafter)
        return cost.curve(most, requests) * (cost.observed and self.passes.observed)

    def _of(self, drafter: str) -> DraftCost:
        if drafter not in self._drafts:
            seen = () if self.measured is None else self.measured.drafts.get(drafter, ())
            self._drafts[drafter] = DraftCost(self.passes.slope, seen, late=self.passes.late)
        return self._drafts[drafter]
