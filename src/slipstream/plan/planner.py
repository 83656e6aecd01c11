"""The plan of a step: the drafter for each request, and the size of its draft. It changes speed, never tokens.

The rule: tokens per second = expected tokens / cost of the step. The planner takes the drafter and size with the
highest rate, none included. A choice changes where another is better by a margin; the guard turns off drafters that
lose by measured time; a small budget tries unused ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest

import numpy as np

from slipstream.core.draft import MAX_NODES, Tree
from slipstream.plan import choose
from slipstream.plan.acceptance import DEPTHS, Acceptance, Ease, Promises
from slipstream.plan.choose import Beside, Candidate, Ranked, Step
from slipstream.plan.cost import Costs
from slipstream.plan.guard import HORIZON, MEMBERS, Guard, Probes
from slipstream.plan.types import (
    Budget,
    Decision,
    Floats,
    Gain,
    Load,
    MeasuredCosts,
    Offer,
    StepSeen,
    TreeSeen,
    bucket_of,
)

MARGIN = 1.03
"""The advantage that another choice must have over the last one: estimates are no more exact than that."""

_NOTHING = Tree()
_LEAST_NODES = 16  # nodes considered by `least_chance`


class Planner:
    """The planner's interface. This class always drafts the most allowed nodes, for measurements and tests.

    In each step the engine calls `asks` for each host drafter, `trim` with the guesses of each, `plan` once, and later
    `observe` for each draft and `observe_step`.
    """

    exclusive = False  # True: only one of the offered drafters drafts for a request

    expected_gain = 1.0
    """The planned speed of the last step relative to plain decoding; 1: no draft pays."""

    def adopt(self, measured: MeasuredCosts) -> None:
        """Take the costs measured before the first request."""

    def pad_passes(self) -> None:
        """Assume passes padded to a few sizes."""

    @property
    def compares(self) -> bool:
        """True if the next step is plain, to be compared with drafted ones."""
        return False

    def asks(self, drafter: str, requests: int) -> bool:
        """True if a host drafter is asked in the next step. A device waits for it."""
        return True

    def least_chance(self, requests: int) -> float:
        """The chance below which a guess is useless in this step."""
        return 0.0

    def trim(
        self,
        drafter: str,
        request_ids: Sequence[str],
        trees: Sequence[Tree],
        promises: Sequence[Sequence[float] | None],
        requests: int,
        *,
        whole: bool = False,
    ) -> list[Tree]:
        """The nodes of existing guesses to verify. whole: keep or drop each tree entirely."""
        return list(trees)

    def plan(self, offers: Sequence[Offer], load: Load) -> list[Budget]:
        """The size of each offered drafter's drafts in this step."""
        return [Budget(list(one.caps), one.levels[-1].deep if one.levels else 0) for one in offers]

    def follows(self, drafter: str) -> bool:
        """True if the drafter reads new requests' prompts at once; False: when it is to draft."""
        return True

    def observe(self, drafter: str, request_id: str, drafted: int, accepted: int, tree: TreeSeen | None = None) -> None:
        """Learn from one request's draft. drafted, accepted: levels; tree: None for a chain."""

    def observe_step(self, step: StepSeen) -> None:
        """Learn from the time and the result of a step."""

    def observe_draft(self, drafter: str, size: int, seconds: float, requests: int) -> None:
        """Learn the time of a device drafter's guesses. size: nodes of a chain, or levels of a tree."""

    def observe_wait(self, drafter: str, requests: int, seconds: float) -> None:
        """Learn the time of asking a host drafter."""

    def observe_catch_up(self, drafter: str, requests: int, seconds: float) -> None:
        """Learn the time that a drafter took to read the tokens that it had missed."""

    def forget(self, request_id: str) -> None:
        """Drop the estimates of a finished request."""

    def gain(self, request_id: str) -> Gain:
        """The planned and measured gain of a request."""
        return Gain()

    def gains(self) -> dict[str, float]:
        """The recent speed of drafted steps relative to plain ones, by drafter and batch size."""
        return {}

    def decision(self, drafter: str) -> Decision | None:
        """The last plan for a drafter's guesses."""
        return None

    def words(self, drafter: str, decision: Decision, *, shared: bool = True) -> str:
        """The decision in words. shared: include facts about other requests."""
        return ""

    def why_off(self, drafter: str) -> str | None:
        """The reason why the guard keeps a drafter off; None: it is on."""
        return None

    def reasons(self) -> dict[str, str]:
        """By drafter: the last decision and its reason. Thread-safe."""
        return {}


class AdaptivePlanner(Planner):
    """Drafts whatever is expected to be fastest.

    slope: the relative cost of one more row, until passes were timed.
    min_gain: the required speed relative to plain decoding.
    """

    exclusive = True

    def __init__(self, slope: float, *, min_gain: float = 1.0) -> None:
        self.costs = Costs(slope)
        self._min_gain = min_gain
        self._guard = Guard(min_gain)
        self._probes = Probes()
        self._ease = Ease()  # shared by the drafters whose guesses take time
        self._acceptance: dict[str, Acceptance] = {}
        self._promises: dict[str, Promises] = {}
        self._decided: dict[str, Decision] = {}
        self._step = 0
        self._requests = 1  # of the last step
        self._free: dict[str, list[float]] = {}  # by request: chances by depth of this step's free guesses
        self._free_nodes = 0
        self._asked: set[str] = set()  # host drafters with guesses in this step
        self._worth: dict[tuple[str, int], float] = {}  # by host drafter and bucket: seconds that its guesses save
        self._last = choose.UNDRAFTED  # the last choice
        self._sizes: dict[str, tuple[int, int]] = {}  # by drafter: last chosen nodes and levels
        self._used: dict[str, int] = {}  # by drafter: step of its last draft

    def adopt(self, measured: MeasuredCosts) -> None:
        self.costs.adopt(measured)

    def pad_passes(self) -> None:
        self.costs.pad_passes()

    # --- free guesses

    @property
    def compares(self) -> bool:
        return self._guard.compares

    def asks(self, drafter: str, requests: int) -> bool:
        if self._guard.compares or self._guard.is_off(drafter, requests):
            return False
        wait_s, worth_s = self.costs.wait(drafter, requests), self._worth.get((drafter, bucket_of(requests)))
        if not requests or wait_s is None or worth_s is None or worth_s >= wait_s:
            return True
        return self._probes.spend(drafter, wait_s - worth_s)

    def least_chance(self, requests: int) -> float:
        if self.costs.padded or not self.costs.observed:
            return 0.0  # added rows may cost nothing
        pass_s = self.costs.passes(requests + _LEAST_NODES)[requests:]
        needed = requests * (MARGIN * pass_s[1:] / pass_s[0] - 1) / np.arange(1, _LEAST_NODES + 1)
        return max(0.0, float(needed.min()) / 2)  # half: chances are estimates

    def trim(
        self,
        drafter: str,
        request_ids: Sequence[str],
        trees: Sequence[Tree],
        promises: Sequence[Sequence[float] | None],
        requests: int,
        *,
        whole: bool = False,
    ) -> list[Tree]:
        self._asked.add(drafter)
        if self._guard.is_off(drafter, requests):
            return [_NOTHING] * len(trees)
        if not any(tree.tokens for tree in trees):
            return list(trees)
        word = self._promises.setdefault(drafter, Promises())
        estimate = self._estimate(drafter, Ease())
        factors = [0.0 if said is None else word.factor(name) for name, said in zip(request_ids, promises, strict=True)]
        chances: list[Sequence[float]] = []
        for name, tree, said, factor in zip(request_ids, trees, promises, factors, strict=True):
            if said is None:
                chances.append(choose.shared_out(tree, float(estimate.paths([name], 1)[0, 0])) if tree.tokens else ())
            else:
                chances.append([factor * chance for chance in said] if factor < 1 else said)
        if whole:
            taken, left = self._whole(drafter, request_ids, trees, requests)
        else:
            taken, left = self._paying_nodes(drafter, request_ids, trees, chances, requests)
        for name, tree, kept, factor in zip(request_ids, taken, left, factors, strict=True):
            if tree.tokens:
                if factor:
                    word.promise(name, sum(kept) / factor)
                both = zip_longest(choose.by_depth(tree, kept), self._free.get(name, ()), fillvalue=0.0)
                self._free[name] = [max(pair) for pair in both]
                self._free_nodes += len(tree.tokens)
        return taken

    def _beside(self, request_ids: Sequence[str], requests: int) -> Beside:
        """The guesses that are expected of the drafter that was used last."""
        last = self._last
        reach = last.levels or last.nodes
        if not reach:
            return Beside()
        estimate, share = self._acceptance[last.offer.drafter], min(1.0, len(last.members) / max(self._requests, 1))
        chances = share * estimate.paths(request_ids, reach)
        if last.levels:
            depths = np.minimum(np.arange(reach), DEPTHS - 1)
            chances *= estimate.ranks.kept()[depths, min(last.nodes, MAX_NODES), None]
        tokens = requests * float(chances.sum(0).mean())
        return Beside(chances, tokens, round(share * requests * last.nodes), last.guess_s, bool(last.levels))

    def _paying_nodes(
        self,
        drafter: str,
        request_ids: Sequence[str],
        trees: Sequence[Tree],
        chances: Sequence[Sequence[float]],
        requests: int,
    ) -> tuple[list[Tree], list[list[float]]]:
        """The nodes that are worth their rows, alone or beside the drafter that was used last."""
        ranked, ways = Ranked(trees, chances), []
        beside = self._beside(request_ids, requests)
        for one in (Beside(), beside)[: 1 + bool(beside.rows)]:
            added, rows = ranked.added(one), requests + one.rows
            tokens = requests + one.tokens + np.concatenate(([0.0], np.cumsum(-np.sort(-added))))  # [N + 1]
            pass_s = self.costs.passes(rows + len(added), is_tree=one.is_tree)[rows:] + one.seconds
            ways.append((added, pass_s, tokens / pass_s))
        alone, without = float(ways[0][2][0]), max(float(rates[0]) for _, _, rates in ways)
        added, pass_s, rates = max(ways, key=lambda way: float(way[2].max()))
        best = self._paying(drafter, rates, range(len(rates)), requests, plain=alone, without=without)
        if not best:
            best = min(2, len(added))
            if not self._probes.spend(drafter, float(pass_s[best] - pass_s[0])):
                return [_NOTHING] * len(trees), [[] for _ in trees]
        return ranked.take(best, added)

    def _paying(
        self, drafter: str, rates: Floats, nodes: Sequence[int], requests: int, *, plain: float, without: float
    ) -> int:
        """The index of the highest rate and the decision on it; 0: it does not pay.

        nodes: by index. plain: the rate of plain decoding; without: of a step without this drafter.
        """
        best = int(rates.argmax())
        gain = float(rates[best] / plain)
        if rates[best] <= MARGIN * without or gain <= self._min_gain:
            gain, best = min(gain, float(rates[best] / without)), 0
        self._decided[drafter] = Decision(requests, nodes[best], gain, row=self.costs.row(requests))
        return best

    def _whole(
        self, drafter: str, request_ids: Sequence[str], trees: Sequence[Tree], requests: int
    ) -> tuple[list[Tree], list[list[float]]]:
        """Keep or drop each tree entirely, by the tokens that such trees brought."""
        brought = self._acceptance[drafter].paths(request_ids, DEPTHS).sum(0)  # [B]
        sizes = np.array([len(tree.tokens) for tree in trees])
        order = np.argsort(-brought / np.maximum(sizes, 1) * (sizes > 0), kind="stable")
        order = order[: int((sizes > 0).sum())]
        tokens = np.concatenate(([0.0], brought[order].cumsum())) + requests
        nodes = np.concatenate(([0], sizes[order].cumsum()))
        pass_s = self.costs.passes(requests + int(nodes[-1]))[requests:][nodes]
        rates, plain = tokens / pass_s, float(tokens[0] / pass_s[0])
        best = self._paying(drafter, rates, nodes.tolist(), requests, plain=plain, without=plain)
        if not best and self._probes.spend(drafter, float(pass_s[-1] - pass_s[0])):
            best = len(order)
        kept = set(order[:best].tolist())
        left = [tree if i in kept else _NOTHING for i, tree in enumerate(trees)]
        # each node gets an equal part of the tree's expected tokens
        return left, [[part / max(len(tree), 1)] * len(tree) for part, tree in zip(brought.tolist(), left, strict=True)]

    # --- guesses that take time

    def plan(self, offers: Sequence[Offer], load: Load) -> list[Budget]:
        self.costs.load = load
        budgets = [Budget([0] * len(one.caps)) for one in offers]
        if load.requests and not self._guard.compares:
            step = self._begin(offers, load)
            found = {one.drafter: best for one in offers if (best := self._best(one, step)) is not None}
            chosen = self._chosen(step.undrafted, list(found.values()))
            self._weigh_hosts(step, chosen, offers)
            self._decide_offers(step, offers, found, chosen)
            if chosen.offer in offers:
                self._use(budgets, offers, chosen, chosen.members.tolist())
                self._sizes[chosen.offer.drafter] = chosen.nodes, chosen.levels
            self._last = chosen
            self._probe(step, budgets, offers, found, chosen)
            unused = {one.drafter for one in offers if one is not chosen.offer} | {name for name, _ in self._worth}
            self._probes.earn(unused, chosen.seconds)
            self._requests = load.requests
        self._step += 1
        self._guard.next_step(load.requests)
        for estimate in self._acceptance.values():
            estimate.next_step()
        self._free, self._free_nodes, self._asked = {}, 0, set()
        return budgets

    def _begin(self, offers: Sequence[Offer], load: Load) -> Step:
        most = load.requests + self._free_nodes + max([sum(one.caps) for one in offers], default=0)
        kinds = (False, True)[: 1 + any(one.levels for one in offers)]
        passes = {is_tree: self.costs.passes(most, is_tree=is_tree) + self.costs.read_s for is_tree in kinds}
        return Step(load, passes, self._free_nodes, self._free)

    def _best(self, one: Offer, step: Step) -> Candidate | None:
        """The drafter's size with the highest rate, or its last size within the margin. None: it may not draft."""
        if not any(one.caps) or self._guard.is_off(one.drafter, step.load.requests):
            return None
        caps, levels = one.caps, one.levels
        if self.costs.observed and not self.costs.knows_draft(one.drafter):  # one guess suffices to time it
            caps, levels = [min(most, 1) for most in caps], levels[:1]
        deepest = levels[-1].deep if levels else max(caps)
        estimate = self._estimate(one.drafter, self._ease)
        chances, free = estimate.paths(one.request_ids, deepest), step.free_chances(one.request_ids, deepest)
        if levels:
            sizes = choose.tree_sizes(caps, levels, chances, estimate.ranks.kept(), free)
        else:
            sizes = choose.chain_sizes(caps, chances, free)
        draft_s = self.costs.drafts(one.drafter, sizes.steps, step.load.requests)
        late_s = np.array([self.costs.catch_up(one.drafter, late) / HORIZON for late in range(len(one.lagging) + 1)])
        return step.best_size(one, sizes, draft_s, late_s, self._sizes.get(one.drafter, (0, 0)), MARGIN)

    def _chosen(self, undrafted: Candidate, found: Sequence[Candidate]) -> Candidate:
        """The candidate with the highest rate, or the last choice within the margin."""

        def score(one: Candidate) -> float:
            stays = MARGIN if one.offer.drafter == self._last.offer.drafter else 1.0
            return one.rate * stays * (self._min_gain if one is undrafted else 1.0)

        return max([undrafted, *found], key=score)

    def _use(self, budgets: list[Budget], offers: Sequence[Offer], one: Candidate, members: Sequence[int]) -> None:
        self._used[one.offer.drafter] = self._step
        budgets[offers.index(one.offer)] = one.budget(members)

    def _weigh_hosts(self, step: Step, chosen: Candidate, offers: Sequence[Offer]) -> None:
        """Update the seconds that the guesses of host drafters save."""
        saved_s = 0.0
        if step.free_nodes:
            alone = replace(step, free_nodes=0, free={})
            others = [chosen.offer] if chosen.offer in offers else offers
            found = [best for one in others if (best := self._best(one, alone)) is not None]
            saved_s = max(0.0, chosen.tokens / self._chosen(alone.undrafted, found).rate - chosen.seconds)
        for name in self._asked:
            key = (name, bucket_of(step.load.requests))
            self._worth[key] = (self._worth.get(key, saved_s) + saved_s) / 2

    def _probe(
        self,
        step: Step,
        budgets: list[Budget],
        offers: Sequence[Offer],
        found: Mapping[str, Candidate],
        chosen: Candidate,
    ) -> None:
        """Let an unused drafter with enough budget draft for a few requests, in place of the chosen one."""
        for one in offers:
            best = found.get(one.drafter)
            if best is None or one is chosen.offer:
                continue
            able = [i for i, most in enumerate(one.caps) if most]
            ready = [i for i in able if one.request_ids[i] not in one.lagging]  # needs no catching up
            pool = ready if len(ready) >= min(len(able), MEMBERS) else able
            members = [pool[(self._step + j) % len(pool)] for j in range(min(len(pool), MEMBERS))]
            late = sum([one.request_ids[i] in one.lagging for i in members])
            cost_s = step.loss(chosen, best, members) + self.costs.catch_up(one.drafter, late)
            if self._probes.spend(one.drafter, max(cost_s, chosen.seconds / 16)):
                taken = {one.request_ids[i] for i in members}
                for other, budget in zip(offers, budgets, strict=True):
                    for i, name in enumerate(other.request_ids):
                        budget.nodes[i] *= name not in taken
                self._use(budgets, offers, best, members)
                if len(members) == len(able):
                    self.expected_gain = 1.0
                return  # one probe a step

    def _estimate(self, drafter: str, ease: Ease) -> Acceptance:
        if drafter not in self._acceptance:
            self._acceptance[drafter] = Acceptance(ease)
        return self._acceptance[drafter]

    def follows(self, drafter: str) -> bool:
        return not self.costs.padded or self._step - self._used.get(drafter, 0) <= HORIZON

    # --- results

    def observe(self, drafter: str, request_id: str, drafted: int, accepted: int, tree: TreeSeen | None = None) -> None:
        if drafted:
            estimate = self._estimate(drafter, self._ease)
            estimate.observe(request_id, drafted, accepted, tree)
            if drafter in self._promises:
                self._promises[drafter].observe(request_id, accepted)

    def observe_step(self, step: StepSeen) -> None:
        self.costs.observe_read(step.read_s)
        if step.rows:
            self.costs.observe_pass(step.rows, step.pass_s, step.load, is_tree=step.is_tree)
        self._guard.observe(step)

    def observe_draft(self, drafter: str, size: int, seconds: float, requests: int) -> None:
        self.costs.observe_draft(drafter, size, seconds, requests)

    def observe_wait(self, drafter: str, requests: int, seconds: float) -> None:
        self.costs.observe_wait(drafter, requests, seconds)

    def observe_catch_up(self, drafter: str, requests: int, seconds: float) -> None:
        self.costs.observe_catch_up(drafter, requests, seconds)

    def forget(self, request_id: str) -> None:
        for estimate in self._acceptance.values():
            estimate.forget(request_id)
        for word in self._promises.values():
            word.forget(request_id)
        self._guard.forget(request_id)

    # --- reasons

    def _decide_offers(
        self, step: Step, offers: Sequence[Offer], found: Mapping[str, Candidate], chosen: Candidate
    ) -> None:
        requests = step.load.requests
        plain_s, row = step.seconds(requests, is_tree=False), self.costs.row(requests)
        is_drafted = chosen.offer in offers
        self.expected_gain = chosen.rate / requests * plain_s if is_drafted or step.free_nodes else 1.0
        for one in offers:
            if (best := found.get(one.drafter)) is not None:
                nodes, levels = (chosen.nodes, chosen.levels) if chosen.offer is one else (0, 0)
                gain = best.rate / requests * plain_s
                self._decided[one.drafter] = Decision(requests, nodes, gain, best.guess_s / plain_s, levels, row)

    def gain(self, request_id: str) -> Gain:
        return self._guard.gain(request_id)

    def gains(self) -> dict[str, float]:
        return self._guard.gains()

    def decision(self, drafter: str) -> Decision | None:
        return self._decided.get(drafter)

    def words(self, drafter: str, decision: Decision, *, shared: bool = True) -> str:
        estimate = self._acceptance.get(drafter) if shared else None
        return decision.text(drafter, estimate.told() if estimate else "", self._min_gain, shared=shared)

    def why_off(self, drafter: str) -> str | None:
        return self._guard.why(drafter, self._requests)

    def reasons(self) -> dict[str, str]:
        decided = list(self._decided.items())
        return {name: self.why_off(name) or self.words(name, decision) for name, decision in decided}

    def assume(self, drafter: str, chances: Acceptance) -> None:
        """Replace a drafter's estimates."""
        self._acceptance[drafter] = chances
