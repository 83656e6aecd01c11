"""Medusa training on a GPU: bf16 loses what fp32 loses, and engines with captured rounds take weights and tree."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch

from conftest import VOCAB
from slipstream import LLM, SamplingParams
from slipstream.drafters.medusa import MedusaDrafter
from slipstream.train.config import TrainConfig
from slipstream.train.medusa import MedusaModule, MedusaRecipe
from slipstream.train.recipe import Setting, Text
from slipstream.train.teacher import Teacher
from training_rows import random_rows

pytestmark = pytest.mark.gpu
LENGTHS = ([40, 3, 70], [128], [1, 90])
WIDTH = 128


def make(teacher: Teacher) -> MedusaRecipe:
    torch.manual_seed(5)
    config = TrainConfig("medusa", "t", Path("out"), self_prompts=1, options={"kept": "fp32", "heads": 3})
    recipe = MedusaRecipe.make(Setting(config, teacher, torch.zeros(VOCAB, dtype=torch.int64)))
    made = torch.Generator().manual_seed(6)
    with torch.no_grad():
        for weight in recipe.module.parameters():
            weight.add_(0.1 * torch.randn(weight.shape, generator=made).to(weight.device))
    return recipe


def test_a_step_in_bf16_is_a_step_in_fp32(tiny_target: Path) -> None:
    found = []
    for device in ("cpu", "cuda"):
        teacher = Teacher.open(tiny_target, device)
        recipe = make(teacher)
        batch = teacher.look(random_rows(LENGTHS, WIDTH, VOCAB).to(teacher.device), recipe.taps)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            losses = recipe.loss(batch)
        losses.total.backward()
        gradient = cast(MedusaModule, recipe.module).weights[0].grad
        assert gradient is not None
        found.append((float(losses.total.detach()), losses.positions.tolist(), gradient.cpu()))
    (wide, counted, wide_grad), (narrow, narrow_counted, narrow_grad) = found
    assert counted == narrow_counted
    assert narrow == pytest.approx(wide, rel=0.03)
    assert torch.cosine_similarity(wide_grad.flatten(), narrow_grad.flatten(), dim=0) > 0.97


def test_an_open_engine_takes_weights_and_tree(tiny_target: Path, tmp_path: Path) -> None:
    """Captured graphs read them: as many guesses are right as in an engine that was opened with them."""
    recipe = make(Teacher.open(tiny_target, "cuda"))
    recipe.export(tmp_path / "first")
    prompts = [{"prompt_token_ids": [10 + i, 20, 30 + i]} for i in range(4)]
    how = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
    options: dict[str, Any] = {"device": "cuda", "memory": "1GiB", "max_num_seqs": 8, "planner": "fixed"}

    def accepted(llm: LLM) -> list[int]:
        return [output.outputs[0].speculation.accepted for output in llm.generate(prompts, how)]

    with LLM(tiny_target, drafter=recipe.drafter(tmp_path / "first"), **options) as llm:
        said = llm.generate(prompts, how)
        recipe.hear([Text(tuple(o.prompt_token_ids), tuple(o.outputs[0].token_ids)) for o in said])
        with torch.no_grad():
            for weight in recipe.module.parameters():
                weight.mul_(0.3)
        drafter = cast(MedusaDrafter, llm.engine.drafting.drafters["medusa"])
        recipe.refresh(drafter)
        tree, refreshed = drafter.tree, accepted(llm)
    recipe.export(tmp_path / "second")
    with LLM(tiny_target, drafter=recipe.drafter(tmp_path / "second"), **options) as llm:
        opened = cast(MedusaDrafter, llm.engine.drafting.drafters["medusa"])
        assert opened.tree.parents == tree.parents
        assert opened.tree.ranks == tree.ranks
        assert accepted(llm) == refreshed
