"""Kept states are what the target would say again, whatever row a sequence stands in by then."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from slipstream.models.taps import Taps
from slipstream.train import states
from slipstream.train.batch import Batch, Rows
from slipstream.train.config import TrainConfig
from slipstream.train.corpus import Sequences
from slipstream.train.packing import RowPlan
from slipstream.train.ranks import Ranks
from slipstream.train.states import States, states_for, worth_keeping
from slipstream.train.teacher import Teacher

LENGTHS = (5, 9, 3, 12, 7, 4)
ROW = 16


@pytest.fixture
def plan() -> RowPlan:
    starts = np.concatenate(([0], np.cumsum(LENGTHS)))
    tokens = np.random.default_rng(0).integers(1, 200, size=starts[-1]).astype(np.uint32)
    half = np.array(LENGTHS, dtype=np.int64) // 2
    return RowPlan(Sequences(tokens, starts, half, np.arange(len(LENGTHS))), ROW, seed=1)


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
    made = kept.look(first)
    torch.testing.assert_close(made.normed, teacher.look(first, taps).normed)
    wanted = teacher.look(second, taps)

    def refuse(*_: object) -> Batch:
        raise AssertionError("asked again")

    monkeypatch.setattr(Teacher, "look", refuse)
    found = kept.look(second)
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
    look = Teacher.look

    def noted(self: Teacher, rows: Rows, taps: Taps) -> Batch:
        asked.append(len(rows.ids))
        return look(self, rows, taps)

    monkeypatch.setattr(Teacher, "look", noted)
    kept.look(plan.batch(0, 1))
    kept.look(plan.batch(0, 2))
    kept.look(plan.batch(0, 2))
    assert asked == [1, 2]


def test_kept_where_tokens_come_again_and_there_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = TrainConfig(recipe="draft", target="x", out=tmp_path, data="d", steps=10, rows=2, row_tokens=100)
    monkeypatch.setattr(states, "_free", lambda device: 1000)
    gpu = torch.device("cuda")
    assert worth_keeping(config, 1999, 500, gpu)
    assert not worth_keeping(config, 2000, 500, gpu)  # seen once
    assert not worth_keeping(config, 1999, 501, gpu)  # half of what is free is the drafter's
    assert not worth_keeping(config, 1999, 500, torch.device("cpu"))


def test_kept_by_a_process_that_is_alone(tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of several sees other sequences in every epoch: it would have the memory full and ask all the same."""
    config = TrainConfig(recipe="draft", target="x", out=tmp_path, data="d", steps=10, rows=2, row_tokens=100)
    teacher = Teacher.open(tiny_target, "cpu")
    monkeypatch.setattr(states, "worth_keeping", lambda *_: True)
    for ranks, kept in ((Ranks(), True), (Ranks(0, 2), False)):
        said: list[str] = []
        found = states_for(config, teacher, Taps(), 50, ranks, said.append)
        assert found.let_go() is kept
        assert len(said) == kept
        assert not found.let_go()


def test_bytes_are_those_of_the_plane(tiny_target: Path) -> None:
    teacher = Teacher.open(tiny_target, "cpu")
    for taps in (Taps(), Taps((0, 2)), Taps((1,), normed=True)):
        plane = States(teacher, taps, 50)._plane
        assert plane is not None
        assert States.bytes(teacher, taps, 50) == plane.numel() * plane.element_size()
