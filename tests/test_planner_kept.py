"""Promises of drafters whose guesses take time are bent by what became of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.plan.kept import Foretold, KeptPromises

ROUND = Foretold(tokens=12.0, seconds=0.005, nodes=20)
WHO = frozenset({"model"})


def told(rounds: int, *, tokens: int = 12, seconds: float = 0.005, nodes: int = 20, requests: int = 4) -> KeptPromises:
    promises = KeptPromises()
    promises.foretell("model", 4, ROUND)
    for _ in range(rounds):
        promises.observe(WHO, requests, tokens, seconds, nodes)
    return promises


def test_a_promise_that_is_kept_stays_as_it_is() -> None:
    assert told(30).kept("model", 4) == pytest.approx(1.0)
    assert KeptPromises().kept("model", 4) == 1.0, "of whom nothing is known is believed"


def test_fewer_tokens_or_longer_rounds_make_less_of_it() -> None:
    assert 0.7 < told(30, tokens=10).kept("model", 4) < 0.92
    assert 0.7 < told(30, seconds=0.006).kept("model", 4) < 0.92
    assert 1.0 < told(30, seconds=0.0045).kept("model", 4) < 1.15
    assert told(2, tokens=10).kept("model", 4) > told(30, tokens=10).kept("model", 4), "two rounds say little"


def test_rounds_of_another_kind_say_nothing_of_it() -> None:
    """A probe has fewer nodes; others at once are another matter; and somebody else's rounds are not its own."""
    assert told(30, tokens=4, nodes=2).kept("model", 4) == 1.0
    assert told(30, tokens=4, requests=64).kept("model", 4) == 1.0
    assert told(30, tokens=4).kept("model", 64) == 1.0
    assert told(30, tokens=4).kept("eagle", 4) == 1.0


def test_what_was_is_forgotten_in_rounds_of_others() -> None:
    promises = told(30, tokens=8)
    before = promises.kept("model", 4)
    for _ in range(600):
        promises.observe(frozenset({"eagle"}), 4, 12, 0.005, 60)
    assert before < 0.8
    assert promises.kept("model", 4) > 0.93


@given(st.lists(st.tuples(st.integers(0, 40), st.floats(1e-4, 1.0)), max_size=60))
def test_no_promise_is_bent_further_than_so_far(rounds: list[tuple[int, float]]) -> None:
    promises = told(0)
    for tokens, seconds in rounds:
        promises.observe(WHO, 4, tokens, seconds, 20)
    assert 0.7 <= promises.kept("model", 4) <= 1.2
