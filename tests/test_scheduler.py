"""Who runs next: whatever joins, grows, leaves or runs out of pages, nothing is lost, mixed up, unfair or forgotten."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from conftest import VOCAB
from scripted import Answers, Right
from slipstream import LLM, SamplingParams, SpeculationParams
from slipstream.core.outputs import CompletionOutput
from slipstream.engine.allowance import PromptAllowance
from slipstream.engine.chunks import Chunk, ChunkRule
from slipstream.engine.schedule import Schedule, Scheduler
from slipstream.engine.state import Answer, Job, Phase
from slipstream.engine.text import TextStream
from slipstream.kv.pages import PageCopy, PagePool
from slipstream.kv.prefix import PrefixStore

PAGE = 4
PAGES = 10
SEATS = 4
MAX_ROWS = 8


class NoText:
    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        return ""


def make_job(prompt: int, n: int = 1, begins: int = 0, salt: str = "", tenant: str = "") -> Job:
    """A job with a prompt of tokens that occur nowhere else, but for the first ones, which others may have, too."""
    make_job.made += 1  # type: ignore[attr-defined]
    first = 1000 * make_job.made  # type: ignore[attr-defined]
    tokens = [*range(min(begins, prompt)), *range(first + begins, first + prompt)]
    params = SamplingParams(n=n, cache_salt=salt, speculation=SpeculationParams(tenant=tenant))
    job = Job(f"job-{first}", None, tokens, params, lambda output: None)
    for sample in range(n):
        leader = job.answers[0] if sample else None
        text = TextStream(NoText(), job.prompt_ids)
        job.answers.append(Answer(job, sample, 0, list(job.prompt_ids), text, CompletionOutput(sample), leader=leader))
    return job


make_job.made = 0  # type: ignore[attr-defined]


class World:
    """A scheduler with an engine around it that computes nothing: a cache slot holds the token written to it."""

    def __init__(
        self,
        pages: int = PAGES,
        chunks: ChunkRule | None = None,
        most_kept: int | None = None,
        allowance: PromptAllowance | None = None,
        seats: int = SEATS,
    ) -> None:
        self.seats = seats
        self.pool = PagePool(pages, PAGE, most_kept)
        self.prefixes = PrefixStore(self.pool)
        self.cache: dict[int, int] = {}
        self.admitted: set[Answer] = set()
        self.copied = 0
        self.refuses: Callable[[Answer], bool] = lambda answer: False
        self.scheduler = Scheduler(
            self.pool,
            max_running=seats,
            chunks=chunks or ChunkRule(MAX_ROWS),
            prefixes=self.prefixes,
            copy_pages=self.copy_pages,
            on_admit=self.on_admit,
            on_release=self.admitted.discard,
            allowance=allowance,
        )

    def on_admit(self, answer: Answer) -> None:
        assert answer not in self.admitted
        assert answer.table is not None
        assert 0 <= answer.slot < self.seats
        self.admitted.add(answer)
        if self.refuses(answer):
            raise ZeroDivisionError("not this one")

    def copy_pages(self, copies: list[PageCopy]) -> None:
        for copy in copies:
            self.copied += 1
            for offset in range(PAGE):
                self.cache[copy.dst * PAGE + offset] = self.cache.get(copy.src * PAGE + offset, -1)

    def add(self, job: Job) -> Job:
        for answer in job.answers:
            self.scheduler.add(answer)
        return job

    def write(self, answer: Answer, tokens: list[int]) -> None:
        """The rows of a pass: each reads what its request has in the cache, then writes behind it."""
        assert answer.table is not None
        seen = [self.cache[slot] for slot in answer.table.slots(0, answer.cached)]
        assert seen == answer.tokens[: answer.cached]
        for slot, token in zip(answer.table.slots(answer.cached, len(tokens)), tokens, strict=True):
            self.cache[slot] = token

    def run(self, plan: Schedule, drafts: Callable[[Answer], tuple[int, int]], length: int) -> None:
        """One round; answers end when they are `length` long."""
        grown: list[tuple[Answer, int]] = []
        for answer in plan.decodes:
            nodes, accepted = drafts(answer)
            fits = self.scheduler.reserve_draft(answer, nodes)
            assert 0 <= fits <= nodes
            accepted = min(accepted, fits, length - len(answer.tokens) - 1)
            guesses = [len(answer.tokens) + i for i in range(fits)]
            self.write(answer, [answer.tokens[-1], *guesses])
            assert answer.table is not None
            answer.table.commit(1 + accepted)
            answer.tokens.extend([*guesses[:accepted], 7])
            grown.append((answer, accepted))
        for chunk in plan.chunks:
            answer, completes = chunk.answer, chunk.completes
            self.write(answer, answer.tokens[answer.cached : answer.cached + chunk.rows])
            self.scheduler.commit(chunk)
            if completes:
                answer.tokens.append(7)
        for answer in [*plan.decodes, *(c.answer for c in plan.chunks)]:
            if len(answer.tokens) >= length:
                self.end(answer)

    def end(self, answer: Answer) -> None:
        answer.end("length")
        self.scheduler.release(answer)


def plainly(answer: Answer) -> tuple[int, int]:
    return 0, 0


class Rounds(RuleBasedStateMachine):
    """Requests come, grow, are cancelled and preempted in any order. Everything that must always hold is checked."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(most_kept=PAGES // 2)
        self.answers: list[Answer] = []

    @property
    def alive(self) -> list[Answer]:
        return [answer for answer in self.answers if not answer.ended]

    @precondition(lambda self: len(self.alive) < 12)
    @rule(
        prompt=st.integers(1, PAGES * PAGE - 1),
        n=st.integers(1, 3),
        begins=st.sampled_from([0, 7, 8, 9, 20, 40]),
        salt=st.sampled_from(["", "other"]),
        tenant=st.sampled_from(["", "ann", "bob"]),
    )
    def join(self, prompt: int, n: int, begins: int, salt: str, tenant: str) -> None:
        self.answers.extend(self.world.add(make_job(prompt, n, begins, salt, tenant)).answers)

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        """What it holds must not be found: something is wrong with it."""
        table = data.draw(st.sampled_from(self.alive)).table
        if table is not None:
            self.world.prefixes.forget(table.pages)
            found = {page for page in range(PAGES) if page in self.world.pool.named}
            assert found.isdisjoint(table.pages)

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.world.end(data.draw(st.sampled_from(self.alive)))

    @rule(data=st.data())
    def round(self, data: st.DataObject) -> None:
        plan = self.schedule()
        size = st.integers(0, 9)
        self.world.run(plan, lambda answer: (data.draw(size), data.draw(size)), PAGES * PAGE)

    def schedule(self) -> Schedule:
        scheduler = self.world.scheduler
        before = list(scheduler.running)
        places = {answer: self.place(answer) for answer in scheduler.waiting}
        plan = scheduler.schedule()
        assert bool(plan) == bool(self.alive)  # while there is work, each round does some of it
        chosen = [*plan.decodes, *(chunk.answer for chunk in plan.chunks)]
        assert len(set(chosen)) == len(chosen)
        assert set(chosen) <= set(scheduler.running)
        assert len(plan.decodes) + sum(chunk.rows for chunk in plan.chunks) <= MAX_ROWS
        assert all(1 <= chunk.rows <= chunk.answer.pending for chunk in plan.chunks)
        assert all(answer.pending == 1 for answer in plan.decodes)
        # whoever decoded before and may go on, does: prompts wait for decodes, never the other way round
        assert {a for a in before if a.phase is Phase.RUNNING and a.pending == 1} <= set(chosen)
        for preempted in (a for a in before if a.phase is Phase.WAITING):
            assert all(self.place(a) < self.place(preempted) for a in before if a.phase is Phase.RUNNING)
        for started in set(scheduler.running) - set(before):
            for other in (a for a in scheduler.waiting if a.turn is not None or a.tenant == started.tenant):
                computing = other.leader is not None and other.leader.phase is Phase.RUNNING and not other.generated
                assert computing or self.place(other) > places.get(started, self.place(started))
        return plan

    def place(self, answer: Answer) -> tuple[bool, int]:
        """Who had a turn before comes first, in that order; of one tenant, who came first."""
        return answer.turn is None, self.answers.index(answer) if answer.turn is None else answer.turn

    @invariant()
    def nothing_is_lost(self) -> None:
        scheduler = self.world.scheduler
        scheduler.check_integrity()
        assert set(scheduler.running) == self.world.admitted == {a for a in self.answers if a.phase is Phase.RUNNING}
        assert set(scheduler.waiting) == {a for a in self.answers if a.phase is Phase.WAITING}
        for tenant in ("", "ann", "bob"):
            queue = [answer for answer in scheduler.waiting if answer.tenant == tenant]
            assert queue == sorted(queue, key=self.place)
        assert scheduler.running == sorted(scheduler.running, key=self.place)
        assert len(scheduler.running) <= SEATS

    def teardown(self) -> None:
        """Nobody starves: left alone, everybody comes to an end, and everything is given back."""
        for _ in range(60 * (1 + len(self.alive))):
            if not self.alive:
                break
            self.world.run(self.schedule(), plainly, PAGES * PAGE)
            self.nothing_is_lost()
        assert not self.alive
        assert self.world.pool.free_pages == PAGES
        self.world.prefixes.clear()
        assert self.world.pool.kept_pages == 0


Rounds.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestRounds = Rounds.TestCase


def test_pages_of_past_drafts_are_given_back_before_anybody_is_preempted() -> None:
    world = World(pages=6)
    old, young = (world.add(make_job(4)).answers[0] for _ in range(2))
    world.run(world.scheduler.schedule(), plainly, 100)
    world.run(world.scheduler.schedule(), lambda a: (11, 0) if a is young else (0, 0), 100)  # four pages, for nothing
    assert world.pool.free_pages == 0
    for _ in range(5):  # the older one grows into a third page: the younger one's guesses make room
        world.run(world.scheduler.schedule(), plainly, 100)
    assert world.scheduler.preemptions == 0
    assert world.scheduler.running == [old, young]
    world.scheduler.check_integrity()


@pytest.mark.parametrize("n", [1, 2])
def test_pages_of_past_drafts_are_given_back_to_let_somebody_in(n: int) -> None:
    world = World(pages=6)
    first = world.add(make_job(5, n)).answers
    world.run(world.scheduler.schedule(), plainly, 100)
    assert world.scheduler.reserve_draft(first[0], 20) in range(9, 21)
    assert world.pool.free_pages <= 1
    late = first[1] if n == 2 else world.add(make_job(5)).answers[0]
    world.scheduler.schedule()
    assert late.phase is Phase.RUNNING
    world.scheduler.check_integrity()


def test_a_prompt_in_the_making_keeps_its_pages() -> None:
    """Taking back guesses must not take what a long prompt has reserved and not yet written."""
    world = World(pages=12)
    long = world.add(make_job(30)).answers[0]
    world.run(world.scheduler.schedule(), plainly, 100)
    assert long.table is not None
    held = long.table.pages
    assert long.cached < 30
    world.add(make_job(30))
    world.run(world.scheduler.schedule(), plainly, 100)  # no room for the second
    assert long.table.pages == held
    for _ in range(4):
        world.run(world.scheduler.schedule(), plainly, 100)
    assert long.generated > 0


def test_siblings_share_the_prompts_pages() -> None:
    world = World(pages=20)
    leader, *others = world.add(make_job(11, n=3)).answers
    world.run(world.scheduler.schedule(), plainly, 40)
    assert [a.phase for a in others] == [Phase.WAITING] * 2  # until the prompt is computed
    world.run(world.scheduler.schedule(), plainly, 40)
    plan = world.scheduler.schedule()
    assert plan.decodes == [leader]
    assert [(chunk.answer, chunk.rows) for chunk in plan.chunks] == [(others[0], 1), (others[1], 1)]
    for other in others:
        assert other.table is not None
        assert leader.table is not None
        assert other.table.pages[:2] == leader.table.pages[:2]
        assert other.table.pages[2] != leader.table.pages[2]
    assert world.copied == 2
    world.run(plan, plainly, 40)
    world.end(leader)
    while others[0].phase is Phase.RUNNING:
        world.run(world.scheduler.schedule(), plainly, 40)
    assert world.pool.free_pages == 20


def test_a_decode_runs_beside_every_chunk_of_a_long_prompt() -> None:
    world = World(pages=30)
    short = world.add(make_job(2)).answers[0]
    world.run(world.scheduler.schedule(), plainly, 100)
    long = world.add(make_job(40)).answers[0]
    rounds = 0
    while not long.generated:
        before = short.generated
        plan = world.scheduler.schedule()
        assert plan.decodes == [short]
        assert plan.chunks == [Chunk(long, min(MAX_ROWS - 1, long.pending))]
        world.run(plan, plainly, 100)
        assert short.generated == before + 1
        rounds += 1
    assert rounds == 6


def test_one_that_cannot_start_fails_alone() -> None:
    world = World(pages=20)
    good, bad, last = (world.add(make_job(2)).answers[0] for _ in range(3))
    world.refuses = lambda answer: answer is bad
    plan = world.scheduler.schedule()
    assert plan.refused == [bad]
    assert [chunk.answer for chunk in plan.chunks] == [good, last]
    assert bad.ended
    assert bad.output.finish_reason == "error"
    assert bad.output.error == "it could not start: ZeroDivisionError: not this one"
    assert world.admitted == {good, last}
    world.scheduler.check_integrity()


def test_integrity_finds_what_was_lost() -> None:
    world = World()
    (answer,) = world.add(make_job(3)).answers
    world.scheduler.schedule()
    world.scheduler.check_integrity()
    answer.slot += 1
    with pytest.raises(AssertionError, match="each must be free or held, once"):
        world.scheduler.check_integrity()
    answer.slot -= 1
    world.scheduler.running.remove(answer)
    with pytest.raises(AssertionError, match="owners"):
        world.scheduler.check_integrity()


def tokens_of(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> list[list[int]]:
    outputs = llm.generate(prompts, params)
    assert all(answer.error is None for output in outputs for answer in output.outputs)
    return [answer.token_ids for output in outputs for answer in output.outputs]


WORKSPACE, BYTES_PER_PAGE = 256 * VOCAB * 4 * 3, 6144


@pytest.mark.parametrize("drafter", [None, "ngram", "right"])
@pytest.mark.parametrize("pages", [6, 9])
def test_preempted_requests_give_the_same_tokens(open_llm: Callable[..., LLM], drafter: str | None, pages: int) -> None:
    prompts = [[(7 * i + j) % 250 for j in range(3 + 5 * i)] for i in range(6)]
    params = [SamplingParams(n=1 + i % 2, max_tokens=45, ignore_eos=True, seed=i, temperature=i / 3) for i in range(6)]
    plenty = open_llm(drafter=None)
    expected = tokens_of(plenty, prompts, params)
    assert plenty.engine.scheduler.preemptions == 0
    made: Any = drafter
    if drafter == "right":
        answers = Answers()
        flat = iter(expected)
        for prompt, p in zip(prompts, params, strict=True):
            for sample in range(p.n):
                answers.tell(prompt, p.seed, next(flat), sample)
        made = Right(answers)
    tight = open_llm(drafter=made, planner="fixed", memory=WORKSPACE + pages * BYTES_PER_PAGE)
    assert tight.engine.pool.num_pages == pages
    for _ in range(2):  # the second time on pages that others have used
        assert tokens_of(tight, prompts, params) == expected
    assert tight.engine.scheduler.preemptions > 0


def test_a_request_as_long_as_the_memory_runs_alone(open_llm: Callable[..., LLM]) -> None:
    llm = open_llm(drafter="ngram", memory=WORKSPACE + 4 * BYTES_PER_PAGE)
    assert llm.max_model_len == 64
    params = SamplingParams(max_tokens=1000, ignore_eos=True, temperature=0)
    for length in (1, 15, 16, 17, 62, 63):
        many = llm.generate([[3] * length] * 3, params)
        assert [len(output.outputs[0].token_ids) for output in many] == [64 - length] * 3
        assert {output.outputs[0].finish_reason for output in many} == {"length"}
