"""Distilled drafts on a GPU: bf16 loses what fp32 loses, and engines take new weights where graphs read them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import VOCAB
from slipstream import LLM, SamplingParams
from slipstream.train.config import TrainConfig
from slipstream.train.distill import DraftRecipe
from slipstream.train.recipe import Setting
from slipstream.train.teacher import Teacher
from training_rows import random_rows

pytestmark = pytest.mark.gpu
LENGTHS = ([40, 3, 70], [128], [1, 90])
WIDTH = 128


def make(teacher: Teacher, **options: Any) -> DraftRecipe:
    torch.manual_seed(5)
    config = TrainConfig("draft", "t", Path("out"), self_prompts=1, options={"kept": "fp32", "layers": 2, **options})
    return DraftRecipe.make(Setting(config, teacher, torch.ones(VOCAB, dtype=torch.int64)))


@pytest.mark.parametrize("hidden", [0, 16])
def test_a_step_in_bf16_is_a_step_in_fp32(hidden: int, tiny_target: Path) -> None:
    found = []
    weights = make(Teacher.open(tiny_target, "cpu"), hidden=hidden).module.state_dict()
    for device in ("cpu", "cuda"):
        teacher = Teacher.open(tiny_target, device)
        recipe = make(teacher, hidden=hidden)
        recipe.module.load_state_dict(weights)  # a narrow draft's directions may be turned on another device
        batch = teacher.look(random_rows(LENGTHS, WIDTH, VOCAB).to(teacher.device), recipe.taps)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            losses = recipe.loss(batch)
        losses.total.backward()
        gradient = recipe.module.get_parameter("layers.0.mlp.up_proj.weight").grad
        assert gradient is not None
        found.append((float(losses.total.detach()), losses.positions.tolist(), gradient.cpu()))
    (wide, counted, wide_grad), (narrow, narrow_counted, narrow_grad) = found
    assert counted == narrow_counted
    assert narrow == pytest.approx(wide, rel=0.03)
    assert torch.cosine_similarity(wide_grad.flatten(), narrow_grad.flatten(), dim=0) > 0.97


@pytest.mark.parametrize("hidden", [0, 16])
def test_an_open_engine_takes_new_weights(hidden: int, tiny_target: Path, tmp_path: Path) -> None:
    """Captured graphs read them: as many guesses are right as in an engine that was opened with them."""
    recipe = make(Teacher.open(tiny_target, "cuda"), hidden=hidden)
    recipe.export(tmp_path / "first")
    prompts = [{"prompt_token_ids": [10 + i, 20, 30 + i]} for i in range(4)]
    how = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)

    def accepted(llm: LLM) -> list[int]:
        return [output.outputs[0].speculation.accepted for output in llm.generate(prompts, how)]

    options: dict[str, Any] = {"device": "cuda", "memory": "1GiB", "max_num_seqs": 8, "planner": "fixed"}
    with LLM(tiny_target, drafter=recipe.drafter(tmp_path / "first"), **options) as llm:
        accepted(llm)
        with torch.no_grad():
            for weight in recipe.module.parameters():
                weight.add_(0.3 * weight.std(unbiased=False) * torch.randn_like(weight))
        recipe.refresh(llm.engine.drafting.drafters["model"])
        refreshed = accepted(llm)
    recipe.export(tmp_path / "second")
    with LLM(tiny_target, drafter=recipe.drafter(tmp_path / "second"), **options) as llm:
        assert accepted(llm) == refreshed
