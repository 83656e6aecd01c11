"""The plan that pays, by what was measured.

More rows make the pass dearer; each node brings its chance of acceptance. The plan takes the nodes that raise the
expected tokens per second of the whole batch, and none where none does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from slipstream.core.draft import Tree
from slipstream.plan.acceptance import Acceptance, Floats
from slipstream.plan.calibration import Calibration
from slipstream.plan.cost import PassCost
from slipstream.plan.costs import Costs
from slipstream.plan.cutting import shared_out
from slipstream.plan.decisions import Decision
from slipstream.plan.gains import NO_WAIT, Gain, Turn, Waited
from slipstream.plan.hosts import EXPLORE, NOTHING, HostPlans
from slipstream.plan.measured import Load, MeasuredCosts
from slipstream.plan.others import Others, others_of
from slipstream.plan.planner import Beside, Levels, TreeBudget, TreeSeen
from slipstream.plan.probes import Probes
from slipstream.plan.ranking import MANY, FewNodes, ManyNodes
from slipstream.plan.ranks import NodeRanks
from slipstream.plan.rivals import Rivals
from slipstream.plan.sizes import MARGIN, CapturedSizes
from slipstream.plan.traits import Traits
from slipstream.plan.trees import TreeChoices, explores, probe_of, tree_choices
from slipstream.plan.unsent import Unsent

_COMPARE = 4
"""Every so many rounds nothing is drafted, where no undrafted round of as many requests was seen lately."""

_FIRST = 1
"""Nodes for a request, of a drafter of which nobody knows how long it takes."""


class _Chosen(NamedTuple):
    """A size, and for whom."""

    size: int
    members: NDArray[np.int64]  # requests


class AdaptivePlanner(HostPlans):
    """Drafts what pays by what was measured, and probes now and then whether it has begun to."""

    exclusive = True

    def __init__(self, cost: PassCost, *, min_gain: float = 1.0) -> None:
        super().__init__(cost, min_gain)
        self.costs = Costs(cost)
        self._plain_round = False  # nothing is drafted in this round, so that there is something to compare with
        self._traits: dict[str, Traits] = {}
        self._kept_word: dict[str, Calibration] = {}
        self._acceptance: dict[str, Acceptance] = {}
        self._ranks: dict[str, NodeRanks] = {}  # of those that make trees
        self._grown: dict[str, int] = {}  # … and how often they were planned
        self._probes = Probes(cost)
        self._unsent = Unsent()
        self._guessed_s = 0.0  # what guesses took in this round, of drafters that take time
        self._sizes = CapturedSizes()
        self._rivals = Rivals()
        self._begun: set[str] = set()  # drafters that were asked for guesses that take time
        self._busy: set[str] = set()  # … in the last plan, too

    def start(self, request_id: str, traits: Traits) -> None:
        for asking in self._asking.values():
            asking.newcomer(len(self._traits))
        self._traits[request_id] = traits
        self._gains.start(request_id, traits)

    def speculates(self, request_id: str, drafters: tuple[str, ...] = ()) -> bool:
        return not self._plain_round and self._gains.drafts(request_id, drafters)

    def pad_passes(self) -> None:
        self._cost.padded = True
        self._cost.context.per_row = False  # rows of a request share what is read of its context

    def adopt(self, measured: MeasuredCosts) -> None:
        self.costs.adopt(measured)

    def budget(
        self,
        drafter: str,
        request_ids: Sequence[str],
        caps: Sequence[int],
        rows: int,
        beside: Sequence[Sequence[Beside]] = (),
    ) -> list[int]:
        """Sizes for a drafter whose guesses cost time: one depth for all, since its steps run for all together."""
        if self._cost.observed and not (drafter in self._begun or self.costs.knows(drafter)):
            caps = [min(nodes, _FIRST) for nodes in caps]
        deepest = max(caps, default=0)
        if deepest == 0:
            return list(caps)
        depths = np.arange(deepest + 1)[:, None]  # [K + 1, 1]
        drafted = np.minimum(depths, np.array(caps))  # [K + 1, B]
        others = others_of(request_ids, self._rivals.beside(beside), deepest, self._estimate)
        gained = np.zeros(drafted.shape)  # [K + 1, B]
        chances = self._estimate(drafter).paths(request_ids, deepest) * (1 - others.right[1:])
        gained[1:] = np.where(depths[1:] <= np.array(caps), chances, 0).cumsum(0)
        draft_s = np.concatenate(([0.0], self.costs.guess_curve(drafter, deepest, rows)))
        chosen = self._paying(drafter, request_ids, rows, others, gained, drafted, draft_s)
        small = min(2, deepest)
        size = self._probes.size(drafter, chosen.size, small, rows, self.costs.guess_s(drafter, small, rows))
        return self._granted(drafter, chosen, caps, size)

    def budget_trees(
        self,
        drafter: str,
        request_ids: Sequence[str],
        caps: Sequence[int],
        rows: int,
        beside: Sequence[Sequence[Beside]] = (),
        *,
        levels: Sequence[Levels],
    ) -> TreeBudget:
        """Sizes and levels where the best nodes come first: one pair for all.

        alpha is here the chance that a whole tree has the right token of the next level.
        """
        most, deepest = max(caps, default=0), levels[-1].deep
        if most == 0:
            return TreeBudget(list(caps), deepest)
        others = others_of(request_ids, self._rivals.beside(beside), deepest, self._estimate)
        chances = self._estimate(drafter).paths(request_ids, deepest) * (1 - others.right[1:])  # [L, B]
        ranks = self._ranks_of(drafter)
        sizes = self._sizes.choices(drafter, most)[1:] if self._cost.padded else range(1, most + 1)
        trees = tree_choices(sizes, levels, caps, chances, ranks.kept(levels[-1].nodes))
        level_s = np.concatenate(([0.0], self.costs.guess_curve(drafter, deepest, rows)))
        parts = trees.gained, trees.drafted, level_s[trees.levels], trees
        chosen = self._paying(drafter, request_ids, rows, others, *parts)
        probe = probe_of(levels, most)
        deep = trees.levels[chosen.size] or probe.deep
        size = self._probes.size(drafter, trees.nodes[chosen.size], probe.nodes, rows, float(level_s[deep]))
        granted = self._granted(drafter, chosen, caps, size, deep)
        if any(granted):
            self._sizes.plan(rows, sum(granted), deep)
        return TreeBudget(granted, deep)

    def _paying(
        self,
        drafter: str,
        request_ids: Sequence[str],
        rows: int,
        others: Others,
        gained: NDArray[np.float64],  # [K + 1, B]
        drafted: NDArray[np.int64],  # [K + 1, B]
        draft_s: NDArray[np.float64],  # [K + 1]
        trees: TreeChoices | None = None,
    ) -> _Chosen:
        """Which size, 0 to K, or which of the trees, brings most tokens a second, and for whom: each brings `gained`,
        adds `drafted` rows, and takes `draft_s`, for however many. Those of whom most is expected come first, if they
        pay for their rows.

        0 unless another is clearly better; and where sizes are captured, no new one that is hardly better than another.
        """
        brought, known = rows + others.right.sum(), rows + others.nodes
        order = np.argsort(-gained[-1], kind="stable")  # [B]
        tokens, nodes = gained[:, order].cumsum(1), drafted[:, order].cumsum(1)  # [K + 1, B]: of the first 1, 2, …
        pass_s = self._cost.curve(known, known + int(nodes[-1, -1]))[nodes]
        if not others.nodes:
            pass_s[1:] += self._extras.seconds(rows)
        rates = (brought + tokens) / (pass_s + draft_s[:, None])
        rate = rates.max(1)  # [K + 1]
        rate[0] = rates[0, 0]
        has_turn = self._rivals.has_turn(drafter, request_ids, rows, float(rate.max() / rate[0]), self._rounds)
        size = self._size(drafter, rows, rate, trees) if has_turn else 0
        shown = size or int(rate.argmax())
        guess = float(draft_s[shown or -1] / pass_s[0, 0])
        most, deep = (size, 0) if trees is None else (trees.nodes[size], trees.levels[size])
        self._decide(drafter, Decision(rows, most, float(rate[shown] / rate[0]), guess, deep))
        count = int(rates[size].argmax()) if size else 0  # of requests, less one
        took = float(pass_s[size, count] + draft_s[size]) if size else float(pass_s[0, 0])
        if has_turn and drafter not in self._waits:  # it guesses on the device
            self._settle_beside(rows, float(rate[size]) * took, took, size > 0, others.nodes)
        return _Chosen(size, order[: int(rates[size].argmax()) + 1] if size else order)

    def _size(self, drafter: str, rows: int, rate: NDArray[np.float64], trees: TreeChoices | None) -> int:
        if not self._cost.padded:
            best = int(rate.argmax())
        elif trees is None:
            best = self._sizes.best(drafter, rate)
        else:
            best = self._sizes.best_tree(drafter, rate, trees.nodes, trees.levels)
        again = MARGIN if self._cost.padded and drafter in self._begun - self._busy else 1.0  # it has to catch up
        if rate[best] <= rate[0] * self._margin * again * self._gains.doubt(self._with(drafter)):
            return 0
        if trees is None:
            return best
        self._grown[drafter] = self._grown.get(drafter, 0) + 1
        if not explores(self._grown[drafter]):
            return best
        nodes = trees.drafted.sum(1).tolist()  # [C]
        old = [self._sizes.planned(rows, *pair) for pair in zip(nodes, trees.levels, strict=True)]
        return trees.larger(best, rate, old if self._cost.padded else None)

    def _granted(self, drafter: str, chosen: _Chosen, caps: Sequence[int], size: int, levels: int = 0) -> list[int]:
        """Nodes for each request: the size that pays for those for whom it does, or now and then a probe for all."""
        if not size:
            self._busy.discard(drafter)
            return [0] * len(caps)
        self._begun.add(drafter)
        self._busy.add(drafter)
        self._sizes.use(drafter, size, levels)
        granted = [0] * len(caps)
        for i in chosen.members.tolist() if chosen.size else range(len(caps)):
            granted[i] = min(size, caps[i])
        return granted

    def trim(
        self,
        drafter: str,
        request_ids: Sequence[str],
        trees: Sequence[Tree],
        promises: Sequence[Sequence[float] | None],
        rows: int,
    ) -> list[Tree]:
        """Keep the nodes that pay, of guesses that cost nothing to have any more. A node stays only with its parent."""
        wait_s = self._wait(drafter) + self.costs.spent(drafter)
        nodes = sum([len(tree.tokens) for tree in trees])
        if not nodes:
            self._weigh(drafter, rows, rows / (self._cost.seconds(rows) + wait_s))
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
            best = self._probes.size(drafter, best, self._probes.small(rows, nodes), rows)
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
        self._weigh(drafter, rows, top)
        least = plain * self._margin * self._gains.doubt(self._with(drafter))
        best = best if top > least else 0
        waits = not best and wanted > least
        self._decide(drafter, Decision(rows, best, (wanted if waits else top) / plain, waits=waits))
        return best

    def next_round(self, requests: int = 0, context: int = 0) -> None:
        self._settle()
        self._rounds += 1
        self.costs.at(Load(requests, context))
        self._gains.next_round(requests or 1)
        self._guessed_s, self._hoped, self._guessing = 0.0, 1.0, ()
        self._plain_round = requests > 0 and self._rounds % _COMPARE == 2 and self._gains.lacks_plain(requests)

    def observe_round(
        self,
        turns: Sequence[Turn],
        seconds: float,
        context: int = 0,
        beyond_s: float | None = None,
        waited: Waited = NO_WAIT,
    ) -> None:
        rows, nodes = len(turns), sum([turn.drafted for turn in turns])
        if beyond_s is not None and turns:
            self._extras.observe(rows, nodes > 0, beyond_s - self._guessed_s)
        usual = self._cost.seconds(rows + nodes) / self._cost.seconds(rows) if nodes else 1.0
        self._gains.observe(turns, seconds, self._hoped, context, usual, waited)

    def gain(self, request_id: str) -> Gain:
        return self._gains.of(request_id)

    def gains(self) -> dict[str, float]:
        return {str(kind): gain.measured for kind, gain in self._gains.kinds().items() if gain.drafts}

    def why(self, request_id: str, drafter: str | None = None) -> str | None:
        return self._gains.off(request_id, drafter)

    def reasons(self) -> dict[str, str]:
        decided = list(self._decided.items())
        return {name: decision.text(name, self._cost, self._alpha(name)) for name, decision in decided}

    def decision(self, drafter: str) -> Decision | None:
        """The last plan of its guesses."""
        return self._decided.get(drafter)

    def assume(self, drafter: str, chances: Acceptance) -> None:
        """Take these to be the chances of its guesses."""
        self._acceptance[drafter] = chances

    def _alpha(self, drafter: str) -> float | None:
        found = self._acceptance.get(drafter)
        return found.shared if found is not None and found.known else None  # else it is only assumed

    def observe_pass(self, rows: int, seconds: float, load: Load | None = None) -> None:
        self._cost.observe(rows, seconds, load)

    def observe_draft(
        self, drafter: str, size: int, seconds: float, requests: int = 1, *, is_tree: bool = False
    ) -> None:
        self.costs.observe_draft(drafter, size, requests, seconds)
        self._guessed_s += seconds

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

    def observe(self, drafter: str, request_id: str, drafted: int, accepted: int, tree: TreeSeen | None = None) -> None:
        if drafted:
            estimate, missed = self._estimate(drafter), 0.0
            if tree is not None:
                ranks = self._ranks_of(drafter)
                missed = ranks.missed(estimate.alpha(request_id), tree.nodes, accepted)
                ranks.observe(tree.path, tree.nodes)
            estimate.observe(request_id, drafted, accepted, missed)
            if drafter in self._kept_word:
                self._kept_word[drafter].observe(request_id, accepted)
            if accepted:
                self._probes.succeeded(drafter)
            if drafter in self._investments:
                self._investments[drafter].observe(request_id, accepted)

    def forget(self, request_id: str) -> None:
        for estimate in self._acceptance.values():
            estimate.forget(request_id)
        for invested in self._investments.values():
            invested.forget(request_id)
        for word in self._kept_word.values():
            word.forget(request_id)
        self._unsent.forget(request_id)
        self._traits.pop(request_id, None)
        self._gains.forget(request_id)
        for waits in self._waits.values():
            waits.gone += 1

    def _explore(self, rows: int, nodes: int) -> int:
        """Fewer nodes once in a while, to see what a smaller pass costs: a rule that always takes many never learns."""
        if not nodes or not self._cost.padded or self._rounds % EXPLORE != EXPLORE - 1:
            return nodes
        size = self._cost.unseen(rows, rows + nodes)
        return nodes if size is None else size - rows

    def _ranks_of(self, drafter: str) -> NodeRanks:
        if drafter not in self._ranks:
            self._ranks[drafter] = NodeRanks()
        return self._ranks[drafter]

    def _estimate(self, drafter: str) -> Acceptance:
        if drafter not in self._acceptance:
            self._acceptance[drafter] = Acceptance(self._traits)
        return self._acceptance[drafter]
