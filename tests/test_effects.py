"""What makes passes dearer beside their rows: told from recorded ones, and not where nothing tells it."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from operator import attrgetter

import pytest

from simulator.costs import RoundCosts
from simulator.effects import Slowdown, WaitPrice, Wake
from simulator.recording import Costs, PassSeen, WaitSeen
from slipstream.plan.types import Load

EACH = 0.07
"""Of a doubling, as the logarithm of how many times as long a pass takes."""


wake_of = attrgetter("wake")


def bare_s(rows: int, context: int = 0) -> float:
    return 0.006 + 0.0015 * (rows - 1) + 1e-6 * context


def seen(each: float, noise: float = 0.0) -> list[PassSeen]:
    dice = random.Random(0)
    return [
        PassSeen(1, rows, 0, context, bare_s(rows, context) * math.exp(each * wake + dice.gauss(0, noise)), 5, wake)
        for rows in (1, 2, 4, 8)
        for context in (50, 100, 200)
        for wake in (0.0, 1.2, 3.1, 4.9)
    ]


def test_a_wake_is_felt_by_narrower_passes_and_fades() -> None:
    wake = Wake()
    assert wake.felt(1, 0.0) == 0, "nothing ran before"
    wake.passed(64, seconds=0.5, ended=1.0)
    assert wake.felt(1, 1.0) == pytest.approx(6, abs=0.01)
    assert wake.felt(16, 1.0) == pytest.approx(2, abs=0.01)
    assert wake.felt(64, 1.0) == wake.felt(256, 1.0) == 0
    assert 0 < wake.felt(1, 1.02) < 0.4 * wake.felt(1, 1.0), "a pause alone lets it fade"
    felt = []
    for number in range(8):
        felt.append(wake.felt(1, 1.0 + 0.006 * number))
        wake.passed(1, seconds=0.006, ended=1.006 + 0.006 * number)
    assert felt == sorted(felt, reverse=True)
    assert felt[0] > 5
    assert felt[-1] < 1


def test_a_short_pass_leaves_less_behind_than_a_long_one() -> None:
    short, long = Wake(), Wake()
    short.passed(64, seconds=0.005, ended=1.0)
    long.passed(64, seconds=0.1, ended=1.0)
    assert 0 < short.felt(1, 1.0) < 0.5 * long.felt(1, 1.0)


def test_what_a_wake_costs_is_told_from_passes_alike_in_all_else() -> None:
    costs = RoundCosts(Costs(tuple(seen(EACH, noise=0.02))), apart=False)
    for rows in (1, 4, 8):
        among_its_like = costs.pass_s(rows, 0, Load(1, 100))
        assert among_its_like == pytest.approx(bare_s(rows, 100), rel=0.03)
        assert costs.pass_s(rows, 0, Load(1, 100), wake=5.0) == pytest.approx(
            among_its_like * math.exp(5 * EACH), rel=0.05
        )


def test_rare_small_passes_among_wide_ones_are_not_taken_for_usual() -> None:
    """Nearly all that was recorded ran behind wide passes: among themselves small ones are quicker than their mean."""
    passes = [
        PassSeen(1, 1, 0, context, 0.006 * math.exp(EACH * wake), 90 if wake else 4, wake)
        for context in (50, 60)
        for wake in (0.0, 2.0, 5.0)
    ]
    costs = RoundCosts(Costs(tuple(passes)), apart=False)
    assert costs.pass_s(1, 0, Load(1, 50)) == pytest.approx(0.006, rel=0.01)


def test_no_price_rests_on_a_few_passes_or_goes_beyond_what_was_seen() -> None:
    few = [PassSeen(1, rows, 0, 9, bare_s(rows) * (1 + 0.5 * wake), 1, wake) for rows in (1, 2) for wake in (0.0, 1.0)]
    assert Slowdown(few, wake_of).factor(6.0) == 1.0
    price = Slowdown(seen(EACH), wake_of)
    assert price.factor(4.9) == pytest.approx(math.exp(4.9 * EACH), rel=0.03)
    assert price.factor(8.0) == price.factor(4.9)


def test_where_wakes_cost_nothing_none_is_reckoned_with() -> None:
    """On a device that is as fast at all times, or of a recording that does not tell of wakes."""
    for passes in (seen(0.0, noise=0.05), seen(-EACH), [PassSeen(1, n, 0, 9, bare_s(n), 9) for n in (1, 2, 4)]):
        assert Slowdown(passes, wake_of).factor(6.0) == pytest.approx(1.0, abs=0.05)
    assert Slowdown([PassSeen(1, 1, 0, 9, 0.0, 1)], wake_of).factor(6.0) == 1.0, "a clock that stood still"


def test_who_reads_along_makes_prompts_dearer_by_what_was_seen() -> None:
    """A fifth, of prompts of four lengths."""
    both = [
        PassSeen(0, 0, n, 0, 0.0001 * n * (1.2 if along else 1), 3, 0.0, along)
        for n in (9, 30, 70, 200)
        for along in (False, True)
    ]
    price = Slowdown(both, attrgetter("along"))
    assert price.factor(True) == pytest.approx(1.2)
    assert price.factor(False) == 1
    assert [one.seconds for one in price.bare(both)] == pytest.approx([0.0001 * seen.read_rows for seen in both])


def waits(by_row: float, by_newcomer: float, sizes: Sequence[tuple[int, int]]) -> list[WaitSeen]:
    return [
        WaitSeen(1, rows, newcomers, 0.05 + by_row * rows + by_newcomer * newcomers, 9) for rows, newcomers in sizes
    ]


MIXED = [(8, 0), (8, 1), (16, 0), (16, 1), (40, 1), (40, 0), (64, 0)]


def test_what_rows_and_newcomers_add_to_a_wait_is_told_apart() -> None:
    price = WaitPrice(waits(0.0001, 0.004, MIXED))
    assert (price.seconds(10, 0), price.seconds(0, 1)) == pytest.approx((0.001, 0.004))
    fewer = WaitPrice(waits(-0.00002, 0.004, MIXED))
    assert fewer.seconds(64, 0) == 0, "nothing is quicker for more"
    assert fewer.seconds(0, 1) == pytest.approx(0.004, rel=0.3)


def test_nothing_is_said_of_rows_and_newcomers_that_always_come_together() -> None:
    together = [(8, 0), (16, 1), (24, 2), (32, 3), (40, 4)]
    assert WaitPrice(waits(0.0001, 0.004, together)).seconds(40, 4) == 0
    same = WaitPrice(waits(0.0, 0.004, [(8, n % 3) for n in range(6)]))
    assert (same.seconds(99, 0), same.seconds(0, 1)) == pytest.approx((0, 0.004))
    assert WaitPrice([]).seconds(8, 1) == 0
