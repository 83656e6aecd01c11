"""The benchmark's large target computes what the small one does, and its drafters guess what they guess for that."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from conftest import VOCAB, save_model, tiny_llama
from gpu_bench import widen
from medusa_checkpoints import head_tensors, save_heads
from slipstream import LLM, SamplingParams
from slipstream.models.identity import TRAINED_FOR, identity_of
from slipstream.train.config import TrainConfig
from slipstream.train.draft import DraftRecipe
from slipstream.train.eagle3 import Eagle3Recipe
from slipstream.train.medusa import MedusaRecipe
from slipstream.train.recipe import Recipe, Setting
from slipstream.train.teacher import Teacher
from training_scenes import packed

SHAPE = {"hidden": 48, "layers": 5, "heads": 8, "kv_heads": 4, "inner": 80}


def test_it_computes_the_same(tiny_target: Path, tmp_path: Path) -> None:
    folder = tmp_path / "wide"
    total = widen.write(tiny_target, folder, SHAPE, torch.float32, shard_bytes=20_000)
    assert len(list(folder.glob("*.safetensors"))) > 2
    small = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32)
    wide = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert sum(p.numel() * 4 for p in wide.parameters()) == total
    assert (wide.config.hidden_size, wide.config.num_hidden_layers) == (48, 5)
    ids = torch.arange(40, 70)[None]
    with torch.inference_mode():
        torch.testing.assert_close(wide(ids).logits, small(ids).logits, rtol=1e-4, atol=1e-4)
    assert AutoTokenizer.from_pretrained(folder).decode([72, 105]) == AutoTokenizer.from_pretrained(tiny_target).decode(
        [72, 105]
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [({"hidden": 16}, "--hidden 16: must be at least"), ({"heads": 6}, "--heads 6 --kv-heads 4: there must be 2")],
)
def test_a_model_that_does_not_fit_is_refused(
    tiny_target: Path, tmp_path: Path, change: dict[str, int], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        widen.write(tiny_target, tmp_path / "wide", SHAPE | change, torch.float32)


def test_a_model_with_more_than_a_llama_has_is_refused(tmp_path: Path) -> None:
    source = save_model(tmp_path / "biased", tiny_llama(attention_bias=True))
    with pytest.raises(ValueError, match=r"has model\.layers\.0\.self_attn\.k_proj\.bias"):
        widen.write(source, tmp_path / "wide", SHAPE, torch.float32)


heads = import_module("widen_heads")


PROMPTS = [[10 + i, 20 + i, 30 + i] for i in range(4)]


HOW = SamplingParams(temperature=0.7, seed=1, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "small", tiny_llama(), seed=3)


@pytest.fixture(scope="module")
def wide(small: Path) -> Path:
    folder = small.parent / "wide"
    widen.write(small, folder, SHAPE, torch.float32)
    return folder


@pytest.fixture(scope="module")
def teacher(small: Path) -> Teacher:
    return Teacher.open(small, "cpu")


def learnt(kind: type[Recipe], teacher: Teacher, texts: list[list[int]], turns: int, **options: Any) -> Recipe:
    """A drafter that knows these texts a little: some of its guesses are right."""
    torch.manual_seed(2)
    config = TrainConfig(kind.name, "t", Path("out"), self_prompts=1, options={"kept": "fp32", **options})
    counts = torch.bincount(torch.tensor(texts).flatten(), minlength=VOCAB)
    recipe = kind.make(Setting(config, teacher, counts))
    batch = teacher.run(packed([texts[:2], texts[2:]], 2 * len(texts[0]), prompt=3), recipe.taps)
    optimizer = torch.optim.AdamW(recipe.module.parameters(), lr=4e-3, weight_decay=0.0)
    for _ in range(turns):
        losses = recipe.loss(batch)
        optimizer.zero_grad()
        (losses.total / losses.count).backward()
        nn.utils.clip_grad_norm_(recipe.module.parameters(), 1.0)
        optimizer.step()
    return recipe


def outcome(llm: LLM) -> list[tuple[list[int], int, int, int]]:
    """Of each answer: its tokens, and how many rounds, guesses and right guesses it took."""
    found = [output.outputs[0] for output in llm.generate(PROMPTS, HOW)]
    counts = [(a.speculation.rounds, a.speculation.drafted, a.speculation.accepted) for a in found]
    return [(list(answer.token_ids), *count) for answer, count in zip(found, counts, strict=True)]


@pytest.fixture
def texts(small: Path, open_llm: Callable[..., LLM]) -> list[list[int]]:
    plain = outcome(open_llm(small, drafter=None))
    return [prompt + tokens for prompt, (tokens, *_) in zip(PROMPTS, plain, strict=True)]


def check_the_same(
    small: Path, wide: Path, narrow_drafter: str, wide_drafter: str, open_llm: Callable[..., LLM]
) -> None:
    expected = outcome(open_llm(small, drafter=narrow_drafter, planner="fixed"))
    got = outcome(open_llm(wide, drafter=wide_drafter, planner="fixed"))
    assert got == expected
    assert 0 < sum(accepted for *_, accepted in got) < sum(drafted for _, _, drafted, _ in got)


@pytest.mark.parametrize(
    "options",
    [
        {"draft_vocab": 64, "kv_heads": 2},
        {"coverage": 1.0, "norm_before_residual": False, "taps": "3,0"},
    ],
)
def test_an_eagle3_head(
    options: dict[str, Any],
    small: Path,
    wide: Path,
    teacher: Teacher,
    texts: list[list[int]],
    tmp_path: Path,
    open_llm: Callable[..., LLM],
) -> None:
    recipe = learnt(Eagle3Recipe, teacher, texts, 60, steps=3, inner=48, depth=3, width=2, **options)
    recipe.export(tmp_path / "head")
    made = heads.widen_head(small, wide, tmp_path / "head", tmp_path / "wide", torch.float32)
    assert made == f"eagle:{tmp_path / 'wide'}"
    for folder in (tmp_path / "wide", tmp_path / "wide" / "speculators"):
        check_the_same(small, wide, recipe.drafter(tmp_path / "head"), f"eagle:{folder}?depth=3&width=2", open_llm)
    config = json.loads((tmp_path / "wide" / "config.json").read_text())
    assert (config["hidden_size"], config["num_attention_heads"], config["intermediate_size"]) == (48, 8, 80)


@pytest.mark.parametrize("shares", [True])
def test_a_distilled_draft_keeps_its_width(
    shares: bool,
    small: Path,
    wide: Path,
    teacher: Teacher,
    texts: list[list[int]],
    tmp_path: Path,
    open_llm: Callable[..., LLM],
) -> None:
    recipe = learnt(DraftRecipe, teacher, texts, 40, layers=1, start="none", shares=shares)
    recipe.export(tmp_path / "draft")
    made = heads.widen_head(small, wide, tmp_path / "draft", tmp_path / "alone", torch.float32)
    assert made == f"model:{tmp_path / 'alone'}"
    check_the_same(small, wide, recipe.drafter(tmp_path / "draft"), made, open_llm)
    assert json.loads((tmp_path / "alone" / "config.json").read_text())["hidden_size"] == 32


@pytest.mark.parametrize(("own_heads", "chained"), [(True, False), (False, True)])
def test_medusa_heads(
    own_heads: bool, chained: bool, small: Path, wide: Path, tmp_path: Path, open_llm: Callable[..., LLM]
) -> None:
    tensors = head_tensors("original", 3, 2, own_heads=own_heads)
    config: dict[str, Any] = {"medusa_num_heads": 3, "medusa_num_layers": 2, "hidden_size": 32}
    if chained:
        dice = torch.Generator().manual_seed(4)
        tensors |= {f"{head}.token.weight": torch.randn(32, 32, generator=dice) for head in range(3)}
        config["medusa_chained"] = True
    save_heads(tmp_path / "heads", tensors, "medusa_lm_head.safetensors", **config)
    made = heads.widen_head(small, wide, tmp_path / "heads", tmp_path / "wide", torch.float32)
    assert made == f"medusa:{tmp_path / 'wide'}"
    expected = outcome(open_llm(small, drafter=f"medusa:{tmp_path / 'heads'}", planner="fixed"))
    assert outcome(open_llm(wide, drafter=made, planner="fixed")) == expected
    assert sum(drafted for _, _, drafted, _ in expected) > 0
    assert json.loads((tmp_path / "wide" / "config.json").read_text()) == config | {
        "hidden_size": 48,
        TRAINED_FOR: identity_of(wide),
    }


def test_chained_medusa_heads_that_know_something(
    small: Path, wide: Path, teacher: Teacher, texts: list[list[int]], tmp_path: Path, open_llm: Callable[..., LLM]
) -> None:
    recipe = learnt(MedusaRecipe, teacher, texts, 60, heads=3)
    recipe.export(tmp_path / "heads")
    made = heads.widen_head(small, wide, tmp_path / "heads", tmp_path / "wide", torch.float32)
    check_the_same(small, wide, recipe.drafter(tmp_path / "heads"), made, open_llm)


def test_what_does_not_fit_is_refused(small: Path, wide: Path, teacher: Teacher, tmp_path: Path) -> None:
    recipe = learnt(Eagle3Recipe, teacher, [PROMPTS[0] * 4] * 4, 0, inner=96, coverage=1.0, kv_heads=2)
    recipe.export(tmp_path)
    widened = partial(heads.widen_head, small, wide, tmp_path, tmp_path / "wide", torch.float32)
    with pytest.raises(ValueError, match="--inner 80: must be at least the small head's 96"):
        widened()
    with pytest.raises(ValueError, match="--heads 7: there must be 2 to each head of keys"):
        widened(heads=7, inner=96)
    folder = save_heads(tmp_path / "vllm", head_tensors("vllm"), "model.safetensors", medusa_num_heads=3)
    with pytest.raises(ValueError, match=r"only Medusa heads in the original layout, with 0\.0\.linear\.weight"):
        heads.widen_head(small, wide, folder, tmp_path / "wide", torch.float32)
