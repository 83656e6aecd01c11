"""Tau of a drafter in training: what its weights of this moment reach, and nothing of those that it had before."""

from __future__ import annotations

from pathlib import Path

import torch

from conftest import VOCAB
from slipstream.train.config import TrainConfig
from slipstream.train.distill import DraftRecipe
from slipstream.train.measure import Measure
from slipstream.train.recipe import Setting
from slipstream.train.teacher import Teacher

PROMPTS = [[(5 * i + 11 * k) % 250 for i in range(50)] for k in range(3)]
"""Of several pages: what an engine has computed of them it may find again."""


def test_new_weights_are_measured_as_if_there_had_been_no_others(tiny_target: Path, tmp_path: Path) -> None:
    config = TrainConfig(
        "draft", "t", tmp_path, self_prompts=1, measure_tokens=24, options={"layers": 3, "start": "0,1,2"}
    )
    teacher = Teacher.open(tiny_target, "cpu")
    recipe = DraftRecipe.make(Setting(config, teacher, torch.ones(VOCAB, dtype=torch.int64)))
    right = {name: tensor.clone() for name, tensor in recipe.module.state_dict().items()}
    with torch.no_grad():
        for weight in recipe.module.parameters():
            weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)))
    with Measure(config, recipe, tiny_target, PROMPTS, "cpu", print) as measure:
        before = measure()
        recipe.module.load_state_dict(right)  # the target's own layers: what they guess is right
        after = measure()
    assert before[0].alpha < 0.5
    assert after[0].alpha > 0.95
    with Measure(config, recipe, tiny_target, PROMPTS, "cpu", print) as fresh:
        assert fresh() == after
