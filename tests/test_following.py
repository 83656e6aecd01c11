"""Who lags behind, and how much a draft has to read again: by what is known of rounds that are over and under way."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from slipstream.core.verdict import Verdict, author
from slipstream.drafters.model import ModelDrafter
from slipstream.engine.draft_loops import DraftSize
from slipstream.engine.drafts import Plan, Share
from slipstream.engine.following import Following
from slipstream.engine.rounds import RoundShape
from slipstream.kernels.gpu.rows import RECENT
from slipstream.sampling.table import Features

DRAFTS = (DraftSize("model", 5),)
NOBODY = Plan((), (), ())


@dataclass
class Text:
    """An answer, as far as it matters here: 100 tokens, of which the last is not in the cache."""

    cached: int = 99
    queued: int = 0
    coming: int = 0
    stride: int = RECENT
    guessers: tuple[str, ...] = ()
    drafters: tuple[str, ...] = ("model", "suffix")
    behind: dict[str, int] = field(default_factory=dict)
    missed: dict[str, int] = field(default_factory=dict)

    @property
    def tokens(self) -> list[int]:
        return [1] * (self.cached + 1)


@pytest.fixture
def following() -> Following:
    return Following({"model": ModelDrafter.__new__(ModelDrafter)})


def plan_for(*nodes: int) -> Any:
    shares = tuple((Share("model", count),) if count else () for count in nodes)
    return replace(NOBODY, trees=(), shares=shares)


def lags(following: Following, *texts: Text) -> bool:
    answers: Any = texts
    return bool(following.lagging(answers, plan_for(*[5] * len(texts))))


def test_a_tree_under_way_commits_no_more_than_it_is_deep(following: Following) -> None:
    """60 nodes in 10 levels: at most 11 tokens, which a draft reads again."""
    answers: Any = [Text(queued=1, coming=61, stride=11, behind={"model": 99})]
    assert not lags(following, *answers)
    assert following.recent(answers, DRAFTS) == 12


def test_of_many_less_is_read_again(following: Following) -> None:
    late = Text(behind={"model": 80})  # 20 of its tokens
    assert not lags(following, *[Text()] * 7, late)
    assert lags(following, *[Text()] * 8, late)
    assert lags(following, Text(behind={"model": 60}))


def test_who_is_out_of_reach_or_nobodys_does_not_count(following: Following) -> None:
    follows, late = Text(stride=1), Text(behind={"model": 10})
    others = Text(drafters=("suffix",), stride=16, queued=1, guessers=("suffix",))
    answers: Any = [follows, late, others]
    assert following.recent(answers, DRAFTS) == 2
    following.follows(answers, plan_for(5, 0, 0))
    assert late.behind == {"model": 10}, "nothing was read of it"


def test_while_others_guesses_are_under_way_they_may_be_right(following: Following) -> None:
    """A draft that is begun then and one that is made when they are heard of read as much."""
    for under_way in (0, 1):
        answers: Any = [Text(queued=under_way, coming=15 * under_way, stride=15, guessers=("suffix",))]
        assert following.recent(answers, DRAFTS) == 8, "more is noted when it is heard of"
        short: Any = [Text(queued=under_way, coming=4 * under_way, stride=4, guessers=("model", "suffix"))]
        assert following.recent(short, DRAFTS) == 4
    alone: Any = [Text(queued=1, coming=6, stride=6, guessers=("model",))]
    assert following.recent(alone, DRAFTS) == 2


def test_what_it_guessed_itself_is_known_though_it_stopped_meanwhile(following: Following) -> None:
    text = Text(queued=1, coming=6, stride=6)
    answers: Any = [text]
    following.follows(answers, plan_for(0))
    assert text.behind == {"model": 99}, "as far as the round under way began with"
    text.cached, text.queued, text.coming = 105, 0, 0
    following.falls_behind(answers[0], Verdict("a", (1,) * 6, 5, 5, (0, 1, 2, 3, 4), authors=author("model")))
    assert text.behind == {"model": 104}, "its last guess was not read"
    text.cached = 107
    following.falls_behind(answers[0], Verdict("a", (1, 1), 5, 1, (0,), authors=author("model")))
    assert text.behind == {"model": 104}, "that round is not the one in which it stopped"


@pytest.mark.parametrize("requests", [1, 3, 5, 8, 9, 16, 33, 64])
def test_a_round_that_is_filled_up_reaches_as_far(requests: int) -> None:
    shape = RoundShape.of(
        [5] * requests,
        100,
        is_tree=False,
        features=Features(),
        version=0,
        keeps_logits=False,
        most_keys=2048,
    )
    assert ModelDrafter.reaches(shape.requests) == ModelDrafter.reaches(requests)
