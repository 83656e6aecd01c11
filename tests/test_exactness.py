"""Speculation never changes a token: any drafter, temperature and parameter, alone or in company, at any time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from exactness import FEW, Case, cases, differences, plain, run
from scripted import BAD, GOOD, Answers, Bushy, Hangs, RaisesForSome, RightThenWrong, Scripted, all_scripted
from slipstream import LLM, CompletionOutput, SamplingParams, SpeculationParams
from slipstream.drafters import guard
from slipstream.drafters.base import Drafter

OURS = ("ngram", "suffix", "prediction", "model")
SEATS = 8


@dataclass(frozen=True)
class Bench:
    """One engine with every drafter, the cases, and their plain answers."""

    llm: LLM
    cases: list[Case]
    expected: list[CompletionOutput]
    answers: Answers
    scripted: dict[str, Scripted]

    def speculate(self, batch: Sequence[Case], drafter: str, **how: Any) -> list[CompletionOutput]:
        """Run, and check that it is exact."""
        got = run(self.llm, batch, drafter, **how)
        assert not differences(batch, [self.expected[self.cases.index(case)] for case in batch], got)
        return got


@pytest.fixture(scope="module", params=["fixed", "adaptive"])
def bench(request: pytest.FixtureRequest, tiny_target: Path, tiny_draft: Path) -> Iterator[Bench]:
    answers = Answers()
    scripted = dict(all_scripted(answers))
    drafters: list[str | Drafter] = [*scripted.values(), "ngram", "suffix", "prediction", f"model:{tiny_draft}"]
    with LLM(
        tiny_target, device="cpu", drafter=drafters, planner=request.param, max_num_seqs=SEATS, memory="64MiB"
    ) as llm:
        batch = cases()
        expected = plain(llm, batch, answers)
        # a prediction that is right but for one character in the middle, where the text has any
        texts = [text[:5] + "X" + text[6:] for text in (output.text for output in expected)]
        predicted = [
            replace(case, params=replace(case.params, prediction=text)) for case, text in zip(batch, texts, strict=True)
        ]
        yield Bench(llm, predicted, expected, answers, scripted)
        assert not llm.engine.busy
        llm.engine.scheduler.check_integrity()
        assert llm.engine.pool.free_pages == llm.engine.pool.num_pages


fixed = pytest.mark.parametrize("bench", ["fixed"], indirect=True)


def accepted(outputs: Sequence[CompletionOutput]) -> int:
    return sum(output.speculation.accepted for output in outputs)


def test_the_cases_are_worth_it(bench: Bench) -> None:
    """Every parameter does something, and no two answers are alike."""
    assert len({tuple(output.token_ids) for output in bench.expected}) == len(bench.expected)
    by_name = dict(zip((case.name for case in bench.cases), bench.expected, strict=True))
    assert {output.finish_reason for output in bench.expected} == {"length", "stop"}
    assert all(len(by_name[f"min_tokens at {t}"].token_ids) >= 7 for t in (0.0, 0.7, 1.2))
    assert all("5?" not in by_name[f"bad_words at {t}"].text for t in (0.0, 0.7, 1.2))


@pytest.mark.parametrize("drafter", [*(kind.name for kind in GOOD), *OURS, RaisesForSome.name])
def test_the_same_tokens_in_a_batch(bench: Bench, drafter: str) -> None:
    """24 requests on 8 seats: they join as others leave."""
    got = bench.speculate(bench.cases, drafter)
    if drafter in OURS and bench.llm.engine.config.planner == "fixed":
        assert accepted(got) > 0
        assert accepted(got) < sum(output.speculation.drafted for output in got)


@fixed
@pytest.mark.parametrize("drafter", [*(kind.name for kind in GOOD), *OURS])
def test_the_same_tokens_alone(bench: Bench, drafter: str) -> None:
    bench.speculate(bench.cases[1::3], drafter, alone=True)
    bench.speculate(bench.cases[::6], drafter, alone=True, draft_tokens=2)


@fixed
def test_a_batch_of_all_drafters(bench: Bench) -> None:
    """Chains, trees, nothing and nonsense side by side in the same pass."""
    names = [*(kind.name for kind in GOOD), *OURS, "raises", "twins", None]
    batch = bench.cases
    hows = [SpeculationParams(enabled=n is not None, drafter=n) for n in (names * len(batch))[: len(batch)]]
    params = [replace(case.params, speculation=how) for case, how in zip(batch, hows, strict=True)]
    got = [out.outputs[0] for out in bench.llm.generate([list(case.prompt) for case in batch], params)]
    assert not differences(batch, bench.expected, got)
    assert {name for output in got for name in output.speculation.by_drafter} >= {"right", "bushy", "twins", "model"}


@fixed
@pytest.mark.parametrize("draft_tokens", [1, 3, 63])
def test_right_drafts_are_accepted_whole(bench: Bench, draft_tokens: int) -> None:
    """tau is the draft's length and one more: guesses are really checked together."""
    batch = [case for case in bench.cases if not case.params.min_tokens]
    for case, output in zip(batch, bench.speculate(batch, "right", draft_tokens=draft_tokens), strict=True):
        behind_first = case.params.max_tokens - 1  # the first token comes with the prompt
        # eight share the rows of a pass, so that a draft has at most 31 nodes: more than any answer here
        rounds = -(-behind_first // (draft_tokens + 1))
        stats = output.speculation
        assert (stats.rounds, stats.accepted) == (1 + rounds, behind_first - rounds)
        assert stats.drafted == stats.accepted
        assert stats.by_drafter["right"].drafts <= rounds


@fixed
def test_wrong_drafts_cost_rounds_only(bench: Bench) -> None:
    for drafter in ("wrong", "bushy_wrong"):
        for output in bench.speculate(bench.cases, drafter):
            assert output.speculation.rounds == len(output.token_ids)
            assert output.speculation.accepted == 0
            assert output.speculation.drafted > 0


@fixed
def test_a_wrong_guess_ends_what_is_accepted(bench: Bench) -> None:
    """Nothing behind the first wrong node counts, even where it would be right again."""
    for output in bench.speculate(bench.cases, "right_then_wrong", draft_tokens=5):
        inner = len(output.token_ids) - 1
        full = inner // (RightThenWrong.right + 1)
        assert full * RightThenWrong.right <= output.speculation.accepted <= (full + 1) * RightThenWrong.right
        assert output.speculation.accepted < output.speculation.drafted


@fixed
def test_the_right_path_of_a_tree_moves_together(bench: Bench) -> None:
    """Accepted paths skip nodes, so the cache must be compacted; later tokens are right only if it was."""
    drafter = bench.scripted[Bushy.name]
    batch = [case for case in bench.cases if not case.params.min_tokens]  # where an answer ends inside a path
    for how in ({"alone": True}, {}):
        drafter.forget()
        got = bench.speculate(batch, Bushy.name, **how)
        moved = [v for v in drafter.verdicts if v.path != tuple(range(v.accepted))]
        assert len(moved) > 20
        assert max(v.accepted for v in moved) >= 4
        assert accepted(got) == drafter.due


@fixed
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_trees_of_63_nodes(bench: Bench, temperature: float) -> None:
    """The largest trees: every bit of a mask word is in use."""
    params = SamplingParams(temperature=temperature, seed=55, max_tokens=120, ignore_eos=True)
    batch = [Case("long", (3, 4, 5), params)]
    expected = plain(bench.llm, batch, bench.answers)
    drafter = bench.scripted[Bushy.name]
    drafter.forget()
    got = run(bench.llm, batch, Bushy.name)
    assert not differences(batch, expected, got)
    assert max(v.drafted for v in drafter.verdicts) == 63
    assert max(max(v.path, default=0) for v in drafter.verdicts) > 40
    assert accepted(got) == drafter.due


@fixed
@pytest.mark.parametrize("drafter", [kind.name for kind in BAD])
def test_bad_drafters_are_dropped_and_counted(bench: Bench, drafter: str) -> None:
    some = bench.scripted[RaisesForSome.name]
    assert isinstance(some, RaisesForSome)
    some.hates = frozenset(case.params.seed for case in bench.cases[::3] if case.params.seed is not None)
    for i, output in enumerate(bench.speculate(bench.cases, drafter)):
        stats = output.speculation.by_drafter[drafter]
        hated = drafter != RaisesForSome.name or i % 3 == 0
        assert stats.failures == hated
        assert (stats.drafts > 0) == (stats.accepted > 0) == (not hated)
    assert bench.llm.engine.drafting.guards[drafter].dropped is None


def test_a_drafter_that_hangs_is_dropped_for_good(
    open_llm: Callable[..., LLM], caplog: pytest.LogCaptureFixture
) -> None:
    answers = Answers()
    drafter = Hangs(answers)
    llm = open_llm(drafter=drafter, planner="fixed")
    batch = cases()[:4]
    expected = plain(llm, batch, answers)
    try:
        assert not differences(batch, expected, run(llm, batch, Hangs.name))
        hung = llm.engine.drafting.guards[Hangs.name]
        assert hung.late == guard.LATE_IN_A_ROW
        assert hung.dropped is not None
        got = run(llm, batch, Hangs.name)
        assert not differences(batch, expected, got)
        assert not any(output.speculation.drafted for output in got)
        assert {output.speculation.why for output in got} == {"off: it was late 3 times in a row"}
        assert llm.snapshot().drops == {Hangs.name: {"late": 8}}
        assert len(caplog.records) == 1
        assert "Its thread is at" in caplog.text
        assert "let_go.wait" in caplog.text
    finally:
        drafter.let_go.set()


@fixed
@pytest.mark.parametrize("drafter", [None, "right", "bushy", "model"])
def test_a_seed_gives_the_same_tokens_among_others(bench: Bench, drafter: str | None) -> None:
    """Alone and among eight others, which come and go, and in whatever order."""
    one = bench.cases[1]
    others = bench.cases[5:13]
    want = bench.expected[1].token_ids
    for batch in ([*others, one], [one, *others], [*others[:4], one, *others[4:]]):
        assert run(bench.llm, batch, drafter)[batch.index(one)].token_ids == want


@fixed
def test_without_a_seed_answers_differ(bench: Bench) -> None:
    params = SamplingParams(temperature=1.2, max_tokens=12, ignore_eos=True)
    outputs = [o.outputs[0] for o in bench.llm.generate([[5, 6, 7]] * 4, params)]
    assert len({tuple(output.token_ids) for output in outputs}) == 4


@fixed
@pytest.mark.parametrize("drafter", ["right", "bushy", "ngram", "suffix", "model"])
@pytest.mark.parametrize("extra", [{}, {"frequency_penalty": 1.0, "logit_bias": FEW}], ids=["plain", "penalties"])
def test_n_samples(bench: Bench, drafter: str, extra: dict[str, Any]) -> None:
    """Each of n samples is its own answer, and the same with speculation."""
    prompt = list(range(20, 45))
    params = SamplingParams(n=4, temperature=1.0, seed=9, max_tokens=12, ignore_eos=True, **extra)
    off = bench.llm.generate([prompt], replace(params, speculation=SpeculationParams(enabled=False)))[0].outputs
    for sample, output in enumerate(off):
        bench.answers.tell(prompt, 9, output.token_ids, sample)
    on = bench.llm.generate([prompt], replace(params, speculation=SpeculationParams(drafter=drafter)))[0].outputs
    assert [output.token_ids for output in on] == [output.token_ids for output in off]
    assert len({tuple(output.token_ids) for output in off}) == 4
    assert [output.index for output in on] == [0, 1, 2, 3]
    if drafter == "right":
        assert all(output.speculation.accepted >= 8 for output in on)
    # the first sample is what one sample would be
    one = bench.llm.generate([prompt], replace(params, n=1, speculation=SpeculationParams(drafter="wrong")))[0]
    assert one.outputs[0].token_ids == off[0].token_ids


@fixed
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_penalties_follow_the_path(bench: Bench, temperature: float) -> None:
    """With penalties this strong each token hangs on how often the ones before it came, most of them still guesses."""
    params = SamplingParams(
        temperature=temperature,
        seed=77,
        max_tokens=40,
        ignore_eos=True,
        frequency_penalty=2.0,
        presence_penalty=1.0,
        repetition_penalty=1.5,
        logit_bias=dict.fromkeys(FEW, 20.0),
    )
    batch = [Case("strong penalties", (10, 20, 30), params)]
    expected = plain(bench.llm, batch, bench.answers)
    assert len(set(expected[0].token_ids[:20])) <= 8  # few tokens, many repeats
    right = run(bench.llm, batch, "right", draft_tokens=12)
    assert not differences(batch, expected, right)
    assert right[0].speculation.rounds == 1 + 3  # 39 tokens in drafts of 12 and one more
    bushy = bench.scripted[Bushy.name]
    bushy.forget()
    assert not differences(batch, expected, got := run(bench.llm, batch, "bushy"))
    assert accepted(got) == bushy.due > 8
