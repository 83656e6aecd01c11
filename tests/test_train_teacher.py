"""The teacher's states are what transformers computes for each sequence alone; tau is that of the weights of now."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import InternalTorchDynamoError
from transformers import Gemma2Config

from conftest import VOCAB, save_model
from slipstream.models.taps import Taps
from slipstream.train import progress
from slipstream.train import teacher as module
from slipstream.train.batch import Batch, RowPlan, Rows
from slipstream.train.config import TrainConfig
from slipstream.train.data import Corpus
from slipstream.train.draft import DraftRecipe
from slipstream.train.layers import Compiled
from slipstream.train.measure import Measure
from slipstream.train.progress import Clock, watched
from slipstream.train.ranks import Ranks
from slipstream.train.recipe import Setting
from slipstream.train.teacher import States, Teacher, states_for, worth_keeping
from training_scenes import packed

TAPS = Taps((0, 1, 3), normed=True)


def alone(teacher: Teacher, tokens: list[int]) -> Tensor:
    out = teacher.model(torch.tensor([tokens]), output_hidden_states=True, use_cache=False)
    layers = [out.hidden_states[i] for i in TAPS.layers[:-1]]
    return torch.cat(layers, dim=-1)[0]


def test_packed_sequences_are_as_alone(tiny_target: Path) -> None:
    teacher = Teacher.open(tiny_target, "cpu")
    first, second = [5, 6, 7, 8], [9, 10, 11, 12, 13, 14]
    batch = teacher.run(packed([[first, second]], 12), TAPS)
    wide = 2 * teacher.hidden
    assert batch.taps.shape == (1, 12, 4 * teacher.hidden)
    torch.testing.assert_close(batch.taps[0, :4, :wide], alone(teacher, first), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(batch.taps[0, 4:10, :wide], alone(teacher, second), atol=1e-5, rtol=1e-5)
    logits = teacher.model(torch.tensor([second]), use_cache=False).logits[0]
    torch.testing.assert_close(teacher.logits(batch.normed[0, 4:10]), logits, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(batch.taps[..., -teacher.hidden :], batch.normed)


def test_capped_logits_are_the_models_own(tmp_path: Path) -> None:
    config = Gemma2Config(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        final_logit_softcapping=2.0,
        initializer_range=0.5,
    )
    teacher = Teacher.open(save_model(tmp_path / "gemma", config), "cpu")
    assert teacher.logits(teacher.run(packed([[[3, 4, 5]]], 3), Taps()).normed).abs().max() <= 2


def test_rows_know_their_sequences() -> None:
    rows = packed([[[1, 2], [3, 4, 5]]], 7)
    assert rows.same(1).tolist() == [[True, False, True, True, False, False, False]]
    assert rows.sees[0, 3].tolist() == [False, False, True, True, False, False, False]


def test_a_layer_that_is_not_there(tiny_target: Path) -> None:
    with pytest.raises(Exception, match="after layer 9"):
        Teacher.open(tiny_target, "cpu").run(packed([[[1, 2]]], 2), Taps((9,)))


def test_compiled_layers_give_the_same_states(tiny_target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the stage that makes graphs: what becomes machine code differs by device."""
    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **options: compile(function, backend="eager", **options))
    teacher = Teacher.open(tiny_target, "cpu")
    rows = packed([[[5, 6, 7, 8], [9, 10, 11]]], 8)
    plain = teacher.run(rows, TAPS)
    teacher.compile(1, 8)
    torch.testing.assert_close(teacher.run(rows, TAPS).taps, plain.taps)


LENGTHS = (5, 9, 3, 12, 7, 4)


ROW = 16


@pytest.fixture
def plan() -> RowPlan:
    starts = np.concatenate(([0], np.cumsum(LENGTHS)))
    tokens = np.random.default_rng(0).integers(1, 200, size=starts[-1]).astype(np.uint32)
    half = np.array(LENGTHS, dtype=np.int64) // 2
    return RowPlan(Corpus(tokens, starts, half, np.arange(len(LENGTHS))), ROW, seed=1)


def epoch(plan: RowPlan, number: int) -> Rows:
    rows = [len(plan._epoch(i)) for i in range(number + 1)]
    return plan.batch(sum(rows[:number]), rows[number])


@pytest.mark.parametrize("taps", [Taps(), Taps((0, 2), normed=True), Taps((1, 3))])
def test_the_second_time_the_target_is_not_asked(
    tiny_target: Path, plan: RowPlan, taps: Taps, monkeypatch: pytest.MonkeyPatch
) -> None:
    teacher = Teacher.open(tiny_target, "cpu")
    kept = States(teacher, taps, sum(LENGTHS))
    first, second = epoch(plan, 0), epoch(plan, 1)
    assert not torch.equal(first.ids, second.ids)  # the same sequences in other rows
    made = kept.run(first)
    torch.testing.assert_close(made.normed, teacher.run(first, taps).normed)
    wanted = teacher.run(second, taps)

    def refuse(*_: object) -> Batch:
        raise AssertionError("asked again")

    monkeypatch.setattr(Teacher, "run", refuse)
    found = kept.run(second)
    real = second.real
    torch.testing.assert_close(found.normed[real], wanted.normed[real], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found.taps[real], wanted.taps[real], atol=1e-5, rtol=1e-5)
    assert found.taps.shape == wanted.taps.shape
    assert found.normed.is_contiguous()
    assert (~real).any()
    assert not found.normed[~real].any()  # padding says nothing


def test_one_new_sequence_is_enough_to_ask(tiny_target: Path, plan: RowPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    teacher = Teacher.open(tiny_target, "cpu")
    kept = States(teacher, Taps(), sum(LENGTHS))
    asked: list[int] = []
    run = Teacher.run

    def noted(self: Teacher, rows: Rows, taps: Taps) -> Batch:
        asked.append(len(rows.ids))
        return run(self, rows, taps)

    monkeypatch.setattr(Teacher, "run", noted)
    kept.run(plan.batch(0, 1))
    kept.run(plan.batch(0, 2))
    kept.run(plan.batch(0, 2))
    assert asked == [1, 2]


def test_kept_where_tokens_come_again_and_there_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = TrainConfig(recipe="draft", target="x", out=tmp_path, data="d", steps=10, rows=2, row_tokens=100)
    monkeypatch.setattr(module, "_free", lambda device: 1000)
    gpu = torch.device("cuda")
    assert worth_keeping(config, 1999, 500, gpu)
    assert not worth_keeping(config, 2000, 500, gpu)  # seen once
    assert not worth_keeping(config, 1999, 501, gpu)  # half of what is free is the drafter's
    assert not worth_keeping(config, 1999, 500, torch.device("cpu"))


def test_kept_by_a_process_that_is_alone(tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of several sees other sequences in every epoch: it would have the memory full and ask all the same."""
    config = TrainConfig(recipe="draft", target="x", out=tmp_path, data="d", steps=10, rows=2, row_tokens=100)
    teacher = Teacher.open(tiny_target, "cpu")
    monkeypatch.setattr(module, "worth_keeping", lambda *_: True)
    for ranks, kept in ((Ranks(), True), (Ranks(0, 2), False)):
        said: list[str] = []
        found = states_for(config, teacher, Taps(), 50, ranks, said.append)
        assert found.release() is kept
        assert len(said) == kept
        assert not found.release()


def test_bytes_are_those_of_the_plane(tiny_target: Path) -> None:
    teacher = Teacher.open(tiny_target, "cpu")
    for taps in (Taps(), Taps((0, 2)), Taps((1,), normed=True)):
        plane = States(teacher, taps, 50)._plane
        assert plane is not None
        assert States.bytes(teacher, taps, 50) == plane.numel() * plane.element_size()


def double(x: Tensor) -> Tensor:
    return 2 * x


def test_only_calls_of_its_size_are_compiled_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **options: lambda x: function(x) + 1)
    fast = Compiled(double, (2, 3))
    assert fast(torch.ones(2, 3, 5)).max() == 3
    assert fast(torch.ones(2, 4, 5)).max() == 2


def test_where_compiling_fails_it_goes_on_without(monkeypatch: pytest.MonkeyPatch) -> None:
    tries = []

    def compile(function: Callable[[Tensor], Tensor], **options: object) -> Callable[[Tensor], Tensor]:
        def run(x: Tensor) -> Tensor:
            tries.append(x)
            raise InternalTorchDynamoError("no compiler")

        return run

    monkeypatch.setattr(torch, "compile", compile)
    fast = Compiled(double)
    assert [fast(torch.tensor(x)).item() for x in (1, 2, 3)] == [2, 4, 6]
    assert len(tries) == 1


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


def test_texts_that_none_of_has_ended_are_spoken_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "watched", partial(watched, every_s=0.001))
    lines: list[str] = []
    said = {"reading": threading.Event(), "begun": threading.Event(), "one": threading.Event()}
    written = 0

    def say(line: str) -> None:
        lines.append(line)
        for name, form in (
            ("reading", r"answers: 0 of 2, reading prompts"),
            ("begun", r"answers: 0 of 2, 30 tokens, [\d,]+ tok/s, at most \d+ s left"),
            ("one", r"answers: 1 of 2, 25 tokens, [\d,]+ tok/s, at most \d+ s left"),
        ):
            if re.fullmatch(form, line):
                said[name].set()

    with Clock("answers", 2, 20, say, lambda: written) as clock:
        assert said["reading"].wait(30), lines
        written = 30
        assert said["begun"].wait(30), lines
        written = 15
        clock.tick(10)
        assert said["one"].wait(30), lines
        written = 0
        clock.tick(20)
    assert lines[-1].startswith("answers: 2 of 2, 30 tokens, ")
    assert lines[-1].endswith(" 0 s left")
    told = len(lines)
    time.sleep(0.01)
    assert len(lines) == told, "no more lines after its end"


def test_what_is_left_is_bounded_by_what_is_being_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of four has ended after 9 s, and the others are as far as one can be: they do not take 27 s more."""
    now = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    written = 0
    clock = Clock("answers", 4, 100, print, lambda: written)
    now, written = 1.0, 40
    assert clock.line() == "answers: 0 of 4, 40 tokens, 40 tok/s, at most 9 s left"
    clock.tick(90)
    now, written = 9.0, 270
    assert clock.line() == "answers: 1 of 4, 360 tokens, 40 tok/s, at most 1 s left"
    written = 0
    assert clock.line() == "answers: 1 of 4, 90 tokens, 10 tok/s, at most 27 s left", (
        "not 30: bounded by the answers that ended"
    )
