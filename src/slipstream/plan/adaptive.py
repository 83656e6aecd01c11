"""The plan that pays, by what was measured.

More rows make the pass dearer; each node brings its chance of acceptance. The plan takes the nodes that raise the
expected tokens per second of the whole batch, and none where none does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from slipstream.plan.catching_up import margin_for
from slipstream.plan.cost import PassCost
from slipstream.plan.decisions import Decision
from slipstream.plan.dips import LONG
from slipstream.plan.floor import HostFloor
from slipstream.plan.gains import NO_WAIT, Turn, Waited, guessers
from slipstream.plan.kept import Foretold, KeptPromises
from slipstream.plan.measured import Load
from slipstream.plan.others import Others, others_of
from slipstream.plan.planner import Beside, Levels, TreeBudget, TreeSeen
from slipstream.plan.probing import PROBED, Chosen, ProbingPlanner
from slipstream.plan.traits import Traits
from slipstream.plan.trees import TreeChoices, explores, probe_of, tree_choices

_COMPARE = 4
"""Every so many rounds nothing is drafted, where no undrafted round of as many requests was seen lately; and in all of
them but one, once, where a device may wait for the host in such rounds as well."""

_FIRST = 1
"""Nodes for a request, of a drafter of which nobody knows how long it takes."""

_RECKON = 2
"""Every so many rounds that wait for others it is reckoned what a drafter would bring if nobody was waited for."""

_Brought = tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.float64]]
"""What sizes bring, as in `_paying`: tokens [K + 1, B] for rows [K + 1, B] in seconds [K + 1]."""


class _Aside(NamedTuple):
    """What was decided for device drafters of a round that has not begun."""

    guessing: tuple[str, ...] = ()
    hoped: float = 1.0


class AdaptivePlanner(ProbingPlanner):
    """Drafts what pays by what was measured, and probes now and then whether it has begun to."""

    exclusive = True
    foresees = True

    def __init__(self, cost: PassCost, *, min_gain: float = 1.0) -> None:
        super().__init__(cost, min_gain)
        self._plain_round = False  # nothing is drafted in this round, so that there is something to compare with
        self._grown: dict[str, int] = {}  # how often drafters were planned that make trees
        self._promises = KeptPromises()
        self._floor = HostFloor()
        self._supposed: tuple[str, ...] = ()  # who is supposed to guess on the host in a round that is planned ahead
        self._aside = _Aside()  # what was planned of it

    def start(self, request_id: str, traits: Traits) -> None:
        for asking in self._asking.values():
            asking.newcomer(len(self._traits))
        self._traits[request_id] = traits
        self._gains.start(request_id, traits)

    def speculates(self, request_id: str, drafters: tuple[str, ...] = ()) -> bool:
        return not self._plain_round and self.allows(request_id, self._rivals.company(drafters))

    @property
    def silences(self) -> bool:
        return self._plain_round or self._gains.silences

    def pad_passes(self) -> None:
        super().pad_passes()
        self.costs.pad_passes()
        self._gains.hiccups = True
        self._cost.context.per_row = False  # rows of a request share what is read of its context

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
        paths = self._estimate(drafter, takes_time=True).paths(request_ids, deepest)
        chances = np.where(depths[1:] <= np.array(caps), paths, 0)

        def brought(part: NDArray[np.float64] | float) -> NDArray[np.float64]:  # [K + 1, B]
            """By so much of what is right; the rest others have right as well."""
            return np.concatenate((np.zeros((1, len(caps))), (chances * part).cumsum(0)))

        draft_s = np.concatenate(([0.0], self.costs.guess_curve(drafter, deepest, rows)))
        gained = brought(1 - others.right[1:])
        chosen = self._paying(
            drafter, request_ids, rows, others, gained, drafted, draft_s, lambda: (brought(1.0), drafted, draft_s)
        )
        few = min(max(PROBED, chosen.wanted), deepest)
        small = Chosen(few, 0, chosen.members, float(draft_s[few]))
        chosen = self._or_probe(drafter, request_ids, caps, rows, chosen, small, draft_s)
        return self._granted(drafter, chosen, caps)

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
        chances = self._estimate(drafter, takes_time=True).paths(request_ids, deepest)  # [L, B]
        ranks = self._ranks_of(drafter)
        sizes = self._sizes.choices(drafter, most)[1:] if self._cost.padded else range(1, most + 1)
        level_s = np.concatenate(([0.0], self.costs.guess_curve(drafter, deepest, rows)))

        def choices(right: NDArray[np.float64]) -> TreeChoices:
            return tree_choices(sizes, levels, caps, right, ranks.kept(levels[-1].nodes))

        def alone() -> _Brought:
            every = choices(chances)
            return every.gained, every.drafted, level_s[every.levels]

        trees = choices(chances * (1 - others.right[1:]))
        parts = trees.gained, trees.drafted, level_s[trees.levels], alone, trees
        chosen = self._paying(drafter, request_ids, rows, others, *parts)
        deep, nodes = probe_of(levels, most if chosen.has_turn else (most + 1) // 2)  # the other one needs room, too
        small = Chosen(nodes, deep, chosen.members, float(level_s[deep]))
        chosen = self._or_probe(drafter, request_ids, caps, rows, chosen, small, level_s)
        granted = self._granted(drafter, chosen, caps)
        if any(granted):
            self._sizes.plan(rows, sum(granted), chosen.levels)
        return TreeBudget(granted, chosen.levels or deep)

    def _paying(
        self,
        drafter: str,
        request_ids: Sequence[str],
        rows: int,
        others: Others,
        gained: NDArray[np.float64],  # [K + 1, B]
        drafted: NDArray[np.int64],  # [K + 1, B]
        draft_s: NDArray[np.float64],  # [K + 1]
        alone: Callable[[], _Brought],  # the same three, if nobody else guessed
        trees: TreeChoices | None = None,
    ) -> Chosen:
        """Which size, 0 to K, or which of the trees, brings most tokens a second, and for whom: each brings `gained`,
        adds `drafted` rows, and takes `draft_s`, for however many. Those of whom most is expected come first, if they
        pay for their rows. 0 unless another is clearly better, or was until now (`patience.py`); of captured sizes the
        last, unless another is.
        """
        brought, known = rows + others.right.sum(), rows + others.nodes
        order = np.argsort(-gained[-1], kind="stable")  # [B]
        tokens, nodes = gained[:, order].cumsum(1), drafted[:, order].cumsum(1)  # [K + 1, B]: of the first 1, 2, …
        curve = self._cost.curve if trees is None else self.costs.tree_curve
        pass_s = curve(known, known + int(nodes[-1, -1]))[nodes]
        if not others.nodes:
            pass_s[1:] += self._extras.seconds(rows)
        tokens = brought + tokens
        round_s = pass_s + draft_s[:, None]
        if not others.nodes:
            for part, has_nodes in ((slice(1), False), (slice(1, None), True)):
                round_s[part] = np.maximum(round_s[part], self._floor.seconds(rows, has_nodes, self._rounds))
        whole_s = round_s + self._reads.seconds(rows, tokens)
        rates = tokens / whole_s
        rate, counts = rates.max(1), rates.argmax(1)  # [K + 1]; counts: of requests, less one
        rate[0], counts[0] = rates[0, 0], 0
        speed = float(rate.max() / rate[0])
        plain_s, best = float(pass_s[0, 0]), int(rate.argmax())
        behind = self._behind(drafter, request_ids)[order].cumsum()[counts]  # [K + 1]: of those who would get any
        late = int(behind[best])
        catch_up_s = self._catch_ups.seconds(drafter, late, plain_s) if late else 0.0
        margin = margin_for(catch_up_s, rows, plain_s)
        speed /= margin
        speed *= self._promises.kept(drafter, rows)
        beside, is_dip = bool(others.nodes), self._is_dip(rows)
        if is_dip:  # what is promised for few is no reason to change
            has_turn = not self._rivals.waits(drafter, self._dips.usual, self._rounds)
        else:
            has_turn = self._rivals.has_turn(
                drafter,
                request_ids,
                rows,
                speed,
                self._rounds,
                beside=beside,
                untried=self._estimate(drafter).untried([request_ids[i] for i in order[: counts[best] + 1]]),
                loses=self._trial_loses(drafter, rows, late, float(draft_s[best]), plain_s),
            )
        size = 0
        if has_turn:
            asked = self._asked(drafter, rows, margin)
            size = self._size(drafter, rows, rate, asked, trees)
            if not beside and self._cost.padded and drafter not in self._hosts:
                won_s = whole_s[np.arange(len(rate)), counts] * (rate / rate[0] / asked - 1)  # [K + 1]
                size = self._or_patient(drafter, rows, size, won_s, behind, trees)
        if has_turn and not (size or beside or is_dip):  # free guesses may leave nothing to win
            self._rivals.decline(drafter, rows, self._rounds)

        def gain(size: int) -> float:
            """Of rounds without prompts beside them, which is what is measured."""
            at = size, counts[size]
            return float(tokens[at] / tokens[0, 0] * round_s[0, 0] / round_s[at])

        shown = size or int(rate.argmax())
        guess = float(draft_s[shown or 1] / pass_s[0, 0])  # where none is the best, of the smallest
        most, deep = (size, 0) if trees is None else (trees.nodes[size], trees.levels[size])
        self._decide(drafter, Decision(rows, most, gain(shown), guess, deep))
        count = int(counts[size])
        if size:
            total = int(nodes[size, count]) + others.nodes
            foretold = Foretold(float(tokens[size, count]), float(round_s[size, count]), total)
            self._promises.foretell(drafter, rows, foretold)
        if has_turn and drafter not in self._hosts:  # it guesses on the device
            if not others.nodes:
                self._hear_alone(rows, gain(size))
            elif self._rounds % _RECKON == 0:
                self._suppose_alone(rows, curve, *alone())
        if not has_turn:
            wanted = max(self._sizes.choices(drafter, len(rate) - 1), key=rate.__getitem__) if trees is None else 0
            return self._of_rival(drafter, rows, order, wanted)
        if size or trees is not None:  # a tree that nearly pays may have a shape that is new
            return Chosen(most, deep, order[: count + 1] if size else order)
        lost_s = whole_s[:, -1] * (1 - rates[:, -1] / rate[0])  # [K + 1]: with guesses for all of them
        sizes = self._sizes.choices(drafter, len(rate) - 1)[1:]
        return Chosen(0, 0, order, trials=tuple(Chosen(nodes, 0, order, float(lost_s[nodes])) for nodes in sizes))

    def _size(
        self,
        drafter: str,
        rows: int,
        rate: NDArray[np.float64],  # [K + 1]
        asked: float,  # times the first of them
        trees: TreeChoices | None,
    ) -> int:
        if not self._cost.padded:
            best = int(rate.argmax())
        elif trees is None:
            best = self._sizes.best(drafter, rate)
        else:
            best = self._sizes.best_tree(drafter, rate, trees.nodes, trees.levels)
        if rate[best] <= rate[0] * asked:
            return 0
        if trees is None:
            return best
        self._grown[drafter] = self._grown.get(drafter, 0) + 1
        if not explores(self._grown[drafter]):
            return best
        nodes = trees.drafted.sum(1).tolist()  # [C]
        old = [self._sizes.planned(rows, *pair) for pair in zip(nodes, trees.levels, strict=True)]
        return trees.larger(best, rate, old if self._cost.padded else None)

    def next_round(self, requests: int = 0, context: int = 0, running: int = 0) -> None:
        self._rounds += 1
        self._dips.next_round(requests, running)
        self.costs.at(Load(requests, context))
        self._gains.next_round(requests or 1)
        if not self._plain_round:  # who had to be silent for a round of comparison misses no more than its tokens
            self._busy = self._granting
        self._granting = set()
        drafts = bool(self._guessing or self._busy or self._sampling or self._plain_round)
        self._rest.next_round(requests, drafts=drafts)
        self._sampling = set()
        for estimate in self._acceptance.values():
            estimate.next_round()
        self._guessed_s, self._hoped, self._guessing = 0.0, 1.0, ()
        turn = self._rounds % _COMPARE
        lacks_plain = turn == 2 and self._gains.lacks_plain(requests)
        self._plain_round = requests > 0 and (lacks_plain or (turn > 0 and self._gains.lacks_idle(requests)))
        if self._plain_round:
            self._gains.ask_plain(requests)

    def suppose(self, drafters: Sequence[str]) -> None:
        self._guessing = self._supposed = tuple(drafters)

    def put_aside(self) -> None:
        theirs = tuple([name for name in self._guessing if name not in self._supposed])
        self._aside = _Aside(theirs, self._hoped)
        self._guessing, self._hoped = (), 1.0

    def go_on(self) -> None:
        others = [name for name in self._aside.guessing if name not in self._guessing]
        self._guessing, self._hoped = (*self._guessing, *others), max(self._hoped, self._aside.hoped)

    def plan_again(self) -> None:
        self._granting, self._sampling = set(), set()

    def skip_round(self) -> None:
        self._granting, self._sampling = self._busy, set()

    def leaves(self, drafter: str) -> bool:
        return self._cost.padded and self._rest.leaves(drafter)

    def idles(self, requests: int) -> bool:
        return self._cost.padded and self._rest.idles(requests)

    def asks(self, drafter: str, rows: int) -> bool:
        if not super().asks(drafter, rows):
            return False
        if not self._cost.padded:
            return True
        if not self._rest.asks(drafter, rows):
            return False
        if self._dips.is_dip(rows) and self._rounds - self._last_granted.get(drafter, self._rounds) > LONG:
            return False  # nobody is woken for a dip
        if self._is_dip(rows):
            return not self._rivals.waits(drafter, self._dips.usual, self._rounds)
        return not self._busy or self._rivals.asks(drafter, rows, self._rounds)

    def _is_dip(self, rows: int) -> bool:
        """Is it one in which somebody has the turn?"""
        return self._dips.is_dip(rows) and self._rivals.whose(self._dips.usual, self._rounds) is not None

    def observe_round(
        self,
        turns: Sequence[Turn],
        seconds: float,
        context: int = 0,
        beyond_s: float | None = None,
        waited: Waited = NO_WAIT,
        hoped: float | None = None,
        ready_s: float = 0.0,
    ) -> None:
        hoped = self._hoped if hoped is None else hoped
        rows, nodes = len(turns), sum([turn.drafted for turn in turns])
        if beyond_s is not None and turns:
            self._extras.observe(rows, nodes > 0, beyond_s - self._guessed_s)
        if nodes:
            emitted, who = sum([turn.emitted for turn in turns]), guessers(turns)
            self._promises.observe(who, rows, emitted, seconds - waited.seconds, nodes)
            if seconds > 0 and self._hosts.isdisjoint(who) and not waited.drafters:
                self._hear_brought(rows, emitted / rows * self._cost.seconds(rows) / seconds)
        if turns and ready_s and self._cost.padded:
            self._floor.observe(rows, nodes > 0, ready_s, self._rounds)
        usual = self._cost.seconds(rows + nodes) / self._cost.seconds(rows) if nodes else 1.0
        is_probe = self._cost.padded and hoped <= 1
        self._gains.observe(turns, seconds, hoped, context, usual, waited, is_probe=is_probe)

    def observe_plain(self, load: Load, seconds: float, waited: Waited) -> None:
        self._gains.observe_plain(load, seconds, waited)

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
            self._unsent.drop(drafter, request_id)
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
