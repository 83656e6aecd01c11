"""A request that is over leaves nothing behind that only Python's search for garbage would find: rounds wait for it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest

from slipstream import LLM, SamplingParams
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


def test_who_hears_late_is_told_all_the_same(open_llm: Callable[..., LLM]) -> None:
    """An answer's job lets go of it only when its end was told."""
    whole = open_llm().generate("once", SamplingParams(max_tokens=6, ignore_eos=True, temperature=0))[0].outputs[0]
    params = SamplingParams(max_tokens=6, ignore_eos=True, temperature=0, output_kind="delta")
    parts = list(open_llm().stream("once", params))
    assert [token for part in parts for token in part.outputs[0].token_ids] == list(whole.token_ids)
    assert parts[-1].finished
