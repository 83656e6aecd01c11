"""The measurement of what HTTP costs: both ways are asked the same, in turn, and compared pair by pair."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from serving import serving
from slipstream import LLM
from slipstream.serve.measure import FIRST_TOKENS, WARM_UP, Asked, Http, Library, measure


class Scripted:
    """Takes so many seconds for all, and for a first token; a machine that gets slower doubles both after a while."""

    def __init__(self, all_s: float, first_s: float) -> None:
        self.asked = 0
        self._all_s, self._first_s = all_s, first_s

    def all(self) -> float:
        self.asked += 1
        return self._all_s * (2 if self.asked > WARM_UP + 3 else 1)

    def first(self, index: int) -> float:
        return self._first_s


def test_a_machine_that_changes_its_pace_is_no_cost_of_http() -> None:
    library, http = Scripted(1.0, 0.010), Scripted(1.04, 0.0115)
    found = measure(library, http, Asked(4, 8, 7))  # type: ignore[arg-type]
    assert found.throughput_cost == pytest.approx(0.0385, abs=1e-3)
    assert found.first_token_cost_ms == pytest.approx(1.5)
    assert library.asked == http.asked == WARM_UP + 7
    assert found.library.tokens_per_s == pytest.approx(4 * 8 / 2.0)


def test_both_ways_on_a_real_server(open_llm: Callable[..., LLM]) -> None:
    llm, asked = open_llm(), Asked(3, 8, 2)
    before = llm.snapshot().generated_tokens
    with serving(llm, models=("measured",)) as server:
        http = Http(server.url, asked)
        try:
            found = measure(Library(llm, asked), http, asked)
        finally:
            http.close()
    tokens = llm.snapshot().generated_tokens - before
    assert tokens == 2 * ((WARM_UP + 2) * 3 * 8 + (WARM_UP + FIRST_TOKENS) * 2)
    assert found.library.first_token_s > 0
    assert found.http.first_token_s > 0
    assert found.throughput_cost < 1
