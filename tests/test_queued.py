"""The queued engine, on the CPU: one round ahead of the host, and the tokens of plain eager decoding all the same."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from conftest import EOS
from exactness import FEW, Case, cases, differences, plain, run
from scripted import GOOD, Answers, Bushy, Scripted, all_scripted
from slipstream import LLM, CompletionOutput, RequestOutput, SamplingParams, SpeculationParams
from slipstream.drafters.base import Drafter
from slipstream.drafters.model import ModelDrafter
from slipstream.engine.queued import QueuedBackend
from stepping import Arrival, Stepper


@dataclass(frozen=True)
class Bench:
    """A queued engine with every drafter, the cases, and what an eager engine answers without any."""

    llm: LLM
    eager: LLM
    cases: list[Case]
    expected: list[CompletionOutput]
    answers: Answers
    scripted: dict[str, Scripted]

    def speculate(self, batch: Sequence[Case], drafter: str | None, **how: Any) -> list[CompletionOutput]:
        """Run, and check that it is exact."""
        got = run(self.llm, batch, drafter, **how)
        assert not differences(batch, [self.expected[self.cases.index(case)] for case in batch], got)
        return got

    def one(self, prompt: Sequence[int], params: SamplingParams, drafter: str | None) -> RequestOutput:
        how = SpeculationParams(enabled=drafter is not None, drafter=drafter)
        return self.llm.generate([list(prompt)], replace(params, speculation=how))[0]


@pytest.fixture(scope="module")
def bench(tiny_target: Path, tiny_draft: Path) -> Iterator[Bench]:
    answers = Answers()
    scripted = dict(all_scripted(answers))
    drafters: list[str | Drafter] = [*scripted.values(), "ngram", "suffix", "prediction", f"model:{tiny_draft}"]
    common: dict[str, Any] = {"device": "cpu", "max_num_seqs": 8, "memory": "64MiB"}
    with (
        LLM(tiny_target, drafter=None, rounds="eager", **common) as eager,
        LLM(tiny_target, drafter=drafters, rounds="queued", planner="fixed", **common) as llm,
    ):
        assert isinstance(llm.engine.backend, QueuedBackend)
        assert not isinstance(eager.engine.backend, QueuedBackend)
        batch = cases()
        expected = plain(eager, batch, answers)
        texts = [output.text[:5] + "X" + output.text[6:] for output in expected]  # right but for one character
        predicted = [
            replace(case, params=replace(case.params, prediction=text)) for case, text in zip(batch, texts, strict=True)
        ]
        yield Bench(llm, eager, predicted, expected, answers, scripted)
        ends = time.monotonic() + 30
        while llm.engine.busy and time.monotonic() < ends:
            time.sleep(0.01)  # whoever was dropped last ends within a round
        assert not llm.engine.busy
        llm.engine.scheduler.check_integrity()
        assert llm.engine.pool.free_pages == llm.engine.pool.num_pages


NAMES = [None, *(kind.name for kind in GOOD), "ngram", "suffix", "prediction", "model"]


@pytest.mark.parametrize("drafter", NAMES)
def test_the_same_tokens_in_a_batch(bench: Bench, drafter: str | None) -> None:
    """24 requests on 8 seats: they join as others leave."""
    got = bench.speculate(bench.cases, drafter)
    accepted = sum(output.speculation.accepted for output in got)
    if drafter in ("right", "bushy", "ngram", "suffix", "prediction", "model"):
        assert accepted > 0
    if drafter in (None, "wrong", "bushy_wrong"):
        assert accepted == 0


@pytest.mark.parametrize("drafter", NAMES)
def test_the_same_tokens_alone(bench: Bench, drafter: str | None) -> None:
    bench.speculate(bench.cases[1::3], drafter, alone=True)
    bench.speculate(bench.cases[::6], drafter, alone=True, draft_tokens=2)


def test_a_batch_of_all_drafters(bench: Bench) -> None:
    """Chains and trees of the host, guesses of the device, nothing and nonsense side by side in the same round."""
    names = [*NAMES, "raises", "twins"]
    hows = [SpeculationParams(enabled=n is not None, drafter=n) for n in (names * 3)[: len(bench.cases)]]
    params = [replace(case.params, speculation=how) for case, how in zip(bench.cases, hows, strict=True)]
    got = [out.outputs[0] for out in bench.llm.generate([list(case.prompt) for case in bench.cases], params)]
    assert not differences(bench.cases, bench.expected, got)
    assert {name for output in got for name in output.speculation.by_drafter} >= {"right", "bushy", "twins", "model"}


def test_accepted_paths_are_those_that_were_due(bench: Bench) -> None:
    """Paths that skip nodes are moved together in the cache: later tokens are right only if they were."""
    drafter = bench.scripted[Bushy.name]
    batch = [case for case in bench.cases if not case.params.min_tokens]
    drafter.forget()
    got = bench.speculate(batch, Bushy.name)
    moved = [v for v in drafter.verdicts if v.path != tuple(range(v.accepted))]
    assert len(moved) > 20
    assert sum(output.speculation.accepted for output in got) == drafter.due


@pytest.mark.parametrize("drafter", [None, "right", "bushy", "ngram", "suffix", "model"])
@pytest.mark.parametrize("extra", [{}, {"frequency_penalty": 1.0, "logit_bias": FEW}], ids=["plain", "penalties"])
def test_n_samples(bench: Bench, drafter: str | None, extra: dict[str, Any]) -> None:
    prompt = list(range(20, 45))
    params = SamplingParams(n=4, temperature=1.0, seed=9, max_tokens=12, ignore_eos=True, **extra)
    off = bench.eager.generate([prompt], params)[0].outputs
    for sample, output in enumerate(off):
        bench.answers.tell(prompt, 9, output.token_ids, sample)
    on = bench.one(prompt, params, drafter).outputs
    assert [output.token_ids for output in on] == [output.token_ids for output in off]
    assert len({tuple(output.token_ids) for output in off}) == 4


def endings(whole: CompletionOutput) -> dict[str, dict[str, Any]]:
    """Parameters that end this answer somewhere in the middle."""
    ids, text = whole.token_ids, whole.text
    middle = next(i for i in range(5, len(ids)) if ids[i] not in ids[:i])
    return {
        "stop id": {"stop_token_ids": [ids[middle]], "ignore_eos": True},
        "stop id kept": {"stop_token_ids": [ids[middle]], "ignore_eos": True, "include_stop_str_in_output": True},
        "stop string": {"stop": [text[4:7]], "ignore_eos": True},
        "limit": {"max_tokens": middle, "ignore_eos": True},
        "limit of one": {"max_tokens": 1, "ignore_eos": True},
    }


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("drafter", [None, "right", "bushy", "model"])
def test_an_end_inside_an_accepted_run(bench: Bench, drafter: str | None, temperature: float) -> None:
    """Text, ids, log probabilities and counts are cut at the same token, and nothing comes after."""
    prompt = (10, 20, 30)
    letters = dict.fromkeys(range(65, 91), 30.0)
    params = SamplingParams(
        temperature=temperature, seed=31, max_tokens=24, logit_bias=letters, logprobs=1, frequency_penalty=1.5
    )
    (whole,) = bench.eager.generate([list(prompt)], replace(params, ignore_eos=True))[0].outputs
    bench.answers.tell(prompt, 31, whole.token_ids)
    for name, change in endings(whole).items():
        wanted = replace(params, **change)
        (want,) = bench.eager.generate([list(prompt)], wanted)[0].outputs
        (have,) = bench.one(prompt, wanted, drafter).outputs
        assert len(want.token_ids) < 24, name
        for field in ("token_ids", "text", "finish_reason", "stop_reason"):
            assert getattr(have, field) == getattr(want, field), (name, field)
        assert have.speculation.emitted == len(have.token_ids), name
        assert have.logprobs is not None
        assert len(have.logprobs) == len(have.token_ids), name
        assert have.speculation.accepted <= len(have.token_ids), name


@pytest.mark.parametrize("drafter", [None, "right", "model"])
def test_end_of_text_inside_an_accepted_run(bench: Bench, drafter: str | None) -> None:
    prompt = (7, 7)
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=60, logit_bias={**FEW, EOS: 6.0}, min_tokens=9)
    (want,) = bench.eager.generate([list(prompt)], params)[0].outputs
    assert want.finish_reason == "stop"
    assert 9 < len(want.token_ids) < 60
    bench.answers.tell(prompt, 5, [*want.token_ids, 10, 20, 30, 40])  # guesses beyond the end
    (have,) = bench.one(prompt, params, drafter).outputs
    assert (have.token_ids, have.text, have.finish_reason) == (want.token_ids, want.text, "stop")


@pytest.mark.parametrize("drafter", [None, "right", "bushy", "model"])
def test_log_probabilities_are_the_eager_engines(bench: Bench, drafter: str | None) -> None:
    """Of those who ask, beside others who do not, through prompts in company and accepted paths."""
    batch = bench.cases[:8]
    params = [replace(case.params, logprobs=i % 4 if i % 3 else None, prediction=None) for i, case in enumerate(batch)]
    prompts = [list(case.prompt) for case in batch]
    eager = bench.eager.generate(prompts, params)
    how = SpeculationParams(enabled=drafter is not None, drafter=drafter)
    queued = bench.llm.generate(prompts, [replace(p, speculation=how) for p in params])
    for want, have in zip(eager, queued, strict=True):
        (theirs,), (ours,) = want.outputs, have.outputs
        assert ours.token_ids == theirs.token_ids
        assert (ours.logprobs is None) == (theirs.logprobs is None)
        for mine, other in zip(ours.logprobs or (), theirs.logprobs or (), strict=True):
            assert list(mine) == list(other)
            for token in mine:
                assert mine[token].logprob == pytest.approx(other[token].logprob, abs=1e-4)
                assert (mine[token].rank, mine[token].decoded_token) == (other[token].rank, other[token].decoded_token)


def test_chunks_of_a_long_prompt_beside_decodes(tiny_target: Path) -> None:
    """In chunks that leave nothing, one token, or many: the last one alone is a decode."""
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=30, ignore_eos=True)
    arrivals = [Arrival(3, params), *(Arrival(n, replace(params, seed=n), 2) for n in (16, 17, 33, 100))]
    want = Stepper(tiny_target, None, rounds="eager").run(arrivals)
    for drafter in (None, "ngram", f"model:{tiny_target}"):
        bench = Stepper(tiny_target, drafter, rounds="queued", max_num_seqs=5, max_num_batched_tokens=16)
        got = bench.run(arrivals)
        assert [answer.token_ids for answer in got] == [answer.token_ids for answer in want]
        if drafter and drafter.startswith("model"):
            # always right: only what the last round guessed beyond the answer's end is lost
            most = ModelDrafter.default_draft_tokens
            assert all(0 <= a.speculation.drafted - a.speculation.accepted < most for a in got)
            assert all(a.speculation.accepted > 15 for a in got)


def test_log_probabilities_of_one_that_joins_those_who_want_none(tiny_target: Path) -> None:
    """Its first token is chosen in a round whose other logits nobody keeps."""
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    arrivals = [Arrival(3, params), Arrival(5, params), Arrival(4, replace(params, logprobs=2, max_tokens=4), 3)]
    for drafter in (None, "ngram"):
        want, got = (Stepper(tiny_target, drafter, rounds=rounds).run(arrivals) for rounds in ("eager", "queued"))
        assert [a.token_ids for a in got] == [a.token_ids for a in want]
        assert [list(position) for position in got[2].logprobs or ()] == [list(p) for p in want[2].logprobs or ()]
        assert len(got[2].logprobs or ()) == 4
