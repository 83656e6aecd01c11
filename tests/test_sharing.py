"""Many callers of one engine: they share its passes, none waits for another, and whoever leaves takes all along."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

import pytest

from slipstream import LLM, RequestOutput, SamplingParams
from slipstream.core.errors import RequestError

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def ids(output: RequestOutput) -> list[int]:
    return output.outputs[0].token_ids


class Slow:
    """Lets an engine run round by round: each pass waits for a permit."""

    def __init__(self, llm: LLM) -> None:
        self._forward = llm.engine.target.forward
        self._permits = threading.Semaphore(0)
        self._free = threading.Event()
        self.rows: list[int] = []
        llm.engine.target.forward = self._wait  # type: ignore[method-assign]

    def _wait(self, batch: Any, cache: Any) -> Any:
        if not self._free.is_set():
            self._permits.acquire()
        self.rows.append(batch.num_rows)
        return self._forward(batch, cache)

    def rounds(self, count: int) -> None:
        for _ in range(count):
            self._permits.release()

    def let_go(self) -> None:
        self._free.set()
        self._permits.release()


class TestCompany:
    def test_a_long_prompt_does_not_stop_a_running_answer(self, open_llm: Callable[..., LLM]) -> None:
        llm = open_llm(max_num_batched_tokens=16, drafter=None)
        slow = Slow(llm)
        params = SamplingParams(max_tokens=200, ignore_eos=True, temperature=0)
        running = llm.stream([1, 2, 3], params)
        slow.rounds(2)
        assert [len(ids(next(running))) for _ in range(2)] == [1, 2]
        finished: queue.SimpleQueue[RequestOutput] = queue.SimpleQueue()
        work = threading.Thread(
            target=lambda: finished.put(llm.generate([[9] * 100], SamplingParams(max_tokens=1, temperature=0))[0])
        )
        slow.rounds(1)  # the round in flight; the long prompt comes in behind it
        next(running)
        work.start()
        seen = 3
        while finished.empty():
            slow.rounds(1)
            seen += 1
            assert len(ids(next(running))) == seen  # one token a round, whatever else is in it
            assert seen < 200  # steps between its pieces: the prompt takes half of the time at most
        work.join()
        assert max(slow.rows) == 16
        assert sum(rows > 1 for rows in slow.rows) >= 1 + 100 // 15
        slow.let_go()
        rest = list(running)
        assert len(ids(rest[-1])) == 200

    def test_threads_share_an_engine(self, llm: LLM) -> None:
        def params(seed: int) -> SamplingParams:
            return SamplingParams(max_tokens=10, seed=seed, temperature=0.8, n=1 + seed % 2, stop=["zz"])

        def text(seed: int) -> str:
            return "abc " * (1 + seed % 5)

        def answer(outputs: list[RequestOutput]) -> list[list[int]]:
            return [a.token_ids for output in outputs for a in output.outputs]

        expected = {seed: answer(llm.generate(text(seed), params(seed))) for seed in range(24)}
        found: dict[int, list[list[int]]] = {}
        errors: list[BaseException] = []

        def work(seeds: list[int]) -> None:
            try:
                for seed in seeds[:4]:
                    found[seed] = answer(llm.generate(text(seed), params(seed)))
                both = llm.generate([text(s) for s in seeds[4:]], [params(s) for s in seeds[4:]])
                found.update({s: answer([output]) for s, output in zip(seeds[4:], both, strict=True)})
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(list(range(i, 24, 4)),)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors
        assert found == expected

    def test_a_batch_starts_together(self, open_llm: Callable[..., LLM]) -> None:
        llm = open_llm(drafter=None)
        slow = Slow(llm)
        slow.let_go()
        llm.generate([[1, 2, 3]] * 8, SamplingParams(max_tokens=5, ignore_eos=True))
        assert slow.rows == [24, 8, 8, 8, 8]


class TestEnding:
    def test_closing_a_stream_early_frees_everything(self, llm: LLM) -> None:
        slow = Slow(llm)
        for rounds in (1, 2, 5):
            stream: Any = llm.stream([1] * 20, SamplingParams(n=2, max_tokens=100, ignore_eos=True))
            slow.rounds(rounds + 1)
            for _ in range(rounds):
                next(stream)
            stream.close()
            slow.rounds(2)
            llm._loop.call(lambda: None)  # behind the abort
            assert not llm.engine.jobs
            assert llm.engine.pool.free_pages == llm.engine.pool.num_pages
            llm.engine.scheduler.check_integrity()
        slow.let_go()

    def test_a_callback_that_raises_takes_its_batch_back(self, llm: LLM) -> None:
        def fail(output: RequestOutput) -> None:
            raise ZeroDivisionError("enough")

        params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (2, 200, 200)]
        with pytest.raises(ZeroDivisionError):
            llm.generate([[1], [2], [3]], params, on_output=fail)
        llm._loop.call(lambda: None)
        assert not llm.engine.busy
        assert llm.engine.pool.free_pages == llm.engine.pool.num_pages

    def test_closing_twice(self, open_llm: Callable[..., LLM]) -> None:
        with open_llm() as llm:
            llm.generate("a", GREEDY)
        llm.close()
        llm.close()

    def test_use_after_closing(self, open_llm: Callable[..., LLM]) -> None:
        llm = open_llm()
        llm.close()
        with pytest.raises(RequestError, match="the engine is closed: make a new LLM"):
            llm.generate("a", GREEDY)
        with pytest.raises(RequestError, match="the engine is closed"):
            next(llm.stream("a"))
        llm.abort("anything")  # nothing runs: nothing to end

    def test_closing_ends_what_runs(self, open_llm: Callable[..., LLM]) -> None:
        llm = open_llm()
        stream = llm.stream([1], SamplingParams(max_tokens=200, ignore_eos=True))
        next(stream)
        llm.close()
        *_, last = stream
        assert last.outputs[0].finish_reason in ("abort", "length")
        forgotten = open_llm()
        stream = forgotten.stream([1], SamplingParams(max_tokens=200, ignore_eos=True))
        next(stream)
        forgotten.close()
        del stream  # closes it: that the engine is closed already must not matter

    def test_closing_wakes_everybody_who_waits(self, open_llm: Callable[..., LLM]) -> None:
        llm = open_llm()
        slow = Slow(llm)
        reasons: queue.SimpleQueue[str | None] = queue.SimpleQueue()

        def wait() -> None:
            for output in llm.generate([[1], [2]], SamplingParams(max_tokens=100, ignore_eos=True)):
                reasons.put(output.outputs[0].finish_reason)

        threads = [threading.Thread(target=wait) for _ in range(3)]
        for thread in threads:
            thread.start()
        # all have come: some run, and hang in their first pass; the others stand at the door
        while len(llm.engine.jobs) // 2 + llm._loop._inbox.qsize() < 3:
            threads[0].join(0.01)
        closing = threading.Thread(target=llm.close)
        closing.start()
        while llm._loop._open:
            closing.join(0.01)
        slow.let_go()
        for thread in (*threads, closing):
            thread.join(60)
            assert not thread.is_alive()
        assert [reasons.get() for _ in range(6)] == ["abort"] * 6
