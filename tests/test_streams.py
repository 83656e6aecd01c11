"""Streams without asyncio: what each output holds, what it costs, and how the engine's thread ends."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import Any, NoReturn

import pytest

from slipstream import LLM, RequestOutput, SamplingParams, SpeculationParams
from slipstream.core.errors import CapacityError
from slipstream.engine import loop
from slipstream.engine.loop import EngineLoop

PARAMS: dict[str, Any] = {"max_tokens": 40, "seed": 3, "ignore_eos": True, "logprobs": 1, "stop": ["zzz"]}


def collect(llm: LLM, **changes: Any) -> list[RequestOutput]:
    return list(llm.stream("abc abc abc", SamplingParams(**{**PARAMS, **changes})))


@pytest.mark.parametrize("n", [1, 3])
def test_deltas_add_up_to_the_whole(llm: LLM, n: int) -> None:
    whole = collect(llm, n=n, speculation=SpeculationParams(tenant="one"))[-1]
    news = collect(llm, n=n, speculation=SpeculationParams(tenant="two"), output_kind="delta")
    assert len(news) > 5
    assert [output.finished for output in news] == [False] * (len(news) - 1) + [True]
    for answer in whole.outputs:
        parts = [output.outputs[answer.index] for output in news]
        assert "".join(part.text for part in parts) == answer.text
        assert [token for part in parts for token in part.token_ids] == answer.token_ids
        logprobs = [entry for part in parts for entry in part.logprobs or ()]
        assert [list(entry) for entry in logprobs] == [list(entry) for entry in answer.logprobs or ()]
        for entry, same in zip(logprobs, answer.logprobs or (), strict=True):
            for token, found in entry.items():  # up to rounding: other guesses may have stood beside it
                assert found.logprob == pytest.approx(same[token].logprob, abs=1e-4)
        assert max(len(part.token_ids) for part in parts) < len(answer.token_ids)
        assert parts[-1].finish_reason == answer.finish_reason
        assert [part.speculation.emitted for part in parts][-1] == len(answer.token_ids), "counts are of all so far"


def test_a_delta_costs_what_is_new(llm: LLM) -> None:
    """However long the answer, an output carries the tokens of one round, and the prompt is not copied again."""
    outputs = collect(llm, max_tokens=200, stop=[], output_kind="delta")
    assert sum(len(output.outputs[0].token_ids) for output in outputs) == 200
    assert max(len(output.outputs[0].token_ids) for output in outputs) <= 64
    assert len({id(output.prompt_token_ids) for output in outputs}) == 1
    assert len({id(output.prompt_token_ids) for output in collect(llm)}) == 1
    *running, last = [output.outputs[0] for output in outputs]
    assert len({id(one.speculation) for one in running}) == 1, "counts are copied with the end, not every round"
    assert last.speculation is not running[0].speculation
    assert last.speculation.emitted == 200


def test_cumulative_outputs_hold_everything_so_far_and_do_not_change(llm: LLM) -> None:
    outputs = collect(llm)
    lengths = [len(output.outputs[0].token_ids) for output in outputs]
    assert lengths == sorted(lengths)
    assert lengths[0] < lengths[-1] == 40
    assert all(
        output.outputs[0].token_ids == outputs[-1].outputs[0].token_ids[:length]
        for output, length in zip(outputs, lengths, strict=True)
    )


def test_final_only_is_one_output(llm: LLM) -> None:
    (only,) = collect(llm, output_kind="final_only")
    assert only.finished
    assert only.outputs[0].token_ids == collect(llm)[-1].outputs[0].token_ids


def test_generate_gives_the_whole_whatever_the_kind(llm: LLM) -> None:
    first, *others = [
        llm.generate("abc", SamplingParams(max_tokens=20, seed=1, output_kind=kind))[0].outputs[0].token_ids
        for kind in ("cumulative", "delta", "final_only")
    ]
    assert others == [first, first]


def engine_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "slipstream-engine"]


def test_an_engine_that_cannot_be_made_leaves_no_thread_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that is still ending when the program does is torn out of torch, which aborts the process."""
    waited: list[str] = []
    join = threading.Thread.join

    def seen(thread: threading.Thread, timeout: float | None = None) -> None:
        waited.append(thread.name)
        join(thread, timeout)

    def refused() -> NoReturn:
        raise CapacityError("too large")

    before = engine_threads()
    monkeypatch.setattr(threading.Thread, "join", seen)
    with pytest.raises(CapacityError, match="too large"):
        EngineLoop(refused)
    assert waited == ["slipstream-engine"]
    assert engine_threads() == before


def test_ctrl_c_while_loading_leaves_no_thread_behind() -> None:
    """A thread that still loads when the program ends is torn out of torch, which aborts the process."""
    before = engine_threads()
    main, over = threading.get_ident(), threading.Event()
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # a program in the background has none

    def make() -> Any:
        signal.pthread_kill(main, signal.SIGINT)
        while not over.wait(0.001):  # like a load of many small steps
            pass

    try:
        with pytest.raises(KeyboardInterrupt):
            EngineLoop(make)
        assert engine_threads() == before
        assert not loop._running
    finally:
        signal.signal(signal.SIGINT, handler)
        over.set()


def test_engines_that_nobody_closed_end_with_the_program(open_llm: Callable[..., LLM]) -> None:
    llm = open_llm()
    stream = llm.stream("abc", SamplingParams(max_tokens=200, ignore_eos=True))
    next(stream)
    thread = llm._loop._thread
    assert llm._loop in loop._running
    loop._close_all()  # what Python calls at its end
    assert not thread.is_alive()
    assert llm._loop not in loop._running
    assert list(stream)[-1].finished, "who still listens is told"
