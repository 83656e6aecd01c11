"""The guard's evidence: rounds of many requests, and rounds in which the device waited for a drafter on the host."""

from __future__ import annotations

from slipstream.plan.gains import Gains, Turn, Waited
from slipstream.plan.traits import Traits


def guard(requests: int, plain_s: float = 1.0) -> Gains:
    gains = Gains(0.001)
    for i in range(requests):
        gains.start(f"r{i}", Traits())
    for _ in range(3):
        gains.next_round(requests)
        gains.observe([Turn(f"r{i}", 0, 1) for i in range(requests)], plain_s)
    return gains


def test_a_round_of_many_is_judged_as_a_whole() -> None:
    """Half of 64 requests gain much and half nothing: 2 tokens each in 1.8 plain rounds, whoever stands last."""
    gains = guard(64)
    for _ in range(40):
        gains.next_round(64)
        gains.observe([Turn(f"r{i}", 3, 3 if i < 32 else 1, ("d",)) for i in range(64)], 1.8, 1.1)
        assert gains.drafts("r0", ("d",))


def test_a_round_of_many_that_loses_is_soon_found_out() -> None:
    gains = guard(64)
    for _ in range(3):
        gains.next_round(64)
        gains.observe([Turn(f"r{i}", 3, 1 + (i % 4 == 0), ("d",)) for i in range(64)], 1.6, 1.2)
    assert not gains.drafts("r0", ("d",))


def test_a_wait_is_the_fault_of_those_who_are_waited_for() -> None:
    """A round with guesses of the device takes 1.3 plain ones and brings 1.5, and half of a plain one is a wait."""
    turns = [Turn(f"r{i}", 2, 2 if i % 2 else 1, ("head",)) for i in range(4)]
    mixed = [Turn(f"r{i}", 2, 2 if i % 2 else 1, ("ngram", "head")) for i in range(4)]
    gains = guard(4)
    for _ in range(40):
        gains.next_round(4)
        gains.observe(turns, 1.8, 1.2, waited=Waited(("ngram",), 0.5))
        assert gains.drafts("r0", ("head",))
    for _ in range(40):
        gains.next_round(4)
        gains.observe(mixed, 1.8, 1.2, waited=Waited(("ngram",), 0.5))
    assert not gains.drafts("r0", ("ngram", "head"))
    assert gains.drafts("r0", ("head",))


def test_a_round_that_waits_in_vain_is_no_measure_for_others() -> None:
    """Nothing was drafted, and yet it waited: rounds that do not wait are not taken for quick because of that."""
    gains = guard(4)
    for _ in range(9):
        gains.next_round(4)
        gains.observe([Turn(f"r{i}", 0, 1) for i in range(4)], 1.5, waited=Waited(("ngram",), 0.5))
    for _ in range(60):
        gains.next_round(4)
        gains.observe([Turn(f"r{i}", 2, 1, ("head",)) for i in range(4)], 1.3, 1.2)
    assert not gains.drafts("r0", ("head",))
