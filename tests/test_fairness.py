"""Who may come in, who is read next, and how much: nobody waits for others without end."""

from __future__ import annotations

import asyncio
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from queueing import Queue
from slipstream import LLM, RequestOutput, SamplingParams
from slipstream.core.errors import ConfigError, InvalidRequest, QueueFull, RequestError
from slipstream.engine.allowance import SETTLED_S, PromptAllowance
from slipstream.engine.chunks import Chunk, ChunkRule, OwnChunks, piece_rows
from slipstream.engine.config import EngineConfig
from slipstream.engine.line import Admission, WaitingLine
from slipstream.engine.state import Answer, Deadlines, Phase
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


LONGEST_S = 0.22


DECODE_S = 0.018


PROMPT = 6000


@dataclass
class Clock:
    """A scheduler whose steps take simulated time: so much for the decodes, and so much for each row of a prompt."""

    chunks: ChunkRule
    row_s: float
    decode_s: float = DECODE_S
    longest_s: float | None = LONGEST_S  # None: steps are not shared by time
    own_passes: bool = False
    now: float = 100.0
    gaps: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        bounded = self.longest_s is not None
        self.allowance = PromptAllowance(self.longest_s, lambda: self.now) if bounded else None  # type: ignore[arg-type]
        self.world = World(pages=12000, chunks=self.chunks, allowance=self.allowance, seats=40)

    def add(self, prompt: int) -> Answer:
        job = self.world.add(make_job(prompt))
        job.arrived = self.now
        job.answers[0].params = replace(job.params, max_tokens=10**6)
        return job.answers[0]

    def step(self) -> None:
        plan = self.world.scheduler.schedule()
        rows = sum(chunk.rows for chunk in plan.chunks)
        decode_s = self.decode_s if plan.decodes else 0.0
        lasted_s = decode_s + rows * self.row_s
        self.now += lasted_s
        self.world.run(plan, plainly, 10**6)
        for answer in self.world.scheduler.running:
            if answer.generated and not answer.output.timing.first_token_s:
                answer.output.timing.first_token_s = self.now - answer.job.arrived
        if self.allowance is not None:
            read_s = rows * self.row_s if self.own_passes else None
            self.allowance.observe(rows, lasted_s, read_s, bool(plan.decodes))
        if plan.decodes:
            self.gaps.append(lasted_s)

    def until_first(self, answer: Answer) -> float:
        while not answer.generated:
            self.step()
        return answer.output.timing.first_token_s


CPU = {"chunks": ChunkRule(192), "row_s": 0.0025}


GPU = {"chunks": OwnChunks(1024, 256, 512, 2048, 16, 8192), "row_s": 2.6e-5, "decode_s": 0.004, "own_passes": True}


def clock(kind: str, *, bounded: bool = True) -> Clock:
    longest_s = (LONGEST_S if kind == "cpu" else 0.04) if bounded else None
    return Clock(**(CPU if kind == "cpu" else GPU), longest_s=longest_s)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_a_long_prompt_halves_a_stream_at_most(kind: str) -> None:
    alone_s = (idle := clock(kind)).until_first(idle.add(PROMPT))
    busy = clock(kind)
    stream = busy.add(8)
    busy.until_first(stream)
    while busy.now < stream.job.arrived + 2 * SETTLED_S:  # for longer than a burst
        busy.step()
    before, began = stream.generated, busy.now
    busy.gaps.clear()
    first_s = busy.until_first(busy.add(PROMPT))
    rate = (stream.generated - before) / (busy.now - began)
    assert rate >= 0.5 / busy.decode_s
    assert first_s <= 2.4 * alone_s
    assert max(busy.gaps) <= (0.3 if kind == "cpu" else 0.05)


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_requests_that_arrive_together_do_not_hold_each_other_up(kind: str) -> None:
    """Streams of the same burst have no claim, also where they began before the last of it arrived."""
    times = []
    for bounded in (False, True):
        burst = clock(kind, bounded=bounded)
        first = burst.add(8)
        burst.until_first(first)
        answers = [burst.add(128) for _ in range(3)]
        times.append(max(burst.until_first(answer) for answer in answers))
    assert times[1] <= 1.3 * times[0]


@pytest.mark.parametrize("streams", [1, 10])
def test_streams_beside_a_backlog_of_older_prompts_keep_a_third(streams: int) -> None:
    busy = clock("cpu")
    began = [busy.add(8) for _ in range(streams)]
    for _ in range(20):
        busy.add(2000)
    for one in began:
        busy.until_first(one)
    while busy.now < began[0].job.arrived + 2:
        busy.step()
    busy.gaps.clear()
    before, start = began[0].generated, busy.now
    while busy.now < start + 10:
        busy.step()
    assert (began[0].generated - before) / 10 >= 0.3 / DECODE_S
    assert max(busy.gaps) <= 0.3


def test_a_stall_is_no_price() -> None:
    """After one step that hung for 10 s a prompt is read nearly as soon as ever."""
    busy = clock("cpu")
    busy.until_first(busy.add(8))
    for _ in range(40):
        busy.step()
    usual_s = busy.until_first(busy.add(600))
    assert busy.allowance is not None
    busy.allowance.observe(88, 10.0, None, decodes=True)
    assert busy.until_first(busy.add(600)) <= 3 * usual_s


def test_a_stream_that_began_just_before_a_long_prompt_is_not_left_to_it() -> None:
    busy = clock("cpu")
    stream = busy.add(8)
    busy.until_first(stream)
    busy.step()
    long = busy.add(PROMPT)
    while busy.now < long.job.arrived + 2:
        busy.step()
    before, began = stream.generated, busy.now
    busy.until_first(long)
    assert (stream.generated - before) / (busy.now - began) >= 0.5 / DECODE_S


def test_a_short_prompt_passes_one_whose_pieces_fill_a_step() -> None:
    world = World(pages=4000, chunks=OwnChunks(64, 8, 20, step_rows=64))
    world.add(make_job(2000))
    world.run(world.scheduler.schedule(), plainly, 10**6)
    short = world.add(make_job(20)).answers[0]
    for _ in range(4):
        world.run(world.scheduler.schedule(), plainly, 10**6)
    assert short.generated


def test_a_stream_that_is_owed_nothing_leaves_the_prompt_alone() -> None:
    """After the prompt the debt is gone: the next prompt begins at once."""
    busy = clock("cpu")
    stream = busy.add(8)
    busy.until_first(stream)
    busy.until_first(busy.add(600))
    for _ in range(40):
        busy.step()
    second = busy.add(8)
    busy.step()
    assert second.generated


@pytest.mark.parametrize(("billions", "rows"), [(0.135, 2048), (4, 2048), (7, 1024), (8, 1024), (14, 512), (70, 512)])
def test_a_piece_is_smaller_for_a_larger_model(billions: float, rows: int) -> None:
    """It decides a prompt's bits, so it depends on the model and on nothing that was measured."""
    assert piece_rows(2e9 * billions, 2048) == rows
    assert piece_rows(2e9 * billions, 256) == 256


RULE = OwnChunks(max_rows=64, narrow=8, together=20)


@dataclass(eq=False)
class FakeAnswer:
    prompt_length: int
    generated: int = 0
    cached: int = 0
    wide: list[tuple[int, int]] = field(default_factory=list)

    @property
    def pending(self) -> int:
        return self.prompt_length + self.generated - self.cached


def read_in_pieces(answer: FakeAnswer, rooms: Sequence[int]) -> None:
    """Compute everything that is pending, in passes with these rooms; then with all the room there is."""
    for room in [*rooms, *[RULE.max_rows] * 1000]:
        if answer.pending == 0:
            return
        rows = RULE.rows(answer, room)  # type: ignore[arg-type]
        assert 0 <= rows <= min(room, answer.pending)
        if rows > RULE.narrow:
            answer.wide.append((answer.cached, answer.cached + rows))
        answer.cached += rows
    raise AssertionError("it never ends")


@given(st.integers(1, 300), st.integers(0, 40), st.lists(st.integers(1, 64), max_size=30))
def test_what_is_computed_widely_depends_on_the_prompt_alone(prompt: int, generated: int, rooms: list[int]) -> None:
    alone, in_company = FakeAnswer(prompt), FakeAnswer(prompt, generated)
    read_in_pieces(alone, [])
    read_in_pieces(in_company, rooms)
    assert alone.wide == in_company.wide
    assert all(end < prompt for _, end in alone.wide)  # the last token of a prompt, and what follows, is never in it


@given(st.lists(st.integers(1, 64), max_size=20))
def test_a_wide_chunk_has_a_pass_to_itself(rows: list[int]) -> None:
    chunks = [Chunk(FakeAnswer(n + 1), n) for n in rows]  # type: ignore[arg-type]
    passes = RULE.passes(chunks)
    assert sorted(map(id, chunks)) == sorted(id(chunk) for part in passes for chunk in part)
    for part in passes:
        assert len(part) == 1 or sum(chunk.rows for chunk in part) <= RULE.together
        assert RULE.is_wide(part) == any(chunk.rows > RULE.narrow for chunk in part)
        assert not RULE.is_wide(part) or len(part) == 1


@given(st.lists(st.integers(1, 64), max_size=20))
def test_wide_chunks_share_passes_where_they_may(rows: list[int]) -> None:
    rule = replace(RULE, wide_together=50)
    chunks = [Chunk(FakeAnswer(n + 1), n) for n in rows]  # type: ignore[arg-type]
    passes = rule.passes(chunks)
    assert sorted(map(id, chunks)) == sorted(id(chunk) for part in passes for chunk in part)
    for part in passes:
        wide = rule.is_wide(part)
        assert all((chunk.rows > rule.narrow) == wide for chunk in part)
        assert len(part) == 1 or sum(chunk.rows for chunk in part) <= (50 if wide else 20)
        assert rule.shares(part) == wide
        assert not RULE.shares(part)
    for before, after in pairwise(part for part in passes if rule.shares(part)):
        assert sum(chunk.rows for chunk in before) + after[0].rows > 50  # none is left half empty


@pytest.mark.parametrize("rounds", ["eager", "queued"])
def test_bad_words_with_a_prompt_in_chunks(open_llm: Callable[..., LLM], rounds: str) -> None:
    """A pass may emit nothing at all."""
    llm = open_llm(drafter=None, max_num_batched_tokens=32, rounds=rounds)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    neighbour, long = llm.generate([[1, 2, 3], list(range(40, 140))], [params, replace(params, bad_words=["ab"])])
    assert [o.outputs[0].error for o in (neighbour, long)] == [None, None]
    assert (
        long.outputs[0].token_ids
        == open_llm(drafter=None).generate(list(range(40, 140)), params)[0].outputs[0].token_ids
    )


LONG = SamplingParams(max_tokens=100, ignore_eos=True)


SHORT = SamplingParams(max_tokens=2, ignore_eos=True)


@pytest.mark.parametrize("wrong", [-1, 1.5, True, "many"])
def test_limits_that_mean_nothing_are_refused(wrong: object) -> None:
    wanted = "0 or more" if wrong == -1 else "a whole number, 0 or more, or None"
    with pytest.raises(ConfigError, match=f"^max_queue={wrong!r}: must be {wanted}$"):
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
