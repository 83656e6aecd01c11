"""Weights in 8 bits: how far they are off, and that heads with them draft as others do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import eagle_scenes
from eagle_scenes import VOCAB, H
from slipstream import LLM, SamplingParams
from slipstream.kernels.narrow import FP8, NarrowLinear, narrow_join, narrowed, widened
from slipstream.models.heads import eagle
from slipstream.models.heads.base import Weights
from slipstream.models.heads.checkpoint import HeadFiles, TargetShape
from slipstream.models.heads.eagle import EagleHead
from slipstream.models.heads.layouts import read_eagle

TARGET = TargetShape(hidden=H, vocab=VOCAB, layers=8, max_positions=128)


def test_codes_are_near_the_weight_whatever_its_rows_have() -> None:
    """Each row has its own scale: small ones are as exact as large ones; zeros stay zeros."""
    weight = torch.randn(5, 256) * torch.tensor([1e-6, 1e-2, 1.0, 300.0, 0.0])[:, None]
    codes, scale = narrowed(weight)
    assert (codes.dtype, scale.dtype) == (FP8, torch.float32)
    found = widened(codes, scale, torch.float32)
    off = (found - weight).norm(dim=1) / weight.norm(dim=1).clamp_min(1e-30)
    assert off.max() < 0.04
    assert torch.equal(found[4], weight[4])
    torch.testing.assert_close(found.abs().amax(1), weight.abs().amax(1))  # the largest of a row is a code by itself


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_numbers_are_rounded_once(dtype: torch.dtype) -> None:
    codes, scale = narrowed(torch.randn(9, 64) * 0.02)
    wide = widened(codes, scale, dtype)
    assert wide.dtype == dtype
    assert torch.equal(wide, (codes.float() * scale[:, None]).to(dtype))
    assert codes.dtype == FP8, "the codes stay"


def test_a_product_by_eight_bits() -> None:
    linears = [nn.Linear(64, 24, bias=False), nn.Linear(64, 40)]
    both, x = narrow_join(*linears), torch.randn(7, 64)
    want = torch.cat([linear(x) for linear in linears], dim=1)
    got = both(x)
    assert got.shape == want.shape
    assert (got - want).norm() / want.norm() < 0.05
    assert torch.equal(both.bias[:24], torch.zeros(24))  # type: ignore[index]


def test_refilled_in_the_same_memory() -> None:
    linear, other = NarrowLinear(torch.randn(8, 16)), torch.randn(8, 16)
    places = linear.weight.data_ptr(), linear.scale.data_ptr()
    linear.refill(other)
    assert places == (linear.weight.data_ptr(), linear.scale.data_ptr())
    codes, scale = narrowed(other)
    assert torch.equal(widened(linear.weight, linear.scale, torch.float32), widened(codes, scale, torch.float32))


@pytest.fixture(params=["eagle1", "eagle3"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    stored = eagle_scenes.eagle1(embeds=False) if request.param == "eagle1" else eagle_scenes.eagle3()
    return stored.write(tmp_path / "head")


def head(folder: Path, kept: Weights) -> EagleHead:
    torch.manual_seed(11)
    embedding, lm_head = nn.Embedding(VOCAB, H), nn.Linear(H, VOCAB, bias=False)
    checkpoint = read_eagle(HeadFiles.read(folder), TARGET)
    return EagleHead(checkpoint, embedding.requires_grad_(False), lm_head.requires_grad_(False), kept)


@torch.inference_mode()
def test_a_head_in_eight_bits_takes_less_and_says_nearly_the_same(folder: Path) -> None:
    plain, narrow = head(folder, "plain"), head(folder, "fp8")
    assert not plain.narrow
    assert narrow.narrow
    assert not head(folder, "auto").narrow  # small, and no kernels here
    assert narrow.weights_bytes < 0.45 * plain.weights_bytes  # fp32 here
    read = torch.randn(6, H)
    assert (narrow.logits(read) - plain.logits(read)).norm() <= 0.06 * plain.logits(read).norm()
    taps = torch.randn(6, plain.taps.width(H))
    assert (narrow.combine(taps) - plain.combine(taps)).norm() <= 0.06 * plain.combine(taps).norm()


@torch.inference_mode()
def test_large_heads_have_eight_bits_where_there_are_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large by what every level reads: a table of embeddings of its own is not among that."""
    folders = [eagle_scenes.eagle3(embeds=own).write(tmp_path / str(own)) for own in (False, True)]
    products = head(folders[0], "plain").weights_bytes
    assert head(folders[1], "plain").weights_bytes > products
    monkeypatch.setattr(eagle, "has_kernels", lambda _: True)
    monkeypatch.setattr(eagle, "_Kernels", lambda _: None)
    for large, narrow in ((products, True), (products + 1, False)):
        monkeypatch.setattr(eagle, "_LARGE", large)
        assert [head(folder, "auto").narrow for folder in folders] == [narrow, narrow]
        assert not head(folders[0], "plain").narrow


@pytest.mark.parametrize("rounds", ["eager", "queued"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_are_plain_decodings(
    tmp_path: Path, open_llm: Callable[..., LLM], rounds: str, temperature: float
) -> None:
    path = eagle_scenes.eagle3().write(tmp_path / "head")
    params = SamplingParams(temperature=temperature, seed=5, max_tokens=24, ignore_eos=True)
    (want,) = open_llm().generate([[5, 6, 7]], params)
    llm = open_llm(drafter=f"eagle3:{path}?depth=3&width=3&weights=fp8", planner="fixed", rounds=rounds)
    (output,) = llm.generate([[5, 6, 7]], params)
    assert output.outputs[0].token_ids == want.outputs[0].token_ids
    assert output.outputs[0].speculation.drafted
