"""Medusa heads in training: the numbers of the heads that will guess, each aimed at its own position, and a tree."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from conftest import VOCAB
from families import CPU
from medusa_checkpoints import counting_target
from slipstream import LLM, SamplingParams
from slipstream.core.errors import ConfigError
from slipstream.drafters.medusa import RANKS, MedusaDrafter, best_tree, usual_table
from slipstream.models.heads.medusa import load_medusa
from slipstream.models.runner import open_unchecked
from slipstream.train.batch import Batch
from slipstream.train.config import TrainConfig
from slipstream.train.medusa import MedusaModule, MedusaRecipe, measure_table, table_of
from slipstream.train.recipe import Setting, Text, UsesTexts
from slipstream.train.teacher import Teacher
from training_scenes import learn, random_rows

LENGTHS = ([9, 4, 3], [12])
WIDTH = 16


@pytest.fixture(scope="module")
def teacher(tiny_target: Path) -> Teacher:
    return Teacher.open(tiny_target, "cpu")


def make(teacher: Teacher, **options: Any) -> MedusaRecipe:
    """Heads whose every weight does something."""
    torch.manual_seed(5)
    kept = {"kept": "fp32", "heads": 3, "layers": 2, **options}
    config = TrainConfig("medusa", "t", Path("out"), self_prompts=1, options=kept)
    recipe = MedusaRecipe.make(Setting(config, teacher, torch.zeros(VOCAB, dtype=torch.int64)))
    with torch.no_grad():
        for weight in recipe.module.parameters():
            weight.add_(0.2 * torch.randn(weight.shape))
    return recipe


def look(teacher: Teacher, recipe: MedusaRecipe) -> Batch:
    return teacher.run(random_rows(LENGTHS, WIDTH, VOCAB), recipe.taps)


APART: dict[str, Any] = {"chained": False}
"""Heads that do not know of one another."""


@pytest.mark.parametrize("options", [{}, {"token": False}, {"layers": 3}, {"layers": 1, "heads": 1}])
def test_training_and_inference_are_the_same_heads(
    options: dict[str, Any], teacher: Teacher, tiny_target: Path, tmp_path: Path
) -> None:
    recipe = make(teacher, **APART, **options)
    recipe.export(tmp_path)
    heads = load_medusa(tmp_path, open_unchecked(tiny_target, torch.float32, CPU))
    states = torch.randn(7, teacher.hidden, generator=torch.Generator().manual_seed(2))
    tokens = torch.randint(0, VOCAB, (7,), generator=torch.Generator().manual_seed(3))
    trained = recipe.module(states.expand(heads.heads, -1, -1), tokens.expand(heads.heads, -1)) @ teacher.lm_head.T
    torch.testing.assert_close(heads.logits(states, tokens), trained.detach(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("options", [{}, {"layers": 3, "heads": 4}, {"layers": 1, "heads": 1}])
def test_chained_heads_make_in_training_what_they_make_along_a_path(
    options: dict[str, Any], teacher: Teacher, tiny_target: Path, tmp_path: Path
) -> None:
    recipe = make(teacher, **options)
    recipe.export(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["medusa_chained"] is True
    assert "medusa_acceptance" not in config
    heads = load_medusa(tmp_path, open_unchecked(tiny_target, torch.float32, CPU))
    states = torch.randn(12, teacher.hidden, generator=torch.Generator().manual_seed(2))
    ids = torch.randint(0, VOCAB, (12,), generator=torch.Generator().manual_seed(3))
    made = cast(MedusaModule, recipe.module).chain(states, ids)
    assert len(made) == heads.heads == recipe.options.heads
    for start in range(12 - heads.heads):
        x = states[[start]]
        for head, all_of_it in enumerate(made):
            x = heads.chained_hidden(head, x, ids[[start + 1 + head]])
            torch.testing.assert_close(x[0], all_of_it[start].detach(), rtol=1e-4, atol=1e-4)


def by_hand(recipe: MedusaRecipe, teacher: Teacher, batch: Batch) -> tuple[Tensor, list[int]]:
    """The loss, and positions by head, written out: sequence by sequence, token by token."""
    module, options = cast(MedusaModule, recipe.module), recipe.options
    shares = [options.decay**head for head in range(options.heads)]
    total, counted = torch.zeros(()), [0] * options.heads
    for row, lengths in enumerate(LENGTHS):
        start = 0
        for length in lengths:
            states, ids = batch.normed[row, start : start + length], batch.rows.ids[row, start : start + length]
            for state in range(1, length):  # the prompt has two tokens: state 1 chose the first of the answer
                for head in range(options.heads):
                    guessed = state + 2 + head
                    if guessed >= length:
                        continue
                    p = teacher.logits(states[guessed - 1]).softmax(0)
                    best = F.one_hot(p.argmax(), VOCAB).float()
                    goal = (1 - options.sharpen) * p + options.sharpen * best
                    if options.chained:
                        out = module.chain(states[[state]].expand(length, -1), ids.roll(-state))[head][0]
                    else:
                        chosen = ids[[state + 1]].expand(options.heads, 1)
                        out = module(states[state].expand(options.heads, 1, -1), chosen)[head, 0]
                    logq = (out @ teacher.lm_head.T).log_softmax(0)
                    divergence = (goal * (goal.clamp_min(1e-30).log() - logq)).sum()
                    total = total + divergence * shares[head] / sum(shares)
                    counted[head] += 1
            start += length
    return total, counted


@pytest.mark.parametrize(
    "options",
    [
        {"sharpen": 0.0, "token": False, **APART},
        {"sharpen": 0.4, "decay": 0.5, "heads": 4, **APART},
        {"layers": 1, **APART},
        {"sharpen": 0.4, "decay": 0.5, "heads": 4},
        {"layers": 1},
    ],
)
def test_every_head_is_aimed_at_its_own_position(options: dict[str, Any], teacher: Teacher) -> None:
    recipe = make(teacher, **options)
    batch = look(teacher, recipe)
    wanted, counted = by_hand(recipe, teacher, batch)
    wanted.backward()
    gradients = {name: cast(Tensor, p.grad).clone() for name, p in recipe.module.named_parameters()}
    recipe.module.zero_grad()
    losses = recipe.loss(batch)
    losses.total.backward()
    assert float(losses.total.detach()) == pytest.approx(float(wanted.detach()), rel=1e-4)
    assert losses.positions.tolist() == counted
    assert int(losses.count) == counted[0]
    assert losses.accepted.shape == (recipe.options.heads,)
    for name, parameter in recipe.module.named_parameters():
        assert bool(gradients[name].any()), name
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-3, atol=1e-4)


def test_fresh_heads_say_nearly_what_the_target_says(teacher: Teacher) -> None:
    states = torch.randn(2, 5, teacher.hidden)
    config = TrainConfig("medusa", "t", Path("out"), self_prompts=1, options={"heads": 2, "layers": 2})
    recipe = MedusaRecipe.make(Setting(config, teacher, torch.zeros(VOCAB, dtype=torch.int64)))
    added = (recipe.module(states, torch.ones(2, 5, dtype=torch.int64)) - states).detach()
    assert 0.0 < float(added.abs().max()) < 0.5
    chain = cast(MedusaModule, recipe.module).chain(states[0], torch.arange(5))
    assert 0.0 < max(float((made - states[0]).detach().abs().max()) for made in chain) < 0.5


def test_the_table_counts_what_comes_after_right_guesses() -> None:
    places = torch.tensor([[0, 0, 1, 99, -1], [2, 0, 0, 0, -1], [-1, 0, 50, 1, -1]])
    table = table_of(places.repeat(1, 1000))
    assert table[0][:3] == pytest.approx((0.5, 0.25, 0.0), abs=0.01)
    assert table[1][:3] == pytest.approx((2 / 3, 0.0, 1 / 3), abs=0.01)  # where head 1 had it: the first three
    assert table[2][:2] == pytest.approx((0.5, 0.0), abs=0.01)  # of these, two have a third token
    assert [len(row) for row in table] == [RANKS] * 3
    unseen = table_of(torch.zeros(2, 0, dtype=torch.int64))
    assert unseen[1] == pytest.approx(usual_table(2)[1], abs=1e-5)


def test_the_table_is_measured_on_texts(teacher: Teacher) -> None:
    recipe = make(teacher, **APART)
    dice = torch.Generator().manual_seed(4)
    texts = [
        Text(tuple(torch.randint(0, VOCAB, (p,), generator=dice).tolist()), tuple(range(a)))
        for p, a in ((3, 30), (1, 45), (6, 2), (2, 40), (5, 20), (1, 33), (4, 8), (2, 2), (3, 50))
    ]
    places: list[list[int]] = [[] for _ in range(3)]
    with torch.no_grad():
        for text in texts:
            whole = torch.tensor((*text.prompt, *text.answer))
            states = teacher.trunk(input_ids=whole[None], use_cache=False)[0][0]
            for state in range(len(text.prompt) - 1, len(whole) - 2):
                chosen = whole[[state + 1]].expand(3, 1)
                logits = recipe.module(states[state].expand(3, 1, -1), chosen)[:, 0] @ teacher.lm_head.T
                for head in range(3):
                    at = state + 2 + head
                    better = logits[head] > logits[head, whole[at]] if at < len(whole) else torch.zeros(1)
                    places[head].append(int(better.sum()) if at < len(whole) else -1)
    wanted = table_of(torch.tensor(places))
    found = measure_table(teacher, recipe.module, 3, texts)
    assert all(row == pytest.approx(theirs) for row, theirs in zip(found, wanted, strict=True))
    assert isinstance(recipe, UsesTexts)
    assert recipe.table == usual_table(3)  # nothing was heard yet
    recipe.use_texts([*texts, Text((1, 2), (3,))])  # one token is nothing to learn from
    assert recipe.table == found


def test_an_open_engine_takes_weights_and_tree(
    teacher: Teacher, tiny_target: Path, tmp_path: Path, open_llm: Callable[..., LLM]
) -> None:
    recipe = make(teacher, **APART)
    recipe.export(tmp_path / "first")
    options: dict[str, Any] = {"planner": "fixed", "draft_tokens": 20}
    llm = open_llm(tiny_target, drafter=recipe.drafter(tmp_path / "first"), **options)
    prompts = [{"prompt_token_ids": [10 + i, 20, 30 + i]} for i in range(3)]
    how = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    said = llm.generate(prompts, how)
    recipe.use_texts([Text(tuple(o.prompt_token_ids), tuple(o.outputs[0].token_ids)) for o in said])
    with torch.no_grad():
        for weight in recipe.module.parameters():
            weight.mul_(0.5)
    drafter = cast(MedusaDrafter, llm.engine.drafting.drafters["medusa"])
    before = drafter.tree
    recipe.refresh(drafter)
    tree = drafter.tree
    assert tree != before
    refreshed = [o.outputs[0].speculation.accepted for o in llm.generate(prompts, how)]
    recipe.export(tmp_path / "second")
    other = open_llm(tiny_target, drafter=recipe.drafter(tmp_path / "second"), rounds="queued", **options)
    table = json.loads((tmp_path / "second" / "config.json").read_text())["medusa_acceptance"]
    assert cast(MedusaDrafter, other.engine.drafting.drafters["medusa"]).tree == best_tree(table) == tree
    assert [o.outputs[0].speculation.accepted for o in other.generate(prompts, how)] == refreshed
    assert sum(refreshed) > 0


@pytest.mark.parametrize("rounds", ["eager", "queued"])  # which also guess where one token is left
def test_an_open_engine_takes_weights_of_chained_heads(
    teacher: Teacher, tiny_target: Path, tmp_path: Path, open_llm: Callable[..., LLM], rounds: str
) -> None:
    recipe = make(teacher)
    recipe.export(tmp_path / "first")
    prompts = [{"prompt_token_ids": [10 + i, 20, 30 + i]} for i in range(3)]
    how = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    llm = open_llm(tiny_target, drafter=recipe.drafter(tmp_path / "first"), rounds=rounds, planner="fixed")
    said = llm.generate(prompts, how)
    recipe.use_texts([Text(tuple(o.prompt_token_ids), tuple(o.outputs[0].token_ids)) for o in said])
    learn(recipe, look(teacher, recipe), 20)
    recipe.refresh(llm.engine.drafting.drafters["medusa"])
    refreshed = [o.outputs[0].speculation.accepted for o in llm.generate(prompts, how)]
    assert refreshed != [o.outputs[0].speculation.accepted for o in said]
    recipe.export(tmp_path / "second")
    other = open_llm(tiny_target, drafter=recipe.drafter(tmp_path / "second"), rounds=rounds, planner="fixed")
    assert [o.outputs[0].speculation.accepted for o in other.generate(prompts, how)] == refreshed


def test_chained_heads_learn_what_follows_from_guesses(tmp_path: Path) -> None:
    """The target counts on from unforeseeable tokens: a head must read the last one to know the next."""
    teacher = Teacher.open(counting_target(tmp_path / "counting"), "cpu")
    right = {}
    for chained in (False, True):
        recipe = make(teacher, chained=chained, sharpen=1.0)
        known, other = (teacher.run(random_rows([[64]] * 24, 64, 32, seed=s), recipe.taps) for s in (1, 2))
        before = recipe.loss(other).total.detach()
        learn(recipe, known, 150)
        losses = recipe.loss(other)
        right[chained] = [float(losses.parts[f"agreed_{head}"] / losses.count) for head in (1, 2, 3)]
        assert not chained or float(losses.total.detach()) < 0.2 * float(before)
    assert right[False][0] > 0.9
    assert max(right[False][1:]) < 0.2
    assert min(right[True]) > 0.6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"token": False}, r"option token=False: must be true for chained heads \(chained=false\)"),
        ({"sharpen": 2}, r"option sharpen=2\.0: must be between 0 and 1"),
        ({"layers": -1}, "option layers=-1"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str, teacher: Teacher) -> None:
    with pytest.raises(ConfigError, match=message):
        make(teacher, **options)
