"""EAGLE-3 in training: the numbers of the head that will guess, gradients everywhere, and guesses that come true."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from conftest import VOCAB
from slipstream import LLM
from slipstream.core.errors import ConfigError
from slipstream.kv.cache import KVCache
from slipstream.models.attention import PassContext
from slipstream.models.batch import PassBatch
from slipstream.models.heads.checkpoint import HeadFiles, TargetShape
from slipstream.models.heads.eagle import EagleHead
from slipstream.models.heads.eagle_files import read_eagle
from slipstream.train.batch import Batch, Rows
from slipstream.train.chain_attention import Sequences
from slipstream.train.config import TrainConfig
from slipstream.train.eagle3 import Eagle3Module, Eagle3Recipe, choose_vocab
from slipstream.train.recipe import Setting
from slipstream.train.teacher import Teacher
from training_scenes import check_gradients, check_learnt, check_packing, packed, random_rows

LENGTHS = ([9, 4], [12])
WIDTH = 16


@pytest.fixture(scope="module")
def teacher(tiny_target: Path) -> Teacher:
    return Teacher.open(tiny_target, "cpu")


def make(teacher: Teacher, counts: Tensor | None = None, **options: Any) -> Eagle3Recipe:
    torch.manual_seed(5)
    kept = {"kept": "fp32", "draft_vocab": 64, "inner": 48, "steps": 4, **options}
    config = TrainConfig("eagle3", "t", Path("out"), self_prompts=1, options=kept)
    if counts is None:
        counts = torch.randint(0, 1000, (VOCAB,), generator=torch.Generator().manual_seed(7))
    return Eagle3Recipe.make(Setting(config, teacher, counts))


def look(teacher: Teacher, recipe: Eagle3Recipe, rows: Rows | None = None) -> Batch:
    return teacher.run(random_rows(LENGTHS, WIDTH, VOCAB) if rows is None else rows, recipe.taps)


def opened(recipe: Eagle3Recipe, teacher: Teacher, folder: Path) -> EagleHead:
    recipe.export(folder)
    target = TargetShape(teacher.hidden, teacher.vocab_size, teacher.num_layers, 256)
    model = teacher.model
    files = HeadFiles.read(folder)
    return EagleHead(
        read_eagle(files, target), model.get_input_embeddings(), cast(nn.Module, model.get_output_embeddings())
    )


@torch.inference_mode()
def guesses(head: EagleHead, ids: Tensor, taps: Tensor, root: int, steps: int) -> list[Tensor]:
    """The head's logits for a chain behind the row `root`, as it is run: the text's rows, then its own states."""
    cache = KVCache(head.layers, 8, 4, torch.float32, torch.device("cpu"))
    given, found = head.combine(taps)[: root + 1], []
    first, last = 0, root + 1
    for step in range(steps):
        places = torch.arange(first, last)
        batch = PassBatch(
            input_ids=ids[places + 1],
            positions=places,
            slots=places,
            row_starts=(0, len(places)),
            prefix_lengths=(first,),
            pages=(tuple(range(8)),),
            is_tree=(False,),
            masks=None,
            logit_rows=None,
        )
        states = head.run(batch.input_ids, given, PassContext(batch, cache), places, step)
        found.append(head.logits(states.read[-1:])[0])
        given, first, last = states.features[-1:], last, last + 1
    return found


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"norm_before_residual": False, "kv_heads": 1, "heads": 2, "head_dim": 12},
        {"fc_norm": True, "norm_output": True, "taps": "3,0"},
        {"draft_vocab": VOCAB, "layout": "speculators"},
    ],
)
def test_training_and_inference_are_one_head(options: dict[str, Any], teacher: Teacher, tmp_path: Path) -> None:
    """Every step of every chain, in packed rows, gives the logits that the head gives when it guesses."""
    recipe = make(teacher, **options)
    module = cast(Eagle3Module, recipe.module)
    with torch.no_grad():  # norms that are not there for show
        for name, weight in module.named_parameters():
            if "norm" in name:
                weight.mul_(1 + 0.3 * torch.randn(weight.shape))
    head, batch, steps = opened(recipe, teacher, tmp_path), look(teacher, recipe), 4
    with torch.no_grad():
        logits = [module.lm_head(last).view(2, WIDTH, -1) for last in module(batch, steps, Sequences.of(batch.rows))]
    compared = 0
    for row, lengths in enumerate(LENGTHS):
        start = 0
        for length in lengths:
            ids, taps = batch.rows.ids[row, start : start + length], batch.taps[row, start : start + length]
            for root in range(length - steps):
                for step, wanted in enumerate(guesses(head, ids, taps, root, steps)):
                    torch.testing.assert_close(logits[step][row, start + root + step], wanted, rtol=1e-3, atol=1e-3)
                    compared += 1
            start += length
    assert compared == steps * (5 + 0 + 8)


def test_gradients_reach_every_weight_and_nothing_of_the_target(teacher: Teacher) -> None:
    recipe = make(teacher, steps=3, variation=0.3, fc_norm=True)
    check_gradients(recipe, look(teacher, recipe), teacher)
    assert not any(name.startswith("_") for name in recipe.module.state_dict())


def test_a_loss_knows_nothing_of_neighbours_and_counts_what_it_should(teacher: Teacher) -> None:
    """Sequences packed together lose what they lose apart; prompts count a little, the last two tokens not at all."""
    recipe = make(teacher, prompt_weight=0.25)
    together = check_packing(recipe, teacher, LENGTHS, WIDTH)
    # of n tokens n - 2 are guessed, two of which would be a prompt's: but the first two tokens have no row
    assert float(together.count) == (9 - 2) + (4 - 2) + (12 - 2)
    assert together.positions.tolist() == [19, 16, 13, 11]


def test_bf16_loses_what_fp32_does(teacher: Teacher) -> None:
    recipe = make(teacher)
    found = []
    for narrow in (False, True):
        recipe.module.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=narrow):
            losses = recipe.loss(look(teacher, recipe))
        losses.total.backward()
        gradient = cast(Eagle3Module, recipe.module).fc.weight.grad
        assert gradient is not None
        found.append((losses.total.detach(), gradient.clone()))
    (wide, wide_grad), (narrow_loss, narrow_grad) = found
    assert narrow_loss.dtype == narrow_grad.dtype == torch.float32
    torch.testing.assert_close(narrow_loss, wide, rtol=0.03, atol=0)
    assert torch.cosine_similarity(wide_grad.flatten(), narrow_grad.flatten(), dim=0) > 0.98


def test_prompts_count_less(teacher: Teacher) -> None:
    recipe = make(teacher, prompt_weight=0.25)
    rows = packed([[list(range(10))]], WIDTH, prompt=6)
    assert float(recipe.loss(look(teacher, recipe, rows)).count) == 4 + 0.25 * 4
    none = make(teacher, prompt_weight=0.0)
    assert none.loss(look(teacher, none, rows)).positions[0] == 4


def test_what_is_learnt_is_accepted_in_the_engine(tmp_path: Path, open_llm: Callable[..., LLM]) -> None:
    options: dict[str, Any] = {"draft_vocab": 0, "coverage": 1.0, "steps": 3, "depth": 3, "width": 2}
    check_learnt(lambda teacher, counts: make(teacher, counts, **options), "eagle", tmp_path, open_llm, (1.8, 2.4))


def test_both_layouts_are_read_back(teacher: Teacher, tmp_path: Path) -> None:
    recipe = make(teacher, kept="fp16")
    recipe.export(tmp_path)
    target = TargetShape(teacher.hidden, teacher.vocab_size, teacher.num_layers, 256)
    for folder in (tmp_path, tmp_path / "speculators"):
        found = read_eagle(HeadFiles.read(folder), target)
        assert found.shape == cast(Eagle3Module, recipe.module).shape
        ids = torch.arange(64) + found.tensors["d2t"]
        assert torch.equal(ids, recipe.vocab.ids)
        for name, tensor in recipe.module.state_dict().items():
            assert torch.equal(found.tensors[name], tensor.half()), name
    told = json.loads((tmp_path / "speculators" / "config.json").read_text())["speculators_config"]
    assert told["verifier"]["name_or_path"] == "t"  # as the user called it, no path of this machine


def test_a_draft_vocabulary_covers_what_is_said() -> None:
    counts = torch.tensor([5, 0, 9, 1, 9, 0, 3])
    four = choose_vocab(counts, 4, 1.0, 7)
    assert four.ids.tolist() == [0, 2, 4, 6]
    assert four.coverage == 26 / 27
    assert four.offsets.tolist() == [0, 1, 2, 3]
    many = torch.zeros(5000, dtype=torch.int64)
    many[1000:3000] = 10
    assert len(choose_vocab(many, 0, 0.5, 5000).ids) == 1024
    assert len(choose_vocab(many, 0, 0.9, 5000).ids) == 2048
    assert len(choose_vocab(many, 0, 0.9, 1500).ids) == 1500
    with pytest.raises(ConfigError, match="draft_vocab=8: the target's vocabulary has 7 tokens"):
        choose_vocab(counts, 8, 1.0, 7)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decay": 1.5}, r"option decay=1\.5: must be between 0 and 1"),
        ({"taps": "2,x"}, "option taps='2,x': must be layers such as"),
        ({"heads": 5}, "option heads=5: must divide the hidden size of the target, 32"),
    ],
)
def test_wrong_options_say_what_would_be_right(options: dict[str, Any], message: str, teacher: Teacher) -> None:
    with pytest.raises(ConfigError, match=message):
        make(teacher, **options)
