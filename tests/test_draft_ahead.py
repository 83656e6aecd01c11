"""Drafts that the device begins before the host has heard: the same rounds as without, a draft sooner."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from torch import Tensor

from conftest import EOS
from exactness import FEW
from planning import Scripted
from queueing import PARAMS, Echo, Letters, Queue
from scripted import Answers, Right
from slipstream import CompletionOutput, SpeculationParams
from slipstream.core.draft import Tree
from slipstream.drafters.base import DraftRequest, DraftRound
from slipstream.drafters.heads import FeatureDrafter
from slipstream.engine import draft_ahead
from slipstream.engine.draft_ahead import DraftAhead
from slipstream.plan.types import Offer
from stepping import Arrival, Stepper
from tiny_heads import DoubtingHead, save_forgetful

BOTH = SpeculationParams(drafter="letters+echo")
LONG = replace(PARAMS, max_tokens=60, speculation=BOTH)


class Bench(Queue):
    """Tells what became of drafts that were begun ahead."""

    @property
    def taken(self) -> int:
        return self.engine.snapshot().ahead_taken

    @property
    def wasted(self) -> int:
        return self.engine.snapshot().ahead_wasted


class Heads(FeatureDrafter):
    name: ClassVar[str] = "heads"


class Sizes(Scripted):
    """Lets device drafters guess so many, round after round; then from the beginning again."""

    def __init__(self, *sizes: int) -> None:
        self.sizes, self.rounds = sizes, 0

    def nodes(self, offer: Offer) -> list[int]:
        self.rounds += 1
        return [min(cap, self.sizes[self.rounds % len(self.sizes)]) for cap in offer.caps]


def plain(model: Path, arrivals: Sequence[Arrival]) -> list[list[int]]:
    off = [replace(a, params=replace(a.params, speculation=SpeculationParams(enabled=False))) for a in arrivals]
    return [answer.token_ids for answer in Stepper(model, None).run(off)]


class TestWhen:
    def test_the_device_drafts_before_the_host_hears(self, tiny_target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        order: list[str] = []
        echo = Echo()
        bench = Bench(tiny_target, [Letters(), echo])
        draft, hear, propose = Echo.draft, bench.queued._hear, Letters.propose

        def note(what: str, real: Callable[..., Any]) -> Callable[..., Any]:
            def call(*given: Any) -> Any:
                order.append(what)
                return real(*given)

            return call

        monkeypatch.setattr(Echo, "draft", note("draft", draft))
        monkeypatch.setattr(Letters, "propose", note("host", propose))
        monkeypatch.setattr(bench.queued, "_hear", note("hear", hear))
        bench.add([1, 2, 3], LONG)
        bench.drain()
        # the prompt's round is heard; two rounds show what is usual; from then on the draft comes first, and once
        assert order[:6] == ["hear", "host", "draft"] * 2
        assert order[6:18] == ["draft", "hear", "host"] * 4
        assert bench.taken > 8

    def test_not_where_nobody_waits(self, tiny_target: Path) -> None:
        bench = Bench(tiny_target, Echo())
        bench.add([1, 2, 3], replace(LONG, speculation=SpeculationParams()))
        bench.drain()
        assert (bench.taken, bench.wasted) == (0, 0)

    @pytest.mark.parametrize(
        "wish",
        [{"logprobs": 1}, {"structured_outputs": {"regex": "[a-z ]{60}"}, "ignore_eos": False}],
        ids=["log probabilities", "a form"],
    )
    def test_not_where_the_host_must_know_more(self, tiny_target: Path, wish: dict[str, Any]) -> None:
        bench = Bench(tiny_target, [Letters(), Echo()])
        bench.add([1, 2, 3], replace(LONG, **wish))
        bench.drain()
        assert (bench.taken, bench.wasted) == (0, 0)

    def test_those_who_come_and_go_cost_a_few(self, tiny_target: Path) -> None:
        """Whoever joins is in no draft that was begun before; whoever ends by its limit is known to."""
        bench = Bench(tiny_target, [Letters(), Echo()], max_num_seqs=4)
        arrivals = [Arrival(3 + i, replace(LONG, seed=i, max_tokens=20 + 9 * i), 9 * i) for i in range(4)]
        got = bench.run(arrivals)
        assert [answer.token_ids for answer in got] == plain(tiny_target, arrivals)
        assert bench.taken > 20
        assert bench.wasted < 12

    def test_sizes_that_change_are_drafted_anew(self, tiny_target: Path) -> None:
        bench = Bench(tiny_target, [Letters(), Echo()])
        bench.engine.drafting.planner = Sizes(3, 3, 3, 3, 3, 3, 3, 3, 2, 2, 2, 2, 2)
        arrivals = [Arrival(3, replace(LONG, max_tokens=90)), Arrival(5, replace(LONG, temperature=0, max_tokens=90))]
        assert [answer.token_ids for answer in bench.run(arrivals)] == plain(tiny_target, arrivals)
        assert bench.wasted >= 2
        assert bench.taken > 2 * bench.wasted

    def test_it_rests_where_plans_never_want_it(self, tiny_target: Path) -> None:
        """Two plans alike, and then another: every draft that is begun is in vain."""
        bench = Bench(tiny_target, [Letters(), Echo()])
        planner = bench.engine.drafting.planner = Sizes(3, 3, 1, 1)
        bench.run([Arrival(3, replace(LONG, max_tokens=150))])
        assert planner.rounds > 100
        assert bench.taken <= 3  # near its end they are all alike
        assert 1 <= bench.wasted <= 1 + draft_ahead._PURSE // draft_ahead._PRICE + planner.rounds // draft_ahead._REST

    def test_and_comes_back(self, tiny_target: Path) -> None:
        bench = Bench(tiny_target, [Letters(), Echo()])
        bench.engine.drafting.planner = Sizes(3, 3, 1, 1)
        bench.run([Arrival(3, replace(LONG, max_tokens=40))])
        before = bench.taken
        bench.engine.drafting.planner = Sizes(3)
        bench.run([Arrival(3, replace(LONG, max_tokens=150)) for _ in range(2)])
        assert bench.taken > before + 20


JOBS = [
    Arrival(1, replace(PARAMS, max_tokens=40, temperature=0)),
    Arrival(9, replace(PARAMS, max_tokens=33, seed=3)),
    Arrival(40, replace(PARAMS, max_tokens=28, seed=5, top_p=0.9), 6),
    Arrival(3, replace(PARAMS, max_tokens=60, ignore_eos=False, logit_bias={**FEW, EOS: 5.0}, seed=8), 4),
    Arrival(16, replace(PARAMS, max_tokens=30, frequency_penalty=0.7, logit_bias=FEW, temperature=0), 2),
    Arrival(5, replace(PARAMS, max_tokens=25, n=2, seed=2), 12),
]


@pytest.fixture(scope="module")
def forgetful(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_forgetful(tmp_path_factory.mktemp("models") / "forgetful")


@dataclass(frozen=True)
class Case:
    drafters: Callable[[Path, Path], list[Any]]  # of the target's folder and a draft's
    name: str
    verifier: str = "exact"


CASES = {
    "chains": Case(lambda *_: [Letters(), Echo()], "letters+echo"),
    "a model": Case(lambda _, draft: [Letters(), f"model:{draft}"], "letters+model"),
    "a model, drawn": Case(lambda _, draft: [Letters(), f"model:{draft}"], "letters+model", "rejection"),
    "two on the device": Case(lambda _, draft: [Letters(), Echo(), f"model:{draft}"], "letters+echo+model"),
    "a head's chains": Case(lambda target, _: ["ngram", Heads(DoubtingHead(target), depth=4)], "ngram+heads"),
    "a head's trees": Case(
        lambda target, _: ["ngram", Heads(DoubtingHead(target), depth=3, width=3, nodes=12)], "ngram+heads"
    ),
}


class TestTheSame:
    """Every row that a head reads decides what it guesses: were one of them spoilt, rounds would differ."""

    @pytest.fixture(autouse=True)
    def _tried_always(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(draft_ahead, "_PRICE", 0)

    def rounds(self, target: Path, draft: Path, case: Case, jobs: Sequence[Arrival], **config: Any) -> Any:
        how = SpeculationParams(drafter=case.name, verifier=case.verifier)  # type: ignore[arg-type]
        bench = Bench(target, case.drafters(target, draft), max_num_seqs=6, **config)
        got = bench.run([replace(job, params=replace(job.params, speculation=how)) for job in jobs])
        return bench, [self.told(answer) for answer in got]

    @staticmethod
    def told(answer: CompletionOutput) -> tuple[Any, ...]:
        stats = answer.speculation
        return answer.token_ids, answer.finish_reason, stats.rounds, stats.drafted, stats.accepted

    @pytest.mark.parametrize("kind", CASES)
    def test_rounds_and_guesses(
        self, forgetful: Path, tiny_draft: Path, kind: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        case = CASES[kind]
        bench, got = self.rounds(forgetful, tiny_draft, case, JOBS)
        assert bench.taken > 5
        assert bench.wasted > 0
        monkeypatch.setattr(DraftAhead, "begin", lambda *_: None)
        without, want = self.rounds(forgetful, tiny_draft, case, JOBS)
        assert without.taken == without.wasted == 0
        assert got == want
        if case.verifier == "exact":
            assert [answer[0] for answer in got] == plain(forgetful, JOBS)

    @pytest.mark.parametrize("kind", ["a model", "a head's chains", "a head's trees"])
    @pytest.mark.parametrize("pages", [14, 22])
    def test_where_pages_are_short(self, forgetful: Path, tiny_draft: Path, kind: str, pages: int) -> None:
        bench, got = self.rounds(forgetful, tiny_draft, CASES[kind], JOBS, pages=pages, page_size=8, max_model_len=96)
        assert [answer[0] for answer in got] == plain(forgetful, JOBS)
        if pages == 14:
            assert bench.engine.scheduler.preemptions > 0
        else:
            assert bench.taken > 0
        bench.check_lanes()

    @pytest.mark.parametrize("kind", ["a model", "a head's chains", "a head's trees"])
    def test_up_to_the_end_of_the_context(self, forgetful: Path, tiny_draft: Path, kind: str) -> None:
        jobs = [Arrival(5, replace(PARAMS, max_tokens=200, seed=i)) for i in range(2)]
        bench, got = self.rounds(forgetful, tiny_draft, CASES[kind], jobs, max_model_len=64, page_size=8)
        want = Stepper(forgetful, None, max_model_len=64).run(jobs)
        assert [answer[0] for answer in got] == [answer.token_ids for answer in want]
        assert bench.taken > 0
        bench.check_lanes()

    def test_one_that_is_aborted_between_rounds(self, tiny_target: Path) -> None:
        bench = Bench(tiny_target, [Letters(), Echo()])
        jobs = [bench.add([7, 8, i], replace(LONG, seed=i))[0] for i in range(3)]
        for _ in range(9):
            bench.engine.step()
        before = bench.taken
        assert before > 0
        bench.engine.abort(jobs[1].id)
        bench.drain()
        assert bench.taken > before
        off = SpeculationParams(enabled=False)
        for i in (0, 2):
            alone = Queue(tiny_target, None)
            job, _ = alone.add([7, 8, i], replace(LONG, seed=i, speculation=off))
            alone.drain()
            assert jobs[i].answers[0].output.token_ids == job.answers[0].output.token_ids


class TestCaches:
    def test_a_model_that_was_passed_by_reads_what_it_missed(self, tiny_target: Path) -> None:
        """The draft is the target itself: always right, unless what was drafted in vain spoils its cache."""
        answers = Answers()

        class Far(Right):
            """Now and then right for so long that the model is left behind."""

            name: ClassVar[str] = "far"
            default_draft_tokens: ClassVar[int] = 12

            def tree(self, request: DraftRequest, rest: list[int], budget: int) -> Tree:
                return Tree.chain(rest[: budget if len(request.tokens) % 5 == 0 else 0])

        bench = Bench(tiny_target, [Far(answers), f"model:{tiny_target}"])
        params = replace(PARAMS, max_tokens=120)
        prompt = [11, 12, 13]
        plainly = Queue(tiny_target, None)
        job, _ = plainly.add(prompt, params)
        plainly.drain()
        want = job.answers[0].output.token_ids
        answers.tell(prompt, params.seed, want)
        job, _ = bench.add(prompt, replace(params, speculation=SpeculationParams(drafter="far+model")))
        bench.drain()
        output = job.answers[0].output
        assert output.token_ids == want
        share = output.speculation.by_drafter["model"]
        assert share.drafted - share.accepted <= 5  # what the last round guessed beyond the end
        assert bench.taken > 0
        assert bench.wasted > 0

    @pytest.mark.parametrize("config", [{}, {"pages": 17}, {"max_model_len": 47}], ids=["many", "few", "short"])
    def test_chains_are_written_where_their_lane_holds_pages(self, tiny_target: Path, config: dict[str, int]) -> None:
        """All guesses are right, and nobody else needs room: a round can end where its pages do."""
        seen: list[int] = []

        class Silent(Letters):
            def propose(self, requests: Sequence[DraftRequest], budget: Sequence[int]) -> Sequence[Tree]:
                return [Tree()] * len(requests)

        class Looks(Echo):
            def draft(self, round: DraftRound) -> Tensor:
                if bench.tickets:  # the host has not heard yet
                    for lane in [lane for lane in round.lanes.tolist() if lane != round.state.trash]:
                        last = int(round.state.length[lane]) + round.depth
                        own = round.state.pages[lane, : last // 4 + 1].tolist()
                        seen.append(bench.engine.pool.num_pages in own)
                        bench.check_lanes()
                return super().draft(round)

        bench = Bench(tiny_target, [Silent(), Looks()], page_size=4, max_num_seqs=4, **{"max_model_len": 64, **config})
        arrivals = [Arrival(3 + 2 * i, replace(LONG, max_tokens=60, logit_bias={20: 1000.0})) for i in range(2)]
        got = bench.run(arrivals)
        assert all(token == 20 for answer in got for token in answer.token_ids)
        assert all(answer.speculation.alpha == 1 for answer in got)
        assert not any(answer.speculation.by_drafter["echo"].failures for answer in got)
        assert seen
        assert not any(seen)

    def test_one_that_fails_ahead_is_dropped(self, tiny_target: Path) -> None:
        echo = Echo()
        failed: list[int] = []

        class Fails(Echo):
            name: ClassVar[str] = "fails"

            def draft(self, round: DraftRound) -> Tensor:
                if bench.tickets:
                    failed.append(len(self.rounds))
                    raise RuntimeError("out of memory, say")
                return super().draft(round)

        bench = Bench(tiny_target, [Letters(), echo, Fails()])
        how = SpeculationParams(drafter="letters+echo+fails")
        arrivals = [Arrival(3 + i, replace(LONG, seed=i, speculation=how)) for i in range(2)]
        got = bench.run(arrivals)
        assert [answer.token_ids for answer in got] == plain(tiny_target, arrivals)
        assert len(failed) == 1
        assert [a.speculation.by_drafter["fails"].failures for a in got] == [1, 1]
        assert all(a.speculation.by_drafter["fails"].drafts == failed[0] for a in got)
        assert bench.taken > 5  # the other goes on
