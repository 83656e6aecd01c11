"""Bulk generation on a GPU: the engine's answers, by graphs or not, and many more at a time than the engine takes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from conftest import EOS
from gpu_scenes import save_real_heads
from slipstream import LLM, SamplingParams
from slipstream.models.parity import open_model
from slipstream.train.bulk import Bulk, BulkRequest

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_real_heads(tmp_path_factory.mktemp("models") / "target", 1024)


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "no graphs"])
@pytest.mark.parametrize("lanes", [3, 8])
def test_answers_are_the_engines(target: Path, lanes: int, graphs: bool) -> None:
    """Few short prompts at a time, so that their passes are row-independent here as there."""
    asks = [BulkRequest([i + 1, i + 2, 7], i, (0.0, 1.0)[i % 2], 100 + i) for i in range(20)]
    runner = open_model(target, torch.bfloat16, torch.device("cuda", 0))
    bulk = Bulk(runner, lanes=lanes, max_len=200, end_ids=[EOS], graphs=graphs)
    written = {answer.number: answer.tokens.tolist() for answer in bulk.write(enumerate(asks))}
    params = [SamplingParams(temperature=a.temperature, seed=a.seed, max_tokens=a.max_tokens) for a in asks]
    with LLM(target, drafter=None, device="cuda", dtype="bfloat16", memory="1GiB") as llm:
        outputs = llm.generate([{"prompt_token_ids": list(a.prompt)} for a in asks], params)
    assert [written[i] for i in range(len(asks))] == [output.outputs[0].token_ids for output in outputs]


def test_a_thousand_lanes(target: Path) -> None:
    asks = [BulkRequest([i % 250 + 1] * (1 + i % 40), i, 1.0, 20 + i % 50) for i in range(2500)]
    runner = open_model(target, torch.bfloat16, torch.device("cuda", 0))
    bulk = Bulk(runner, lanes=1024, max_len=128, end_ids=[EOS])
    written = {answer.number: answer for answer in bulk.write(enumerate(asks))}
    assert sorted(written) == list(range(len(asks)))
    for number, answer in written.items():
        assert not answer.broken
        ended = answer.tokens[-1] == EOS
        assert ended or len(answer.tokens) == asks[number].max_tokens
        assert EOS not in answer.tokens[:-1]
