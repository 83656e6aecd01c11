"""Drafting inside queued rounds: a model that drafts for itself is always right, and whoever fails is dropped."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from conftest import save_model, tiny_llama
from exactness import Case, cases, differences, plain, run
from planning import Scripted
from queueing import OFF, PARAMS, Echo, First, Knowing, KnowingAhead, Letters, Queue
from slipstream import LLM, CompletionOutput, SamplingParams, SpeculationParams
from slipstream.core.draft import Tree
from slipstream.drafters.base import DeviceDrafter, DraftRequest
from slipstream.drafters.model import ModelDrafter
from slipstream.models.batch import PassBatch
from slipstream.models.runner import Runner
from slipstream.plan.planner import AdaptivePlanner
from slipstream.plan.types import Budget, Load, Offer
from stepping import Arrival, Stepper


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
        drafters = [f"model:{tiny_target}", Letters(), Echo()]
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

    @pytest.mark.parametrize(("every", "room"), [(12, 512), (40, 8), (40, 512)])
    def test_it_catches_up_on_rounds_without_drafts(
        self, tiny_target: Path, monkeypatch: pytest.MonkeyPatch, every: int, room: int
    ) -> None:
        """A few of them are not even missed: what was said then is read again with the next draft."""
        passes: list[list[int]] = []
        read = ModelDrafter._read_missed

        def note(self: ModelDrafter, missed: Sequence[tuple[DraftRequest, int, int]]) -> None:
            passes.append([end - at for _, at, end in missed])
            read(self, missed)

        monkeypatch.setattr(ModelDrafter, "_read_missed", note)

        class Moody(Scripted):
            """Drafts now and then."""

            rounds = 0

            def nodes(self, offer: Offer) -> list[int]:
                self.rounds += 1
                return [0 if self.rounds % every else cap for cap in offer.caps]

        bench = Queue(tiny_target, f"model:{tiny_target}", max_num_batched_tokens=room, max_num_seqs=4)
        arrivals = [Arrival(4 + i, replace(PARAMS, max_tokens=200, seed=i), 2 * i) for i in range(3)]
        bench.engine.drafting.planner = Moody()
        got = bench.run(arrivals)
        assert [a.token_ids for a in got] == [a.token_ids for a in Stepper(tiny_target, None).run(arrivals)]
        for answer in got:
            assert answer.speculation.drafted >= 15
            assert answer.speculation.drafted - answer.speculation.accepted <= 5  # behind the limit
        if every < 40:
            assert not passes
        else:
            assert max(map(len, passes)) == (3 if room > 8 else 2)  # together, as far as there is room
            assert max(map(sum, passes)) <= room

    @pytest.mark.parametrize("planned", [True, False])
    @pytest.mark.parametrize("helper", [Knowing, KnowingAhead])
    @pytest.mark.parametrize("requests", [2, 8, 9, 11])
    def test_however_far_it_is_behind_its_guesses_are_right(
        self, tiny_target: Path, requests: int, helper: type[Knowing | KnowingAhead], planned: bool
    ) -> None:
        """Rounds without it, rounds that others take further, few requests and a crowd, in any order."""

        class Chance(Scripted):
            """Nobody, one or both, for some or for all; now one more often, now the other."""

            dice = random.Random(requests)
            keen = 0.5

            def asks(self, drafter: str, requests: int) -> bool:
                self.keen = self.dice.choice([0.1, 0.5, 0.9]) if self.dice.random() < 0.1 else self.keen
                return self.dice.random() >= self.keen

            def nodes(self, offer: Offer) -> list[int]:
                wants = self.dice.random() < self.keen
                return [cap if wants and self.dice.random() < 0.8 else 0 for cap in offer.caps]

        other = helper()
        bench = Queue(tiny_target, [f"model:{tiny_target}", other], max_num_seqs=requests)
        plainly = [Arrival(4 + i, replace(PARAMS, max_tokens=150, seed=i), i % 3) for i in range(requests)]
        expected = Stepper(tiny_target, None).run(plainly)
        other.texts = [list(answer.token_ids) for answer in expected]
        if planned:
            bench.engine.drafting.planner = Chance()
        both = SpeculationParams(drafter=f"model+{other.name}")
        got = bench.run([replace(one, params=replace(one.params, speculation=both)) for one in plainly])
        assert [a.token_ids for a in got] == [a.token_ids for a in expected]
        for answer in got:
            own = answer.speculation.of("model")
            assert own.drafted - own.accepted <= 5  # behind the limit
        assert sum(answer.speculation.of("model").drafted for answer in got) >= 15 * requests

    def test_it_follows_those_whom_it_does_not_draft_for_beside_others(
        self, tiny_target: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Turns(Scripted):
            """Drafts for one of them in a round."""

            rounds = 0

            def nodes(self, offer: Offer) -> list[int]:
                self.rounds += 1
                return [cap if i == self.rounds % len(offer.caps) else 0 for i, cap in enumerate(offer.caps)]

        monkeypatch.setattr(ModelDrafter, "_read_missed", lambda *_: pytest.fail("nothing was missed"))
        bench = Queue(tiny_target, f"model:{tiny_target}")
        arrivals = [Arrival(4 + i, replace(PARAMS, max_tokens=40, seed=i), 0) for i in range(3)]
        bench.engine.drafting.planner = Turns()
        got = bench.run(arrivals)
        assert [a.token_ids for a in got] == [a.token_ids for a in Stepper(tiny_target, None).run(arrivals)]
        for answer in got:
            assert answer.speculation.drafted >= 10
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

        llm = open_llm(target, drafter=f"model:{short}", planner="fixed", rounds="queued", max_num_batched_tokens=16)
        monkeypatch.setattr(Runner, "_call", note)
        params = replace(PARAMS, max_tokens=40)
        llm.generate([[1] * 10, [2] * 30, [3] * 70, [4]], params)
        assert highest
        assert max(highest) < 32


class TestTheHostKnowsTheText:
    """A round may be queued before the last one is heard. Nobody on the host can guess then."""

    @pytest.mark.parametrize("silent", ["compares", "asks"])
    def test_it_is_not_asked_otherwise(self, tiny_target: Path, silent: str) -> None:
        """In plain steps that others are compared with, and where it does not pay."""

        class Now(AdaptivePlanner):
            rounds = 0

            def plan(self, offers: Sequence[Offer], load: Load) -> list[Budget]:
                self.rounds += 1
                return super().plan(offers, load)

            @property
            def compares(self) -> bool:
                return silent == "compares" and self.rounds % 4 == 0

            def asks(self, drafter: str, requests: int) -> bool:
                return silent != "asks" or self.rounds % 4 > 0

        unheard: list[int] = []

        class Listens(Letters):
            def propose(self, requests: Sequence[DraftRequest], budget: Sequence[int]) -> Sequence[Tree]:
                ids = {request.id for request in requests}
                unheard.append(sum(a.queued for a in bench.engine.scheduler.running if a.id in ids))
                return super().propose(requests, budget)

        bench = Queue(tiny_target, Listens(), max_num_seqs=4)
        bench.engine.drafting.planner = Now(0.001)
        arrivals = [Arrival(3 + i, replace(PARAMS, max_tokens=40, seed=i)) for i in range(3)]
        got = bench.run(arrivals)
        assert [a.token_ids for a in got] == [a.token_ids for a in Stepper(tiny_target, None).run(arrivals)]
        assert len(unheard) > 20
        assert not any(unheard)


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

    def test_when_one_raises_the_others_are_not_asked_again(self, tiny_target: Path) -> None:
        """What they guessed stands: a second call would let them learn from a guess that nobody saw."""
        drafter, asked = Echo(), []

        class Counts(Letters):
            def propose(self, requests: Sequence[DraftRequest], budget: Sequence[int]) -> Sequence[Tree]:
                asked.append(len(requests[0].tokens))
                return super().propose(requests, budget)

        bench = Queue(tiny_target, [drafter, Counts()])
        arrivals = [
            Arrival(3, replace(PARAMS, speculation=SpeculationParams(drafter=name))) for name in ("letters", "echo")
        ]
        want = [a.token_ids for a in Stepper(tiny_target, None).run([Arrival(3, PARAMS)] * 2)]

        def break_down() -> None:
            drafter.raises = len(drafter.rounds) >= 2

        got = bench.run(arrivals, break_down)
        assert [a.token_ids for a in got] == want
        assert got[1].speculation.by_drafter["echo"].failures == 1
        assert got[0].speculation.by_drafter["letters"].drafts == len(asked)
        assert len(set(asked)) == len(asked)

    @pytest.mark.parametrize("why", ["dropped", "rests"])
    def test_nobody_waits_for_a_drafter_that_is_not_asked(
        self, tiny_target: Path, why: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        bench = Queue(tiny_target, Letters())
        bench.add([1, 2, 3], PARAMS)
        for _ in range(3):
            bench.engine.step()
        drafting, running = bench.engine.drafting, bench.engine.scheduler.running
        assert drafting.waits(running)
        if why == "dropped":
            drafting.guards["letters"].close()
        else:
            monkeypatch.setattr(drafting.planner, "asks", lambda drafter, requests: False)
        assert not drafting.waits(running)
        bench.engine.step()
        bench.engine.step()
        assert len(bench.flights) == 1  # one ahead, as without a drafter
        assert all(not member.drafted for member in bench.flights[0].members)
        bench.drain()

    def test_one_that_cannot_draft_in_a_queued_round_is_dropped(self, tiny_target: Path) -> None:
        class Eager(Echo):
            draft = DeviceDrafter.draft  # type: ignore[assignment]  # it may give trees, too

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
