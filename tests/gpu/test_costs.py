"""Costs measured on a GPU, in captured rounds: every drafter can be timed, and nothing of it stays behind."""

from __future__ import annotations

from pathlib import Path

import pytest

import eagle_scenes
from gpu_scenes import open_on_gpu, save_real_heads
from medusa_checkpoints import tiny_medusa
from shared_drafts import tiny_shared
from slipstream import SamplingParams
from slipstream.engine.measuring import SIZES, measure

pytestmark = pytest.mark.gpu

PARAMS = SamplingParams(temperature=0.7, seed=3, max_tokens=24, ignore_eos=True)
PROMPTS = [[5 + i] * (4 + 7 * i) for i in range(5)]


def test_drafters_by_crowd(tiny_target: Path, tmp_path: Path) -> None:
    eagle_scenes.eagle3().write(tmp_path / "eagle3")
    tiny_medusa(tmp_path / "medusa")
    tiny_shared(tmp_path / "shared")
    drafters = [f"eagle:{tmp_path / 'eagle3'}", f"medusa:{tmp_path / 'medusa'}", f"model:{tmp_path / 'shared'}"]
    with open_on_gpu(tiny_target, "bfloat16", drafter=drafters, planner="adaptive", max_num_seqs=64) as llm:
        expected = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS)]
    with open_on_gpu(tiny_target, "bfloat16", drafter=drafters, planner="adaptive", max_num_seqs=64) as llm:
        said: list[str] = []
        costs = measure(llm.engine, None, said.append)
        assert costs is not None
        assert not [text for text in said if "not be timed" in text or "not captured" in text]
        assert costs.passes.sizes == SIZES
        for name in ("eagle", "medusa", "model"):
            assert [seen.requests for seen in costs.drafts[name]] == [1, 8, 64]
        assert llm.engine.pool.free_pages == llm.engine.pool.num_pages
        llm.engine.drafting.planner.adopt(costs)
        assert [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS)] == expected
        llm.engine.scheduler.check_integrity()


def test_what_a_long_context_adds(tmp_path: Path) -> None:
    target = save_real_heads(tmp_path / "target", 4096)
    with open_on_gpu(target, "bfloat16", drafter="suffix", planner="adaptive", max_num_seqs=16) as llm:
        costs = measure(llm.engine, None)
    assert costs is not None
    assert costs.key_s >= 0
    assert costs.row_key_s >= 0
    assert costs.drafts == {}
