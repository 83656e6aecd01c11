"""Streams under asyncio: they grow, they end, and a stream that is closed frees everything."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from slipstream import LLM, RequestOutput, SamplingParams, SpeculationParams
from slipstream.core.errors import InvalidRequest

LONG = SamplingParams(max_tokens=200, ignore_eos=True, seed=1)


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 120))


def everything_is_free(llm: LLM) -> None:
    llm._loop.call(lambda: None)  # after all earlier actions
    assert not llm.engine.jobs
    assert not llm.engine.busy
    assert llm.engine.pool.free_pages == llm.engine.pool.num_pages


class Gate:
    """Holds the engine before a pass, so that the test does not depend on the clock."""

    def __init__(self, llm: LLM) -> None:
        self._forward = llm.engine.target.forward
        self.open = threading.Event()
        self.reached = threading.Event()
        llm.engine.target.forward = self._pass  # type: ignore[method-assign]

    def _pass(self, batch: Any, cache: Any) -> Any:
        self.reached.set()
        assert self.open.wait(120)
        return self._forward(batch, cache)


async def collect(stream: AsyncIterator[RequestOutput]) -> list[RequestOutput]:
    return [output async for output in stream]


def test_text_grows_to_the_whole(llm: LLM) -> None:
    params = SamplingParams(max_tokens=40, seed=3, ignore_eos=True, logprobs=1)

    async def main() -> None:
        outputs = await collect(llm.generate_async("abc", params, request_id="mine"))
        assert {output.request_id for output in outputs} == {"mine"}
        for earlier, later in itertools.pairwise(outputs):
            assert not earlier.finished
            assert later.outputs[0].text.startswith(earlier.outputs[0].text)
            count = len(earlier.outputs[0].token_ids)
            assert later.outputs[0].token_ids[:count] == earlier.outputs[0].token_ids
            assert count < len(later.outputs[0].token_ids)
            assert len(earlier.outputs[0].logprobs or ()) == count == earlier.outputs[0].speculation.emitted
        assert outputs[-1].finished
        (whole,) = await asyncio.to_thread(llm.generate, "abc", params)
        assert outputs[-1].outputs[0].token_ids == whole.outputs[0].token_ids
        assert outputs[-1].outputs[0].text == whole.outputs[0].text

    run(main())
    everything_is_free(llm)


def test_many_streams_at_once(llm: LLM) -> None:
    def params(i: int) -> SamplingParams:
        return SamplingParams(max_tokens=3 + i, seed=i, ignore_eos=True, n=1 + i % 2)

    expected = llm.generate([[i + 1] * (1 + i) for i in range(30)], [params(i) for i in range(30)])

    async def main() -> None:
        streams = [collect(llm.generate_async([i + 1] * (1 + i), params(i))) for i in range(30)]
        for outputs, right in zip(await asyncio.gather(*streams), expected, strict=True):
            assert outputs[-1].finished
            assert [a.token_ids for a in outputs[-1].outputs] == [a.token_ids for a in right.outputs]

    run(main())
    everything_is_free(llm)


def test_abort_by_id(llm: LLM) -> None:
    async def main() -> None:
        gate = Gate(llm)
        task = asyncio.create_task(collect(llm.generate_async([1], LONG, request_id="one")))
        other = asyncio.create_task(collect(llm.generate_async([2], LONG, request_id="two")))
        await asyncio.to_thread(gate.reached.wait)
        llm.abort("one")
        gate.open.set()
        outputs, others = await task, await other
        assert outputs[-1].outputs[0].finish_reason == "abort"
        assert outputs[-1].outputs[0].error == "cancelled by its owner"
        assert len(outputs[-1].outputs[0].token_ids) < 10
        assert others[-1].outputs[0].finish_reason == "length"

    run(main())
    everything_is_free(llm)


@pytest.mark.parametrize("after", [0, 1, 3])
def test_a_cancelled_task_frees_everything(llm: LLM, after: int) -> None:
    """Also one that is cancelled before the engine has taken it."""

    async def main() -> None:
        gate = Gate(llm)
        heard: asyncio.Queue[int] = asyncio.Queue()

        async def listen() -> None:
            async for output in llm.generate_async([1] * 30, LONG):
                heard.put_nowait(len(output.outputs[0].token_ids))

        task = asyncio.create_task(listen())
        await asyncio.sleep(0)  # it has begun
        if after:
            gate.open.set()
            for _ in range(after):
                await heard.get()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        gate.open.set()

    run(main())
    everything_is_free(llm)


def test_closing_the_iterator_early(llm: LLM) -> None:
    async def main() -> None:
        async with aclosing(llm.generate_async([1], LONG)) as stream:  # type: ignore[type-var]
            async for output in stream:
                if len(output.outputs[0].token_ids) > 3:
                    break
        await asyncio.to_thread(everything_is_free, llm)

    run(main())


def test_a_name_is_taken_while_its_request_runs(llm: LLM) -> None:
    async def main() -> None:
        gate = Gate(llm)
        first = asyncio.create_task(collect(llm.generate_async([1], LONG, request_id="name")))
        await asyncio.to_thread(gate.reached.wait)
        second = asyncio.create_task(collect(llm.generate_async([2], LONG, request_id="name")))
        await asyncio.sleep(0)
        gate.open.set()
        with pytest.raises(InvalidRequest, match="request_id='name' is running already: choose another"):
            await second
        outputs = await first  # the other's failure is not its end
        assert outputs[-1].outputs[0].finish_reason == "length"
        assert len(outputs[-1].outputs[0].token_ids) == 200
        again = await collect(llm.generate_async([3], SamplingParams(max_tokens=2), request_id="name"))
        assert again[-1].finished

    run(main())
    everything_is_free(llm)


def test_closing_an_ended_stream_does_not_abort_a_namesake(llm: LLM) -> None:
    """The first stream is closed after its request ended, when another has its name."""

    async def main() -> None:
        left: Any = llm.generate_async([1], SamplingParams(max_tokens=8, ignore_eos=True), request_id="name")
        await anext(left)
        while llm.engine.jobs:
            await asyncio.to_thread(llm._loop.call, lambda: None)
        gate = Gate(llm)
        task = asyncio.create_task(collect(llm.generate_async([2], LONG, request_id="name")))
        await asyncio.to_thread(gate.reached.wait)
        await left.aclose()
        gate.open.set()
        outputs = await task
        assert outputs[-1].outputs[0].finish_reason == "length"

    run(main())


def test_names_that_look_like_anothers_samples(open_llm: Callable[..., LLM], tiny_draft: Path) -> None:
    """Two answers of the same name would share a page table with the draft model, and lose it together."""
    llm = open_llm(drafter=f"model:{tiny_draft}", planner="fixed")

    async def main() -> None:
        params = SamplingParams(n=2, max_tokens=20, seed=1, ignore_eos=True)
        longer = SamplingParams(max_tokens=40, seed=1, ignore_eos=True)
        streams = [
            collect(llm.generate_async([5] * 9, params, request_id="x")),
            collect(llm.generate_async([5] * 9, longer, request_id="x/1")),
            collect(llm.generate_async([5] * 9, longer, request_id="x/0")),
        ]
        two, *ones = await asyncio.gather(*streams)
        assert [len(a.token_ids) for a in two[-1].outputs] == [20, 20]
        assert [len(outputs[-1].outputs[0].token_ids) for outputs in ones] == [40, 40]

    run(main())
    everything_is_free(llm)


def test_an_event_loop_that_died_does_not_take_the_engine_along(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine drops its requests at their next output; other callers are not affected."""
    gate = Gate(llm)
    loop = asyncio.new_event_loop()
    stream: Any = llm.generate_async([1], LONG)
    waiting = loop.create_task(stream.__anext__())
    loop.call_soon(loop.stop)
    loop.run_forever()
    assert gate.reached.wait(60)
    with monkeypatch.context() as patch:  # the stream's owner does not drop it
        patch.setattr(llm._loop, "drop", lambda job: None)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            loop.run_until_complete(waiting)
    loop.close()
    gate.open.set()
    (output,) = llm.generate([2], SamplingParams(max_tokens=20, ignore_eos=True))
    assert output.outputs[0].error is None
    assert len(output.outputs[0].token_ids) == 20
    everything_is_free(llm)


def test_closing_the_engine_ends_streams(open_llm: Callable[..., LLM]) -> None:
    llm = open_llm()

    async def main() -> None:
        gate = Gate(llm)
        task = asyncio.create_task(collect(llm.generate_async([1], LONG)))
        await asyncio.to_thread(gate.reached.wait)
        closing = asyncio.create_task(asyncio.to_thread(llm.close))
        while llm._loop._open:
            await asyncio.sleep(0)
        gate.open.set()
        await closing
        outputs = await task
        assert outputs[-1].outputs[0].finish_reason == "abort"

    run(main())


def test_a_round_wakes_the_loop_once(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many streams it brought something to."""
    params = SamplingParams(max_tokens=20, ignore_eos=True, seed=1, speculation=SpeculationParams(enabled=False))

    async def main() -> None:
        loop = asyncio.get_running_loop()
        calls: list[object] = []
        wake = loop.call_soon_threadsafe

        def counted(*arguments: Any, **named: Any) -> Any:
            if getattr(arguments[0], "__name__", "") == "_hand_out":
                calls.append(arguments[0])
            return wake(*arguments, **named)

        monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
        await asyncio.gather(*(collect(llm.generate_async([i + 1], params)) for i in range(8)))
        assert 1 <= len(calls) <= 60  # 160 tokens came in some 27 rounds, beside 8 requests that were taken in

    run(main())
    everything_is_free(llm)


def test_requests_started_together_end_together(llm: LLM) -> None:
    async def main() -> None:
        params = [SamplingParams(max_tokens=4 + i, ignore_eos=True, seed=1) for i in range(3)]
        jobs = [llm._job([1, 2], own, None) for own in params]
        stream = llm._start(*jobs)
        counts = {}
        while arrived := await stream.take():
            counts.update({o.request_id: len(o.outputs[0].token_ids) for o in arrived if o.finished})
        assert counts == {job.id: 4 + i for i, job in enumerate(jobs)}

    run(main())
    everything_is_free(llm)


def test_one_that_is_refused_ends_those_started_with_it(llm: LLM) -> None:
    async def main() -> None:
        stream = llm._start(*[llm._job([1], LONG, "same") for _ in range(2)])
        with pytest.raises(InvalidRequest, match="same"):
            await stream.take()

    run(main())
    everything_is_free(llm)


def test_the_pulse_tells_a_hanging_round_from_rest(llm: LLM) -> None:
    assert llm._loop.pulse().alive
    gate = Gate(llm)

    async def main() -> None:
        task = asyncio.create_task(collect(llm.generate_async([1], LONG)))
        await asyncio.to_thread(gate.reached.wait)
        assert llm._loop.pulse().busy_s > 0
        gate.open.set()
        await task

    run(main())
    everything_is_free(llm)
    while llm._loop.pulse().busy_s:  # until its thread waits for work
        pass
    llm.close()
    assert not llm._loop.pulse().alive
