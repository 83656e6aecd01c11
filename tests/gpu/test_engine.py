"""The whole engine on a GPU: the same tokens with any drafter, in bf16 and fp32, by graphs or not, alone or not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from exactness import Case, differences, plain, run
from gpu_scenes import open_on_gpu, save_real_heads, some_cases
from scripted import Answers, Bushy, Right, RightThenWrong
from slipstream import LLM, CompletionOutput, SamplingParams, SpeculationParams
from slipstream.engine.queued import QueuedBackend
from slipstream.models.gpu import GpuTrunk

pytestmark = pytest.mark.gpu
OFF = SpeculationParams(enabled=False)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads as real models have them, and a context of several runs of attention."""
    return save_real_heads(tmp_path_factory.mktemp("models") / "target", 2048)


@dataclass(frozen=True)
class Bench:
    llm: LLM
    cases: list[Case]
    expected: list[CompletionOutput]
    answers: Answers

    def check(self, drafter: str | None, *, alone: bool) -> list[CompletionOutput]:
        got = run(self.llm, self.cases, drafter, alone=alone)
        assert not differences(self.cases, self.expected, got)
        return got


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=[True, False], ids=["graphs", "no graphs"])
def bench(request: pytest.FixtureRequest, dtype: str, target: Path, tiny_draft: Path) -> Iterator[Bench]:
    answers = Answers()
    batch = some_cases()
    with open_on_gpu(target, dtype, drafter=None, graphs=False) as plainly:
        expected = plain(plainly, batch, answers)  # each by itself, no graphs, nothing drafted
    drafters = [Right(answers), RightThenWrong(answers), Bushy(answers), "ngram", f"model:{tiny_draft}"]
    with open_on_gpu(target, dtype, drafter=drafters, graphs=request.param) as llm:
        yield Bench(llm, batch, expected, answers)
        assert not llm.engine.busy
        llm.engine.scheduler.check_integrity()
        assert llm.engine.pool.free_pages == llm.engine.pool.num_pages


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("drafter", [None, "right", "right_then_wrong", "bushy", "ngram", "model"])
def test_the_same_tokens(bench: Bench, drafter: str | None, alone: bool) -> None:
    assert isinstance(bench.llm.engine.backend, QueuedBackend)
    got = bench.check(drafter, alone=alone)
    if drafter in ("right", "bushy"):
        assert sum(output.speculation.accepted for output in got) > 20


def test_a_batch_of_all_drafters(bench: Bench) -> None:
    names = [None, "right", "bushy", "model", "ngram", "right_then_wrong", "model"]
    hows = [SpeculationParams(enabled=n is not None, drafter=n) for n in names]
    params = [replace(case.params, speculation=how) for case, how in zip(bench.cases, hows, strict=True)]
    got = [o.outputs[0] for o in bench.llm.generate([list(case.prompt) for case in bench.cases], params)]
    assert not differences(bench.cases, bench.expected, got)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("drafter", [None, "model"])
def test_requests_that_come_and_go_leave_the_device_at_work(bench: Bench, drafter: str | None) -> None:
    """Only results of rounds are waited for: what a request brings is sent behind what is queued."""
    wishes = [
        SamplingParams(temperature=0),
        SamplingParams(temperature=0.9, top_k=7, seed=1),
        SamplingParams(temperature=0.7, top_p=0.8, min_p=0.01, seed=2),
        SamplingParams(temperature=0.7, seed=3, repetition_penalty=1.2, presence_penalty=0.1),
        SamplingParams(temperature=0, logit_bias={3: 1.5}, min_tokens=2),
    ]
    how = SpeculationParams(enabled=drafter is not None, drafter=drafter)
    params = [
        replace(wishes[i % len(wishes)], max_tokens=5 + i % 7, ignore_eos=True, speculation=how) for i in range(50)
    ]
    prompts = [[7 + i, 3, 5, 1 + i % 9] * 4 for i in range(50)]
    asked = [bench.llm.generate(prompts, params) for _ in range(2)]  # the second time nothing is left to be recorded
    torch.cuda.set_sync_debug_mode("error")
    try:
        asked.append(bench.llm.generate(prompts, params))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    outputs = [[output.outputs[0] for output in outputs] for outputs in asked]
    assert not [output.error for output in outputs[2] if output.error]
    failures = [stats.failures for output in outputs[2] for stats in output.speculation.by_drafter.values()]
    assert not any(failures), "a drafter that raises is left out, and the tokens are the same"
    assert drafter is None or sum(output.speculation.drafted for output in outputs[2]) > 50
    assert len({str([output.token_ids for output in one]) for one in outputs}) == 1


def test_the_fused_trunk_is_in_place(bench: Bench) -> None:
    assert any(isinstance(module, GpuTrunk) for module in bench.llm.engine.target.model.modules())


def test_an_eager_engine_says_the_same(bench: Bench, dtype: str, target: Path) -> None:
    with open_on_gpu(target, dtype, drafter=None, rounds="eager") as eager:
        assert not isinstance(eager.engine.backend, QueuedBackend)
        assert not differences(bench.cases, bench.expected, run(eager, bench.cases, None))


@pytest.mark.parametrize("length", [100, 505, 700])
def test_what_was_said_may_be_read_again(bench: Bench, length: int) -> None:
    """As after a preemption: read as a prompt, in wide tiles, the answer goes on as it went on token by token."""
    prompt = torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=30, ignore_eos=True, speculation=OFF)
    whole = bench.llm.generate([prompt], params)[0].outputs[0].token_ids
    for cut in (1, 9, 20):
        again = bench.llm.generate([prompt + whole[:cut]], replace(params, max_tokens=30 - cut))[0].outputs[0]
        assert again.token_ids == whole[cut:]


def test_long_prompts_come_out_the_same_in_company(bench: Bench) -> None:
    """Whether they share passes, where cuBLAS allows it, or not: what is in the cache does not depend on it."""
    lengths = (130, 140, 258, 300, 384, 385, 500, 900)
    dice = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, 256, (length,), generator=dice).tolist() for length in lengths]
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=20, ignore_eos=True, speculation=OFF)
    alone = [bench.llm.generate([prompt], params)[0].outputs[0].token_ids for prompt in prompts]
    together = [output.outputs[0].token_ids for output in bench.llm.generate(prompts, params)]
    assert together == alone


@pytest.mark.parametrize("requests", [1, 8])
def test_a_model_that_drafts_for_itself_is_always_right(dtype: str, target: Path, requests: int) -> None:
    params = [SamplingParams(temperature=i % 2, seed=i, max_tokens=31, ignore_eos=True) for i in range(requests)]
    prompts = [[10 + i] * (5 + 9 * i) for i in range(requests)]
    with open_on_gpu(target, dtype, drafter=f"model:{target}") as llm:
        plainly = llm.generate(prompts, [replace(p, speculation=OFF) for p in params])
        drafted = llm.generate(prompts, params)
    for want, have in zip(plainly, drafted, strict=True):
        assert have.outputs[0].token_ids == want.outputs[0].token_ids
        assert have.outputs[0].speculation.rounds == 1 + 30 // 6


def test_log_probabilities(bench: Bench) -> None:
    params = [replace(case.params, logprobs=2) for case in bench.cases]
    prompts = [list(case.prompt) for case in bench.cases]
    off = bench.llm.generate(prompts, [replace(p, speculation=OFF) for p in params])
    how = SpeculationParams(drafter="right")
    on = bench.llm.generate(prompts, [replace(p, speculation=how) for p in params])
    for want, have in zip(off, on, strict=True):
        assert have.outputs[0].token_ids == want.outputs[0].token_ids
        ours, theirs = have.outputs[0].logprobs or [], want.outputs[0].logprobs or []
        for mine, other in zip(ours, theirs, strict=True):
            assert list(mine) == list(other)
            assert [e.logprob for e in mine.values()] == pytest.approx([e.logprob for e in other.values()], abs=1e-5)
