"""Prompts that begin alike on a GPU: what is found has the bits of what would have been computed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gpu_scenes import open_on_gpu, save_real_heads
from slipstream import LLM, RequestOutput, SamplingParams

pytestmark = pytest.mark.gpu

PARAMS = SamplingParams(temperature=1.0, seed=5, max_tokens=24, ignore_eos=True, logprobs=2)
TEXT = torch.randint(0, 256, (1500,), generator=torch.Generator().manual_seed(2)).tolist()
LENGTHS = (40, 100, 129, 130, 200, 257, 258, 300, 600, 600, 601, 640, 1000, 1400)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_real_heads(tmp_path_factory.mktemp("models") / "target", 2048)


def facts(output: RequestOutput) -> tuple[object, ...]:
    """What was said, and how likely it was to the last bit."""
    answer = output.outputs[0]
    return answer.token_ids, [[entry.logprob for entry in row.values()] for row in answer.logprobs or []]


def ask(llm: LLM, length: int, end: int) -> RequestOutput:
    return llm.generate([[*TEXT[: length - 3], end, end + 1, end + 2]], PARAMS)[0]


@pytest.mark.parametrize("max_num_batched_tokens", [None, 512])
@pytest.mark.parametrize("drafted", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_to_the_last_bit(
    dtype: str, drafted: bool, max_num_batched_tokens: int | None, target: Path, tiny_draft: Path
) -> None:
    drafter = f"model:{tiny_draft}" if drafted else None
    how = {"drafter": drafter, "max_num_batched_tokens": max_num_batched_tokens}
    with open_on_gpu(target, dtype, **how) as llm:
        fresh = [ask(llm, length, length % 200) for length in LENGTHS]
        shares = llm.engine.target.shares_wide
    with open_on_gpu(target, dtype, prefix_caching=True, **how) as llm:
        for turn in range(2):
            for length, want in zip(LENGTHS, fresh, strict=True):
                have = ask(llm, length, length % 200)
                assert facts(have) == facts(want), f"{length} tokens, {have.num_cached_tokens} of them found"
                assert not drafted or not have.outputs[0].speculation.of("model").failures
                if turn and (length <= 257 or (shares and length > 600)):
                    assert have.num_cached_tokens > 0
        llm.engine.scheduler.check_integrity()
