"""A request that is over leaves nothing behind that only Python's search for garbage would find: rounds wait for it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from queueing import Queue
from slipstream import LLM, SamplingParams, StructuredOutputsParams
from slipstream.engine.state import Answer, Job


@pytest.fixture(autouse=True)
def by_hand() -> Iterator[None]:
    """Nothing is searched but by the test, and what is found is kept."""
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    yield
    gc.set_debug(0)
    gc.garbage.clear()
    gc.enable()


def found() -> list[object]:
    gc.collect()
    return [one for one in gc.garbage if isinstance(one, Job | Answer)]


@pytest.mark.parametrize("rounds", ["eager", "queued"])
@pytest.mark.parametrize("drafter", [None, "auto", "ngram"])
def test_requests_that_ended_are_gone(open_llm: Callable[..., LLM], rounds: str, drafter: str | None) -> None:
    llm = open_llm(rounds=rounds, drafter=drafter)
    params = SamplingParams(max_tokens=6, n=2)
    outputs = llm.generate(["one", "two two two", "three"], params)
    assert [len(output.outputs) for output in outputs] == [2, 2, 2]
    llm.generate("after them", SamplingParams(max_tokens=2))  # the engine's thread holds on to what it did last
    assert not found()


def test_streams_and_those_that_were_dropped_are_gone(open_llm: Callable[..., LLM]) -> None:
    llm = open_llm()
    for last in (100, 2):
        for output in llm.stream("one two", SamplingParams(max_tokens=8, ignore_eos=True)):
            if len(output.outputs[0].token_ids) >= last:
                break
    llm.generate("after them", SamplingParams(max_tokens=2))
    assert not found()


def test_the_forms_of_requests_are_gone_with_them(open_llm: Callable[..., LLM]) -> None:
    llm = open_llm(drafter="ngram")
    form = StructuredOutputsParams(regex="[ab]{1,6}")
    llm.generate("letters", SamplingParams(max_tokens=8, structured_outputs=form))
    llm.generate("after them", SamplingParams(max_tokens=2))
    assert not found()


def test_who_hears_late_is_told_all_the_same(tiny_target: Path) -> None:
    queue = Queue(tiny_target, None)
    job, heard = queue.add([65, 66], SamplingParams(max_tokens=3, output_kind="delta"), streaming=True)
    job.holds = lambda job, urgent: True
    queue.drain()
    (answer,) = job.answers
    assert answer.ended
    assert answer.job is job
    assert not heard
    job.holds = None
    job.report()
    job.release()
    assert heard[-1].finished
    assert answer.job is not job
