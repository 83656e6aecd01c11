"""Many requests for whom nothing pays: what it costs to find out again and again must hardly be seen.

Costs are those of an H200 with a 7B-class model: a pass over 64 rows takes 4.9 ms, one over 128 8.2, one over 256 11.9.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from queueing import Echo, First, Letters, Queue
from slipstream import SamplingParams
from slipstream.core.draft import Tree
from slipstream.plan.adaptive import AdaptivePlanner
from slipstream.plan.catching_up import CatchUps, margin_for
from slipstream.plan.cost import PassCost
from slipstream.plan.gains import Turn
from slipstream.plan.hopes import Hopes
from slipstream.plan.measured import Curve, DraftSeen, MeasuredCosts
from slipstream.plan.planner import Levels
from slipstream.plan.probes import Probes
from slipstream.plan.rest import PlanRest
from slipstream.plan.traits import Traits
from slipstream.plan.waits import CrowdWaits

PASSES = Curve((1, 16, 64, 96, 128, 192, 256), (3.8e-3, 4.1e-3, 4.9e-3, 6.6e-3, 8.2e-3, 10.2e-3, 11.9e-3))
SMALL = (DraftSeen(1, Curve((1, 5), (0.1e-3, 0.45e-3))), DraftSeen(64, Curve((1, 5), (0.35e-3, 1.7e-3))))
HEAD = (DraftSeen(1, Curve((1, 6), (0.3e-3, 1.4e-3))), DraftSeen(64, Curve((1, 6), (2.8e-3, 16e-3))))
LEVELS = [Levels(1, 8), Levels(2, 24), Levels(4, 63), Levels(6, 63)]


def new_planner() -> AdaptivePlanner:
    planner = AdaptivePlanner(PassCost(0.001))
    planner.pad_passes()
    planner.limit_rows(256)
    planner.adopt(MeasuredCosts(PASSES, drafts={"small": SMALL, "head": HEAD}))
    return planner


def pass_s(rows: int) -> float:
    return float(PASSES.at(np.array([float(PassCost.filled(rows))]))[0])


def catch_up_s(requests: int) -> float:
    return 1.5e-3 + 0.3e-3 * requests


class Crowd:
    """Rounds of so many requests with a draft model and a head, whose guesses are right with such chances."""

    def __init__(self, requests: int, **right: float) -> None:
        self.planner, self.right = new_planner(), right
        self.ids = [str(i) for i in range(requests)]
        for name in self.ids:
            self.planner.start(name, Traits())
        self.dice = np.random.default_rng(1)
        self.behind: dict[str, set[str]] = {"small": set(), "head": set()}  # requests of which each missed something
        self.rounds = 0
        self.planned = 0  # plans of a drafter
        self.tokens, self.seconds = 0, 0.0
        self.drafted: list[dict[str, int]] = []  # by round: nodes of each drafter

    def play(self, rounds: int) -> float:
        """How fast they are by plain rounds."""
        self.tokens, self.seconds = 0, 0.0
        for _ in range(rounds):
            self._round()
        return self.tokens / self.seconds / (len(self.ids) / pass_s(len(self.ids)))

    def _round(self) -> None:
        planner, ids, rows = self.planner, self.ids, len(self.ids)
        self.rounds += 1
        if self.rounds % 2 == 0:  # one ends, and another takes its place
            planner.forget(ids.pop(0))
            ids.append(f"later {self.rounds}")
            planner.start(ids[-1], Traits())
            for name, behind in self.behind.items():
                behind.intersection_update(ids)
                if planner.leaves(name):
                    behind.add(ids[-1])
        planner.next_round(rows, 300 * rows)
        nodes, plans = [0] * rows, dict[str, tuple[list[int], int]]()
        if not planner.idles(rows):
            for name in ("small", "head"):
                if planner.asks(name, rows):
                    self.planned += 1
                    planner.lag(name, self.behind[name])
                    caps = [max(0, 256 // rows - 1)] * rows
                    if name == "small":
                        plans[name] = planner.budget(name, ids, [min(5, cap) for cap in caps], rows), 0
                    else:
                        grown = planner.budget_trees(name, ids, caps, rows, levels=LEVELS)
                        plans[name] = grown.nodes, grown.levels
        took = 0.0
        for name in ("small", "head"):
            granted, deep = plans.get(name, ([0] * rows, 0))
            if not any(granted):
                self.behind[name] = set(ids)
                continue
            lagging = {request_id for request_id, count in zip(ids, granted, strict=True) if count} & self.behind[name]
            if lagging:
                took += catch_up_s(len(lagging))
                planner.observe_catch_up(name, len(lagging), catch_up_s(len(lagging)))
            self.behind[name] -= lagging
            size = deep or max(granted)
            draft_s = float(planner.costs._of(name)._usual(64 if rows > 16 else 1, size)[-1])
            took += draft_s
            planner.observe_draft(name, size, draft_s, rows, is_tree=bool(deep))
            for i, count in enumerate(granted):
                nodes[i] += count
                depth = min(count, deep or count)
                right = int(np.argmin(np.append(self.dice.random(depth) < self.right[name], False)))
                planner.observe(name, ids[i], depth, right)
                self.tokens += right
        verify_s = pass_s(rows + sum(nodes))
        planner.observe_pass(PassCost.filled(rows + sum(nodes)), verify_s)
        self.tokens += rows
        self.seconds += took + verify_s
        self.drafted.append({name: sum(granted) for name, (granted, _) in plans.items()})


@pytest.mark.parametrize("right", [0.0, 0.3, 0.5])
def test_where_nothing_pays_for_64_hardly_anything_is_lost(right: float) -> None:
    crowd = Crowd(64, small=right, head=right)
    crowd.play(60)
    assert crowd.play(2000) > 0.985


def test_there_plans_are_made_for_one_drafter_in_every_fourth_round() -> None:
    crowd = Crowd(64, small=0.0, head=0.0)
    crowd.play(60)
    crowd.planned = 0
    crowd.play(400)
    assert 90 <= crowd.planned <= 115
    alone = Crowd(4, small=0.0, head=0.0)
    alone.play(100)
    assert alone.planned > 190, "a plan for few takes no time"


def test_a_draft_that_begins_to_pay_is_found() -> None:
    crowd = Crowd(64, small=0.2, head=0.2)
    crowd.play(300)
    crowd.right = {"small": 0.95, "head": 0.2}
    crowd.play(2500)
    assert crowd.play(200) > 1.2
    assert crowd.planned > 400, "who drafts is planned in every round"


def test_what_could_not_pay_is_not_probed() -> None:
    """The head takes 8 ms for what could bring three tokens more in a pass of 12 ms."""
    crowd = Crowd(64, small=0.0, head=1.0)
    crowd.play(60)
    crowd.drafted.clear()
    crowd.play(1500)
    assert not any(plan.get("head") for plan in crowd.drafted)
    assert 1 < sum(bool(plan.get("small")) for plan in crowd.drafted) < 20


def test_a_probe_among_many_makes_the_pass_one_size_larger() -> None:
    crowd = Crowd(64, small=0.0, head=0.0)
    crowd.play(1500)
    late = [nodes for plan in crowd.drafted[100:] for nodes in plan.values() if nodes]
    assert late
    assert max(late) <= 32


def test_hope_is_a_matter_of_what_passes_and_guesses_cost() -> None:
    cost = PassCost(0.001)
    cost.padded = True
    hopes = Hopes(cost, 1.02)
    hopes.most_rows = 256
    slow = np.full(4, 50e-3)
    assert hopes.any("slow", 64, slow, 0), "nothing is known yet"
    cost.adopt(PASSES)
    assert hopes.any("slow", 64, slow, Hopes.HOLDS - 1), "what was found out holds for a while"
    assert not hopes.any("slow", 64, slow, Hopes.HOLDS)
    assert hopes.any("free", 64, np.zeros(4), 0)
    assert hopes.any("slow", 1, np.full(64, 10e-3), 0), "one request has many tokens to win"
    assert not hopes.any("late", 64, np.array([0.0, 8e-3, 8e-3, 8e-3]), 0)


def test_one_whose_probes_cost_much_is_probed_more_rarely() -> None:
    def probed(lost: float, others: int = 0, rounds: int = 3000, could_pay: bool = True) -> int:
        probes, found = Probes(PassCost(0.001)), 0
        for now in range(rounds):
            for other in range(others):
                probes.due(str(other), lost, lambda: True, now=now)
            found += probes.due("one", lost, lambda: could_pay, now=now)
        return found

    assert probed(0.01) > probed(5.0) > 0
    assert probed(2.0) * 2.0 <= 0.011 * 3000
    assert probed(2.0, others=1) <= probed(2.0) // 2 + 1, "they share what may be lost"
    assert probed(0.01, could_pay=False) == 0
    assert probed(0.01, rounds=Hopes.RARELY, could_pay=False) == 1, "costs may have been wrong"


def test_waits_are_known_by_crowd() -> None:
    waits = CrowdWaits()
    waits.of(1).observe(0.5e-3)
    assert waits.of(2).seconds == 0.5e-3, "the nearest that is known"
    waits.of(64).observe(4e-3)
    assert waits.of(40) is waits.of(64)
    assert waits.of(32).seconds == 4e-3
    assert waits.of(1).seconds == 0.5e-3


def test_who_has_something_to_say_is_waited_for_again() -> None:
    waits = CrowdWaits().of(4)
    waits.observe(3e-3)
    while not waits.until:
        waits.weigh(0.6, 1.0, 5e-3, 10, 4)
    assert waits.rests(11, 4)
    waits.wake(11)
    assert not waits.rests(11, 4)
    assert waits.failed == 1


def test_a_wait_that_nothing_could_make_good_is_not_tried_again() -> None:
    planner = new_planner()
    ids = [str(i) for i in range(64)]
    asked = 0
    for _ in range(600):
        planner.next_round(64, 64 * 300)
        if not planner.rests("host", 64):
            asked += 1
            planner.trim("host", ids, [Tree.chain([1, 2, 3])] * 64, [[0.9, 0.8, 0.7]] * 64, 64)
            planner.observe_wait("host", 8e-3)
        planner.observe_pass(64, pass_s(64))
    assert asked == 1


def test_what_catching_up_takes_is_asked_of_whoever_begins_again() -> None:
    catch_ups = CatchUps()
    assert catch_ups.seconds("one", 4, 4e-3) == 0.0, "rounds that are not queued have nothing to read"
    catch_ups.assumes = True
    assert 2e-3 < catch_ups.seconds("one", 1, 4e-3) < 4e-3 < 20e-3 < catch_ups.seconds("one", 64, 4e-3)
    for seconds in (4e-3, 900e-3, 4e-3):
        catch_ups.observe("one", 4, seconds)
    assert catch_ups.seconds("one", 4, 4e-3) == 4e-3, "a hiccup is forgotten"
    assert 20e-3 < catch_ups.seconds("one", 64, 4e-3) < 40e-3, "of more there is more to read"
    assert catch_ups.seconds("one", 5, 4e-3) == pytest.approx(4e-3 * (0.5 + 5 / 12) / (0.5 + 4 / 12))
    assert catch_ups.seconds("one", 1, 4e-3) < 4e-3
    assert margin_for(4e-3, 16, 4e-3) == pytest.approx(1 + 1 / 32)
    assert margin_for(4e-3, 64, 4e-3) == pytest.approx(1 + 1 / 128), "texts of many change less together"
    assert margin_for(10.0, 16, 4e-3) < 1.2


def test_a_drafter_that_nobody_has_any_more_keeps_no_turn() -> None:
    rest = PlanRest()
    rest.plan("gone")
    asked = set()
    for _ in range(200):
        rest.next_round(64, drafts=False)
        if not rest.idles(64):
            for name in ("one", "two"):
                if rest.asks(name, 64):
                    rest.plan(name)
                    asked.add((rest._now, name))
    late = [name for now, name in sorted(asked) if now > 100]
    assert late.count("one") == pytest.approx(late.count("two"), abs=1)
    assert len(late) > 20


class Counting(AdaptivePlanner):
    """Counts its plans; whatever is seen, passes cost what they do on a GPU."""

    def __init__(self) -> None:
        super().__init__(PassCost(0.001))
        self.adopt(MeasuredCosts(PASSES, drafts={"echo": HEAD, "first": HEAD}))
        self.budgets = 0

    def observe_pass(self, rows: int, *_: Any, is_tree: bool = False) -> None:
        super().observe_pass(rows, pass_s(rows))

    def budget(self, *args: Any, **options: Any) -> list[int]:
        self.budgets += 1
        return super().budget(*args, **options)


def test_an_engine_with_many_requests_plans_in_few_rounds_and_says_the_same(tiny_target: Path) -> None:
    """Also where a drafter on the host rests: its rounds are queued as plain ones are."""
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    answers = []
    for drafter in ([Echo(), First(), Letters()], None):
        bench = Queue(tiny_target, drafter, max_num_seqs=16, max_draft_rows=64)
        planner = Counting()
        if drafter:
            planner.pad_passes()
            planner.rests = lambda *_: True  # type: ignore[method-assign]
            bench.engine.drafting.planner = planner
        heard = [bench.add([i, 7, 7 + i], params)[1] for i in range(16)]
        bench.drain()
        answers.append([one[-1].outputs[0].token_ids for one in heard])
        if drafter:
            stats = heard[0][-1].outputs[0].speculation
            assert 0 < planner.budgets < 60
            assert stats.of("echo").declined >= 40
    assert answers[0] == answers[1]


@pytest.mark.parametrize("who", ["small", "host"])
def test_a_round_of_comparison_is_one_round(who: str) -> None:
    """Nothing is drafted in it, and that is no reason to rest, nor to ask of anybody that it first catch up."""
    planner, rows = new_planner(), 16
    ids = [str(i) for i in range(rows)]
    for name in ids:
        planner.start(name, Traits())
    silent: list[bool] = []
    for _ in range(1200):
        planner.next_round(rows, 300 * rows)
        nodes = [0] * rows
        if not planner.idles(rows) and planner.asks(who, rows) and planner.speculates(ids[0], (who,)):
            if who == "small":
                nodes = planner.budget(who, ids, [5] * rows, rows)
            else:
                promises = [[0.8, 0.7, 0.6]] * rows
                trees = planner.trim(who, ids, [Tree.chain([1, 2, 3])] * rows, promises, rows)
                nodes = [len(tree.tokens) for tree in trees]
        seconds = pass_s(rows + sum(nodes))
        planner.observe_pass(PassCost.filled(rows + sum(nodes)), seconds)
        for name, drafted in zip(ids, nodes, strict=True):
            planner.observe(who, name, drafted, min(drafted, 2))
        turns = [Turn(name, n, 1 + min(n, 2), (who,) if n else ()) for name, n in zip(ids, nodes, strict=True)]
        planner.observe_round(turns, seconds + 0.5e-3 * any(nodes), 300 * rows)
        silent.append(not any(nodes))
    later = "".join("-" if one else "d" for one in silent[100:])
    assert "-" in later
    assert "--" not in later
