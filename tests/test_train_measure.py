"""Tau of a drafter in training: what its weights of this moment reach, and nothing of those that it had before."""

from __future__ import annotations

import re
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from conftest import VOCAB
from slipstream.train import measure as measuring
from slipstream.train import progress
from slipstream.train.config import TrainConfig
from slipstream.train.draft import DraftRecipe
from slipstream.train.measure import Measure
from slipstream.train.progress import Clock, watched
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


def test_a_measurement_says_how_far_it_is(tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "watched", partial(watched, every_s=0.001))
    config = TrainConfig("draft", "t", tmp_path, self_prompts=1, measure_tokens=40, temperatures=(1.0,))
    teacher = Teacher.open(tiny_target, "cpu")
    recipe = DraftRecipe.make(Setting(config, teacher, torch.ones(VOCAB, dtype=torch.int64)))
    lines: list[str] = []
    with Measure(config, recipe, tiny_target, PROMPTS, "cpu", lines.append) as measure:
        measure()
    begun = lines.index("measuring tau on 3 held-out prompts, up to 40 tokens each, at T=0, T=1 ...")
    told = [line for line in lines[begun + 1 :] if line.startswith("measuring at T=")]
    left = [re.search(r"(\d) of 6 answers, (\d+) tokens, [\d,]+ tok/s, at most (\d+) s left$", line) for line in told]
    known = [found for found in left if found]
    assert known, lines
    assert all(int(found[1]) <= 6 and 0 < int(found[2]) <= 240 for found in known)


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
