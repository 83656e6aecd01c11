"""Who is let in: the queue's limit is known at once and on the caller's own thread, with when to come again."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from slipstream import LLM, SamplingParams
from slipstream.core.errors import ConfigError, QueueFull, RequestError
from slipstream.engine.admission import Admission
from slipstream.engine.config import EngineConfig
from test_sharing import Slow

LONG = SamplingParams(max_tokens=100, ignore_eos=True)
SHORT = SamplingParams(max_tokens=2, ignore_eos=True)


@pytest.mark.parametrize("wrong", [-1, 1.5, True, "many"])
def test_limits_that_mean_nothing_are_refused(wrong: object) -> None:
    with pytest.raises(ConfigError, match=r"max_queue=.*: must be 0 or more, or None for no limit"):
        EngineConfig(max_queue=wrong)  # type: ignore[arg-type]


def test_the_estimate_follows_how_long_answers_take() -> None:
    door = Admission(2)
    door.check(1, 4)
    for _ in range(100):
        door.observe(8.0)
    with pytest.raises(QueueFull, match=r"3 requests wait, and max_queue=2: come again in about 4\.0 s") as full:
        door.check(3, 4)  # two must start, of four that take 8 s each
    assert full.value.retry_after_s == pytest.approx(4.0)
    assert isinstance(full.value, RequestError)
    assert door.refused == 1
    Admission(None).check(10**9, 1)


def test_a_full_queue_refuses_while_a_round_is_in_flight(open_llm: Callable[..., LLM]) -> None:
    llm = open_llm(max_num_seqs=2, max_queue=1, drafter=None)
    slow = Slow(llm)
    threads = []
    for _ in range(3):  # two run and hang in their pass; the third waits, with the second, at the door
        threads.append(threading.Thread(target=lambda: llm.generate([1], LONG)))
        threads[-1].start()
        while llm.snapshot().running + llm.snapshot().waiting + llm._loop._coming < len(threads):
            threads[-1].join(0.001)
    with pytest.raises(QueueFull):
        llm.generate([1], SHORT)
    with pytest.raises(QueueFull):
        next(llm.stream([1], SHORT))

    async def ask() -> None:
        async for _ in llm.generate_async([1], SHORT):
            raise AssertionError("it was let in")

    with pytest.raises(QueueFull):
        asyncio.run(ask())
    assert llm.snapshot().refused == 3
    slow.let_go()
    for thread in threads:
        thread.join()
    assert len(llm.generate([1], SHORT)[0].outputs[0].token_ids) == 2  # there is room again
    assert llm._loop._coming == 0


def test_without_a_queue_all_seats_may_be_taken(open_llm: Callable[..., LLM]) -> None:
    llm = open_llm(max_num_seqs=4, max_queue=0)
    assert len(llm.generate([[1]] * 4, SHORT)) == 4
    with pytest.raises(QueueFull):  # a batch is let in as a whole, or not
        llm.generate([[1]] * 5, SHORT)
    assert len(llm.generate([[1]] * 4, SHORT)) == 4
