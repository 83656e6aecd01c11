"""Packed rows for tests of training: sequences laid end to end, with a prompt each and padding behind."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from conftest import VOCAB, save_model, tiny_llama
from slipstream import LLM, SamplingParams
from slipstream.train.batch import NO_SEQUENCE, Batch, Rows
from slipstream.train.config import TrainConfig
from slipstream.train.data import Data, gather
from slipstream.train.loop import Trainer
from slipstream.train.recipe import Losses, Recipe
from slipstream.train.run import train
from slipstream.train.teacher import Teacher


def packed(rows: Sequence[Sequence[Sequence[int]]], width: int, prompt: int = 2) -> Rows:
    """Rows of sequences of token ids. prompt: number of prompt tokens of each."""
    ids = torch.zeros(len(rows), width, dtype=torch.int64)
    positions, segments = torch.zeros_like(ids), torch.full_like(ids, NO_SEQUENCE)
    answers = torch.zeros_like(ids, dtype=torch.bool)
    for i, sequences in enumerate(rows):
        at = 0
        for number, sequence in enumerate(sequences):
            here = slice(at, at + len(sequence))
            ids[i, here] = torch.tensor(list(sequence))
            positions[i, here] = torch.arange(len(sequence))
            segments[i, here] = number
            answers[i, at + prompt : at + len(sequence)] = True
            at += len(sequence)
        positions[i, at:] = torch.arange(width - at)
    return Rows(ids, positions, segments, answers)


def random_rows(lengths: Sequence[Sequence[int]], width: int, vocab: int, seed: int = 0) -> Rows:
    made = torch.Generator().manual_seed(seed)
    return packed([[torch.randint(0, vocab, (n,), generator=made).tolist() for n in row] for row in lengths], width)


LENGTHS = ([40, 3, 70], [128], [1, 90])
PROMPTS = [{"prompt_token_ids": [10 + i, 20, 30 + i]} for i in range(4)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)


def questions(folder: Path, count: int = 12) -> Path:
    """A file of prompts."""
    file = folder / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"Question {i}?"}) + "\n" for i in range(count)))
    return file


def small_run(folder: Path, target: Path, recipe: str, *, prompts: int = 12, **changes: Any) -> TrainConfig:
    """A run of a second in `folder`."""
    given: dict[str, Any] = {
        "out": folder / "whole",
        "data": str(folder / "data"),
        "prompts": (str(questions(folder, prompts)),),
        "held_out": 2,
        "max_tokens": 16,
        "lanes": 8,
        "device": "cpu",
        "steps": 5,
        "rows": 1,
        "row_tokens": 64,
        "warmup": 1,
        "average": 0.9,
        "checkpoint_every": 2,
        "measure_every": 2,
        "measure_prompts": 2,
        "measure_tokens": 8,
    }
    return TrainConfig(recipe=recipe, target=str(target), **{**given, **changes})


def killed_before(monkeypatch: pytest.MonkeyPatch, step: int, run: Callable[[], object]) -> None:
    """Run, and be killed after `step` steps."""
    real = Trainer._train_step

    def killed(self: Trainer) -> None:
        if self.step == step:
            raise RuntimeError("killed")
        real(self)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_train_step", killed)
        with pytest.raises(RuntimeError, match="killed"):
            run()


def check_resumed(config: TrainConfig, monkeypatch: pytest.MonkeyPatch, weights: str = "model.safetensors") -> None:
    """A run that is killed on its way and resumed ends with the drafter of one that was not."""
    whole = train(config, print).folder
    other = replace(config, out=config.out.parent / "killed")
    killed_before(monkeypatch, 3, lambda: train(other, print))
    theirs = load_file(train(other, print).folder / weights)
    for name, tensor in load_file(whole / weights).items():
        assert torch.equal(tensor, theirs[name]), name
    said = [(run / "drafter" / "config.json").read_text() for run in (config.out, other.out)]
    assert said[0] == said[1]


def learn(recipe: Recipe, batch: Batch, steps: int) -> Tensor:
    """Some steps over one batch. Gives the acceptance that the last one promises, by guess."""
    optimizer = torch.optim.AdamW(recipe.module.parameters(), lr=4e-3, betas=(0.9, 0.95), weight_decay=0.0)
    for _ in range(steps):
        losses = recipe.loss(batch)
        optimizer.zero_grad()
        (losses.total / losses.count).backward()
        nn.utils.clip_grad_norm_(recipe.module.parameters(), 1.0)
        optimizer.step()
    return losses.accepted / losses.positions


def check_narrow_steps(
    target: Path, make: Callable[[Teacher], Recipe], weight: Callable[[nn.Module], Tensor], device: str = "cuda"
) -> None:
    """A step in bf16 on a GPU is one in fp32 on a CPU. weight: whose gradients are compared."""
    found: list[tuple[float, list[float], Tensor]] = []
    for where in ("cpu", device):
        teacher = Teacher.open(target, where)
        recipe = make(teacher)
        batch = teacher.run(random_rows(LENGTHS, 128, VOCAB).to(teacher.device), recipe.taps)
        with torch.autocast(where, torch.bfloat16, enabled=bool(found)):
            losses = recipe.loss(batch)
        losses.total.backward()
        gradient = weight(recipe.module).grad
        assert gradient is not None
        found.append((float(losses.total.detach()), losses.positions.tolist(), gradient.cpu()))
    (wide, counted, wide_grad), (narrow, narrow_counted, narrow_grad) = found
    assert counted == narrow_counted
    assert narrow == pytest.approx(wide, rel=0.03)
    assert torch.cosine_similarity(wide_grad.flatten(), narrow_grad.flatten(), dim=0) > 0.97


def accepted(llm: LLM) -> list[int]:
    return [output.outputs[0].speculation.accepted for output in llm.generate(PROMPTS, GREEDY)]


def open_with(recipe: Recipe, target: Path, folder: Path, device: str = "cuda") -> LLM:
    """An engine with the drafter as it stands, written to `folder`."""
    recipe.export(folder)
    options: dict[str, Any] = {"device": device, "memory": "1GiB", "max_num_seqs": 8, "planner": "fixed"}
    return LLM(target, drafter=recipe.drafter(folder), **options)


def check_new_weights(recipe: Recipe, name: str, target: Path, folder: Path, device: str = "cuda") -> None:
    """An open engine, whose graphs are captured, takes new weights: it guesses as one that was opened with them."""
    with open_with(recipe, target, folder / "first", device) as llm:
        accepted(llm)
        with torch.no_grad():
            for weight in recipe.module.parameters():
                weight.add_(0.3 * weight.std(unbiased=False) * torch.randn_like(weight))
        recipe.refresh(llm.engine.drafting.drafters[name])
        refreshed = accepted(llm)
    with open_with(recipe, target, folder / "second", device) as llm:
        assert accepted(llm) == refreshed


def measure_on_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tau is measured on prompts that were learnt: a random target has nothing that could be learnt for others."""

    def known(*args: Any) -> Data:
        data = gather(*args)
        prompts = [data.corpus.at(i)[:n].tolist() for i, n in enumerate(data.corpus.prompt_lengths)]
        return replace(data, held_out=tuple(tuple(ids) for ids in prompts))

    monkeypatch.setattr("slipstream.train.run.gather", known)


def check_gradients(recipe: Recipe, batch: Batch, teacher: Teacher) -> None:
    """Every weight of the recipe has a gradient, and none of the target's."""
    losses = recipe.loss(batch)
    (losses.total / losses.count).backward()
    for name, weight in recipe.module.named_parameters():
        assert weight.grad is not None, name
        assert weight.grad.isfinite().all(), name
        assert weight.grad.abs().max() > 0, name
    assert all(weight.grad is None for weight in teacher.model.parameters())


def check_packing(recipe: Recipe, teacher: Teacher, lengths: Sequence[Sequence[int]], width: int) -> Losses:
    """Sequences packed together lose what they lose alone. Returns what they lose together."""
    rows = random_rows(lengths, width, VOCAB)
    together = recipe.loss(teacher.run(rows, recipe.taps))
    alone = []
    for row, own in zip(rows.ids.tolist(), lengths, strict=True):
        at = 0
        for length in own:
            single = packed([[row[at : at + length]]], length)
            alone.append(recipe.loss(teacher.run(single, recipe.taps)))
            at += length
    for name in ("total", "count", "accepted", "positions"):
        parts = sum(getattr(one, name) for one in alone)
        torch.testing.assert_close(getattr(together, name), parts, rtol=1e-4, atol=1e-4)
    return together


def check_learnt(
    make: Callable[[Teacher, Tensor], Recipe],
    name: str,
    folder: Path,
    open_llm: Callable[..., LLM],
    taus: tuple[float, float],
) -> None:
    """A few answers learnt by heart raise tau from below taus[0] to above taus[1], in an engine that stays open."""
    target = save_model(folder / "target", tiny_llama(), seed=3)
    teacher = Teacher.open(target, "cpu")
    prompts = [[10 + i, 20 + i, 30 + i] for i in range(4)]
    how = SamplingParams(temperature=0.8, seed=1, max_tokens=24, ignore_eos=True)
    plain = open_llm(target, drafter=None).generate(prompts, how)
    texts = [[*p, *o.outputs[0].token_ids] for p, o in zip(prompts, plain, strict=True)]
    recipe = make(teacher, torch.bincount(torch.tensor(texts).flatten(), minlength=VOCAB))
    recipe.export(folder / "first")

    def tau(llm: LLM) -> float:
        outputs = llm.generate(prompts, how)
        assert [[*p, *o.outputs[0].token_ids] for p, o in zip(prompts, outputs, strict=True)] == texts
        stats = [o.outputs[0].speculation for o in outputs]
        return 1 + sum(s.accepted for s in stats) / sum(s.rounds for s in stats)

    llm = open_llm(target, drafter=recipe.drafter(folder / "first"), planner="fixed")
    before = tau(llm)
    rows = packed([texts[:2], texts[2:]], 2 * len(texts[0]), prompt=3)
    assert learn(recipe, teacher.run(rows, recipe.taps), 150).min() > 0.7
    recipe.refresh(llm.engine.drafting.drafters[name])
    after = tau(llm)
    assert before < taus[0]
    assert after > taus[1]
    recipe.export(folder / "again")
    assert tau(open_llm(target, drafter=recipe.drafter(folder / "again"), planner="fixed")) == after
    queued = open_llm(target, drafter=recipe.drafter(folder / "again"), planner="fixed", rounds="queued")
    assert tau(queued) == pytest.approx(after, abs=0.2)  # steps that begin before the host knows the end count there
