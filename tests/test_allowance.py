"""Prompts and streams share steps by time: a long prompt halves a stream at most and takes 2.4 times its time alone."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest

from slipstream.engine.allowance import PromptAllowance
from slipstream.engine.chunks import ChunkRule, OwnChunks, piece_rows
from slipstream.engine.state import Answer
from test_scheduler import World, make_job, plainly

LONGEST_S = 0.22
DECODE_S = 0.018
PROMPT = 6000


@dataclass
class Clock:
    """A scheduler whose steps take simulated time: so much for the decodes, and so much for each row of a prompt."""

    chunks: ChunkRule
    row_s: float
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
        decode_s = DECODE_S if plan.decodes else 0.0
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
GPU = {"chunks": OwnChunks(1024, 256, 512, 2048, 16, 8192), "row_s": 2.3e-5, "own_passes": True}


def clock(kind: str, *, bounded: bool = True) -> Clock:
    longest_s = (LONGEST_S if kind == "cpu" else 0.04) if bounded else None
    return Clock(**(CPU if kind == "cpu" else GPU), longest_s=longest_s)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_a_long_prompt_halves_a_stream_at_most(kind: str) -> None:
    alone_s = (idle := clock(kind)).until_first(idle.add(PROMPT))
    busy = clock(kind)
    stream = busy.add(8)
    busy.until_first(stream)
    for _ in range(40):  # for longer than a burst
        busy.step()
    before, began = stream.generated, busy.now
    busy.gaps.clear()
    first_s = busy.until_first(busy.add(PROMPT))
    rate = (stream.generated - before) / (busy.now - began)
    assert rate >= 0.5 / DECODE_S
    assert first_s <= 2.4 * alone_s
    assert max(busy.gaps) <= (0.3 if kind == "cpu" else 0.07)  # 18 ms of it are the decodes'


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
