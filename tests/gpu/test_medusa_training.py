"""Medusa training on a GPU: bf16 loses what fp32 loses, and engines with captured rounds take weights and tree."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import cast

import pytest
import torch

from conftest import VOCAB
from slipstream.drafters.medusa import MedusaDrafter
from slipstream.train.config import TrainConfig
from slipstream.train.medusa import MedusaModule, MedusaRecipe
from slipstream.train.recipe import Setting, Text
from slipstream.train.teacher import Teacher
from training_scenes import GREEDY, PROMPTS, accepted, check_narrow_steps, check_new_weights, open_with

pytestmark = pytest.mark.gpu


def make(teacher: Teacher, *, chained: bool = False) -> MedusaRecipe:
    torch.manual_seed(5)
    options: dict[str, str | int | float | bool] = {"kept": "fp32", "heads": 3, "chained": chained}
    config = TrainConfig("medusa", "t", Path("out"), self_prompts=1, options=options)
    recipe = MedusaRecipe.make(Setting(config, teacher, torch.zeros(VOCAB, dtype=torch.int64)))
    made = torch.Generator().manual_seed(6)
    with torch.no_grad():
        for weight in recipe.module.parameters():
            weight.add_(0.1 * torch.randn(weight.shape, generator=made).to(weight.device))
    return recipe


@pytest.mark.parametrize("chained", [False, True])
def test_a_step_in_bf16_is_a_step_in_fp32(tiny_target: Path, chained: bool) -> None:
    check_narrow_steps(
        tiny_target, partial(make, chained=chained), lambda module: cast(MedusaModule, module).weights[0]
    )


def test_an_open_engine_takes_weights_and_tree(tiny_target: Path, tmp_path: Path) -> None:
    """Captured graphs read them: as many guesses are right as in an engine that was opened with them."""
    recipe = make(Teacher.open(tiny_target, "cuda"))
    with open_with(recipe, tiny_target, tmp_path / "first") as llm:
        said = llm.generate(PROMPTS, GREEDY)
        recipe.use_texts([Text(tuple(o.prompt_token_ids), tuple(o.outputs[0].token_ids)) for o in said])
        with torch.no_grad():
            for weight in recipe.module.parameters():
                weight.mul_(0.3)
        drafter = cast(MedusaDrafter, llm.engine.drafting.drafters["medusa"])
        recipe.refresh(drafter)
        tree, refreshed = drafter.tree, accepted(llm)
    with open_with(recipe, tiny_target, tmp_path / "second") as llm:
        opened = cast(MedusaDrafter, llm.engine.drafting.drafters["medusa"])
        assert opened.tree.parents == tree.parents
        assert opened.tree.ranks == tree.ranks
        assert accepted(llm) == refreshed


def test_an_open_engine_takes_weights_of_chained_heads(tiny_target: Path, tmp_path: Path) -> None:
    check_new_weights(make(Teacher.open(tiny_target, "cuda"), chained=True), "medusa", tiny_target, tmp_path)
