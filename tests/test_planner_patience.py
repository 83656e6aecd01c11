"""A drafter whose guesses do not pay for a while goes on with few of them: to stop and come back takes longer."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from slipstream.plan.adaptive import AdaptivePlanner
from slipstream.plan.cost import PassCost
from slipstream.plan.gains import Turn
from slipstream.plan.measured import Curve
from slipstream.plan.patience import Patience

BACK_S = 0.03


def rounds_of(patience: Patience, lost_s: float, won_s: float = 10.0, first: int = 0) -> int:
    """For which it goes on behind one that won so much, each of which loses so much."""
    patience.pays("model", won_s, first)
    return next(n for n in range(1000) if not patience.lasts("model", lost_s, BACK_S, first + 1 + n))


def test_it_lasts_until_a_part_of_what_it_takes_to_come_back_is_lost() -> None:
    assert rounds_of(Patience(), 0.3 * BACK_S / 10.5) == 10
    assert rounds_of(Patience(), BACK_S) == 0


def test_no_more_is_lost_than_was_won() -> None:
    patience = Patience()
    assert rounds_of(patience, 1e-3, 2.5e-3) == 2
    assert rounds_of(patience, 1e-3, 2.6e-3, first=3) == 3, "half a millisecond was left"
    for now in range(100, 102):
        patience.pays("model", 1e-3, now)
    assert rounds_of(patience, 1e-3, 1.5e-3, first=102) == 3


def test_nobody_is_patient_with_who_has_not_paid_of_late() -> None:
    patience = Patience()
    assert not patience.lasts("model", 1e-6, BACK_S, 7)
    patience.pays("model", 1.0, 7)
    assert not patience.lasts("other", 1e-6, BACK_S, 8)
    assert patience.lasts("model", 1e-6, BACK_S, 11)
    assert not patience.lasts("model", 1e-6, BACK_S, 16)


def test_a_round_that_is_planned_again_counts_once() -> None:
    patience = Patience()
    for _ in range(9):
        patience.pays("model", BACK_S / 4, 6)
    assert all(patience.lasts("model", BACK_S / 5, BACK_S, 7) for _ in range(9))
    assert not patience.lasts("model", BACK_S / 5, BACK_S, 8)


PASS_MS = {64: 4.72, 80: 4.8, 96: 5.0, 128: 5.4, 192: 6.8, 256: 8.2}


def guessed_by(
    right: Callable[[int, int], int],
    requests: int = 64,
    min_gain: float = 1.0,
    behind: Callable[[int], int] | None = lambda now: 0,
) -> list[int]:
    """Nodes of each of 120 rounds, where so many guesses are right, by round and request.

    behind: of how many requests it must read first, by round; None: it never has to.
    """
    curve = Curve((1, *PASS_MS), tuple([1e-3 * ms for ms in (3.7, *PASS_MS.values())]))
    planner = AdaptivePlanner(PassCost(0.01, curve), min_gain=min_gain)
    planner.pad_passes()
    ids, nodes = [str(i) for i in range(requests)], []
    for now in range(120):
        planner.next_round(requests, requests * 300)
        if behind is not None:
            planner.lag("model", ids[: behind(now)])
        granted = list(planner.budget("model", ids, [3] * requests, requests))
        accepted = [min(most, right(now, i)) for i, most in enumerate(granted)]
        for request_id, most, kept in zip(ids, granted, accepted, strict=True):
            planner.observe("model", request_id, most, kept)
        rows = next(size for size in PASS_MS if size >= requests + sum(granted))
        planner.observe_pass(rows, 1e-3 * PASS_MS[rows])
        turns = [
            Turn(name, most, 1 + kept, ("model",) if most else ())
            for name, most, kept in zip(ids, granted, accepted, strict=True)
        ]
        planner.observe_round(turns, 1e-3 * PASS_MS[rows], requests * 300)
        nodes.append(sum(granted))
    return nodes


def half(now: int, request: int) -> int:
    return (now + request) % 4


def stretch(now: int, request: int) -> int:
    """Twenty rounds in which nothing is right."""
    return 0 if 60 <= now < 80 else half(now, request)


def test_a_hard_stretch_stops_nobody() -> None:
    nodes = guessed_by(stretch)
    assert min(nodes[40:60]) >= 64
    assert min(nodes[60:]) > 0
    assert min(nodes[76:80]) < 64, "fewer meanwhile"
    assert min(nodes[100:]) >= 64, "and it is all as before"


@pytest.mark.parametrize("behind", [None, lambda now: 64 * (now >= 60)])
def test_who_need_not_come_back_or_is_away_already_stops(behind: Callable[[int], int] | None) -> None:
    assert guessed_by(stretch, behind=behind)[60:100].count(0) > 10


def test_where_a_text_is_hard_for_good_it_stops() -> None:
    nodes = guessed_by(lambda now, i: 0 if now >= 60 else half(now, i))
    assert nodes[60:].index(0) < 60
    assert sum(nodes[72:]) < 64 * 30, "and meanwhile there are fewer guesses"


def test_what_is_asked_of_guesses_is_asked_all_the_same() -> None:
    """Those that pay, but not as much, are no reason to go on for ever."""
    assert min(guessed_by(half)[40:]) >= 64
    assert guessed_by(half, min_gain=2.5)[40:].count(0) > 60


def test_a_drafter_that_never_paid_is_only_probed() -> None:
    assert sum(guessed_by(lambda now, i: 0)[12:]) < 64 * 5
