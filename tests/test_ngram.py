"""The n-gram drafter: longest match, most recent place, loops that go on, and promises that learn."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.core.draft import Tree
from slipstream.core.errors import ConfigError
from slipstream.core.params import SamplingParams
from slipstream.core.verdict import Verdict
from slipstream.drafters.base import DraftRequest
from slipstream.drafters.ngram import LONGEST_MATCH, NgramDrafter


def request(tokens: Sequence[int], name: str = "a") -> DraftRequest:
    return DraftRequest(name, tokens, len(tokens), SamplingParams(), slot=0)


def propose(drafter: NgramDrafter, tokens: Sequence[int], budget: int = 4, name: str = "a") -> tuple[int, ...]:
    (tree,) = drafter.propose([request(tokens, name)], [budget])
    assert tree == Tree.chain(tree.tokens)
    promise = drafter.promise(name)
    assert promise is not None
    assert len(promise) == len(tree)
    assert all(1 >= a >= b > 0 for a, b in zip([1.0, *promise], promise, strict=False))
    return tree.tokens


def verdict(emitted: Sequence[int], drafted: int = 0, accepted: int = 0, name: str = "a") -> Verdict:
    return Verdict(name, tuple(emitted), drafted, accepted, tuple(range(accepted)))


def test_it_copies_what_followed() -> None:
    assert propose(NgramDrafter(), [1, 2, 3, 4, 5, 6, 9, 1, 2]) == (3, 4, 5, 6)


def test_nothing_to_copy_is_no_draft() -> None:
    drafter = NgramDrafter()
    assert propose(drafter, []) == ()
    assert propose(drafter, [1]) == ()
    assert propose(drafter, [1, 2, 3, 4, 5]) == ()
    assert propose(drafter, [1, 2, 7, 2]) == ()  # one token is no match
    assert propose(NgramDrafter(min_match=1), [1, 2, 7, 2], budget=1) == (7,)


def test_the_longest_match_wins_over_a_later_one() -> None:
    assert propose(NgramDrafter(), [5, 1, 2, 30, 8, 1, 2, 40, 5, 1, 2], budget=1) == (30,)


def test_of_equal_matches_the_most_recent_wins() -> None:
    assert propose(NgramDrafter(), [1, 2, 30, 9, 1, 2, 40, 8, 1, 2], budget=1) == (40,)


def test_a_long_match_in_what_was_answered_is_found_behind_many_short_ones() -> None:
    """The index of long grams is asked only then, and must catch up with what was added since it last was."""
    drafter, long, growing = NgramDrafter(candidates=4), [11, 12, 13, 14, 1, 2], [5, 6, 7]
    drafter.start(request(growing))
    for round_ in range(3):
        last = 70 + round_
        growing += [*long, last]
        for i in range(40):
            growing += (1, 2, 200 + 40 * round_ + i)
            propose(drafter, growing)
        growing += long
        assert propose(drafter, growing, budget=1) == (last,)
        growing.append(90 + round_)


def test_a_loop_goes_on_past_the_end_of_the_text() -> None:
    assert propose(NgramDrafter(), [7, 1, 2, 3, 1, 2, 3], budget=8) == (1, 2, 3, 1, 2, 3, 1, 2)
    assert propose(NgramDrafter(), [4, 4, 4], budget=5) == (4, 4, 4, 4, 4)


def test_it_keeps_to_the_budget() -> None:
    drafter = NgramDrafter()
    assert len(propose(drafter, [1, 2] * 100, budget=3)) == 3
    assert propose(drafter, [1, 2] * 100, budget=0) == ()
    assert len(propose(drafter, [1, 2] * 100, budget=1000)) == 63


@settings(deadline=None)
@given(st.lists(st.integers(0, 2), max_size=60), st.integers(1, 10))
def test_an_index_that_grew_finds_what_a_scan_finds(text: list[int], chunk: int) -> None:
    drafter = NgramDrafter(candidates=1000)
    growing: list[int] = []
    drafter.start(request(growing))
    for begin in range(0, len(text), chunk):
        growing += text[begin : begin + chunk]
        best = (0, 0)
        for place in range(1, len(growing)):
            length = 0
            while length < min(place, LONGEST_MATCH) and growing[place - 1 - length] == growing[-1 - length]:
                length += 1
            best = max(best, (length, place))
        expected = () if best[0] < 2 else (growing[best[1]],)
        assert propose(drafter, growing, budget=1) == expected


def test_a_stopped_request_is_forgotten() -> None:
    drafter = NgramDrafter()
    propose(drafter, [1, 2, 3, 4, 1, 2])
    drafter.stop("a")
    drafter.stop("never started")
    assert drafter.promise("a") == []
    assert propose(drafter, [8, 8, 9, 1, 2]) == ()


def test_a_text_that_shrank_is_indexed_anew() -> None:
    drafter = NgramDrafter()
    propose(drafter, [1, 2, 3, 4, 5, 1, 2])
    assert propose(drafter, [6, 7, 8, 9, 6, 7], budget=1) == (8,)


def test_longer_matches_promise_more() -> None:
    drafter = NgramDrafter()
    shared = list(range(100, 120))
    chances = []
    for length in (2, 4, 8, 16):
        propose(drafter, [*shared, 7, 8, 9, *shared[-length:]])
        chances.append((drafter.promise("a") or [0.0])[0])
        drafter.stop("a")
    assert chances == sorted(set(chances))


def first_promise(drafter: NgramDrafter, name: str) -> float:
    propose(drafter, [1, 2, 3, 9, 1, 2], name=name)
    return (drafter.promise(name) or [0.0])[0]


def test_promises_follow_what_happened_to_the_request_first() -> None:
    drafter = NgramDrafter()
    before = first_promise(drafter, "a")
    for _ in range(30):
        first_promise(drafter, "a")
        drafter.observe([verdict([3, 5], drafted=1, accepted=1)])
    good = first_promise(drafter, "a")
    others = first_promise(drafter, "b")
    assert before < others < good
    assert good > 0.9
    for _ in range(60):
        first_promise(drafter, "a")
        drafter.observe([verdict([4], drafted=1)])
    assert first_promise(drafter, "a") < 0.1


def test_it_learns_from_guesses_that_the_planner_cut() -> None:
    drafter = NgramDrafter()
    before = first_promise(drafter, "a")
    for _ in range(10):
        first_promise(drafter, "a")
        drafter.observe([verdict([3])])
    assert first_promise(drafter, "a") > before + 0.2


def test_guesses_behind_a_wrong_one_teach_nothing() -> None:
    """The target's later tokens follow another text."""
    promises = []
    for emitted in ([4], [4, 9, 1]):  # the guesses are 3, 9, 1, 2
        drafter = NgramDrafter()
        first_promise(drafter, "a")
        drafter.observe([verdict(emitted)])
        first_promise(drafter, "b")
        promises.append(drafter.promise("b"))
    assert promises[0] == promises[1]


def test_a_guess_is_learned_from_once() -> None:
    drafter = NgramDrafter()
    first_promise(drafter, "a")
    drafter.observe([verdict([4])])
    once = first_promise(drafter, "b")
    drafter.observe([verdict([4])])  # the guess is spent
    assert first_promise(drafter, "b") == once


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_match": 0}, "min_match=0: must be 1 to 32"),
        ({"long_match": 1}, "long_match=1: must be min_match=2 to 32"),
        ({"candidates": 0}, "candidates=0"),
    ],
)
def test_wrong_options_explain_themselves(options: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        NgramDrafter(**options)


@pytest.mark.alone
def test_it_is_quick_at_4k_tokens() -> None:
    rng = random.Random(0)
    text = [rng.randrange(40) for _ in range(4096)]  # short matches everywhere: the worst case
    started, proposed = [], []
    for _ in range(5):
        drafter = NgramDrafter()
        one = request(list(text))
        begin = time.perf_counter()
        drafter.start(one)
        started.append(time.perf_counter() - begin)
        for _ in range(20):
            begin = time.perf_counter()
            drafter.propose([one], [16])
            drafter.promise("a")
            proposed.append(time.perf_counter() - begin)
    assert min(started) < 0.050  # five times the aim, for slow machines
    assert min(proposed) < 0.000250
