"""Latency under load: the same scenarios for the library and for any OpenAI server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable

from conftest import VOCAB
from slipstream import LLM
from slipstream.bench.load import Ask, Heard, at_a_rate, beside_long_prompts, library, play, prompt_of, summary


def test_streams_beside_long_prompts(open_llm: Callable[..., LLM]) -> None:
    llm = open_llm(drafter=None, max_num_seqs=4)
    length = llm.max_model_len // 2
    row = asyncio.run(beside_long_prompts(library(llm), length, streams=2, vocab_size=VOCAB))
    assert (row["prompt_tokens"], row["streams"]) == (length, 2)
    assert row["kept"] > 0
    assert row["gap_max_ms"] >= row["gap_p99_ms"] > 0
    assert row["first_times_alone"] > 0
    until = time.perf_counter() + 10
    while llm.engine.busy and time.perf_counter() < until:  # the streams are ended between two steps
        time.sleep(0.01)
    assert not llm.engine.busy


def test_what_is_heard_is_told() -> None:
    ask = Ask([1], 4)
    heard = [Heard(ask, 1.0, [(1.5, 1), (1.7, 2), (2.5, 1)]), Heard(ask, 1.0, [(1.1, 1), (1.2, 3)])]
    assert [round(gap, 6) for gap in heard[0].gaps] == [0.2, 0.8]
    told = summary(heard)
    assert (told["first_p50_ms"], told["gap_max_ms"]) == (300.0, 800.0)
    assert told["token_p50_ms"] == round(1e3 * (1.0 / 3 + 0.1 / 3) / 2, 2)
    assert told["tok_s"] == round(8 / 1.5, 2)


def test_requests_come_when_they_are_to() -> None:
    sent: list[Ask] = []

    async def send(ask: Ask) -> AsyncIterator[int]:
        sent.append(ask)
        yield 1

    asks = at_a_rate(1000, 5, 3, 8)
    assert [one.at for one in asks] == sorted(one.at for one in asks)
    heard = asyncio.run(play(send, asks))
    assert sent == asks
    assert all(one.tokens == 8 and one.first_s >= 0 for one in heard)  # as was asked for, in one event
    assert prompt_of(5) != prompt_of(5)  # nothing is found in a cache
