"""The plan of a step: which drafter guesses for each request, and how far. It changes speed only, never tokens.

The rule: tokens per second = expected tokens / cost of the step. Of all drafters and sizes, none included, the planner
takes what has the highest rate. A choice changes where another is better by a margin; a guard shuts what loses by
measured time; a small budget tries what is not used.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

import numpy as np

from slipstream.core.draft import Tree
from slipstream.plan import choose
from slipstream.plan.acceptance import DEPTHS, Acceptance, Ease, Promises
from slipstream.plan.choose import Candidate, Free, Ranked
from slipstream.plan.cost import Costs
from slipstream.plan.guard import HORIZON, Guard
from slipstream.plan.probe import MEMBERS, Probes
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
"""By how many times another choice must be faster than the last one: estimates are no better than that."""

_NOTHING = Tree()
_LEAST_NODES = 16  # that are thought of when it is asked which chance may pay


class Planner:
    """What the engine asks of a planner. This one drafts as much as may be: for measurements and tests.

    In each step the engine calls `asks` for each host drafter, `trim` with the guesses of each, `plan` once, and later
    `observe` for each draft and `observe_step`.
    """

    exclusive = False  # True: of the drafters that are offered, one guesses for a request

    expected_gain = 1.0
    """How many times as fast as plain decoding the step that was planned last is to be; 1: nothing pays in it."""

    def adopt(self, measured: MeasuredCosts) -> None:
        """These costs were measured before the first request."""

    def pad_passes(self) -> None:
        """Passes come in a few sizes only, and are filled up to the next one."""

    @property
    def compares(self) -> bool:
        """Does the step that comes go without drafts, so that there is something to compare others with?"""
        return False

    def asks(self, drafter: str, requests: int) -> bool:
        """Is a host drafter asked in the step that comes, with so many requests? A device waits for it meanwhile."""
        return True

    def least_chance(self, requests: int) -> float:
        """The chance of a guess below which it is of no use in this step; 0: any may be."""
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
        """What to keep of guesses that are there already. whole: each tree as it is, or not at all."""
        return list(trees)

    def plan(self, offers: Sequence[Offer], load: Load) -> list[Budget]:
        """How far each of these drafters, whose guesses take time, goes in this step."""
        return [Budget(list(one.caps), one.levels[-1].deep if one.levels else 0) for one in offers]

    def follows(self, drafter: str) -> bool:
        """Are the prompts of new requests read for it? Else it reads them when it is to guess."""
        return True

    def observe(self, drafter: str, request_id: str, drafted: int, accepted: int, tree: TreeSeen | None = None) -> None:
        """What became of one request's draft: how deep it was, and how far right. tree: None: it was a chain."""

    def observe_step(self, step: StepSeen) -> None:
        """What a step took and brought."""

    def observe_draft(self, drafter: str, size: int, seconds: float, requests: int) -> None:
        """A drafter took so long to guess `size` nodes, or levels of a tree, for each of these requests."""

    def observe_wait(self, drafter: str, requests: int, seconds: float) -> None:
        """To ask a host drafter took so long, in a step of these requests."""

    def observe_catch_up(self, drafter: str, requests: int, seconds: float) -> None:
        """A drafter first read what it had missed of so many requests, and the step took so much longer."""

    def forget(self, request_id: str) -> None:
        """The request ended."""

    def gain(self, request_id: str) -> Gain:
        """What was measured for a request."""
        return Gain()

    def gains(self) -> dict[str, float]:
        """How many times as fast as plain steps drafted ones were of late, by drafter and batch size."""
        return {}

    def decision(self, drafter: str) -> Decision | None:
        """The last plan of its guesses; None: there was none."""
        return None

    def words(self, drafter: str, decision: Decision, *, shared: bool = True) -> str:
        """Such a plan, as people read it. shared: with what is known from other requests."""
        return ""

    def why_off(self, drafter: str) -> str | None:
        """Why it may not guess at present; None: it may."""
        return None

    def reasons(self) -> dict[str, str]:
        """By drafter: what was decided last, and why."""
        return {}


class AdaptivePlanner(Planner):
    """Drafts what is expected to be fastest.

    slope: what one more row adds to a pass, as a part of the first one, until passes were seen or measured.
    min_gain: how many times as fast as plain decoding drafts must be.
    """

    exclusive = True

    def __init__(self, slope: float, *, min_gain: float = 1.0) -> None:
        self.costs = Costs(slope)
        self._min_gain = min_gain
        self._guard = Guard(min_gain)
        self._probes = Probes()
        self._ease = Ease()  # of drafters whose guesses take time: what is easy for one is for the others
        self._acceptance: dict[str, Acceptance] = {}
        self._promises: dict[str, Promises] = {}
        self._decided: dict[str, Decision] = {}
        self._step = 0
        self._requests = 1  # of the last step
        self._free: dict[str, list[float]] = {}  # by request: chances by depth of what is verified anyway in this step
        self._free_nodes = 0
        self._asked: set[str] = set()  # host drafters with guesses in this step
        self._worth: dict[tuple[str, int], float] = {}  # by host drafter and bucket: seconds that its guesses save
        self._last: str | None = None  # whose guesses, that take time, were chosen last
        self._sizes: dict[str, tuple[int, int]] = {}  # by drafter: nodes and levels that were chosen last
        self._used: dict[str, int] = {}  # … and in which step

    def adopt(self, measured: MeasuredCosts) -> None:
        self.costs.adopt(measured)

    def pad_passes(self) -> None:
        self.costs.padded = True

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
            return 0.0  # rows that cost nothing pay for anything
        pass_s = self.costs.passes(requests + _LEAST_NODES)[requests:]
        needed = requests * (MARGIN * pass_s[1:] / pass_s[0] - 1) / np.arange(1, _LEAST_NODES + 1)
        return max(0.0, float(needed.min()) / 2)  # chances are not sure, either

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
            taken, left = self._likeliest(drafter, Ranked(trees, chances), requests, trees)
        for name, tree, kept, factor in zip(request_ids, taken, left, factors, strict=True):
            if tree.tokens:
                if factor:
                    word.promise(name, sum(kept) / factor)
                both = zip_longest(choose.by_depth(tree, kept), self._free.get(name, ()), fillvalue=0.0)
                self._free[name] = [max(pair) for pair in both]
                self._free_nodes += len(tree.tokens)
        return taken

    def _likeliest(
        self, drafter: str, ranked: Ranked, requests: int, trees: Sequence[Tree]
    ) -> tuple[list[Tree], list[list[float]]]:
        tokens = ranked.tokens(requests)  # [N + 1]
        pass_s = self.costs.passes(requests + len(tokens) - 1)[requests:]
        rates = tokens / pass_s
        best = int(rates.argmax())
        gain = float(rates[best] / rates[0])
        pays = gain > max(MARGIN, self._min_gain)
        self._decide(drafter, Decision(requests, best if pays else 0, gain, row=self.costs.row(requests)))
        if not pays:
            best = min(2, len(tokens) - 1)
            if not self._probes.spend(drafter, float(pass_s[best] - pass_s[0])):
                return [_NOTHING] * len(trees), [[] for _ in trees]
        return ranked.take(best)

    def _whole(
        self, drafter: str, request_ids: Sequence[str], trees: Sequence[Tree], requests: int
    ) -> tuple[list[Tree], list[list[float]]]:
        """Trees whose nodes are of use later, so that their chances say nothing: by what such trees brought."""
        brought = self._acceptance[drafter].paths(request_ids, DEPTHS).sum(0)  # [B]
        sizes = np.array([len(tree.tokens) for tree in trees])
        order = np.argsort(-brought / np.maximum(sizes, 1) * (sizes > 0), kind="stable")
        order = order[: int((sizes > 0).sum())]
        tokens = np.concatenate(([0.0], brought[order].cumsum())) + requests
        nodes = np.concatenate(([0], sizes[order].cumsum()))
        pass_s = self.costs.passes(requests + int(nodes[-1]))[requests:][nodes]
        rates = tokens / pass_s
        best = int(rates.argmax())
        gain = float(rates[best] / rates[0])
        pays = gain > max(MARGIN, self._min_gain)
        self._decide(drafter, Decision(requests, int(nodes[best]) if pays else 0, gain, row=self.costs.row(requests)))
        if not pays:
            best = len(order) if self._probes.spend(drafter, float(pass_s[-1] - pass_s[0])) else 0
        taken = set(order[:best].tolist())
        left = [tree if i in taken else _NOTHING for i, tree in enumerate(trees)]
        # their chances, as if each node had a part of what the tree brings
        return left, [[part / max(len(tree), 1)] * len(tree) for part, tree in zip(brought.tolist(), left, strict=True)]

    # --- guesses that take time

    def plan(self, offers: Sequence[Offer], load: Load) -> list[Budget]:
        free = Free(self._free_nodes, self._free)
        self.costs.load = load
        budgets = [Budget([0] * len(one.caps)) for one in offers]
        if load.requests and not self._guard.compares:
            tables = self._tables(offers, load, free)
            found = {one.drafter: best for one in offers if (best := self._best(one, tables, load, free)) is not None}
            zero = self._without(tables, load, free)
            chosen = self._chosen(list(found.values()), zero, load)
            self._weigh_hosts(chosen, offers, tables, load, free)
            plain_s = float(tables[False][load.requests])
            for one in offers:
                self._decide_offer(one, found.get(one.drafter), chosen, load, plain_s)
            gain = chosen.rate / load.requests * plain_s
            self.expected_gain = gain if chosen is not zero or free.nodes else 1.0
            for i, one in enumerate(offers):
                if one is chosen.offer:
                    budgets[i] = self._granted(chosen)
                    self._sizes[one.drafter] = chosen.nodes, chosen.levels
            self._last = None if chosen is zero else chosen.offer.drafter
            self._probe(offers, budgets, found, chosen, tables, load, free)
            self._probes.earn(self._unused(offers), chosen.seconds)
        self._end_plan(load)
        return budgets

    def _unused(self, offers: Sequence[Offer]) -> set[str]:
        return {one.drafter for one in offers if one.drafter != self._last} | {name for name, _ in self._worth}

    def _end_plan(self, load: Load) -> None:
        self._step += 1
        self._requests = load.requests or self._requests
        self._guard.next_step(load.requests)
        for estimate in self._acceptance.values():
            estimate.next_step()
        self._free, self._free_nodes, self._asked = {}, 0, set()

    def _tables(self, offers: Sequence[Offer], load: Load, free: Free) -> dict[bool, Floats]:
        """Seconds by rows, of passes that check chains, and trees; with what a step takes to read prompts."""
        most = load.requests + free.nodes + max([sum(one.caps) for one in offers], default=0)
        with_trees = any(one.levels for one in offers)
        kinds = (False, True)[: 1 + with_trees]
        return {is_tree: self.costs.passes(most, is_tree=is_tree) + self.costs.read_s for is_tree in kinds}

    @staticmethod
    def _without(tables: dict[bool, Floats], load: Load, free: Free) -> Candidate:
        """Nothing but the free guesses."""
        seconds = float(tables[False][load.requests + free.nodes])
        return Candidate(_NOBODY, 0, 0, np.zeros(0, np.int64), load.requests + free.tokens, seconds)

    def _best(self, one: Offer, tables: dict[bool, Floats], load: Load, free: Free) -> Candidate | None:
        """The size with the highest rate, or the last one, if that is about as good. None: it may not guess."""
        if not any(one.caps) or self._guard.is_off(one.drafter, load.requests):
            return None
        caps, levels = one.caps, one.levels
        if self.costs.observed and not self.costs.knows_draft(one.drafter):  # one guess tells how long it takes
            caps, levels = [min(most, 1) for most in caps], levels[:1]
        deepest = levels[-1].deep if levels else max(caps)
        estimate = self._estimate(one.drafter, self._ease)
        chances = estimate.paths(one.request_ids, deepest) * (1 - free.right(one.request_ids, deepest))
        if levels:
            sizes = choose.tree_sizes(caps, levels, chances, estimate.ranks.kept())
        else:
            sizes = choose.chain_sizes(caps, chances)
        draft_s = self.costs.drafts(one.drafter, sizes.steps, load.requests)
        late_s = np.array([self.costs.catch_up(one.drafter, late) / HORIZON for late in range(len(one.lagging) + 1)])
        last = self._sizes.get(one.drafter, (0, 0))
        return choose.best_size(one, sizes, draft_s, late_s, tables[bool(levels)], load.requests, free, last, MARGIN)

    @staticmethod
    def _late(one: Offer, members: Sequence[int]) -> int:
        return sum([one.request_ids[i] in one.lagging for i in members])

    def _chosen(self, found: Sequence[Candidate], zero: Candidate, load: Load) -> Candidate:
        """The best of these, or the last choice, if that is about as good."""

        def score(one: Candidate) -> float:
            stays = one.offer.drafter == self._last if one is not zero else self._last is None
            return one.rate * (MARGIN if stays else 1.0) * (self._min_gain if one is zero else 1.0)

        return max([zero, *found], key=score)

    def _granted(self, one: Candidate) -> Budget:
        self._used[one.offer.drafter] = self._step
        nodes = [0] * len(one.offer.caps)
        for i in one.members.tolist():
            nodes[i] = min(one.nodes, one.offer.caps[i])
        return Budget(nodes, one.levels)

    def _weigh_hosts(
        self, chosen: Candidate, offers: Sequence[Offer], tables: dict[bool, Floats], load: Load, free: Free
    ) -> None:
        """What the guesses of host drafters saved in this step: seconds."""
        saved_s = 0.0
        if free.nodes:
            nothing = Free()
            rivals = [chosen.offer] if chosen.offer.drafter else offers  # the others lost with these, too
            found = [best for one in rivals if (best := self._best(one, tables, load, nothing)) is not None]
            without = self._chosen(found, self._without(tables, load, nothing), load)
            saved_s = max(0.0, chosen.tokens / without.rate - chosen.seconds)
        for name in self._asked:
            key = (name, bucket_of(load.requests))
            self._worth[key] = (self._worth.get(key, saved_s) + saved_s) / 2

    def _probe(
        self,
        offers: Sequence[Offer],
        budgets: list[Budget],
        found: dict[str, Candidate],
        chosen: Candidate,
        tables: dict[bool, Floats],
        load: Load,
        free: Free,
    ) -> None:
        """Now and then a drafter that is not chosen guesses for a few requests, in place of the one that is."""
        for i, one in enumerate(offers):
            best = found.get(one.drafter)
            if best is None or one is chosen.offer:
                continue
            able = [j for j, most in enumerate(one.caps) if most]
            able.sort(key=lambda j: one.request_ids[j] in one.lagging)  # of the others there is nothing to read
            ready = len(able) - self._late(one, able)
            pool = able[:ready] if ready >= min(len(able), MEMBERS) else able
            members = [pool[(self._step + j) % len(pool)] for j in range(min(len(pool), MEMBERS))]
            part = len(members) / max(len(best.members), 1)
            whole = len(members) == len(able)
            base_nodes = 0 if chosen.offer is _NOBODY else int(sum(self._granted(chosen).nodes))
            instead = len(members) / max(len(chosen.members), 1) if len(chosen.members) else 0.0
            instead = min(instead, 1.0)
            base_tokens = load.requests + free.tokens
            tokens = chosen.tokens - instead * (chosen.tokens - base_tokens) + part * (best.tokens - base_tokens)
            rows = load.requests + free.nodes + (1 - instead) * base_nodes + len(members) * best.nodes
            pass_s = tables[bool(one.levels)]
            seconds = float(pass_s[min(round(rows), len(pass_s) - 1)]) + best.guess_s
            seconds += 0.0 if whole else chosen.guess_s
            cost_s = seconds - tokens / chosen.rate
            cost_s += self.costs.catch_up(one.drafter, self._late(one, members))
            if not self._probes.spend(one.drafter, max(cost_s, chosen.seconds / 16)):
                continue
            for other, budget in zip(offers, budgets, strict=True):
                taken = {one.request_ids[j] for j in members}
                for j, name in enumerate(other.request_ids):
                    if name in taken:
                        budget.nodes[j] = 0
            nodes = [0] * len(one.caps)
            for j in members:
                nodes[j] = min(best.nodes, one.caps[j])
            budgets[i] = Budget(nodes, best.levels)
            if whole:
                self.expected_gain = 1.0
            return  # one at a time

    def _estimate(self, drafter: str, ease: Ease) -> Acceptance:
        if drafter not in self._acceptance:
            self._acceptance[drafter] = Acceptance(ease)
        return self._acceptance[drafter]

    def follows(self, drafter: str) -> bool:
        return not self.costs.padded or self._step - self._used.get(drafter, 0) <= HORIZON

    # --- what became of it

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

    # --- why

    def _decide(self, drafter: str, decision: Decision) -> None:
        self._decided[drafter] = decision

    def _decide_offer(self, one: Offer, best: Candidate | None, chosen: Candidate, load: Load, plain_s: float) -> None:
        if best is not None:
            nodes, levels = (chosen.nodes, chosen.levels) if chosen.offer is one else (0, 0)
            gain = best.rate / load.requests * plain_s
            row = self.costs.row(load.requests)
            self._decide(one.drafter, Decision(load.requests, nodes, gain, best.guess_s / plain_s, levels, row))

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
        decided = list(self._decided.items())  # any thread may ask
        return {name: self.why_off(name) or self.words(name, decision) for name, decision in decided}

    def assume(self, drafter: str, chances: Acceptance) -> None:
        """Take these to be the chances of its guesses."""
        self._acceptance[drafter] = chances


_NOBODY = Offer("", (), ())
