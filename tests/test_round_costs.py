"""What a round costs between the sizes that were recorded, and beyond them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from simulator.costs import Curve, RoundCosts
from simulator.recording import Costs, DraftSeen, PassSeen
from slipstream.core.errors import ConfigError
from slipstream.plan.types import Load


def test_curves_go_on_beyond_what_was_seen_and_never_fall() -> None:
    curve = Curve([(1, 1.0, 9), (2, 3.0, 9), (4, 2.0, 9), (8, 6.0, 9), (3, 99.0, 1)])
    assert curve.at(1) == 1.0
    assert curve.at(2) == curve.at(4) == 2.5
    assert curve.at(6) == pytest.approx(4.25)
    assert curve.at(16) > curve.at(8) == 6.0
    prompts = Curve([(1, 1.0, 9), (2, 1.2, 9), (3, 99.0, 1), (100, 20.0, 1), (300, 62.0, 1)])
    assert prompts.at(300) == 62.0, "lengths of prompts come once, and nothing else says what they cost"
    assert prompts.at(3) < 2, "an accident beside what was seen often"
    stepped = Curve([(64, 1.0, 9), (65, 1.3, 1), (128, 2.0, 9)])
    assert stepped.at(65) == 1.3, "seen once, but no accident"
    costs = RoundCosts(
        Costs(tuple(PassSeen(1, 1, 0, context, 0.01 + 1e-5 * context, 9) for context in (100, 200, 400))), apart=False
    )
    assert costs.pass_s(1, 0, Load(1, 1000)) == pytest.approx(0.02, rel=0.01)
    with pytest.raises(ConfigError, match="no passes"):
        RoundCosts(Costs(), apart=False)


@pytest.mark.parametrize("dearer", [0.0, 0.002])
@pytest.mark.parametrize("context_s", [0.0, 2e-5])
def test_a_row_of_a_decode_beside_prompts_may_cost_more_than_one_of_a_prompt(dearer: float, context_s: float) -> None:
    """Passes of more than 64 rows are slower at once, and long texts make them slower: neither is the rows' doing."""

    def seconds(rows: int, read_rows: int, context: int) -> float:
        total = rows + read_rows
        return (0.010 + 0.004 * total) * (1.3 if total > 64 else 1.0) + dearer * rows + context_s * context

    alone = [PassSeen(1, n, 0, c, seconds(n, 0, c), 5) for n in range(1, 104, 3) for c in (100, 300)]
    beside = [(0, 64), (1, 64), (2, 64), (4, 62), (20, 64), (38, 64), (9, 32)]
    passes = [*alone, *(PassSeen(1, r, n, 100 * r, seconds(r, n, 100 * r), 1) for r, n in beside)]
    costs = RoundCosts(Costs(tuple(passes)), apart=False)
    for rows, read_rows in ((1, 64), (4, 64), (30, 64), (9, 32)):
        assert costs.pass_s(rows, read_rows, Load(1, 100)) == pytest.approx(seconds(rows, read_rows, 100), rel=0.05)
    fewer = costs.pass_s(5, 12, Load()), costs.pass_s(17, 0, Load())
    assert fewer[0] <= fewer[1], "a prompt's last rows, fewer than any that were seen"
    few = RoundCosts(Costs((*alone, passes[-1])), apart=False)
    assert few.pass_s(9, 32, Load(1, 900)) == pytest.approx(seconds(9, 32, 900), rel=0.01), "too few to tell"
    unseen = RoundCosts(Costs(tuple(passes[-7:])), apart=False)
    assert unseen.pass_s(64, 0, Load()) == pytest.approx(seconds(0, 64, 0), rel=0.1), "nothing else is known"


def test_prompts_with_passes_of_their_own_are_added() -> None:
    seen = (PassSeen(1, 1, 0, 0, 0.004, 9), PassSeen(8, 8, 0, 0, 0.005, 9), PassSeen(0, 0, 512, 0, 0.02, 9))
    costs = RoundCosts(Costs(seen), apart=True)
    assert costs.pass_s(8, 512, Load()) == pytest.approx(0.025)
    assert costs.pass_s(0, 512, Load()) == pytest.approx(0.02)


def mixed_s(rows: int, read_rows: int) -> float:
    """A pass in which a decode's row costs twice a prompt's: what no curve by the rows in all can say."""
    return 0.010 + 0.006 * rows + 0.003 * read_rows


MIXED = [(0, 64), (1, 64), (36, 64), (49, 64), (69, 64), (7, 128), (37, 128), (61, 128), (88, 128), (0, 192), (64, 185)]


@pytest.mark.parametrize(("rows", "read_rows"), [(2, 128), (5, 128), (1, 64), (2, 64), (0, 192), (70, 64)])
def test_passes_of_one_mix_of_rows_tell_what_others_alike_cost(rows: int, read_rows: int) -> None:
    passes = [PassSeen(1, r, n, 0, mixed_s(r, n), 1) for r, n in MIXED]
    costs = RoundCosts(Costs(tuple(passes)), apart=False)
    assert costs.pass_s(rows, read_rows, Load()) == pytest.approx(mixed_s(rows, read_rows), rel=0.1)


@pytest.mark.parametrize("apart", [False, True])
def test_an_accident_speaks_for_nobody_else(apart: bool) -> None:
    """One pass of prompts took twenty times as long: neighbours cost a little more at the most, others nothing."""
    passes = [PassSeen(1, n, 0, 0, 0.010 + 0.004 * n, 9) for n in range(1, 60)]
    passes += [PassSeen(0, 0, n, 0, 0.010 + 0.003 * n, 5) for n in (64, 96, 128, 256)]
    usual = RoundCosts(Costs(tuple(passes)), apart=apart)
    spoiled = RoundCosts(Costs((*passes, PassSeen(0, 0, 130, 0, 8.0, 1))), apart=apart)
    assert spoiled.pass_s(0, 128, Load()) <= 1.15 * usual.pass_s(0, 128, Load())
    for rows, read_rows in ((1, 0), (59, 0), (0, 64), (0, 256)):
        assert spoiled.pass_s(rows, read_rows, Load()) == pytest.approx(usual.pass_s(rows, read_rows, Load()), rel=1e-6)


def test_a_size_that_is_no_part_of_the_curve_speaks_for_nobody() -> None:
    """Seen once, and a hundred times what others near it take."""
    passes = [PassSeen(1, n, 0, 0, 0.010 + 0.001 * n, 9) for n in range(1, 60)]
    usual = RoundCosts(Costs(tuple(passes)), apart=False)
    spoiled = RoundCosts(Costs((*passes, PassSeen(1, 70, 0, 0, 6.0, 1))), apart=False)
    for rows in (59, 66, 70, 74):
        assert spoiled.pass_s(rows, 0, Load()) == pytest.approx(usual.pass_s(rows, 0, Load()), rel=1e-6)


def test_queued_rounds_of_prompts_alone_tell_nothing_of_decodes() -> None:
    with pytest.raises(ConfigError, match="no passes of decodes alone: record longer answers"):
        RoundCosts(Costs((PassSeen(0, 0, 64, 0, 0.02, 9),)), apart=True)


def test_where_nothing_alike_was_seen_the_curves_speak() -> None:
    passes = [PassSeen(1, n, 0, 0, 0.010 + 0.004 * n, 9) for n in (1, 10, 100)]
    costs = RoundCosts(Costs(tuple(passes)), apart=False)
    assert costs.pass_s(40, 0, Load()) == pytest.approx(0.010 + 0.004 * 40)
    assert costs.pass_s(1000, 0, Load()) == pytest.approx(0.010 + 0.004 * 1000)


def passes_looking_back(by_row: bool, each: Sequence[int]) -> list[PassSeen]:
    """Four requests with so many rows each; a token of context costs a microsecond, once or for every row."""
    return [
        PassSeen(4, 4 * n, 0, context, 0.01 + 1e-6 * context * (n if by_row else 1), 9)
        for n in each
        for context in (400, 800, 1600, 3200)
    ]


@pytest.mark.parametrize("by_row", [False, True])
def test_context_costs_by_token_or_by_row_whichever_tells_passes_apart(by_row: bool) -> None:
    costs = RoundCosts(Costs(tuple(passes_looking_back(by_row, (1, 8, 16)))), apart=False)
    for each in (1, 8, 16):
        more = costs.pass_s(4 * each, 0, Load(4, 3200)) - costs.pass_s(4 * each, 0, Load(4, 1200))
        assert more == pytest.approx(0.002 * (each if by_row else 1), rel=0.03)


def test_where_both_ways_tell_the_same_context_costs_by_row() -> None:
    """All requests had two rows: that each looks at it is more likely than that one does."""
    costs = RoundCosts(Costs(tuple(passes_looking_back(True, (2,)))), apart=False)
    for rows in (4, 8, 64):
        more = costs.pass_s(rows, 0, Load(4, 3200)) - costs.pass_s(rows, 0, Load(4, 1200))
        assert more == pytest.approx(1e-6 * 2000 * rows / 4, rel=0.1)


def test_passes_of_one_row_a_request_are_not_those_of_drafts() -> None:
    passes = (PassSeen(16, 16, 0, 0, 0.010, 9), PassSeen(1, 16, 0, 0, 0.014, 9))
    costs = RoundCosts(Costs(passes), apart=True)
    assert costs.pass_s(16, 0, Load(16)) == pytest.approx(0.010, rel=0.02)
    assert costs.pass_s(16, 0, Load(1)) == pytest.approx(0.014, rel=0.02)
    assert costs.pass_s(16, 0, Load(10)) == pytest.approx(0.010, rel=0.02), "filled up to a size that there is"


def test_a_draft_smaller_than_was_seen_takes_as_much_less_as_it_did_for_others() -> None:
    seen = [("head", 1, 1, 0.001), ("head", 1, 4, 0.002), ("head", 1, 10, 0.004), ("head", 8, 10, 0.008)]
    seen += [("other", 2, 10, 0.004), ("free", 1, 1, 0.0), ("free", 2, 4, 0.0), ("nobody's", 0, 4, 0.1)]
    costs = RoundCosts(
        Costs((PassSeen(1, 1, 0, 0, 0.01, 9),), tuple(DraftSeen(*one, count=9) for one in seen)), apart=True
    )
    assert costs.draft_s("head", 8, 4) == pytest.approx(0.004)
    assert costs.draft_s("head", 7, 1) == pytest.approx(0.002)
    assert costs.draft_s("other", 2, 4) == pytest.approx(0.004), "no smaller one was seen of anybody"
    assert costs.draft_s("free", 2, 1) == costs.draft_s("nobody's", 1, 4) == costs.draft_s("unheard", 1, 1) == 0.0
    known = costs.known(64, {"head": 10, "free": 4, "unheard": 4})
    assert known.passes.sizes == (1, 2, 4, 8, 16, 32, 64)
    assert list(known.drafts) == ["head"], "what took no time is not known"
    assert [one.requests for one in known.drafts["head"]] == [1, 8]
    assert known.drafts["head"][1].curve.seconds == pytest.approx((0.002, 0.0047, 0.008), rel=0.02)
