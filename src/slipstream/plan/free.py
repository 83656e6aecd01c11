"""Guesses that are there already, of drafters on the host: which of them are worth checking, and a wait."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.core.draft import Tree
from slipstream.plan.acceptance import Floats
from slipstream.plan.calibration import Calibration
from slipstream.plan.cost import PassCost
from slipstream.plan.cutting import shared_out
from slipstream.plan.decisions import Decision
from slipstream.plan.hosts import NOTHING
from slipstream.plan.knowing import KnowingPlanner
from slipstream.plan.probes import Probes
from slipstream.plan.ranking import MANY, FewNodes, ManyNodes
from slipstream.plan.unsent import Unsent


class FreeGuesses(KnowingPlanner):
    """The part of a planner that cuts guesses to those that pay, and hears what became of those that were not sent."""

    def __init__(self, cost: PassCost, min_gain: float = 1.0) -> None:
        super().__init__(cost, min_gain)
        self._kept_word: dict[str, Calibration] = {}
        self._probes = Probes(cost)
        self._unsent = Unsent()

    def trim(
        self,
        drafter: str,
        request_ids: Sequence[str],
        trees: Sequence[Tree],
        promises: Sequence[Sequence[float] | None],
        rows: int,
    ) -> list[Tree]:
        """Keep the nodes that pay, of guesses that cost nothing to have any more. A node stays only with its parent."""
        wait_s = self._wait(drafter, rows) + self.costs.spent(drafter)
        nodes = sum([len(tree.tokens) for tree in trees])
        if not nodes:
            return list(trees)
        word = self._kept_word.get(drafter) or self._kept_word.setdefault(drafter, Calibration(self._traits))
        factors: list[float] = []  # [B]: which part of its promises it kept; 0: it made none
        said: list[Sequence[float]] = []  # [B][K]
        for request_id, tree, promise in zip(request_ids, trees, promises, strict=True):
            factors.append(0.0 if promise is None else word.factor(request_id))
            said.append(shared_out(tree, self._estimate(drafter).alpha(request_id)) if promise is None else promise)
        ranked = (ManyNodes if nodes >= MANY else FewNodes)(trees, said, [factor or 1.0 for factor in factors])
        theirs = [request_id for request_id, tree in zip(request_ids, trees, strict=True) if tree.tokens]
        stake = self._gains.stake(self._with(drafter), theirs, rows)
        best = self._best(drafter, rows, ranked.expected(rows), wait_s, stake)
        if not self._unsent.is_heard(drafter):
            best = self._probes.free(drafter, best, rows, nodes)
        best = self._explore(rows, best)
        if best == 0:
            for i, request_id in enumerate(request_ids):
                self._unsent.note(drafter, request_id, trees[i], said[i], factors[i])
            return [NOTHING] * len(trees)
        taken = ranked.take(best)
        for i, request_id in enumerate(request_ids):
            if not taken.trees[i].tokens:
                self._unsent.note(drafter, request_id, trees[i], said[i], factors[i])
            elif factors[i]:
                word.promise(request_id, taken.promised[i] / factors[i])
        return taken.trees

    def peek(
        self,
        drafter: str,
        request_ids: Sequence[str],
        trees: Sequence[Tree],
        promises: Sequence[Sequence[float] | None],
        rows: int,
    ) -> bool:
        word = self._kept_word.get(drafter)
        found: list[float] = []  # [B]: tokens
        for request_id, tree, promise in zip(request_ids, trees, promises, strict=True):
            if promise is None:
                said, factor = shared_out(tree, self._estimate(drafter).alpha(request_id)), 0.0
            else:
                said, factor = list(promise), 1.0 if word is None else word.factor(request_id)
            found.append((factor or 1.0) * sum(said))
            # what the round under way says next tells whether it would have been right
            self._unsent.note(drafter, request_id, tree, said, factor)
        return self._wakes(drafter, rows, found)

    def _best(self, drafter: str, rows: int, expected: Sequence[float] | Floats, wait_s: float, stake: float) -> int:
        """How many nodes bring most tokens by the second; `expected` [N + 1]: tokens of the pass with 0, 1, … nodes.

        wait_s: what the round took already, whatever is taken of the guesses. stake: as in `Gains`.
        """
        most = len(expected) - 1
        steps = self._cost.steps(rows, rows + most)
        best, plain = 0, rows / (steps.seconds[0] + wait_s)
        top, drafted_s = plain, wait_s + self._extras.seconds(rows)
        most_s, wanted = (1 + stake) * steps.seconds[0] + wait_s, plain
        for size, seconds in zip(steps.rows, steps.seconds, strict=True):
            nodes = min(size - rows, most)
            rate = float(expected[nodes]) / (seconds + drafted_s)
            if nodes and rate > wanted:
                wanted = rate
                if seconds + drafted_s <= most_s:
                    best, top = nodes, rate
            if nodes == most:
                break
        least = plain * self._margin * self._gains.doubt(self._with(drafter))
        best = best if top > least else 0
        waits = not best and wanted > least
        self._decide(drafter, Decision(rows, best, (wanted if waits else top) / plain, waits=waits))
        return best

    def hear(self, drafter: str, request_id: str, token: int) -> None:
        guess = self._unsent.heard(drafter, request_id)
        if guess is None:
            return
        right = int(guess.token == token)
        if drafter in self._asking:
            self._asking[drafter].hear(right > 0)
        self._gains.hear(drafter, request_id, right > 0)
        if guess.said is None:
            self._estimate(drafter).observe(request_id, 1, right)
        else:
            word = self._kept_word[drafter]
            word.promise(request_id, guess.said)
            word.observe(request_id, right)
