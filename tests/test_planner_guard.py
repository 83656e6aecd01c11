"""The guard's evidence: rounds of many requests, and rounds in which the device waited for a drafter on the host."""

from __future__ import annotations

from itertools import pairwise

import pytest

from slipstream.plan.cost import PassCost
from slipstream.plan.gains import NO_WAIT, Gains, Turn, Waited
from slipstream.plan.measured import Load
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
    gains.hiccups = True
    for _ in range(6):
        assert gains.drafts("r0", ("d",)), "it might be a hiccup"
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


@pytest.mark.parametrize("seconds", [0.5, 0.9, 1.0])
@pytest.mark.parametrize("brought", [1, 3])
def test_no_gain_is_told_beyond_what_rounds_brought(seconds: float, brought: int) -> None:
    """Plain rounds were timed while the machine was busy: those with guesses seem to be shorter, as none can be."""
    gains = guard(2)
    for _ in range(20):
        gains.next_round(2)
        gains.observe([Turn(f"r{i}", 4, brought, ("d",)) for i in range(2)], seconds, 1.2)
    assert gains.of("r0").measured == pytest.approx(brought)
    assert [gain.measured for gain in gains.kinds().values()] == [pytest.approx(brought)]


def test_a_short_round_still_makes_up_for_a_long_one() -> None:
    """Noise is both ways: what is told is bounded, what is summed up is not."""
    gains = guard(1)
    for seconds in (0.8, 1.6):
        gains.next_round()
        gains.observe([Turn("r0", 4, 2, ("d",))], seconds, 1.2)
    assert gains.of("r0").measured == pytest.approx(4 / 2.4)


def undrafted(gains: Gains, requests: int, seconds: float, idle: float) -> None:
    gains.next_round(requests)
    gains.observe([Turn(f"r{i}", 0, 1) for i in range(requests)], seconds, waited=Waited(beyond=idle))


def drafted(gains: Gains, seconds: float, brought: int = 2) -> None:
    gains.next_round(4)
    gains.observe([Turn(f"r{i}", 1, brought, ("d",)) for i in range(4)], seconds, 1.1)


def test_a_plain_round_among_drafted_ones_is_not_blamed_for_what_the_host_does_for_those() -> None:
    """Its pass takes 1 s, but the device waits another for the plan: rounds of 2 s that bring 2 are no gain then."""
    gains = guard(4)
    for _ in range(40):
        drafted(gains, 2.2)
        undrafted(gains, 4, 2.0, idle=1.0)
    assert gains.of("r0").measured == pytest.approx(2 / 2.2, rel=0.01)
    assert not gains.drafts("r0", ("d",))


def test_what_plain_decoding_waits_for_the_host_is_its_own() -> None:
    """Rounds that follow each other and wait all the same: a host that is slower than the device."""
    gains = Gains(0.001)
    for i in range(4):
        gains.start(f"r{i}", Traits())
    for _ in range(60):
        undrafted(gains, 4, 2.0, idle=1.0)
    for _ in range(20):
        drafted(gains, 2.2)
        undrafted(gains, 4, 3.0, idle=2.0)  # two of which one would be there without drafts
    assert gains.of("r0").measured == pytest.approx(2 / 1.1, rel=0.02)
    assert gains.drafts("r0", ("d",))


def test_what_plain_rounds_wait_is_found_out_first_where_they_may() -> None:
    """Three of them in a row, once for about as many requests: the third is a plain one among others."""
    gains = Gains(0.001)
    gains.hiccups = True
    for i in range(16):
        gains.start(f"r{i}", Traits())
    assert not gains.lacks_idle(16), "nobody tells it of rounds"
    for idle in (1.9, 1.6, 1.0):
        undrafted(gains, 16, 1.0 + idle, idle=idle)
        assert gains.lacks_idle(16) == (idle > 1)
    assert not gains.lacks_idle(9)
    assert gains.lacks_idle(64)
    assert not gains.lacks_idle(4), "the host is done before the device"


def test_a_plain_round_behind_one_that_nobody_tells_of_is_not_among_plain_ones() -> None:
    gains = guard(4)
    for _ in range(12):
        undrafted(gains, 4, 1.0, idle=0.0)
    for _ in range(40):
        gains.next_round(4)  # with prompts, and drafts
        undrafted(gains, 4, 3.0, idle=2.0)
        gains.next_round(4)
        undrafted(gains, 4, 3.0, idle=2.0)
    drafted(gains, 2.0)
    assert gains.of("r0").measured == pytest.approx(1.0)


def test_a_round_to_compare_with_that_was_not_told_of_is_made_again_ever_more_rarely() -> None:
    """Where prompts are read beside it, or something is recorded, nobody says how long it took."""
    gains = Gains(0.001)
    gains.observe([Turn(str(i), 0, 1) for i in range(4)], 0.004)
    asked = []
    for now in range(600):
        gains.next_round(3)
        if gains.lacks_plain(3):
            gains.ask_plain(3)
            asked.append(now)
    assert [after - before for before, after in pairwise(asked)][:5] == [8, 16, 32, 64, 128]
    gains.observe([Turn(str(i), 0, 1) for i in range(3)], 0.004)
    assert not gains.lacks_plain(3)
    assert not gains._asked_plain


def test_where_passes_take_half_as_long_there_is_a_plain_round_to_compare_with_at_once() -> None:
    """The machine was busy when the last one was seen. Held against that, everything would seem to pay."""
    passes = PassCost(0.02)
    gains = Gains(0.02, passes=passes)
    for seconds, lacks in ((0.06, False), (0.055, False), (0.025, True)):
        for _ in range(9):
            passes.observe(1, seconds)
        for _ in range(9 if seconds == 0.06 else 0):
            gains.observe([Turn("a", 0, 1)], seconds)
        gains.next_round(1)
        assert gains.lacks_plain(1) == lacks
    assert not gains.lacks_plain(0), "a round in which only prompts are read"
    gains.ask_plain(1)
    gains.observe([Turn("a", 0, 1)], 0.025)
    gains.next_round(1)
    assert not gains.lacks_plain(1)
    assert gains._plain.seconds(1) == pytest.approx(0.025), "those of then are forgotten"


def test_rounds_of_about_as_many_are_not_each_compared_with_anew() -> None:
    """With many at once their number changes from round to round."""
    gains = Gains(0.001)
    gains.observe([Turn(str(i), 0, 1) for i in range(4)], 0.004)
    asked = []
    for now in range(64):
        requests = 57 + now % 7
        gains.next_round(requests)
        if gains.lacks_plain(requests):
            gains.ask_plain(requests)
            asked.append(now)
    assert asked == [0, 8, 24, 56]


def test_a_round_to_compare_with_may_have_read_prompts() -> None:
    gains = Gains(0.001)
    gains.observe([Turn("a", 0, 1)], 0.002)
    gains.next_round(60)
    assert gains.lacks_plain(60)
    gains.ask_plain(60)
    gains.observe_plain(Load(60, 6000), 0.005, NO_WAIT)
    assert not gains.lacks_plain(60)
    assert not gains._asked_plain
    assert gains._plain.seconds(60) == pytest.approx(0.005, rel=0.1)


def test_what_plain_rounds_wait_is_not_looked_for_in_every_round_where_nothing_is_heard() -> None:
    gains = Gains(0.001)
    gains.hiccups = True
    gains.observe([Turn("a", 0, 1)], 0.004)
    asked = 0
    for _ in range(500):
        gains.next_round(64)
        if gains.lacks_idle(64):
            gains.ask_plain(64)
            asked += 1
    assert 12 <= asked <= 24


def test_a_probe_that_does_not_pay_is_held_against_nobody() -> None:
    """It was made to find out, though nothing was expected of it. A plan that does not keep its word is off."""
    for is_probe in (True, False):
        gains = Gains(0.001)
        gains.hiccups = True
        ids = [str(number) for number in range(16)]
        for request_id in ids:
            gains.start(request_id, Traits())
        for _ in range(4):
            gains.next_round(16)
            gains.observe([Turn(request_id, 0, 1) for request_id in ids], 4e-3)
        for _ in range(20):
            gains.next_round(16)
            drafted = [Turn(request_id, 1, 1, ("d",)) for request_id in ids]
            gains.observe(drafted, 6e-3, 1.0 if is_probe else 1.2, is_probe=is_probe)
        gains.next_round(16)
        assert gains.drafts("0", ("d",)) == is_probe
        assert gains.of("0").measured < 0.8, "what it came to is told all the same"


def test_plain_rounds_of_about_as_many_are_asked_for_again_when_they_are_old() -> None:
    """One of six was seen, and five run: they are taken to be alike."""
    gains = guard(6)
    assert not gains.lacks_plain(5)
    for _ in range(600):
        gains.next_round(5)
        gains.observe([Turn(f"r{i}", 1, 2, ("d",)) for i in range(5)], 1.0, 1.5)
    assert gains.lacks_plain(5)
    gains.observe([Turn(f"r{i}", 0, 1) for i in range(5)], 1.0)
    assert not gains.lacks_plain(5)
    assert not gains.lacks_plain(6)


def test_what_is_lost_in_the_last_round_of_a_request_empties_no_others_purse() -> None:
    gains = guard(1)
    gains.next_round(1)
    before = gains.stake(("d",), ["r0"], 1)
    gains.observe([Turn("gone", 4, 1, ("d",))], 3.0, 1.5)
    assert gains.stake(("d",), ["r0"], 1) == before
    gains.observe([Turn("r0", 4, 1, ("d",))], 3.0, 1.5)
    assert gains.stake(("d",), ["r0"], 1) < before
