"""The rounds of the queued engine, one by one: what is in flight, who waits, and what becomes of those who leave."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from exactness import FEW
from queueing import CPU, OFF, PARAMS, Echo, Letters, Queue
from scripted import Answers, Right
from slipstream import LLM, SamplingParams
from slipstream.core.draft import Draft, Tree
from slipstream.core.errors import ConfigError
from slipstream.drafters.base import DraftRequest
from slipstream.engine.chunks import Chunk
from slipstream.engine.flight import Flight
from slipstream.engine.packing import pack, pack_chunks
from slipstream.engine.state import Job
from slipstream.kv.pages import PageTable
from stepping import Arrival, Stepper


class TestOneAhead:
    @pytest.mark.parametrize("drafter", [None, "echo", "model"])
    def test_after_a_step_one_round_is_in_flight(
        self, tiny_target: Path, tiny_draft: Path, drafter: str | None
    ) -> None:
        made: Any = {"echo": Echo(), "model": f"model:{tiny_draft}"}.get(drafter or "")
        bench = Queue(tiny_target, made)
        job, _ = bench.add([1, 2, 3], PARAMS)
        (answer,) = job.answers
        bench.engine.step()
        assert len(bench.flights) == 1
        assert (answer.queued, answer.coming, answer.generated) == (1, 1, 0)  # the prompt's round gives one token
        before = 0
        while not answer.ended:
            last = bench.flights[-1]
            bench.engine.step()
            assert len(bench.flights) <= 1
            assert all(ticket is not last for ticket in bench.flights)  # it was read, behind the next one's back
            assert answer.generated > before
            before = answer.generated
            if bench.flights:
                assert answer.queued == 1
                assert answer.coming == sum(m.bound for t in bench.flights for m in t.members)
        bench.drain()

    def test_a_drafter_on_the_host_is_asked_when_all_is_read(self, tiny_target: Path) -> None:
        answers = Answers()
        seen: list[tuple[int, int]] = []

        class Looks(Right):
            name: ClassVar[str] = "looks"

            def propose(self, requests: Sequence[DraftRequest], budget: Sequence[int]) -> Sequence[Tree]:
                seen.append((len(bench.flights), len(requests[0].tokens)))
                return super().propose(requests, budget)

        bench = Queue(tiny_target, Looks(answers))
        (plainly,) = Stepper(tiny_target, None).run([Arrival(3, PARAMS)])
        prompt = random.Random(1).choices(range(256), k=3)
        answers.tell(prompt, 4, plainly.token_ids)
        job, _ = bench.add(prompt, PARAMS)
        bench.drain()
        assert job.answers[0].output.token_ids == plainly.token_ids
        assert seen == [(0, 3 + n) for n in (1, 8, 15)]  # drafts of six, and one token more each round

    @pytest.mark.parametrize("tokens", [1, 2, 7])
    def test_no_round_too_many_where_the_limit_is_sure(
        self, tiny_target: Path, tokens: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        bench = Queue(tiny_target, None)
        rounds: list[int] = []
        launch = bench.queued.launch

        def note(batch: Any, plan: Any, **how: Any) -> Flight:
            rounds.append(len(batch.decodes) + len(batch.chunks))
            return launch(batch, plan, **how)

        monkeypatch.setattr(bench.queued, "launch", note)
        bench.add([1, 2], replace(PARAMS, max_tokens=tokens))
        bench.drain()
        assert rounds == [1] * tokens

    def test_an_answer_that_ends_early_is_in_one_round_too_many(self, tiny_target: Path) -> None:
        """Nobody listens to that round, and its pages are the next one's."""
        bench = Queue(tiny_target, None)
        (whole,) = Stepper(tiny_target, None).run([Arrival(3, PARAMS)])
        stop = next(t for i, t in enumerate(whole.token_ids) if i > 4 and t not in whole.token_ids[:i])
        prompt = random.Random(1).choices(range(256), k=3)
        job, heard = bench.add(prompt, replace(PARAMS, stop_token_ids=[stop]))
        while not job.answers[0].ended:
            bench.engine.step()
        assert [m.answer for t in bench.flights for m in t.members] == job.answers
        assert not any(m.listens for t in bench.flights for m in t.members)
        assert bench.engine.pool.free_pages == bench.engine.pool.num_pages
        again, _ = bench.add(prompt, PARAMS)  # into the same lane and pages
        bench.drain()
        assert heard[0].outputs[0].token_ids == whole.token_ids[: whole.token_ids.index(stop) + 1]
        assert again.answers[0].output.token_ids == whole.token_ids

    def test_rounds_come_in_few_shapes(self, tiny_target: Path) -> None:
        bench = Queue(tiny_target, None, max_num_seqs=8)
        bench.run([Arrival(3 + i, replace(PARAMS, seed=i, max_tokens=12), 2 * i) for i in range(8)])
        assert len(bench.queued.rounds) <= 4  # of one, two, four and eight requests


def test_prompts_alone_are_packed_as_prompts_beside_decodes_are(tiny_target: Path) -> None:
    """Fragmented pages, a prompt in its middle, one that completes and one that does not."""
    bench = Queue(tiny_target, None, page_size=4, max_num_seqs=4)
    tables = [PageTable(bench.engine.pool) for _ in range(3)]
    for length in (5, 9, 14, 22):
        for table in tables:
            table.reserve(length)  # in turns: no table's pages are neighbours
    answers = []
    for slot, (table, cached) in enumerate(zip(tables, (0, 3, 7), strict=True)):
        job, _ = bench.add(list(range(10 * slot, 10 * slot + 12)), PARAMS)
        table.commit(cached)
        job.answers[0].table, job.answers[0].slot = table, slot
        answers.append(job.answers[0])
    chunks = [Chunk(answers[0], 12), Chunk(answers[1], 4), Chunk(answers[2], 5)]
    want = pack([], chunks, Draft.pack([], CPU), paths=False)
    got = pack_chunks(chunks, CPU, wide=False)
    assert got.completing == want.emitting == (answers[0], answers[2])
    for one, other in ((got.batch, want.batch), (got.rows, want.rows)):
        for name in one.__slots__:
            a, b = getattr(one, name), getattr(other, name)
            assert (a.tolist() == b.tolist()) if isinstance(a, Tensor) else a == b, name


class TestLeaving:
    @pytest.mark.parametrize("drafter", [None, "echo", "ngram", "model"])
    @pytest.mark.parametrize("rounds", [1, 2, 5])
    def test_abort_in_flight(self, tiny_target: Path, drafter: str | None, rounds: int) -> None:
        made: Any = {"echo": Echo(), "model": f"model:{tiny_target}"}.get(drafter or "", drafter)
        bench = Queue(tiny_target, made)
        want = [a.token_ids for a in Stepper(tiny_target, None).run([Arrival(3, PARAMS)])]
        gone, _ = bench.add([9] * 20, replace(PARAMS, n=2))
        prompt = random.Random(1).choices(range(256), k=3)
        stays, _ = bench.add(prompt, PARAMS)
        for _ in range(rounds):
            bench.engine.step()
        assert bench.flights
        bench.engine.abort(gone.id)
        bench.engine.scheduler.check_integrity()
        assert {a.output.finish_reason for a in gone.answers} == {"abort"}
        lengths = [len(a.output.token_ids) for a in gone.answers]
        next_one, _ = bench.add([9] * 20, PARAMS)  # takes over slot and pages while the old round is in flight
        bench.drain()
        assert [len(a.output.token_ids) for a in gone.answers] == lengths  # nothing after
        assert stays.answers[0].output.token_ids == want[0]
        alone, _ = bench.add([9] * 20, PARAMS)
        bench.drain()
        assert next_one.answers[0].output.token_ids == alone.answers[0].output.token_ids

    @pytest.mark.parametrize("drafter", [None, "bushy", "model"])
    @pytest.mark.parametrize("n", [1, 2])
    def test_preemption(self, tiny_target: Path, drafter: str | None, n: int) -> None:
        params = replace(PARAMS, logit_bias=FEW, n=n)
        arrivals = [Arrival(5 + 3 * i, replace(params, seed=i, temperature=i % 2)) for i in range(5)]
        want = [a.token_ids for a in Stepper(tiny_target, None).run(arrivals)]
        made: Any = None if drafter is None else f"model:{tiny_target}" if drafter == "model" else Letters()
        shape: dict[str, Any] = {"page_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 12, "max_model_len": 48}
        bench = Queue(tiny_target, made, pages=14, **shape)
        got = bench.run(arrivals)
        assert bench.engine.scheduler.preemptions > 0
        assert [a.token_ids for a in got] == want
        if drafter == "model":
            assert sum(a.speculation.accepted for a in got) > 50
            assert all(a.speculation.drafted - a.speculation.accepted <= 5 for a in got)  # behind the limit
        if drafter == "bushy":
            assert sum(a.speculation.accepted for a in got) > 10


@dataclass
class Interleaving:
    """A queued engine that is used again and again, with the plain answers of those who ever asked."""

    bench: Queue
    known: dict[tuple[int, int, int], list[list[int]]] = field(default_factory=dict)

    def plainly(self, prompt: int, seed: int, tokens: int, params: SamplingParams) -> list[list[int]]:
        key = prompt, seed, tokens
        if key not in self.known:
            job, _ = self.bench.add([prompt] * (1 + prompt), replace(params, speculation=OFF))
            self.bench.drain()
            self.known[key] = [a.output.token_ids for a in job.answers]
        return self.known[key]


@pytest.fixture(scope="module", params=["model", "letters"])
def interleaving(request: pytest.FixtureRequest, tiny_target: Path, tiny_draft: Path) -> Interleaving:
    drafter: Any = f"model:{tiny_draft}" if request.param == "model" else Letters()
    shape: dict[str, Any] = {"page_size": 4, "max_num_seqs": 3, "max_num_batched_tokens": 7, "max_model_len": 48}
    return Interleaving(Queue(tiny_target, drafter, pages=20, **shape))


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 15), st.integers(0, 3), st.sampled_from((1, 5, 20))),
        st.tuples(st.just("abort"), st.integers(0, 5), st.just(0), st.just(0)),
        st.tuples(st.just("step"), st.integers(1, 4), st.just(0), st.just(0)),
    ),
    max_size=25,
)


@settings(deadline=None, max_examples=40, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(actions=ACTIONS)
def test_any_interleaving(interleaving: Interleaving, actions: list[tuple[str, int, int, int]]) -> None:
    """Whoever is not aborted gets its plain tokens; whoever is gets the beginning of them; nothing is lost."""
    bench = interleaving.bench
    jobs: list[tuple[Job, tuple[int, int, int], SamplingParams]] = []
    for kind, a, b, c in actions:
        if kind == "add":
            params = replace(PARAMS, seed=b, temperature=b % 2, n=1 + (b == 3), max_tokens=c, logit_bias=FEW)
            jobs.append((bench.add([a] * (1 + a), params)[0], (a, b, c), params))
        elif kind == "abort" and a < len(jobs):
            bench.engine.abort(jobs[a][0].id)
        elif kind == "step":
            for _ in range(a):
                bench.engine.step()
        bench.engine.scheduler.check_integrity()
        bench.check_lanes()
        assert len(bench.flights) <= 1
    bench.drain()
    for job, key, params in jobs:
        for answer, right in zip(job.answers, interleaving.plainly(*key, params), strict=True):
            assert answer.output.error is None or answer.output.finish_reason == "abort"
            ids = answer.output.token_ids
            assert ids == (right[: len(ids)] if answer.output.finish_reason == "abort" else right)
            assert (answer.queued, answer.coming) == (0, 0)


def test_rounds_must_be_one_of_two(tiny_target: Path) -> None:
    with pytest.raises(ConfigError, match="rounds='lazy': must be one of queued, eager"):
        LLM(tiny_target, rounds="lazy")  # type: ignore[arg-type]
