"""Rounds that are not recorded: a larger one does their work with the same tokens, and nobody waits for a recording."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exactness import cases, differences, plain, run
from scripted import Answers, all_scripted
from slipstream import LLM, SamplingParams
from slipstream.drafters.base import Drafter
from slipstream.engine import rounds, warming
from slipstream.engine.queued import QueuedBackend
from slipstream.engine.rounds import Round, Rounds, RoundShape, StandIns
from slipstream.engine.step import Engine
from slipstream.engine.warming import likely_shapes, warm_up
from slipstream.kernels.gpu.jit import room_for
from slipstream.plan.cost import filled
from slipstream.sampling.table import Features, SamplingTable, is_stale

GREEDY = Features(greedy=True)


def shape(counts: list[int], *, context: int = 10, is_tree: bool = False, **how: Any) -> RoundShape:
    told: dict[str, Any] = {"features": GREEDY, "version": 0, "keeps_logits": False, **how}
    return RoundShape.of(counts, context, is_tree=is_tree, **told)


LARGE = shape([20, 20], is_tree=True)  # 48 rows of at most 63 nodes


class TestWhoStandsIn:
    @pytest.mark.parametrize(
        "other",
        [
            shape([20, 20]),
            shape([5, 20], is_tree=True),
            shape([3, 12]),
            shape([15, 20]),
        ],
    )
    def test_a_larger_round_does_the_work_of_smaller_ones(self, other: RoundShape) -> None:
        assert LARGE.does(other)
        assert not other.does(LARGE)

    @pytest.mark.parametrize(
        "other",
        [
            shape([0, 0]),  # plain rounds are what drafts are compared with
            shape([63, 63], is_tree=True),
            shape([20]),
            shape([20, 20, 5]),
            shape([20, 20], context=600),
            shape([20, 20], features=Features(sampled=True)),
            shape([20, 20], version=1),
            shape([20, 20], keeps_logits=True),
            shape([20, 20], tells_choices=True),
        ],
    )
    def test_but_not_of_others(self, other: RoundShape) -> None:
        assert not LARGE.does(other)

    def test_nor_at_more_than_twice_the_rows(self) -> None:
        large = shape([31] * 8, is_tree=True)
        assert large.rows == 256
        assert large.does(shape([16] * 8))
        assert not large.does(shape([9] * 8))

    def test_but_the_smallest_passes_take_as_long_as_each_other(self) -> None:
        large = shape([12, 0])
        assert large.rows == 16
        assert large.does(shape([1, 1]))

    def test_nor_where_each_place_for_a_node_costs_a_vocabulary(self) -> None:
        rejecting = Features(sampled=True, rejection=True)
        large, small = (shape([nodes, nodes], features=rejecting) for nodes in (20, 12))
        assert not large.does(small)


class TestStandIns:
    def test_the_cheapest_is_taken_until_a_shape_came_often(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(rounds, "_OFTEN", 3)
        wanted, tree, chain, wide = (
            shape([3, 12]), shape([12, 15], is_tree=True), shape([12, 15]), shape([20, 20])
        )  # fmt: skip
        assert tree.rows == chain.rows < wide.rows
        found = StandIns()
        recorded = {wide: 0, tree: 0, chain: 0}
        assert [found.of(wanted, recorded) for _ in range(4)] == [chain, chain, chain, None]
        assert found.of(wanted, recorded) == chain, "it was let go, and begins anew"

    def test_who_was_let_go_stands_in_for_nobody(self) -> None:
        found, wanted = StandIns(), shape([3, 12])
        assert found.of(wanted, {LARGE: 0}) == LARGE
        other = shape([20, 40], is_tree=True)
        assert found.of(wanted, {other: 0}) == other
        assert found.of(wanted, {}) is None

    def test_who_was_recorded_since_may_do_it_better(self) -> None:
        found, wanted, better = StandIns(), shape([3, 12]), shape([12, 15])
        assert found.of(wanted, {LARGE: 0}) == LARGE
        assert found.of(wanted, {LARGE: 0, better: 0}) == LARGE
        found.forget()
        assert found.of(wanted, {LARGE: 0, better: 0}) == better

    def test_what_comes_now_and_then_is_never_recorded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(rounds, "_OFTEN", 3)
        monkeypatch.setattr(rounds, "_OF_LATE", 1)  # among many others, that is
        found = StandIns()
        assert [found.of(shape([3, 12]), {LARGE: 0}) for _ in range(50)] == [LARGE] * 50

    def test_what_is_over_tensors_that_are_gone_fades_at_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(rounds, "_OF_LATE", 3)
        found, wanted = StandIns(), shape([3, 12], version=1)
        newer = LARGE._replace(version=2)
        for version in (1, 1, 2):
            found.of(wanted._replace(version=version), {LARGE._replace(version=1): 0, newer: 0})
        assert not found._came, "of the newer one half of one is left"


def rounds_of(engine: Engine) -> Rounds:
    assert isinstance(engine.backend, QueuedBackend)
    return engine.backend.rounds


def recording(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> tuple[Engine, list[RoundShape]]:
    """An engine on a CPU that takes itself to record rounds, and those that it does."""
    assert isinstance(llm.engine.backend, QueuedBackend)
    made: list[RoundShape] = []

    def capture(self: Round, pool: Any) -> None:
        made.append(self.shape)
        self._verify_graph = self._verify

    monkeypatch.setattr(Round, "capture", capture)
    pool: Any = object()
    rounds_of(llm.engine)._graphs, rounds_of(llm.engine)._pool = True, pool
    rounds_of(llm.engine).let_stand_in()
    return llm.engine, made


@pytest.fixture
def engine(open_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> Engine:
    return recording(open_llm(rounds="queued", drafter="ngram", max_num_seqs=48), monkeypatch)[0]


def engine_of(max_num_seqs: int, max_draft_rows: int) -> Any:
    """As far as likely shapes depend on it."""
    return SimpleNamespace(
        config=SimpleNamespace(max_num_seqs=max_num_seqs, draft_rows=max_draft_rows),
        drafting=SimpleNamespace(drafters={"ngram": object()}),
        sampling=SimpleNamespace(version_of=lambda features: 0),
        plan=SimpleNamespace(most_keys=8192),
    )


SIZES = [(1, 1), (1, 256), (8, 8), (20, 20), (48, 200), (48, 256), (48, 512), (300, 300), (1000, 1000), (2048, 2048)]
LIKELY = {sizes: list(likely_shapes(engine_of(*sizes))) for sizes in SIZES}


class TestWarmUp:
    @pytest.mark.parametrize("sizes", SIZES)
    @settings(max_examples=40)
    @given(data=st.data())
    def test_no_usual_round_has_to_be_recorded_afterwards(self, data: st.DataObject, sizes: tuple[int, int]) -> None:
        """However many requests, nodes and rows: in contexts of up to some 2,000 tokens."""
        most, most_rows = sizes
        requests = data.draw(st.integers(1, most))
        counts = [0] * requests
        for _ in range(data.draw(st.integers(0, 6))):
            more = data.draw(st.integers(0, min(63, most_rows - requests)))
            counts[data.draw(st.integers(0, requests - 1))] = min(more, most_rows - requests - sum(counts))
            counts = [max(0, count) for count in counts]
        wanted = shape(
            counts,
            most_keys=8192,
            context=data.draw(st.integers(1, 1900)),
            is_tree=data.draw(st.booleans()) and any(counts),
            features=data.draw(st.sampled_from([GREEDY, Features(sampled=True), Features(greedy=True, sampled=True)])),
        )
        assert wanted in LIKELY[sizes] or any(other.does(wanted) for other in LIKELY[sizes])

    @pytest.mark.parametrize("sizes", SIZES)
    def test_nothing_is_recorded_that_cannot_come(self, sizes: tuple[int, int]) -> None:
        most, most_rows = sizes
        found = LIKELY[sizes]
        assert len(found) == len(set(found)) < rounds._MOST - 100, "or traffic takes their places"
        assert max(one.rows for one in found) <= filled(most_rows)
        assert max(one.requests for one in found) == shape([0] * most).requests

    def test_a_round_without_drafts_is_all_that_an_engine_without_drafters_needs(
        self, open_llm: Callable[..., LLM]
    ) -> None:
        llm = open_llm(rounds="queued", drafter=None)
        assert isinstance(llm.engine.backend, QueuedBackend)
        found = list(likely_shapes(llm.engine))
        assert {one.width for one in found} == {0}
        assert {one.requests for one in found} == {1, 2, 4, 8}

    def test_all_of_it_is_recorded_and_nothing_stays_behind(
        self, open_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        llm = open_llm(rounds="queued", drafter="ngram")
        engine, made = recording(llm, monkeypatch)
        read: list[int] = []
        forward = engine.target.forward

        def reads(batch: Any, cache: Any) -> Any:
            read.append(batch.num_rows)
            return forward(batch, cache)

        monkeypatch.setattr(engine.target, "forward", reads)
        said: list[str] = []
        warm_up(engine, said.append)
        assert made == list(likely_shapes(engine))
        assert read[:3] == [16, 32, 64]
        assert said == ["warming up: compiling and recording what requests will need (once compiled, it takes seconds)"]
        assert engine.pool.free_pages == engine.pool.num_pages
        assert not engine.tables

    def test_it_ends_in_time_and_says_what_is_left(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(warming, "_LIMIT_S", 0.0)
        said: list[str] = []
        warm_up(engine, said.append)
        assert said[1:] == ["warming up ends here (after 0 s): what is left is recorded when it comes"]
        assert engine.pool.free_pages == engine.pool.num_pages

    def test_a_round_that_cannot_be_recorded_ends_it_but_not_recording(
        self, engine: Engine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It may have been larger than what comes."""
        good, tries = Round.capture, list[RoundShape]()

        def capture(self: Round, pool: Any) -> None:
            tries.append(self.shape)
            if len(tries) > 4:
                raise torch.OutOfMemoryError("for a graph")
            good(self, pool)

        monkeypatch.setattr(Round, "capture", capture)
        said: list[str] = []
        warm_up(engine, said.append)
        assert len(tries) == 5
        assert said[1:] == [
            "warming up ends here (a round could not be recorded): what is left is recorded when it comes"
        ]
        assert rounds_of(engine).pool is not None
        assert len(rounds_of(engine)._rounds) == 4
        assert engine.pool.free_pages == engine.pool.num_pages

    def test_what_fails_is_said_and_the_engine_runs(
        self, open_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        llm = open_llm(rounds="queued", drafter="ngram")
        engine, _ = recording(llm, monkeypatch)

        def forward(batch: Any, cache: Any) -> Any:
            raise torch.OutOfMemoryError("for a prompt")

        monkeypatch.setattr(engine.target, "forward", forward)
        said: list[str] = []
        warm_up(engine, said.append)
        assert said[1:] == [
            "warming up ends here (OutOfMemoryError: for a prompt): what is left is recorded when it comes"
        ]
        assert engine.pool.free_pages == engine.pool.num_pages
        assert not engine.tables
        monkeypatch.undo()
        assert llm.generate("hello", SamplingParams(max_tokens=3))[0].outputs[0].error is None

    def test_in_a_context_that_is_too_short_to_pose_in_rounds_are_recorded_all_the_same(
        self, open_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        engine, made = recording(open_llm(rounds="queued", drafter="ngram", max_model_len=100), monkeypatch)
        warm_up(engine)
        assert made == list(likely_shapes(engine))

    def test_a_request_that_wants_more_leaves_it_warm(
        self, open_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Tensors that grow for biases and penalties are read by rounds with such requests only."""
        llm = open_llm(rounds="queued", drafter="ngram", planner="fixed")
        engine, made = recording(llm, monkeypatch)
        monkeypatch.setattr(rounds, "_OFTEN", 1_000_000)
        plainly = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        expected = llm.generate([[5, 6, 7] * 4], plainly)[0].outputs[0].token_ids
        warm_up(engine)
        for more in ({"logit_bias": {7: 1.0}}, {"presence_penalty": 0.5}, {"logit_bias": {7: 1.0, 9: 1.0}}):
            llm.generate([[5, 6, 7] * 4], replace(plainly, **more))
        warm = len(made)
        assert engine.sampling.version >= 3
        assert llm.generate([[5, 6, 7] * 4], plainly)[0].outputs[0].token_ids == expected
        assert len(made) == warm

    def test_nothing_is_done_where_nothing_is_recorded(self, open_llm: Callable[..., LLM]) -> None:
        llm = open_llm(rounds="queued", drafter="ngram", warm_up=True)
        assert isinstance(llm.engine.backend, QueuedBackend)
        said: list[str] = []
        warm_up(llm.engine, said.append)
        assert not said
        assert not len(rounds_of(llm.engine))


def test_measuring_takes_no_larger_round(engine: Engine) -> None:
    large, small = (shape([nodes, nodes]) for nodes in (12, 5))
    rounds_of(engine).of(large)
    assert rounds_of(engine).of(small).shape == large
    assert rounds_of(engine).of(small, exactly=True).shape == small
    assert rounds_of(engine).of(small).shape == small, "it is there now"


def test_in_an_engine_that_is_not_warm_what_comes_is_recorded(engine: Engine) -> None:
    rounds_of(engine)._stand_ins = None
    large, small = (shape([nodes, nodes]) for nodes in (12, 5))
    assert [rounds_of(engine).of(one).shape for one in (large, small)] == [large, small]


def test_a_shape_that_comes_often_is_recorded(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "_OFTEN", 2)
    large, small = (shape([nodes, nodes]) for nodes in (12, 5))
    rounds_of(engine).of(large)
    assert [rounds_of(engine).of(small).shape for _ in range(4)] == [large, large, small, small]


@pytest.mark.parametrize("often", [0, 2, 1_000_000])
def test_the_same_tokens_whoever_stands_in(
    open_llm: Callable[..., LLM], tiny_draft: Path, monkeypatch: pytest.MonkeyPatch, often: int
) -> None:
    """Chains and trees of all drafters in rounds with more rows, wider ones, and such for trees."""
    monkeypatch.setattr(rounds, "_OFTEN", often)
    answers = Answers()
    scripted: list[str | Drafter] = [*dict(all_scripted(answers)).values()]
    drafters: list[str | Drafter] = [*scripted, "ngram", "suffix", f"model:{tiny_draft}"]
    eager = open_llm(rounds="eager", drafter=None)
    llm = open_llm(rounds="queued", drafter=drafters, planner="fixed")
    engine, made = recording(llm, monkeypatch)
    batch = cases()
    expected = plain(eager, batch, answers)
    warm_up(engine)
    warmed = len(made)
    stood_in = list[RoundShape]()
    known = Rounds.of

    def of(self: Rounds, wanted: RoundShape, *, exactly: bool = False) -> Round:
        found = known(self, wanted, exactly=exactly)
        stood_in.extend([wanted] if found.shape != wanted else [])
        return found

    monkeypatch.setattr(Rounds, "of", of)
    for name in ("right", "bushy", "bushy_wrong", "ngram", "suffix", "model"):
        assert not differences(batch, expected, run(llm, batch, name)), name
    if often:
        assert {one.is_tree for one in stood_in} == {False, True}
    else:
        assert not stood_in
    assert len(made) > warmed, "penalties and the like are recorded when they come"


@pytest.mark.parametrize(
    ("requests", "room"),
    [(0, 16), (1, 16), (16, 16), (17, 64), (64, 64), (65, 256), (256, 256), (257, 512), (600, 1024)],
)
def test_kernels_are_compiled_for_few_numbers_of_requests(requests: int, room: int) -> None:
    assert room_for(requests) == room


class TestVersions:
    """Rounds are stale where tensors that they read were replaced by wider ones."""

    WISHES: ClassVar[dict[str, dict[str, Any]]] = {
        "bias": {"logit_bias": {3: 1.0}},
        "penalties": {"presence_penalty": 0.5},
        "min_tokens": {"min_tokens": 2},
    }

    @pytest.mark.parametrize("wish", WISHES)
    def test_of_whoever_needs_them(self, wish: str) -> None:
        table = SamplingTable(2, 64)
        table.add(0, SamplingParams(temperature=0), seed=0)
        table.add(1, SamplingParams(temperature=0, **self.WISHES[wish]), seed=0, end_ids=(5,))
        plainly, both = table.features([0]), table.features([0, 1])
        assert table.version_of(plainly) == 0
        assert table.version_of(both) == table.version == 1
        assert [is_stale(version, 2) for version in (0, 1, 2)] == [False, True, False]

    def test_longer_lists_seldom_need_wider_tensors(self) -> None:
        table = SamplingTable(2, 64)
        for count in range(1, 33):
            table.add(0, SamplingParams(logit_bias=dict.fromkeys(range(count), 1.0)), seed=0)
            assert table.bias_ids[0].tolist()[:count] == list(range(count))
        assert table.version == 6

    def test_only_those_are_counted_who_want_it(self) -> None:
        table = SamplingTable(2, 8)
        table.add(0, SamplingParams(temperature=0), seed=0)
        table.add(1, SamplingParams(temperature=0, presence_penalty=0.5), seed=0)
        slots, tokens = torch.tensor([0, 1]), torch.tensor([[3], [4]])
        table.commit(slots, tokens, torch.ones(2, dtype=torch.int64), table.features([0]))
        assert not table.counts.any()
        table.commit(slots, tokens, torch.ones(2, dtype=torch.int64), table.features([0, 1]))
        assert table.counts[1].tolist() == [0, 0, 0, 0, 1, 0, 0, 0]

    def test_where_memory_was_short_the_next_one_has_all_of_them(self, monkeypatch: pytest.MonkeyPatch) -> None:
        table, penalized = SamplingTable(2, 8), SamplingParams(temperature=0, presence_penalty=0.5)
        made = list[int]()
        new_zeros = torch.Tensor.new_zeros

        def short(self: torch.Tensor, *sizes: int) -> torch.Tensor:
            made.append(1)
            if len(made) == 2:
                raise torch.OutOfMemoryError("for what was seen")
            return new_zeros(self, *sizes)

        monkeypatch.setattr(torch.Tensor, "new_zeros", short)
        with pytest.raises(torch.OutOfMemoryError):
            table.add(0, penalized, seed=0)
        table.add(0, penalized, seed=0, prompt=(1, 2))
        assert table.prompt_seen[0].nonzero().flatten().tolist() == [1, 2]


def test_a_stale_round_makes_room_and_others_stay(engine: Engine) -> None:
    biased = Features(greedy=True, bias=True)
    for version in (1, 2):
        rounds_of(engine).of(shape([0, 0], features=biased, version=version))
    rounds_of(engine).of(shape([0, 0]))
    rounds_of(engine).of(shape([0, 0], features=biased, version=3))
    assert {one.version for one in rounds_of(engine)._rounds} == {0, 3}
