"""Distilled drafts on a GPU: bf16 loses what fp32 loses, and engines take new weights where graphs read them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import VOCAB
from slipstream.train.config import TrainConfig
from slipstream.train.draft import DraftRecipe
from slipstream.train.recipe import Setting
from slipstream.train.teacher import Teacher
from training_scenes import check_narrow_steps, check_new_weights

pytestmark = pytest.mark.gpu


def make(teacher: Teacher, **options: Any) -> DraftRecipe:
    torch.manual_seed(5)
    config = TrainConfig("draft", "t", Path("out"), self_prompts=1, options={"kept": "fp32", "layers": 2, **options})
    return DraftRecipe.make(Setting(config, teacher, torch.ones(VOCAB, dtype=torch.int64)))


@pytest.mark.parametrize("hidden", [0, 16])
def test_a_step_in_bf16_is_a_step_in_fp32(hidden: int, tiny_target: Path) -> None:
    weights = make(Teacher.open(tiny_target, "cpu"), hidden=hidden).module.state_dict()

    def alike(teacher: Teacher) -> DraftRecipe:
        recipe = make(teacher, hidden=hidden)
        recipe.module.load_state_dict(weights)  # a narrow draft's directions may be turned on another device
        return recipe

    check_narrow_steps(tiny_target, alike, lambda module: module.get_parameter("layers.0.mlp.up_proj.weight"))


@pytest.mark.parametrize("hidden", [0, 16])
def test_an_open_engine_takes_new_weights(hidden: int, tiny_target: Path, tmp_path: Path) -> None:
    check_new_weights(make(Teacher.open(tiny_target, "cuda"), hidden=hidden), "model", tiny_target, tmp_path)
