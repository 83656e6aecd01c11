"""The teacher's states are what transformers computes for each sequence alone, however rows are packed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import Gemma2Config

from conftest import save_model
from slipstream.models.taps import Taps
from slipstream.train.batch import NO_SEQUENCE, Rows
from slipstream.train.teacher import Teacher

TAPS = Taps((0, 1, 3), normed=True)


def packed(sequences: list[list[int]], size: int) -> Rows:
    """One row with all of these, padded."""
    ids: list[int] = []
    positions: list[int] = []
    segments: list[int] = []
    for number, tokens in enumerate(sequences):
        ids += tokens
        positions += range(len(tokens))
        segments += [number] * len(tokens)
    spare = size - len(ids)
    return Rows(
        torch.tensor([ids + [0] * spare]),
        torch.tensor([positions + [0] * spare]),
        torch.tensor([segments + [NO_SEQUENCE] * spare]),
        torch.zeros(1, size, dtype=torch.bool),
    )


def states(teacher: Teacher, tokens: list[int]) -> Tensor:
    out = teacher.model(torch.tensor([tokens]), output_hidden_states=True, use_cache=False)
    layers = [out.hidden_states[i] for i in TAPS.layers[:-1]]
    return torch.cat(layers, dim=-1)[0]


def test_packed_sequences_are_as_alone(tiny_target: Path) -> None:
    teacher = Teacher.open(tiny_target, "cpu")
    first, second = [5, 6, 7, 8], [9, 10, 11, 12, 13, 14]
    batch = teacher.look(packed([first, second], 12), TAPS)
    wide = 2 * teacher.hidden
    assert batch.taps.shape == (1, 12, 4 * teacher.hidden)
    torch.testing.assert_close(batch.taps[0, :4, :wide], states(teacher, first), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(batch.taps[0, 4:10, :wide], states(teacher, second), atol=1e-5, rtol=1e-5)
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
    assert teacher.logits(teacher.look(packed([[3, 4, 5]], 3), Taps()).normed).abs().max() <= 2


def test_rows_know_their_sequences() -> None:
    rows = packed([[1, 2], [3, 4, 5]], 7)
    assert rows.same(1).tolist() == [[True, False, True, True, False, False, False]]
    assert rows.sees[0, 3].tolist() == [False, False, True, True, False, False, False]


def test_a_layer_that_is_not_there(tiny_target: Path) -> None:
    with pytest.raises(Exception, match="after layer 9"):
        Teacher.open(tiny_target, "cpu").look(packed([[1, 2]], 2), Taps((9,)))


def test_compiled_layers_give_the_same_states(tiny_target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the stage that makes graphs: what becomes machine code differs by device."""
    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **options: compile(function, backend="eager", **options))
    teacher = Teacher.open(tiny_target, "cpu")
    rows = packed([[5, 6, 7, 8], [9, 10, 11]], 8)
    plain = teacher.look(rows, TAPS)
    teacher.hasten(1, 8)
    torch.testing.assert_close(teacher.look(rows, TAPS).taps, plain.taps)
