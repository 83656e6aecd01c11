"""Prompts that are read beside decodes, in a pass of their own: what that has to do with how much is drafted."""

from __future__ import annotations

import random

import numpy as np
import pytest

from slipstream.plan.adaptive import AdaptivePlanner
from slipstream.plan.cost import PassCost
from slipstream.plan.measured import Curve, DraftSeen, MeasuredCosts
from slipstream.plan.reads import PromptReads

PASS_S = 0.004


def seen(share: float, tokens: int, requests: int = 64, seconds: float = PASS_S) -> PromptReads:
    """Of so many tokens a round, such a part of the rounds has prompts beside it."""
    reads, owed = PromptReads(), 0.0
    for _ in range(200):
        owed += share
        reads.observe(requests, tokens, seconds if owed >= 1 else 0.0)
        owed -= owed >= 1
    return reads


class TestExpected:
    def test_nothing_is_where_nothing_was_seen(self) -> None:
        assert PromptReads().seconds(64, np.array([64.0])) == 0.0
        assert seen(0.5, 100).seconds(4, np.array([8.0])) == 0.0, "with fewer requests it may be otherwise"

    def test_rounds_like_those_that_were_seen_take_as_long(self) -> None:
        assert seen(0.5, 100).seconds(64, np.array([100.0]))[0] == pytest.approx(0.5 * PASS_S, rel=0.05)

    def test_rounds_with_more_tokens_take_longer_but_less_for_each(self) -> None:
        found = np.asarray(seen(0.5, 100).seconds(64, np.array([50.0, 100.0, 200.0, 1e6])))
        assert list(found) == sorted(found)
        assert list(found / [50, 100, 200, 1e6]) == sorted(found / [50, 100, 200, 1e6], reverse=True)
        assert found[-1] == pytest.approx(PASS_S, rel=0.05)

    def test_what_hardly_ever_happens_is_left_out(self) -> None:
        reads = seen(1.0, 100)
        for _ in range(150):
            reads.observe(64, 100, 0.0)
        assert reads.seconds(64, np.array([100.0])) == 0.0

    def test_rounds_that_all_have_prompts_are_no_reason_to_divide_by_nothing(self) -> None:
        assert np.isfinite(seen(1.0, 100).seconds(64, np.array([1.0, 1e9]))).all()


def planner(right: float) -> AdaptivePlanner:
    """64 requests of whose guesses such a part is right; a second guess for each makes the pass much dearer."""
    made = AdaptivePlanner(PassCost(0.001))
    made.pad_passes()
    made.adopt(
        MeasuredCosts(
            Curve((1, 64, 128, 192, 256), (0.0038, 0.0046, 0.0053, 0.0074, 0.0080)),
            drafts={"draft": (DraftSeen(64, Curve((1, 3), (0.0002, 0.0004))),)},
        )
    )
    dice = random.Random(3)
    for _ in range(48):
        for i in range(64):
            luck = dice.random()
            made.observe("draft", str(i), 3, sum([luck < right ** (depth + 1) for depth in range(3)]))
    return made


def planned(made: AdaptivePlanner) -> int:
    made.next_round(64, 64 * 100)
    return sum(made.budget("draft", [str(i) for i in range(64)], [3] * 64, 64))


def test_more_is_drafted_where_every_round_has_prompts_beside_it() -> None:
    few, many = planner(0.7), planner(0.7)
    for _ in range(50):
        few.observe_reads(64, 100, 0.0)
        many.observe_reads(64, 100, PASS_S)
    assert 0 < planned(few) < planned(many)


def test_a_long_prompt_is_no_reason_for_longer_drafts() -> None:
    """It takes as long, in however many rounds it is read: only a pass is saved where two are read in one."""
    short, long = planner(0.7), planner(0.7)
    for _ in range(50):
        short.observe_reads(64, 100, PASS_S)
        long.observe_reads(64, 100, 10 * PASS_S)
    tokens = np.array([100.0])
    assert long._reads.seconds(64, tokens) == short._reads.seconds(64, tokens)
