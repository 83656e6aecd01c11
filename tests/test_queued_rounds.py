"""The rounds of the queued engine, one by one: what is in flight, who waits, and what becomes of those who leave."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from conftest import save_model, tiny_llama
from exactness import FEW, Case, cases, differences, plain, run
from scripted import Answers, Right
from slipstream import LLM, CompletionOutput, RequestOutput, SamplingParams, SpeculationParams
from slipstream.core.draft import Draft, Tree
from slipstream.drafters.base import DeviceDrafter, DraftRequest, DraftRound, HostDrafter, Needs
from slipstream.engine.queued import QueuedEngine, Ticket
from slipstream.engine.state import Job
from slipstream.models.batch import PassBatch
from slipstream.models.runner import Runner
from slipstream.plan.planner import Planner
from stepping import Arrival, Stepper

OFF = SpeculationParams(enabled=False)
PARAMS = SamplingParams(temperature=1.0, seed=4, max_tokens=20, ignore_eos=True)


class Queue(Stepper):
    """A queued engine, driven round by round."""

    def __init__(self, model: Path, drafter: Any, **config: Any) -> None:
        super().__init__(model, drafter, rounds="queued", **config)
        assert isinstance(self.engine, QueuedEngine)
        self.queued = self.engine

    @property
    def tickets(self) -> list[Ticket]:
        return list(self.queued._tickets)

    def add(self, prompt: Sequence[int], params: SamplingParams, **options: Any) -> tuple[Job, list[RequestOutput]]:
        heard: list[RequestOutput] = []
        job = self._intake.job(list(prompt), params, heard.append, **{"streaming": False, **options})
        self.engine.add(job)
        return job, heard

    def check_lanes(self) -> None:
        """On the device a lane's own pages stand first, and behind them nothing but nobody's page."""
        lanes = self.queued._lanes
        for slot, pages in lanes._sent.items():
            line = lanes.state.pages[slot].tolist()
            assert line == [*pages, *([self.engine.pool.num_pages] * (len(line) - len(pages)))]

    def drain(self) -> None:
        while self.engine.busy:
            self.engine.step()
            self.engine.scheduler.check_integrity()
        self.check_lanes()
        assert self.engine.pool.free_pages == self.engine.pool.num_pages


class Echo(DeviceDrafter):
    """Guesses the last token again, on the device, and notes how often it was asked."""

    name: ClassVar[str] = "echo"
    needs: ClassVar[Needs] = Needs(device=True)
    default_draft_tokens: ClassVar[int] = 3

    def __init__(self) -> None:
        self.rounds: list[int] = []  # requests of each
        self.raises = False

    def propose(self, requests: Sequence[DraftRequest], budget: Sequence[int]) -> Draft:
        return Draft.pack([Tree.chain([r.tokens[-1]] * n) for r, n in zip(requests, budget, strict=True)], CPU)

    def draft(self, round: DraftRound) -> Tensor:
        if self.raises:
            raise RuntimeError("out of memory, say")
        self.rounds.append(round.lanes.shape[0])
        return round.state.last[round.lanes][:, None].expand(-1, round.depth)


class First(Echo):
    """The same, but always the token 10."""

    name: ClassVar[str] = "first"

    def draft(self, round: DraftRound) -> Tensor:
        return super().draft(round) * 0 + 10


CPU = torch.device("cpu")


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
        assert len(bench.tickets) == 1
        assert (answer.queued, answer.coming, answer.generated) == (1, 1, 0)  # the prompt's round gives one token
        before = 0
        while not answer.ended:
            last = bench.tickets[-1]
            bench.engine.step()
            assert len(bench.tickets) <= 1
            assert all(ticket is not last for ticket in bench.tickets)  # it was read, behind the next one's back
            assert answer.generated > before
            before = answer.generated
            if bench.tickets:
                assert answer.queued == 1
                assert answer.coming == sum(m.bound for t in bench.tickets for m in t.members)
        bench.drain()

    def test_a_drafter_on_the_host_is_asked_when_all_is_read(self, tiny_target: Path) -> None:
        answers = Answers()
        seen: list[tuple[int, int]] = []

        class Looks(Right):
            name: ClassVar[str] = "looks"

            def propose(self, requests: Sequence[DraftRequest], budget: Sequence[int]) -> Sequence[Tree]:
                seen.append((len(bench.tickets), len(requests[0].tokens)))
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
        queue = bench.queued._queue

        def note(schedule: Any) -> Ticket:
            rounds.append(len(schedule.decodes) + len(schedule.chunks))
            return queue(schedule)

        monkeypatch.setattr(bench.queued, "_queue", note)
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
        assert [m.answer for t in bench.tickets for m in t.members] == job.answers
        assert not any(m.listens for t in bench.tickets for m in t.members)
        assert bench.engine.pool.free_pages == bench.engine.pool.num_pages
        again, _ = bench.add(prompt, PARAMS)  # into the same lane and pages
        bench.drain()
        assert heard[0].outputs[0].token_ids == whole.token_ids[: whole.token_ids.index(stop) + 1]
        assert again.answers[0].output.token_ids == whole.token_ids

    def test_rounds_come_in_few_shapes(self, tiny_target: Path) -> None:
        bench = Queue(tiny_target, None, max_num_seqs=8)
        bench.run([Arrival(3 + i, replace(PARAMS, seed=i, max_tokens=12), 2 * i) for i in range(8)])
        assert len(bench.queued.rounds) <= 4  # of one, two, four and eight requests


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
        assert bench.tickets
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
        made: Any = None if drafter is None else f"model:{tiny_target}" if drafter == "model" else _Letters()
        shape: dict[str, Any] = {"page_size": 4, "max_num_seqs": 4, "max_batch_tokens": 12, "max_model_len": 48}
        bench = Queue(tiny_target, made, pages=14, **shape)
        got = bench.run(arrivals)
        assert bench.engine.scheduler.preemptions > 0
        assert [a.token_ids for a in got] == want
        if drafter == "model":
            assert sum(a.speculation.accepted for a in got) > 50
            assert all(a.speculation.drafted - a.speculation.accepted <= 5 for a in got)  # behind the limit
        if drafter == "bushy":
            assert sum(a.speculation.accepted for a in got) > 10


class _Letters(HostDrafter):
    """Trees of what is likely to come."""

    name: ClassVar[str] = "letters"
    bounded: ClassVar[bool] = True

    def propose(self, requests: Sequence[DraftRequest], budget: Sequence[int]) -> Sequence[Tree]:
        wide = Tree((10, 20, 30, 40, 10, 20), (-1, -1, -1, -1, 0, 1))
        return [Tree(wide.tokens[:nodes], wide.parents[:nodes]) for nodes in budget]


class TestModelDrafter:
    """A model that drafts for itself is right always, unless its cache is not what it should be."""

    @staticmethod
    def always_right(answers: Sequence[CompletionOutput], draft_tokens: int = 5) -> bool:
        """As few rounds as can be. The last one may guess beyond the limit: it begins before the host knows."""
        return all(
            a.speculation.rounds == 1 + -(-(len(a.token_ids) - 1) // (draft_tokens + 1))
            and a.speculation.drafted - a.speculation.accepted <= draft_tokens
            for a in answers
        )

    @pytest.fixture
    def twins(self, open_llm: Callable[..., LLM], tiny_target: Path) -> LLM:
        drafters = [f"model:{tiny_target}", _Letters(), Echo()]
        return open_llm(drafter=drafters, planner="fixed", rounds="queued", max_num_seqs=8)

    def test_alone_and_among_its_like(self, twins: LLM) -> None:
        batch = [case for case in cases() if not case.params.min_tokens]
        expected = plain(twins, batch)
        for alone in (True, False):
            got = run(twins, batch, "model", alone=alone)
            assert not differences(batch, expected, got)
            assert self.always_right(got)

    @pytest.mark.parametrize("other", [None, "letters", "echo"])
    def test_among_others(self, twins: LLM, other: str | None) -> None:
        """Who draws trees, guesses by other means or not at all in the same round does not spoil its guesses."""
        batch = [case for case in cases() if not case.params.min_tokens][:16]
        expected = plain(twins, batch)
        how = SpeculationParams(enabled=other is not None, drafter=other)
        params = [
            replace(
                case.params, speculation=SpeculationParams(drafter="model", draft_tokens=1 + i % 5) if i % 2 else how
            )
            for i, case in enumerate(batch)
        ]
        got = [o.outputs[0] for o in twins.generate([list(case.prompt) for case in batch], params)]
        assert not differences(batch, expected, got)
        assert all(self.always_right([got[i]], 1 + i % 5) for i in range(1, 16, 2))

    def test_its_guesses_for_others_go_to_nobodys_page(self, tiny_target: Path) -> None:
        """A round guesses as far for all: for one that drafts less, behind its pages, and those were others' once."""
        bench = Queue(tiny_target, f"model:{tiny_target}", page_size=4, max_num_seqs=4)
        drafts = Arrival(6, replace(PARAMS, max_tokens=40))
        plainly = Arrival(5, replace(PARAMS, max_tokens=30, seed=5, speculation=OFF))
        for company in ([plainly], [plainly, drafts, plainly], [plainly] * 3):
            assert self.always_right(bench.run([drafts, *company])[:1])

    def test_it_catches_up_on_rounds_without_drafts(self, tiny_target: Path) -> None:
        class Moody(Planner):
            """Drafts in every fourth round."""

            rounds = 0

            def budget(self, drafter: str, request_ids: Sequence[str], caps: Sequence[int], rows: int) -> list[int]:
                self.rounds += 1
                return [0 if self.rounds % 4 else cap for cap in caps]

        bench = Queue(tiny_target, f"model:{tiny_target}")
        arrivals = [Arrival(4 + i, replace(PARAMS, max_tokens=40, seed=i), 2 * i) for i in range(3)]
        bench.engine.drafting.planner = Moody()
        got = bench.run(arrivals)
        assert [a.token_ids for a in got] == [a.token_ids for a in Stepper(tiny_target, None).run(arrivals)]
        for answer in got:
            assert answer.speculation.drafted >= 15
            assert answer.speculation.drafted - answer.speculation.accepted <= 5  # behind the limit

    def test_n_samples_share_a_prompt_and_a_draft(self, twins: LLM) -> None:
        params = SamplingParams(n=5, temperature=1.0, seed=3, max_tokens=14, ignore_eos=True)
        (on,) = twins.generate([list(range(30, 67))], params)
        (off,) = twins.generate([list(range(30, 67))], replace(params, speculation=OFF))
        assert [a.token_ids for a in on.outputs] == [a.token_ids for a in off.outputs]
        assert self.always_right(on.outputs)

    def test_a_shorter_context(self, open_llm: Callable[..., LLM], tmp_path: Path) -> None:
        """It stops where it ends, and whoever fits is served well beside those who do not."""
        target = save_model(tmp_path / "target", tiny_llama())
        short = save_model(tmp_path / "short", tiny_llama(max_position_embeddings=32))  # the same weights
        llm = open_llm(target, drafter=f"model:{short}", planner="fixed", rounds="queued")
        params = SamplingParams(temperature=1.0, seed=5, max_tokens=40, ignore_eos=True)
        batch = [
            Case("grows out of it", tuple(range(12)), params),
            Case("just fits", tuple(range(31)), params),
            Case("never fits", tuple(range(40)), params),
            Case("short", (5, 6, 7), replace(params, max_tokens=12)),
        ]
        expected = plain(llm, batch)
        for alone in (True, False):
            got = run(llm, batch, "model", alone=alone)
            assert not differences(batch, expected, got)
            assert got[0].speculation.accepted == got[0].speculation.drafted > 10
            assert got[1].speculation.drafted <= 1
            assert got[2].speculation.drafted == 0
            assert self.always_right(got[3:])

    def test_its_passes_stay_within_its_context(
        self, open_llm: Callable[..., LLM], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Beyond it there are no angles: a GPU would read whatever lies there."""
        target = save_model(tmp_path / "target", tiny_llama())
        short = save_model(tmp_path / "short", tiny_llama(max_position_embeddings=32), seed=1)
        highest: list[int] = []
        call = Runner._call

        def note(self: Runner, context: Any, ids: Tensor, positions: Tensor, rows: Any) -> Tensor:
            if self.max_positions == 32:
                highest.append(int(positions.max()))
                assert int(ids.max()) < 300
            return call(self, context, ids, positions, rows)

        llm = open_llm(target, drafter=f"model:{short}", planner="fixed", rounds="queued", max_batch_tokens=16)
        monkeypatch.setattr(Runner, "_call", note)
        params = replace(PARAMS, max_tokens=40)
        llm.generate([[1] * 10, [2] * 30, [3] * 70, [4]], params)
        assert highest
        assert max(highest) < 32


class TestFailures:
    def test_a_drafter_that_raises_in_a_round_is_dropped(self, tiny_target: Path) -> None:
        drafter = Echo()
        bench = Queue(tiny_target, drafter)
        arrivals = [Arrival(3 + i, replace(PARAMS, seed=i)) for i in range(3)]
        want = [a.token_ids for a in Stepper(tiny_target, None).run(arrivals)]

        def break_down() -> None:
            drafter.raises = len(drafter.rounds) >= 4

        got = bench.run(arrivals, break_down)
        assert [a.token_ids for a in got] == want
        assert len(drafter.rounds) == 4
        assert [a.speculation.by_drafter["echo"].failures for a in got] == [1, 1, 1]
        assert all(a.speculation.by_drafter["echo"].drafts for a in got)

    def test_one_that_cannot_draft_in_a_queued_round_is_dropped(self, tiny_target: Path) -> None:
        class Eager(Echo):
            draft = DeviceDrafter.draft

        bench = Queue(tiny_target, Eager())
        want = Stepper(tiny_target, None).run([Arrival(3, PARAMS)])
        (got,) = bench.run([Arrival(3, PARAMS)])
        assert got.token_ids == want[0].token_ids
        assert got.speculation.by_drafter["echo"].failures == 1

    def test_a_drafter_that_cannot_read_a_prompt_is_dropped(
        self, tiny_target: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        bench = Queue(tiny_target, f"model:{tiny_target}")

        def fail(batch: PassBatch) -> None:
            raise RuntimeError("no room")

        monkeypatch.setattr(bench.engine.drafting.drafters["model"], "read", fail)
        (got,) = bench.run([Arrival(3, PARAMS)])
        assert got.token_ids == Stepper(tiny_target, None).run([Arrival(3, PARAMS)])[0].token_ids
        assert (got.speculation.drafted, got.speculation.by_drafter["model"].failures) == (0, 1)

    def test_two_drafters_on_the_device_guess_for_their_own(self, tiny_target: Path) -> None:
        bench = Queue(tiny_target, [Echo(), First()])
        only = replace(PARAMS, logit_bias={10: 1000.0})  # always 10: both would be right
        never = replace(PARAMS, logit_bias={20: 1000.0})  # always 20: an echo is right, the other wrong

        def by(name: str, params: SamplingParams) -> Arrival:
            return Arrival(3, replace(params, speculation=SpeculationParams(drafter=name)))

        got = bench.run([by("echo", never), by("first", only), by("first", never), by("echo", only)])
        shares = [a.speculation.alpha for a in got]
        assert shares == [1.0, 1.0, 0.0, 1.0]

    @pytest.mark.parametrize("drafter", [None, "model"])
    def test_an_exception_in_a_round_ends_what_runs_and_the_engine_goes_on(
        self, open_llm: Callable[..., LLM], tiny_target: Path, drafter: str | None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        llm = open_llm(drafter=drafter and f"model:{tiny_target}", rounds="queued", planner="fixed")
        prompts = [[5] * 3, [6] * 9]
        before = [o.outputs[0].token_ids for o in llm.generate(prompts, PARAMS)]
        for name in ("run", "forward"):
            real, calls = getattr(llm.engine.target, name), 0

            def fail_once(*given: Any, _real: Any = real) -> Any:
                nonlocal calls
                calls += 1
                if calls == 2:
                    raise ZeroDivisionError("the lights went out")
                return _real(*given)

            with monkeypatch.context() as patch:
                patch.setattr(llm.engine.target, name, fail_once)
                outputs = llm.generate(prompts, PARAMS) + llm.generate(prompts, PARAMS)
                failed = [a for o in outputs for a in o.outputs if a.finish_reason == "error"]
                assert failed
                assert {a.error for a in failed} == {"the engine failed: ZeroDivisionError: the lights went out"}
            assert not llm.engine.jobs
            assert llm.engine.pool.free_pages == llm.engine.pool.num_pages
            assert [o.outputs[0].token_ids for o in llm.generate(prompts, PARAMS)] == before


BAD = 13


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path) -> Path:
    """Reading one of its tokens gives NaN."""
    folder = tmp_path_factory.mktemp("models") / "poisoned"
    shutil.copytree(tiny_target, folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][BAD] = torch.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


class TestNaN:
    SOUND = replace(PARAMS, logit_bias={BAD: -1e6})

    @pytest.mark.parametrize("drafter", [None, "echo", "letters"])
    def test_it_fails_one_request_and_no_other(
        self, open_llm: Callable[..., LLM], poisoned: Path, drafter: str | None
    ) -> None:
        made = {"echo": Echo(), "letters": _Letters()}.get(drafter or "")
        llm = open_llm(poisoned, drafter=made, rounds="queued", planner="fixed")
        good = [[20 + i] * (3 + 4 * i) for i in range(3)]
        params = [replace(self.SOUND, seed=i, n=1 + i % 2) for i in range(3)]
        want = [[a.token_ids for a in o.outputs] for o in llm.generate(good, params)]
        says_it = replace(PARAMS, logit_bias={BAD: 1e6})
        outputs = llm.generate(
            [good[0], [1, BAD], good[1], [7, 7], good[2]], [params[0], PARAMS, params[1], says_it, params[2]]
        )
        assert [[a.token_ids for a in outputs[i].outputs] for i in (0, 2, 4)] == want
        for at, tokens in ((1, []), (3, [BAD])):
            (answer,) = outputs[at].outputs
            assert answer.finish_reason == "error"
            assert "no usable logits (NaN" in (answer.error or "")
            assert answer.token_ids == tokens
        for layer in range(len(llm.engine.cache.layers)):
            keys = llm.engine.cache.keys(layer)[: -llm.engine.config.page_size]  # the last page is nobody's
            assert not keys.isnan().any()
        assert [[a.token_ids for a in o.outputs] for o in llm.generate(good, params)] == want

    @pytest.mark.parametrize("tree", [Tree.chain([BAD]), Tree((BAD, 5, 6), (-1, -1, 1)), Tree.chain([5, BAD, 6])])
    def test_a_guess_that_is_not_finite_changes_nothing(
        self, open_llm: Callable[..., LLM], poisoned: Path, tree: Tree
    ) -> None:
        class Guess(_Letters):
            def propose(self, requests: Sequence[DraftRequest], budget: Sequence[int]) -> Sequence[Tree]:
                return [tree if nodes >= len(tree) else Tree() for nodes in budget]

        llm = open_llm(poisoned, drafter=Guess(), rounds="queued", planner="fixed")
        prompts = [[1, 2, 3], [4]]
        plainly = llm.generate(prompts, replace(self.SOUND, speculation=OFF))
        got = llm.generate(prompts, self.SOUND)
        assert [o.outputs[0].token_ids for o in got] == [o.outputs[0].token_ids for o in plainly]
        assert all(o.outputs[0].error is None and o.outputs[0].speculation.drafted for o in got)

    def test_nor_does_one_of_the_device(self, open_llm: Callable[..., LLM], poisoned: Path) -> None:
        """The next round is in flight already when the host hears that this one came to nothing."""

        class Poison(Echo):
            def draft(self, round: DraftRound) -> Tensor:
                return super().draft(round) * 0 + BAD

        llm = open_llm(poisoned, drafter=Poison(), rounds="queued", planner="fixed")
        prompts = [[1, 2, 3], [4]]
        plainly = llm.generate(prompts, replace(self.SOUND, speculation=OFF))
        got = llm.generate(prompts, self.SOUND)
        assert [o.outputs[0].token_ids for o in got] == [o.outputs[0].token_ids for o in plainly]
        assert all(o.outputs[0].error is None and o.outputs[0].speculation.drafted for o in got)


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
    drafter: Any = f"model:{tiny_draft}" if request.param == "model" else _Letters()
    shape: dict[str, Any] = {"page_size": 4, "max_num_seqs": 3, "max_batch_tokens": 7, "max_model_len": 48}
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
        assert len(bench.tickets) <= 1
    bench.drain()
    for job, key, params in jobs:
        for answer, right in zip(job.answers, interleaving.plainly(*key, params), strict=True):
            assert answer.output.error is None or answer.output.finish_reason == "abort"
            ids = answer.output.token_ids
            assert ids == (right[: len(ids)] if answer.output.finish_reason == "abort" else right)
            assert (answer.queued, answer.coming) == (0, 0)


def test_rounds_must_be_one_of_two(tiny_target: Path) -> None:
    from slipstream.core.errors import ConfigError

    with pytest.raises(ConfigError, match="rounds='lazy': must be one of queued, eager"):
        LLM(tiny_target, rounds="lazy")  # type: ignore[arg-type]
