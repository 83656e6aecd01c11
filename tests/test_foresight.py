"""Plans that are made while the device is at work: the same tokens, and nothing is planned while it waits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from queueing import Echo, Letters
from slipstream.core.draft import Tree
from slipstream.core.verdict import author
from slipstream.drafters.base import DraftRequest
from slipstream.engine.foresight import Foreseen
from slipstream.engine.plans import Gathered, HostGuess
from slipstream.plan.adaptive import AdaptivePlanner
from slipstream.plan.cost import PassCost
from slipstream.plan.decisions import Decision
from stepping import Arrival
from test_draft_ahead import LONG, Bench, Sizes, plain


class Foreseeing(Sizes):
    """Plans ahead. Notes how often it was told of a round, and how often it had to plan one again."""

    foresees = True

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.told, self.again = 0, 0

    def next_round(self, requests: int = 0, context: int = 0, running: int = 0) -> None:
        self.told += 1

    def plan_again(self) -> None:
        self.again += 1


class Fickle(Letters):
    """Guesses in some rounds only."""

    name: ClassVar[str] = "letters"

    def __init__(self, every: int) -> None:
        self.every, self.asked = every, 0

    def propose(self, requests: Sequence[DraftRequest], budget: Sequence[int]) -> Sequence[Tree]:
        self.asked += 1
        return super().propose(requests, budget if self.asked % self.every else [0] * len(budget))


class Silent(Letters):
    name: ClassVar[str] = "letters"

    def propose(self, requests: Sequence[DraftRequest], budget: Sequence[int]) -> Sequence[Tree]:
        return [Tree()] * len(budget)


def begun(model: Path, host: Letters, planner: Foreseeing, **config: Any) -> Bench:
    bench = Bench(model, [host, Echo()], **config)
    bench.engine.drafting.planner = planner
    return bench


class TestWhen:
    def test_nothing_is_planned_between_hearing_and_asking_the_host(
        self, tiny_target: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        order: list[str] = []
        planner = Foreseeing(3)
        bench = begun(tiny_target, Letters(), planner)

        def note(what: str, real: Callable[..., Any]) -> Callable[..., Any]:
            def call(*given: Any) -> Any:
                order.append(what)
                return real(*given)

            return call

        monkeypatch.setattr(Echo, "draft", note("draft", Echo.draft))
        monkeypatch.setattr(Letters, "propose", note("host", Letters.propose))
        monkeypatch.setattr(planner, "budget", note("plan", planner.budget))
        monkeypatch.setattr(bench.queued, "_hear", note("hear", bench.queued._hear))
        bench.add([1, 2, 3], LONG)
        bench.drain()
        # in the first round it is not known yet what the host guesses; in the second it is, and the draft is begun
        assert order[:4] == ["hear", "host", "plan", "draft"]
        assert order[4:16] == ["plan", "draft", "hear", "host"] * 3
        assert planner.again <= 1  # near the end there is room for fewer
        assert bench.wasted == 0

    def test_sizes_that_change_are_begun_all_the_same(self, tiny_target: Path) -> None:
        """Without foresight a draft is begun only where two were alike."""
        planner = Foreseeing(3, 2, 1)
        bench = begun(tiny_target, Letters(), planner)
        arrivals = [Arrival(3, replace(LONG, max_tokens=90)), Arrival(5, replace(LONG, temperature=0, max_tokens=90))]
        assert [answer.token_ids for answer in bench.run(arrivals)] == plain(tiny_target, arrivals)
        assert bench.taken > 20
        assert bench.wasted < 3  # where one of them ends

    def test_a_round_is_told_of_once(self, tiny_target: Path) -> None:
        planner = Foreseeing(2)
        bench = begun(tiny_target, Letters(), planner)
        bench.run([Arrival(3, LONG)])
        rounds = bench.engine.snapshot().rounds
        assert planner.told <= rounds + 1
        assert planner.told - 3 <= planner.rounds <= planner.told  # in the last ones there is no room for drafts


class TestWhatIsOtherwise:
    @pytest.mark.parametrize("every", [2, 5])
    def test_other_guesses_than_the_last_are_planned_for_anew(self, tiny_target: Path, every: int) -> None:
        planner, host = Foreseeing(3), Fickle(every)
        bench = begun(tiny_target, host, planner)
        arrivals = [Arrival(3, replace(LONG, max_tokens=80))]
        assert [answer.token_ids for answer in bench.run(arrivals)] == plain(tiny_target, arrivals)
        changes = host.asked // every * min(2, every)
        assert changes - 3 <= planner.again <= changes + 1
        plans = planner.told + planner.again
        assert plans - 6 <= planner.rounds <= plans  # in the last rounds there is no room for drafts

    def test_those_who_come_and_go(self, tiny_target: Path) -> None:
        planner = Foreseeing(3)
        bench = begun(tiny_target, Letters(), planner, max_num_seqs=4)
        arrivals = [Arrival(3 + i, replace(LONG, seed=i, max_tokens=20 + 9 * i), 9 * i) for i in range(4)]
        assert [answer.token_ids for answer in bench.run(arrivals)] == plain(tiny_target, arrivals)
        assert bench.taken > 20

    def test_a_host_that_has_nothing_to_say_is_foreseen(self, tiny_target: Path) -> None:
        planner = Foreseeing(3)
        bench = begun(tiny_target, Silent(), planner)
        arrivals = [Arrival(3, LONG)]
        assert [answer.token_ids for answer in bench.run(arrivals)] == plain(tiny_target, arrivals)
        assert planner.again == 0
        assert bench.taken > 10

    def test_the_same_is_counted_of_those_who_go_without(self, tiny_target: Path) -> None:
        found = []
        for planner in (Sizes(0, 2, 0), Foreseeing(0, 2, 0)):
            bench = Bench(tiny_target, [Letters(), Echo()])
            bench.engine.drafting.planner = planner
            bench.run([Arrival(3, LONG)])
            found.append(dict(bench.engine.drafting.undrafted))
        assert found[0] == found[1]
        assert found[0]["declined"] > 10

    def test_nothing_is_foreseen_while_drafts_are_off(self, tiny_target: Path) -> None:
        planner = Foreseeing(3)
        bench = begun(tiny_target, Letters(), planner)
        bench.engine.drafting.enabled = False
        assert bench.engine.drafting.foresee([]) is None
        assert planner.told == 0


class TestHolds:
    SAID = HostGuess(Tree.chain([1, 2, 3, 4]), author("suffix"), ("suffix",))

    @pytest.mark.parametrize(
        ("guess", "alike"),
        [
            (SAID, True),
            (HostGuess(Tree.chain([9, 9]), author("suffix"), ("suffix",)), True),
            (HostGuess(Tree.chain([9]), author("suffix"), ("suffix",)), False),
            (HostGuess(Tree.chain([9] * 9), author("suffix"), ("suffix",)), False),
            (HostGuess(Tree.chain([1, 2, 3, 4]), author("ngram"), ("ngram",)), False),
            (HostGuess(), False),
        ],
    )
    def test_the_same_drafters_with_about_as_much_to_say(self, guess: HostGuess, alike: bool) -> None:
        foreseen = Foreseen([], [self.SAID, HostGuess()], {}, ())
        planner = Foreseeing(1)
        assert foreseen.stands(Gathered([guess, HostGuess()]), planner) == alike
        assert planner.again == (not alike)


class TestPlanner:
    """What the planner that learns makes of a plan before its round."""

    def planner(self) -> AdaptivePlanner:
        made = AdaptivePlanner(PassCost(0.001))
        made.next_round(1)
        return made

    def test_who_guessed_in_a_plan_that_was_made_anew_has_nothing_to_catch_up(self) -> None:
        planner = self.planner()
        planner._granting = {"eagle"}
        planner.plan_again()
        planner._granting.add("draft")
        planner.next_round(1)
        assert planner._busy == {"draft"}

    def test_a_round_that_does_not_take_place_changes_nobody_s_turn(self) -> None:
        planner = self.planner()
        planner._granting = {"draft"}
        planner.next_round(1)
        planner._granting = {"eagle"}
        planner.skip_round()
        planner.next_round(2)
        assert planner._busy == {"draft"}

    @pytest.mark.parametrize("stands", [True, False])
    def test_company_is_judged_as_if_the_host_had_been_asked_first(self, stands: bool) -> None:
        planner = self.planner()
        planner.suppose(("suffix",))
        assert planner._with("eagle") == ("suffix", "eagle")
        planner._decide("eagle", Decision(1, 5, 1.8))
        planner.put_aside()
        assert planner._with("suffix") == ("suffix",)
        assert planner._hoped == 1.0
        planner._decide("suffix", Decision(1, 5, 1.4))
        (planner.go_on if stands else planner.plan_again)()
        assert planner._guessing == (("suffix", "eagle") if stands else ("suffix",))
        assert planner._hoped == (1.8 if stands else 1.4)

    def test_in_an_engine_it_changes_no_token(self, tiny_target: Path) -> None:
        bench = Bench(tiny_target, [Fickle(3), Echo()], max_num_seqs=4)
        planner = bench.engine.drafting.planner = AdaptivePlanner(PassCost(0.001))
        planner.pad_passes()
        arrivals = [Arrival(3 + i, replace(LONG, seed=i, max_tokens=20 + 9 * i), 9 * i) for i in range(4)]
        assert [answer.token_ids for answer in bench.run(arrivals)] == plain(tiny_target, arrivals)
        assert planner._acceptance["echo"].known
