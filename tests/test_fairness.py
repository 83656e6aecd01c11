"""Nobody starves: long prompts and short ones, those who run and those who wait, those who leave and those late."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
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
from slipstream.engine.state import Answer, Phase
from stepping import Stepper
from test_scheduler import MAX_ROWS, SEATS, World, make_job, plainly
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
    bench = kind(tiny_target, None, max_num_seqs=seats, max_num_batched_tokens=64)
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


LENGTH = 8
"""Tokens of a request, its prompt of three included."""


def waits(world: World, flooders: Sequence[str], requests: int = 12) -> list[int]:
    """Rounds until each request of a client starts. It sends one every third round, beside floods of others."""
    for tenant in flooders:
        for _ in range(200):
            world.add(make_job(3, tenant=tenant))
    for _ in range(3):
        world.run(world.scheduler.schedule(), plainly, LENGTH)
    came: dict[Answer, int] = {}
    begun: dict[Answer, int] = {}
    for now in range(400):
        if now % 3 == 0 and len(came) < requests:
            came[world.add(make_job(3, tenant="client")).answers[0]] = now
        world.run(world.scheduler.schedule(), plainly, LENGTH)
        begun |= {answer: now for answer in came if answer.turn is not None and answer not in begun}
    return [begun[answer] - at for answer, at in came.items()]


@pytest.mark.parametrize("flooders", [("a",), ("a", "b", "c")])
def test_floods_of_others_leave_a_client_its_share(flooders: tuple[str, ...]) -> None:
    """It waits no longer than alone on a machine with its share of the seats, but for an answer that is under way."""
    share = SEATS // (1 + len(flooders))
    beside = waits(World(pages=100), flooders)
    alone = waits(World(pages=100, seats=share), ())
    assert all(wait <= least + LENGTH for wait, least in zip(beside, alone, strict=True)), (beside, alone)


def test_who_was_preempted_comes_before_all_who_never_ran() -> None:
    world = World(pages=9)
    flood = [world.add(make_job(6, tenant="flood")).answers[0] for _ in range(9)]
    rounds = 0
    while not world.scheduler.preemptions:
        world.run(world.scheduler.schedule(), plainly, 100)
        rounds += 1
        assert rounds < 100
    (back,) = [answer for answer in flood if answer.turn is not None and answer.phase is Phase.WAITING]
    world.add(make_job(6, tenant="new"))
    world.end(world.scheduler.running[0])
    assert next(iter(world.scheduler.waiting)) is back
    world.scheduler.schedule()
    assert back in world.scheduler.running


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 3), st.integers(0, 30)), max_size=60), st.data())
def test_in_a_line_each_tenant_has_its_own_order(steps: list[tuple[str, int, int]], data: st.DataObject) -> None:
    """Requests join, leave, start, are put back and end. A new tenant waits for one of each other tenant at most."""
    line, plain = WaitingLine(), dict[str, list[Answer]](a=[], b=[], c=[])
    running: list[Answer] = []

    def end(answer: Answer, length: int) -> None:
        answer.tokens += [0] * length
        line.settle(answer)

    for tenant, step, number in steps:
        mine = plain[tenant]
        if step == 0 or not line:
            mine.append(make_job(1 + number, tenant=tenant).answers[0])
            line.add(mine[-1])
        elif step == 1 and mine:
            line.remove(gone := mine.pop(number % len(mine)))
            assert gone not in line
        elif step == 2 and running:
            end(running.pop(number % len(running)), number)
        else:
            taken = line.take()
            assert taken is plain[taken.tenant][0]
            if number % 3:
                running.append(plain[taken.tenant].pop(0))
            else:
                line.put_back(taken)
        assert {name: [one for one in line if one.tenant == name] for name in plain} == plain
        assert line.lengths() == {name: len(queue) for name, queue in plain.items() if queue}
    others = len(line.lengths())
    new = make_job(30, tenant="new").answers[0]
    line.add(new)
    for _ in range(others):
        if (taken := line.take()) is new:
            return
        end(taken, data.draw(st.integers(0, 300)))
    assert line.take() is new


def test_tokens_that_nobody_else_wanted_are_no_debt() -> None:
    """One long answer on an idle machine, then another tenant's flood: the next request has its turn soon."""
    line = WaitingLine()

    def came(tenant: str) -> Answer:
        line.add(answer := make_job(10, tenant=tenant).answers[0])
        return answer

    def over(answer: Answer, length: int = 100) -> None:
        answer.tokens += [0] * length
        line.settle(answer)

    long = came("a")
    assert line.take() is long
    came("b")
    over(line.take())
    over(long, 100_000)
    for _ in range(1000):
        came("b")
    for _ in range(5):
        over(line.take())
    again = came("a")
    before = 0
    while (taken := line.take()) is not again:
        over(taken)
        before += 1
    assert before <= 4
    assert line.take().tenant == "b", "and what it has now counts"


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 40)), min_size=40, max_size=120), st.integers(1, 4))
def test_two_tenants_that_wait_have_the_same_tokens(sizes: list[tuple[int, int]], seats: int) -> None:
    """Whatever their requests are like, and whatever they ask for: the difference does not grow with their number."""
    line, running, had = WaitingLine(), list[Answer](), {"a": 0, "b": 0}
    lengths: dict[Answer, int] = {}
    for number, (prompt, length) in enumerate(sizes):
        for tenant in "ab":  # the one has the short half, and the other the long one
            size = prompt if tenant == "a" else 10 * prompt
            job = make_job(size, tenant=tenant)
            job.answers[0].params = replace(job.params, max_tokens=400)
            lengths[job.answers[0]] = length if (tenant == "a") == bool(number % 5) else 10 * length
            line.add(job.answers[0])
    while set(line.lengths()) == {"a", "b"}:
        if len(running) < seats:
            running.append(line.take())
        else:
            over = running.pop(0)
            over.tokens += [0] * lengths[over]
            line.settle(over)
            had[over.tenant] += len(over.tokens)
        assert abs(had["a"] - had["b"]) <= 800 * (1 + 2 * seats)
