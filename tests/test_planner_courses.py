"""What is known of guesses further on, where only first ones are tried, and of those who have not guessed for long."""

from __future__ import annotations

import random

import pytest

from slipstream.plan.acceptance import Acceptance
from slipstream.plan.traits import Traits

IDS = [str(i) for i in range(16)]


def told(estimate: Acceptance, rounds: int, drafted: int, right: float) -> None:
    """Guesses of which such a part is right, for all of them."""
    dice = random.Random(rounds)
    for _ in range(rounds):
        estimate.next_round()
        for request_id in IDS:
            accepted = 0
            while accepted < drafted and dice.random() < right:
                accepted += 1
            estimate.observe(request_id, drafted, accepted)


def second(estimate: Acceptance) -> float:
    """The chance of a second guess, if the first is right."""
    first, both = estimate.paths(["new"], 2).mean(1)
    return float(both / first)


class TestFurtherOn:
    @pytest.mark.parametrize("kinds", [False, True])
    @pytest.mark.parametrize(("before", "now"), [(0.5, 0.85), (0.85, 0.5)])
    def test_second_guesses_follow_the_first_where_only_these_are_tried(
        self, kinds: bool, before: float, now: float
    ) -> None:
        """With many requests one guess each is drafted. Text that has become easier is worth more, and else nobody
        would find out."""
        estimate = Acceptance(dict.fromkeys((*IDS, "new"), Traits()) if kinds else None)
        told(estimate, 40, 4, before)
        assert second(estimate) == pytest.approx(before, abs=0.12)
        told(estimate, 40, 1, now)
        assert second(estimate) == pytest.approx(now, abs=0.12)

    def test_what_is_tried_needs_no_leaning(self) -> None:
        estimate = Acceptance()
        told(estimate, 60, 4, 0.7)
        assert estimate._course.known() == pytest.approx(estimate._course.right, rel=0.15)

    def test_numbers_that_are_brought_down_stay_in_proportion(self) -> None:
        estimate = Acceptance()
        told(estimate, 20, 4, 0.7)
        before = second(estimate)
        for _ in range(2100):  # a weight of 0.99 ** -2062 is brought down
            estimate.next_round()
        assert estimate._course.weight < 1e3
        told(estimate, 3, 1, 0.7)
        assert second(estimate) == pytest.approx(before, abs=0.2)


class TestPauses:
    def rivals(self) -> tuple[Acceptance, Acceptance]:
        one, two = Acceptance(), Acceptance()
        one.peers = two.peers = [one, two]
        return one, two

    def test_who_stopped_when_it_was_least_lucky_is_given_another_chance(self) -> None:
        one, two = self.rivals()
        told(one, 40, 3, 0.8)
        for _ in range(5):
            one.next_round()
            one.observe("0", 3, 0)
        unlucky = one.alpha("0")
        assert unlucky < 0.6
        for _ in range(40):
            one.next_round()
            two.next_round()
            two.observe("0", 3, 3)
        assert one.alpha("0") > unlucky + 0.1

    def test_it_is_believed_for_a_few_rounds(self) -> None:
        one, _ = self.rivals()
        told(one, 20, 3, 0.8)
        known = one.alpha("0")
        for _ in range(4):
            one.next_round()
        assert one.alpha("0") == known

    def test_who_has_no_rival_is_only_known_by_its_own(self) -> None:
        alone = Acceptance()
        told(alone, 20, 3, 0.8)
        known = alone.alpha("0")
        for _ in range(50):
            alone.next_round()
        assert alone.alpha("0") == known
