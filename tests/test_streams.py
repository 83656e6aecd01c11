"""Streams: what each output holds, when it reaches its event loop, and how the engine's thread ends."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn, cast

import pytest

from slipstream import LLM, RequestOutput, SamplingParams, SpeculationParams
from slipstream.core.errors import CapacityError
from slipstream.engine import loop as engine_loop
from slipstream.engine.loop import EngineLoop
from slipstream.engine.state import Answer, Job
from slipstream.engine.streams import LONGEST_S, LOOP_SHARE, Deliveries, OutputStream

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
        assert not engine_loop._running
    finally:
        signal.signal(signal.SIGINT, handler)
        over.set()


def test_open_engines_end_with_the_program(open_llm: Callable[..., LLM]) -> None:
    llm = open_llm()
    stream = llm.stream("abc", SamplingParams(max_tokens=200, ignore_eos=True))
    next(stream)
    thread = llm._loop._thread
    assert llm._loop in engine_loop._running
    engine_loop._close_all()  # what Python calls at its end
    assert not thread.is_alive()
    assert llm._loop not in engine_loop._running
    assert list(stream)[-1].finished, "a stream that is still open gets its end"


class Loop:
    """An event loop that does at once what it is called for. To tell one stream is `each` seconds of work."""

    def __init__(self, each: float) -> None:
        self.each = each
        self.now = self.worked = 100.0
        self.woken = 0
        self.deliveries = Deliveries(cast(Any, self), lambda: self.now, lambda: self.worked)
        self._soon: list[Callable[[], None]] = []

    def is_closed(self) -> bool:
        return False

    def call_soon(self, action: Callable[..., None], *arguments: Any) -> None:
        self._soon.append(lambda: action(*arguments))

    def call_soon_threadsafe(self, action: Callable[[], None]) -> None:
        self.woken += 1
        streams = len(self.deliveries._waiting)
        action()
        self.worked += self.each * streams
        while self._soon:
            later, self._soon = self._soon, []
            for one in later:
                one()


@dataclass(eq=False)
class Request:
    """One that says a token in every round, and makes an output of what is new when it may tell."""

    deliveries: Deliveries
    told: list[int] = field(default_factory=list)  # tokens of each output
    new: int = 0
    stream: OutputStream = field(init=False)

    def __post_init__(self) -> None:
        self.stream = OutputStream(self.deliveries, lambda: None)

    def say(self, *, last: bool = False) -> None:
        self.new += 1
        if not self.deliveries.holds(self, last or not self.told):
            self._tell(last=last)

    def report(self) -> None:
        if not (self.stream.finished or self.deliveries.holds(self, False)):
            self._tell(last=False)

    def _tell(self, *, last: bool) -> None:
        self.told.append(self.new)
        self.new = 0
        self.stream.put(RequestOutput("r", None, [], [], last))


def a_crowd(count: int, each: float) -> tuple[Loop, list[Request]]:
    loop = Loop(each)
    return loop, [Request(loop.deliveries) for _ in range(count)]


def play(loop: Loop, requests: list[Request], rounds: int, round_s: float, *, last: bool = False) -> None:
    for _ in range(rounds):
        loop.now += round_s
        for request in requests:
            request.say(last=last)
        loop.deliveries.flush()


def test_few_streams_get_every_step() -> None:
    loop, requests = a_crowd(7, each=50e-6)
    play(loop, requests, 40, 0.0005)
    assert all(request.told == [1] * 40 for request in requests)
    assert loop.woken == 40


def test_a_crowd_gets_every_long_step() -> None:
    loop, requests = a_crowd(32, each=25e-6)
    play(loop, requests, 40, 0.004)  # telling is a fifth of it
    assert all(request.told == [1] * 40 for request in requests)


@pytest.mark.parametrize(("each", "wait"), [(10e-6, 0.008), (200e-6, LONGEST_S)])
def test_a_crowd_gets_several_short_steps_together(each: float, wait: float) -> None:
    """Reports take a bounded share of the time, and none waits for long."""
    loop, requests = a_crowd(32, each)
    play(loop, requests, 400, 0.001)
    first, *others = requests
    assert first.told[0] == 1  # the first token comes at once
    assert first.told[-1] == pytest.approx(wait / 0.001, abs=1)
    assert sum(first.told) + first.new == 400  # nothing is lost
    assert all(other.told == first.told for other in others)
    assert loop.woken < 400 / first.told[-1] + 30  # it takes some rounds to see how long they and the telling take
    spent = 32 * each * (loop.woken - 1)
    assert spent < 2 * LOOP_SHARE * 0.4 or wait == LONGEST_S


def test_the_end_comes_at_once_with_everything_held() -> None:
    loop, requests = a_crowd(32, each=30e-6)
    play(loop, requests, 50, 0.001)
    assert requests[0].new > 0
    held = requests[0].new
    play(loop, requests[:1], 1, 0.001, last=True)
    assert requests[0].told[-1] == held + 1
    assert requests[0].stream.finished
    assert requests[0] not in loop.deliveries._holding  # nothing is left of it, though no round may follow


def test_held_news_come_without_further_tokens() -> None:
    """Of a request that waits for memory, say."""
    loop, requests = a_crowd(32, each=30e-6)
    play(loop, requests, 50, 0.001)
    silent, others = requests[0], requests[1:]
    assert silent.new > 0
    play(loop, others, 30, 0.001)
    assert silent.new == 0
    assert sum(silent.told) == 50


def test_first_tokens_and_ends_are_urgent_of_each_answer(llm: LLM) -> None:
    """One of two answers ends while the other goes on: its end is reported at once, and once."""
    told: list[RequestOutput] = []
    urgent: list[bool] = []

    def holds(_: Job, is_urgent: bool) -> bool:
        urgent.append(is_urgent)
        return not is_urgent

    job = llm._intake.job("abc", SamplingParams(n=2, output_kind="delta"), told.append, streaming=True)
    job.holds = holds
    one, two = job.answers

    def say(answer: Answer, token: int) -> None:
        answer.output.token_ids.append(token)
        job.report()

    for answer, token, expected in ((one, 1, True), (one, 2, False), (two, 3, True), (two, 4, False), (one, 5, False)):
        say(answer, token)
        assert urgent[-1] is expected
    one.end("length")
    for expected in (True, False):
        job.report()
        assert urgent[-1] is expected
    two.end("length")
    job.report()
    assert urgent[-1]
    news = [[output.token_ids for output in request.outputs] for request in told]
    assert news == [[[1], []], [[2], [3]], [[5], [4]], [[], []]]
    assert [request.finished for request in told] == [False, False, False, True]


@pytest.mark.parametrize("rounds", ["eager", "queued"])
def test_a_crowd_gets_all_of_its_answers(open_llm: Callable[..., LLM], rounds: str) -> None:
    """With several answers each, stop strings and logprobs, and more requests than run at once. No output is empty."""
    llm = open_llm(rounds=rounds, max_num_seqs=16, drafter=None)
    params = [
        SamplingParams(
            n=1 + i % 2,
            max_tokens=40 + i,
            seed=i,
            ignore_eos=True,
            stop=["b", "é"] if i % 3 else [],
            logprobs=1 if i % 4 == 0 else None,
            output_kind="delta",
        )
        for i in range(12)
    ]
    told: dict[int, list[RequestOutput]] = {}

    async def listen(i: int) -> None:
        told[i] = [output async for output in llm.generate_async([1 + i, 2], params[i])]

    async def main() -> None:
        deliveries = llm._listeners.to(asyncio.get_running_loop())
        deliveries._each_s = 1.0  # as if telling took ever so long
        deliveries._handed_out = lambda *_: None  # type: ignore[method-assign]
        await asyncio.wait_for(asyncio.gather(*[listen(i) for i in range(12)]), 120)
        assert not deliveries._holding

    asyncio.run(main())
    whole = llm.generate([[1 + i, 2] for i in range(12)], [replace(p, output_kind="cumulative") for p in params])
    merged = 0
    for i, wanted in enumerate(whole):
        for k, answer in enumerate(wanted.outputs):
            parts = [part for output in told[i] for part in output.outputs if part.index == k]
            assert "".join(part.text for part in parts) == answer.text
            assert [token for part in parts for token in part.token_ids] == answer.token_ids
            if answer.logprobs is not None:
                logprobs = [one for part in parts for one in part.logprobs or []]
                assert [list(one) for one in logprobs] == [list(one) for one in answer.logprobs]
                for one, same in zip(logprobs, answer.logprobs, strict=True):
                    for token, found in one.items():  # up to rounding: it ran beside others
                        assert found.logprob == pytest.approx(same[token].logprob, abs=1e-4)
            assert parts[-1].finish_reason == answer.finish_reason
            assert len(parts[0].token_ids) <= 1  # the first one does not wait
            merged += sum(len(part.token_ids) > 1 for part in parts)
        assert all(output.finished or any(part.token_ids for part in output.outputs) for output in told[i])
    assert merged > 12
