"""Nobody starves: long prompts and short ones, those who run and those who wait, those who leave and those late."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from queueing import Queue
from slipstream import LLM, RequestOutput, SamplingParams
from slipstream.core.errors import InvalidRequest
from slipstream.engine.deadlines import Deadlines
from slipstream.engine.line import WaitingLine
from slipstream.engine.state import Answer
from stepping import Stepper
from test_scheduler import MAX_ROWS, World, make_job, plainly
from test_sharing import Slow


def rounds_until_first(world: World, answer: Answer, most: int = 50) -> int:
    for rounds in range(1, most):
        world.run(world.scheduler.schedule(), plainly, 1000)
        if answer.generated:
            return rounds
    raise AssertionError("it never begins")


@pytest.mark.parametrize("long", [1, 2])
def test_a_short_prompt_does_not_wait_for_long_ones(long: int) -> None:
    world = World(pages=80)
    for _ in range(long):
        world.add(make_job(100))
        world.run(world.scheduler.schedule(), plainly, 1000)
    short = world.add(make_job(3)).answers[0]
    assert rounds_until_first(world, short) <= 2


def test_short_prompts_do_not_keep_a_long_one_waiting() -> None:
    """However many of them come, it gets half of every pass, and all that they leave."""
    world = World(pages=200)
    long = world.add(make_job(80)).answers[0]
    world.run(world.scheduler.schedule(), plainly, 1000)
    rounds = 1
    shorts: list[Answer] = []
    while not long.generated:
        shorts += world.add(make_job(4)).answers
        before = long.cached
        world.run(world.scheduler.schedule(), plainly, 1000)
        assert long.cached - before >= min(MAX_ROWS // 2, 80 - before)
        for answer in [a for a in shorts if a.generated]:
            world.end(answer)
            shorts.remove(answer)
        rounds += 1
        assert len(shorts) <= 1  # and none of them waits for longer than a round
    assert rounds == 2 + (80 - 2 * MAX_ROWS) // (MAX_ROWS // 2)  # its first and its last pass have no other in it


def test_a_prompt_that_fits_is_not_divided() -> None:
    """Half of a pass for each of two that fit would make the first one late, and the second no earlier."""
    world = World(pages=40)
    first, second = (world.add(make_job(6)).answers[0] for _ in range(2))
    world.run(world.scheduler.schedule(), plainly, 1000)
    assert first.generated == 1
    assert second.cached == MAX_ROWS - 6


@pytest.mark.parametrize("kind", [Stepper, Queue])
@pytest.mark.parametrize("seats", [8, 64])
def test_first_tokens_of_many_alike_are_near_each_other(
    tiny_target: Path, kind: type[Stepper] | type[Queue], seats: int
) -> None:
    """64 requests that come at once: the last one to begin waits less than five times as long as most, in rounds."""
    bench = kind(tiny_target, None, max_num_seqs=seats, max_batch_tokens=64)
    begun: dict[int, int] = {}
    rounds = 0

    def sink(index: int) -> Callable[[RequestOutput], None]:
        def hear(output: RequestOutput) -> None:
            if output.outputs[0].token_ids:
                begun.setdefault(index, rounds)

        return hear

    for index in range(64):
        params = SamplingParams(max_tokens=8, ignore_eos=True, seed=index)
        prompt = [index, *range(20 + index % 5)]
        bench.engine.add(bench._intake.job(prompt, params, sink(index), streaming=True))
    while bench.engine.busy:
        rounds += 1
        bench.engine.step()
        bench.engine.scheduler.check_integrity()
    assert len(begun) == 64
    assert max(begun.values()) < 5 * statistics.median(begun.values())


class TestTimeouts:
    PARAMS = SamplingParams(max_tokens=200, ignore_eos=True, timeout_s=60.0)

    @pytest.mark.parametrize("wrong", [0, -1.0, True, "soon", float("nan")])
    def test_times_that_mean_nothing_are_refused(self, wrong: object) -> None:
        with pytest.raises(InvalidRequest, match=r"timeout_s=.*: must be seconds, above 0, or None for no end"):
            SamplingParams(timeout_s=wrong)  # type: ignore[arg-type]

    @pytest.mark.parametrize("kind", [Stepper, Queue])
    def test_it_ends_between_two_rounds_and_gives_everything_back(
        self, tiny_target: Path, kind: type[Stepper] | type[Queue]
    ) -> None:
        bench = kind(tiny_target, "ngram", max_num_seqs=2)
        heard: list[list[RequestOutput]] = [[] for _ in range(4)]
        jobs = []
        for index, sink in enumerate(heard):
            params = replace(self.PARAMS, n=1 + index % 2, timeout_s=None if index == 0 else 60.0)
            jobs.append(bench._intake.job([1, 2, index], params, sink.append, streaming=False))
            bench.engine.add(jobs[-1])
        for _ in range(5):
            bench.engine.step()
        assert len(bench.engine.scheduler.running) == 2
        # the clock does not move in a test: what moves is when they came
        bench.engine._deadlines._heap = [(end - 100, i, job) for end, i, job in bench.engine._deadlines._heap]
        bench.engine.step()
        bench.engine.scheduler.check_integrity()
        assert list(bench.engine.jobs.values()) == jobs[:1]
        assert not bench.engine.scheduler.waiting
        for (output,) in heard[1:]:
            assert {a.finish_reason for a in output.outputs} == {"timeout"}
            assert {a.error for a in output.outputs} == {"timeout_s=60: its time was over before its answer was"}
        assert len(heard[1][0].outputs[0].token_ids) > 0  # what it had by then
        while bench.engine.busy:
            bench.engine.step()
        assert heard[0][0].outputs[0].finish_reason == "length"
        assert bench.engine.pool.free_pages == bench.engine.pool.num_pages
        assert bench.engine.snapshot().finished == {"timeout": 5, "length": 1}

    def test_by_the_clock(self, open_llm: Callable[..., LLM]) -> None:
        llm = open_llm(drafter=None)
        slow = Slow(llm)
        stream = llm.stream([1], replace(self.PARAMS, timeout_s=0.01))
        slow.rounds(1)
        next(stream)
        arrived = time.perf_counter()
        while time.perf_counter() < arrived + 0.02:  # its second pass hangs
            pass
        slow.let_go()
        *_, last = stream
        assert last.outputs[0].finish_reason == "timeout"
        assert 1 <= len(last.outputs[0].token_ids) <= 2  # the round in flight, and no more

    def test_jobs_that_ended_in_time_are_forgotten(self) -> None:
        deadlines = Deadlines()
        for _ in range(1000):
            job = make_job(3)
            job.params = self.PARAMS
            deadlines.add(job)
            job.answers[0].end("stop")
        assert len(deadlines._heap) < 150
        assert deadlines.over() == []


@given(st.lists(st.integers(0, 2), max_size=60))
def test_a_line_keeps_its_order_whoever_leaves(steps: list[int]) -> None:
    line, plain = WaitingLine(), list[Answer]()
    gone: list[Answer] = []
    for number, step in enumerate(steps):
        if step == 0 or not plain:
            back = gone and number % 3 == 0
            answer = gone.pop() if back else make_job(1).answers[0]
            line.add(answer)
            plain.append(answer)
            plain.sort(key=lambda answer: answer.arrival)
        elif step == 1:
            gone.append(plain.pop(0))
            assert line.take() is gone[-1]
        else:
            gone.append(plain.pop(number % len(plain)))
            line.remove(gone[-1])
            assert gone[-1] not in line
        assert list(line) == plain
        assert len(line) == len(plain)


def test_leaving_a_long_line_is_quick() -> None:
    """Of 20,000 who wait each leaves at a cost that does not grow with the line: the heap is made anew a few times."""
    line = WaitingLine()
    answers = [job.answers[0] for job in map(make_job, [1] * 20_000)]
    for answer in answers:
        line.add(answer)
    made = 0
    before = line._heap
    for answer in answers[::-1]:
        line.remove(answer)
        made += line._heap is not before
        before = line._heap
    assert len(line) == 0
    assert made <= 20
    assert len(line._heap) <= 16
