"""EAGLE-3 training on a GPU: the fast attention and bf16 lose what plain fp32 loses, and engines take new weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch

from conftest import VOCAB
from slipstream.train import chain_attention
from slipstream.train.chain_attention import Sequences, attend_chain
from slipstream.train.config import TrainConfig
from slipstream.train.eagle3 import Eagle3Module, Eagle3Recipe, Layer
from slipstream.train.recipe import Setting
from slipstream.train.teacher import Teacher
from training_scenes import LENGTHS, check_narrow_steps, check_new_weights, random_rows

pytestmark = pytest.mark.gpu
WIDTH = 128


def make(teacher: Teacher) -> Eagle3Recipe:
    torch.manual_seed(5)
    options: dict[str, Any] = {"kept": "fp32", "draft_vocab": 64, "steps": 4}
    config = TrainConfig("eagle3", "t", Path("out"), self_prompts=1, options=options)
    counts = torch.randint(0, 1000, (VOCAB,), generator=torch.Generator().manual_seed(7))
    return Eagle3Recipe.make(Setting(config, teacher, counts))


@pytest.mark.parametrize("dim", [64, 128])
def test_the_fast_attention_is_used_and_right(dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = random_rows(LENGTHS, WIDTH, VOCAB).to(torch.device("cuda"))
    sequences, count, steps = Sequences.of(rows), rows.ids.numel(), 3
    made = torch.Generator("cuda").manual_seed(1)
    shapes = [(count, 3, dim)] * 3 + [(steps, count, 3, dim)] * 2
    given = [torch.randn(shape, generator=made, device="cuda").bfloat16().requires_grad_() for shape in shapes]
    push = torch.randn(count, 3, dim, generator=made, device="cuda").bfloat16()
    push *= ((sequences.offset >= steps) & rows.real.flatten())[:, None, None]
    assert chain_attention._uses_flash(given[0])

    def both() -> list[torch.Tensor]:
        q, k, v, chain_k, chain_v = given
        out = attend_chain(q, k, v, chain_k, chain_v, sequences)
        return [out.detach() * (push != 0), *torch.autograd.grad(out, given, push)]

    fast = both()
    monkeypatch.setattr(chain_attention, "_uses_flash", lambda query: False)
    for mine, plain in zip(fast, both(), strict=True):
        torch.testing.assert_close(mine.float(), plain.float(), rtol=0.03, atol=0.03 * float(plain.abs().max()))


def test_a_step_in_bf16_is_a_step_in_fp32(tiny_target: Path) -> None:
    check_narrow_steps(
        tiny_target, make, lambda module: cast(Layer, cast(Eagle3Module, module).layers[0]).self_attn.v_proj.weight
    )


def test_an_open_engine_takes_new_weights(tiny_target: Path, tmp_path: Path) -> None:
    check_new_weights(make(Teacher.open(tiny_target, "cuda")), "eagle", tiny_target, tmp_path)
