"""A distilled draft in training: the numbers of the model that will guess, gradients, and guesses that come true."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from conftest import VOCAB
from families import CPU, Passes
from slipstream import LLM
from slipstream.core.errors import ConfigError
from slipstream.drafters.model import ModelDrafter
from slipstream.models.parity import open_model
from slipstream.models.runner import Runner
from slipstream.train.batch import Batch, Rows
from slipstream.train.chain_attention import Sequences
from slipstream.train.config import TrainConfig
from slipstream.train.draft import DraftModule, DraftRecipe
from slipstream.train.recipe import Setting
from slipstream.train.teacher import Teacher
from training_scenes import check_gradients, check_learnt, check_packing, packed, random_rows

LENGTHS = ([9, 4], [12])
WIDTH = 16


@pytest.fixture(scope="module")
def teacher(tiny_target: Path) -> Teacher:
    return Teacher.open(tiny_target, "cpu")


@pytest.fixture(scope="module")
def target(tiny_target: Path) -> Runner:
    return open_model(tiny_target, torch.float32, CPU)


def config_of(**options: Any) -> TrainConfig:
    kept = {"kept": "fp32", "layers": 2, **options}
    return TrainConfig("draft", "t", Path("out"), self_prompts=1, options=kept)


def make(teacher: Teacher, **options: Any) -> DraftRecipe:
    torch.manual_seed(5)
    return DraftRecipe.make(Setting(config_of(**options), teacher, torch.ones(VOCAB, dtype=torch.int64)))


def check(teacher: Teacher, **options: Any) -> None:
    """As before anything is made."""
    DraftRecipe.check(config_of(**options), teacher)


def look(teacher: Teacher, recipe: DraftRecipe, rows: Rows | None = None) -> Batch:
    return teacher.run(random_rows(LENGTHS, WIDTH, VOCAB) if rows is None else rows, recipe.taps)


def module_of(recipe: DraftRecipe) -> DraftModule:
    return cast(DraftModule, recipe.module)


def stir(recipe: DraftRecipe) -> None:
    """Weights that are neither the target's nor plain."""
    made = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for weight in recipe.module.parameters():
            weight.mul_(1 + 0.3 * torch.randn(weight.shape, generator=made))


@torch.no_grad()
def logits_of(recipe: DraftRecipe, teacher: Teacher, rows: Rows) -> Tensor:  # [B, T, V]
    module = module_of(recipe)
    hidden = module.widened(module(rows, Sequences.of(rows)))
    return (hidden @ teacher.lm_head.T).view(*rows.ids.shape, -1)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"inner": 64, "heads": 2, "kv_heads": 1, "head_dim": 12, "layers": 3},
        {"shares": False},
        {"hidden": 16, "layers": 1},
    ],
)
def test_training_and_inference_are_one_model(
    options: dict[str, Any], teacher: Teacher, target: Runner, tmp_path: Path
) -> None:
    """Every row of packed texts gives the logits of the engine's own pass, also when weights are put in later."""
    recipe = make(teacher, **options)
    recipe.export(tmp_path)
    runner = open_model(tmp_path, torch.float32, CPU, target=target)
    assert "fused" in runner.swaps
    first = module_of(recipe).state_dict()
    first = {name: tensor.clone() for name, tensor in first.items()}
    for again in (False, True):
        if again:
            stir(recipe)
            assert all(not torch.equal(first[n], t) for n, t in recipe.module.state_dict().items())
            recipe.refresh(ModelDrafter(runner))
        rows = random_rows(LENGTHS, WIDTH, VOCAB)
        ours, compared = logits_of(recipe, teacher, rows), 0
        for row, lengths in enumerate(LENGTHS):
            start = 0
            for number, length in enumerate(lengths):
                ids = rows.ids[row, start : start + length]
                theirs = Passes(runner, 8).run([(number, ids.tolist())])
                torch.testing.assert_close(ours[row, start : start + length], theirs, rtol=1e-3, atol=1e-3)
                start, compared = start + length, compared + length
        assert compared == 25


def test_gradients_reach_every_weight_and_nothing_of_the_target(teacher: Teacher) -> None:
    for options in ({"variation": 0.3}, {"hidden": 16}):
        recipe = make(teacher, **options)
        check_gradients(recipe, look(teacher, recipe), teacher)


def test_the_gradient_is_the_losss(teacher: Teacher) -> None:
    """Held against small steps of the loss itself, in the direction of the gradient."""
    recipe = make(teacher, variation=0.7)
    stir(recipe)
    batch = look(teacher, recipe)
    loss = recipe.loss(batch).total
    loss.backward()
    weights = list(recipe.module.parameters())
    grads = [cast(Tensor, weight.grad) for weight in weights]
    norm = torch.stack([grad.pow(2).sum() for grad in grads]).sum().sqrt()
    step, found = 1e-2, []
    for sign in (1, -1):
        with torch.no_grad():
            for weight, grad in zip(weights, grads, strict=True):
                weight.add_(grad, alpha=float(sign * step / norm))
            found.append(float(recipe.loss(batch).total))
            for weight, grad in zip(weights, grads, strict=True):
                weight.sub_(grad, alpha=float(sign * step / norm))
    assert (found[0] - found[1]) / (2 * step) == pytest.approx(float(norm), rel=0.02)


def test_a_loss_knows_nothing_of_neighbours_and_counts_answers_only(teacher: Teacher) -> None:
    recipe = make(teacher, prompt_weight=0.25)
    together = check_packing(recipe, teacher, LENGTHS, WIDTH)
    # prompts have two tokens; the first is never guessed, the second is a guess in a prompt
    assert together.positions.tolist() == [7 + 2 + 10]
    assert float(together.count) == 7 + 2 + 10 + 3 * 0.25


def test_a_loss_of_nothing_is_one(teacher: Teacher) -> None:
    """Rows of prompts alone, or of padding."""
    recipe = make(teacher)
    losses = recipe.loss(look(teacher, recipe, packed([[list(range(8))]], WIDTH, prompt=8)))
    losses.total.backward()
    assert (float(losses.total.detach()), float(losses.count)) == (0.0, 0.0)


def test_it_begins_with_the_targets_own_layers(teacher: Teacher) -> None:
    """All of them and its last norm, it is the target, and nothing is left to learn."""
    whole = make(teacher, layers=3, variation=0.0)
    with torch.no_grad():
        whole.module.get_parameter("norm.weight").copy_(teacher.trunk.get_parameter("norm.weight"))
    losses = whole.loss(look(teacher, whole))
    assert float(losses.total.detach()) == pytest.approx(0, abs=1e-3)
    assert float(losses.accepted / losses.positions) == pytest.approx(1, abs=1e-4)
    own = module_of(make(teacher, start="0,2")).layers[1].state_dict()
    assert all(torch.equal(tensor, own[name]) for name, tensor in teacher.layer(2).state_dict().items())
    fresh = module_of(make(teacher, start="none")).layers[1].state_dict()
    assert not any(torch.equal(fresh[name], own[name]) for name in fresh if "proj" in name)
    wide = make(teacher, layers=3, variation=0.0, inner=80)  # the same, with room to learn
    with torch.no_grad():
        wide.module.get_parameter("norm.weight").copy_(teacher.trunk.get_parameter("norm.weight"))
    found = wide.loss(look(teacher, wide))
    assert float(found.total.detach()) == pytest.approx(0, abs=1e-3)
    found.total.backward()
    new = module_of(wide).layers[0].get_parameter("mlp.down_proj.weight")[:, 48:]
    assert not new.any()
    assert module_of(wide).layers[0].get_parameter("mlp.gate_proj.weight")[48:].abs().mean() > 0.01
    other = make(teacher, inner=40)  # of another size: fresh ones, without a word
    assert other.loss(look(teacher, other)).total.isfinite()


def test_it_is_stored_without_the_targets_words(teacher: Teacher, tmp_path: Path) -> None:
    recipe = make(teacher, kept="fp16")
    recipe.export(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert {name for name in stored if "layers" not in name} == {"model.norm.weight"}
    assert all(tensor.dtype == torch.float16 for tensor in stored.values())
    assert sum(t.numel() for t in stored.values()) == sum(p.numel() for p in recipe.module.parameters())
    assert not list(tmp_path.glob("tokenizer*"))
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["shares_embeddings"] is True
    assert (config["vocab_size"], config["hidden_size"], config["num_hidden_layers"]) == (VOCAB, 32, 2)


@pytest.mark.parametrize("hidden", [0, 16])
def test_what_is_learnt_is_accepted_in_the_engine(hidden: int, tmp_path: Path, open_llm: Callable[..., LLM]) -> None:
    check_learnt(
        lambda teacher, counts: make(teacher, start="none", hidden=hidden), "model", tmp_path, open_llm, (1.5, 2.5)
    )


def test_a_draft_goes_on_from_another(teacher: Teacher, tmp_path: Path) -> None:
    """With the same guesses, also where its MLPs are wider; one of another kind is refused."""
    first = make(teacher)
    stir(first)
    first.export(tmp_path)
    rows = random_rows(LENGTHS, WIDTH, VOCAB)
    wanted = logits_of(first, teacher, rows)
    for more in ({}, {"inner": 80}):
        torch.testing.assert_close(logits_of(make(teacher, start=str(tmp_path), **more), teacher, rows), wanted)
    for other in ({"layers": 3}, {"inner": 16}, {"hidden": 16}):
        for begin in (make, check):
            with pytest.raises(ConfigError, match="its tensors do not fit this draft"):
                begin(teacher, start=str(tmp_path), **other)
    check(teacher, start=str(tmp_path), inner=80)
    stored = load_file(tmp_path / "model.safetensors")
    save_file({name: tensor[None] for name, tensor in stored.items()}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match="its tensors do not fit this draft"):
        make(teacher, start=str(tmp_path))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"start": "0,x"}, "option start='0,x': must be layers such as 0,1,2, the folder of a draft, or none"),
        ({"start": str(Path(__file__).parent)}, "has no readable model.safetensors"),
        ({"start": "0,3"}, "option start='0,3': must be below 3, the target.s layers"),
        ({"start": "0,2", "inner": 40}, "option start='0,2': the target's layers have other tensors"),
    ],
)
def test_wrong_options_say_what_would_be_right(options: dict[str, Any], message: str, teacher: Teacher) -> None:
    with pytest.raises(ConfigError, match=message):
        make(teacher, **options)
