"""The GPU's pass with its kernels' twins: transformers' logits, family by family, as loaded and with its own trunk."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from families import CPU, save_random, tiny_config
from slipstream.kv.cache import KVCache
from slipstream.models import build, parity
from slipstream.models.batch import PassBatch
from slipstream.models.fused import FusedTrunk
from slipstream.models.gpu import DevicePass, GpuTrunk, RowLinear, layout_of
from slipstream.models.runner import Runner, open_unchecked

CLOSE = 1e-4
EVERY_KIND = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gpt-oss", "gpt2", "phi3", "deepseek-v3")
FUSED = ("llama", "llama-yarn", "qwen2", "qwen2-slides", "qwen3", "mistral")


class OnDevice(Runner):
    """A runner whose passes all take the GPU's way."""

    def forward(self, batch: PassBatch, cache: KVCache) -> Tensor:
        layout = layout_of(batch, cache.page_size)
        return self._call(DevicePass(layout, cache), batch.input_ids, batch.positions, batch.logit_rows).float()


def opened(folder: Path, family: str) -> OnDevice:
    runner = open_unchecked(save_random(folder / family, tiny_config(family)), torch.float32, CPU)
    return OnDevice(runner.model, runner.config)


@pytest.fixture
def plain_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights as they lie on a GPU: in no form that only a CPU can use."""
    monkeypatch.setattr("slipstream.kernels.cpu.tiled.tiler", lambda *weights: None)
    monkeypatch.setattr("slipstream.kernels.linear.packs", lambda weight: False)


@pytest.mark.parametrize("family", EVERY_KIND)
def test_prompts_trees_and_the_far_end(tmp_path: Path, family: str) -> None:
    """Windows, soft caps, sinks and all: two prompts in chunks, a branching tree, the end of the context."""
    runner = opened(tmp_path, family)
    assert parity._errors(parity._reference(runner), parity._ours(runner)).max() < CLOSE


@pytest.mark.usefixtures("plain_weights")
@pytest.mark.parametrize("family", FUSED)
def test_its_own_trunk(tmp_path: Path, family: str) -> None:
    """Runs of split products, the residual in place, norms, biases, rotary and cache write in one."""
    runner = opened(tmp_path, family)
    reference = parity._reference(runner)
    assert build.fuse(runner.model, runner._traits) == 3
    assert build.install(runner.model, runner.max_positions) == 1
    kinds = {type(module) for module in runner.model.modules()}
    assert {GpuTrunk, RowLinear} <= kinds
    assert FusedTrunk not in kinds
    assert parity._errors(reference, parity._ours(runner)).max() < CLOSE


@pytest.mark.usefixtures("plain_weights")
def test_runs_are_really_split(tmp_path: Path) -> None:
    """A weight wide enough for several runs: the same logits."""
    config = tiny_config("llama", hidden_size=128, intermediate_size=256)
    loaded = open_unchecked(save_random(tmp_path / "wide", config), torch.float32, CPU)
    runner = OnDevice(loaded.model, loaded.config)
    reference = parity._reference(runner)
    build.fuse(runner.model, runner._traits)
    build.install(runner.model, runner.max_positions)
    (trunk,) = (m for m in runner.model.modules() if isinstance(m, GpuTrunk))
    assert [layer.down.splits for layer in trunk._layers] == [2, 2, 2]
    assert parity._errors(reference, parity._ours(runner)).max() < CLOSE


@pytest.mark.usefixtures("plain_weights")
def test_in_bf16(tmp_path: Path) -> None:
    loaded = open_unchecked(save_random(tmp_path / "qwen3", tiny_config("qwen3")), torch.bfloat16, CPU)
    runner = OnDevice(loaded.model, loaded.config)
    judge = parity._Judge.of(runner)
    build.fuse(runner.model, runner._traits)
    build.install(runner.model, runner.max_positions)
    assert judge.verdict(parity._ours(runner)).holds


def test_a_layout_says_where_rows_lie_and_whom_they_see() -> None:
    """A chunk in its middle, a tree, and a prompt that a check puts at the far end of the context."""
    words = [0, 0, 0b1, 0b11, 0b101, 0b1101]
    batch = PassBatch(
        input_ids=torch.zeros(7, dtype=torch.int64),
        positions=torch.tensor([5, 6, 9, 10, 10, 11, 90]),
        slots=torch.tensor([45, 46, 9, 10, 11, 12, 70]),
        row_starts=(0, 2, 6, 7),
        prefix_lengths=(5, 9, 0),
        pages=((11, 3), (2,), (17,)),
        is_tree=(False, True, False),
        masks=torch.tensor([*words, 0]),
        logit_rows=None,
    )
    layout = layout_of(batch, 4)
    assert layout.positions.tolist() == [5, 6, 9, 10, 10, 11, 0]  # places among the request's own keys
    assert layout.starts.tolist() == [0, 2, 6, 7]
    assert layout.pages.tolist() == [[11, 3], [2, 0], [17, 0]]
    assert (layout.lengths.tolist(), layout.max_keys) == ([5, 9, 0], 13)
    assert layout.ancestors is not None
    assert layout.ancestors.tolist() == [
        [0, -1, -1], [0, 1, -1], [2, -1, -1], [2, 3, -1], [2, 4, -1], [2, 4, 5], [6, -1, -1],
    ]  # fmt: skip


def test_a_product_keeps_the_shape_of_its_input_and_gives_fp32_where_asked() -> None:
    linear = nn.Linear(24, 10, dtype=torch.bfloat16)
    x = torch.randn(2, 3, 24, dtype=torch.bfloat16)
    logits = RowLinear(linear, torch.float32)(x)
    assert (logits.dtype, logits.shape) == (torch.float32, (2, 3, 10))
    exact = x.double() @ linear.weight.double().T + linear.bias.double()
    torch.testing.assert_close(logits.double(), exact, rtol=1e-5, atol=1e-5)
    assert RowLinear(linear)(x).dtype == torch.bfloat16


def test_rows_that_fill_up_a_pass_change_nothing(tmp_path: Path) -> None:
    """Two prompts, alone and with padding rows behind them."""
    runner = opened(tmp_path, "llama")
    cache = runner.new_cache(5, 4)
    trash = 4 * 4
    ids = torch.tensor([5, 6, 7, 8, 9, 10])
    batch = PassBatch(
        input_ids=ids,
        positions=torch.tensor([0, 1, 2, 0, 1, 2]),
        slots=torch.tensor([0, 1, 2, 4, 5, 6]),
        row_starts=(0, 3, 6),
        prefix_lengths=(0, 0),
        pages=((0,), (1,)),
        is_tree=(False, False),
        masks=None,
        logit_rows=torch.tensor([2, 5]),
        wide=True,
    )
    expected, kept = runner.forward(batch, cache), cache.keys(0)[:trash].clone()
    filled = replace(
        batch,
        input_ids=torch.cat((ids, torch.zeros(2, dtype=torch.int64))),
        positions=torch.cat((batch.positions, torch.zeros(2, dtype=torch.int64))),
        slots=torch.cat((batch.slots, torch.full((2,), trash))),
    )
    assert torch.equal(runner.forward(filled, cache), expected)
    assert torch.equal(cache.keys(0)[:trash], kept)
