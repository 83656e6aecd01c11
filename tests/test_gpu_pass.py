"""The GPU's pass with its kernels' twins, and the hidden states that are kept on the way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from families import CPU, PAGE, Passes, in_torch, load_reference, path_to, random_tokens, save_random, tiny_config
from shared_drafts import tiny_shared
from slipstream.core.errors import DrafterError
from slipstream.kernels.cpu.compiled import can_compile
from slipstream.kv.cache import KVCache, LayerShape
from slipstream.kv.pages import PageCopy
from slipstream.models import build, parity
from slipstream.models.batch import PassBatch
from slipstream.models.build import fuse, install
from slipstream.models.fused import FusedTrunk
from slipstream.models.gpu import DevicePass, GpuTrunk, RowLinear, layout_of
from slipstream.models.runner import Runner, open_unchecked
from slipstream.models.taps import Taps, TapView

CLOSE = 1e-4


EVERY_KIND = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gpt-oss", "gpt2", "phi3", "deepseek-v3")


FUSED = ("llama-yarn", "qwen2-slides", "qwen3", "mistral")


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


@pytest.mark.usefixtures("plain_weights")
def test_a_draft_in_bf16_that_shares_the_swapped_lm_head(tmp_path: Path) -> None:
    loaded = open_unchecked(save_random(tmp_path / "target", tiny_config("llama")), torch.bfloat16, CPU)
    target = OnDevice(loaded.model, loaded.config)
    build.fuse(target.model, target._traits)
    build.install(target.model, target.max_positions)
    shared = tiny_shared(tmp_path / "draft", vocab_size=target.vocab_size)
    draft = open_unchecked(shared, torch.bfloat16, CPU, target=target)
    judge = parity._Judge.of(draft)
    assert judge.verdict(parity._ours(OnDevice(draft.model, draft.config, target=target))).holds


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


ALL = Taps((0, 1, 2, 3), normed=True)


def test_the_union_has_every_state_once() -> None:
    union = Taps.union([Taps((4, 1)), Taps((1,), normed=True), Taps()])
    assert union == Taps((1, 4), normed=True)
    assert union.width(8) == 24
    assert union
    assert not Taps.union([])


def test_a_view_finds_its_own_columns_in_its_own_order() -> None:
    union = Taps((1, 2, 4), normed=True)
    plane = torch.tensor([[10, 11, 20, 21, 40, 41, 90, 91], [0] * 8])  # two numbers a state
    slots = torch.tensor([1, 0])
    assert TapView.of(Taps((4, 1)), union, plane).at(slots)[1].tolist() == [40, 41, 10, 11]
    assert TapView.of(Taps((), normed=True), union, plane).at(slots)[1].tolist() == [90, 91]
    whole = TapView.of(union, union, plane)
    assert whole.columns == (slice(0, 8),)
    assert torch.equal(whole.at(slots), plane[slots])


def test_a_layer_that_the_target_does_not_have_is_refused() -> None:
    Taps((0, 4)).check(4)
    with pytest.raises(DrafterError, match="after layer 5 are wanted, but the target has 4 layers"):
        Taps((0, 5)).check(4)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("taps")
    return cache(lambda family: save_random(root / family, tiny_config(family, intermediate_size=48)))


@torch.inference_mode()
def reference_states(folder: Path, tokens: Sequence[int]) -> Tensor:  # [len(tokens), 5 * 32]
    """Of transformers itself: before each of the 3 layers, behind the last, behind the norm."""
    model = load_reference(folder)
    (layers,) = (m for m in model.base_model.modules() if isinstance(m, nn.ModuleList) and len(m) == 3)
    last: list[Tensor] = []
    layers[2].register_forward_hook(lambda _, given, out: last.append(out[0] if isinstance(out, tuple) else out))
    out: Any = model(torch.tensor([list(tokens)]), output_hidden_states=True, use_cache=False)
    assert len(out.hidden_states) == 4  # transformers' last one is normed
    return torch.cat((*out.hidden_states[:3], last[0], out.hidden_states[3]), dim=-1)[0]


def told(runner: Runner, folder: Path) -> None:
    """A prompt in chunks beside another, single steps and a tree leave transformers' hidden states in the cache."""
    runner.tap(ALL)
    passes = Passes(runner)
    first, second, nodes = random_tokens(21, 1), random_tokens(9, 2), random_tokens(4, 3)
    parents = (-1, 0, 0, 2)
    passes.run([(0, first[:11])])
    passes.run([(0, first[11:20]), (1, second[:8])])
    passes.run([(0, first[20:]), (1, second[8:])])
    passes.run([(0, nodes)], parents=parents)
    features = passes.cache.features
    assert features is not None

    def kept(request: int, start: int, end: int) -> Tensor:
        slots = [passes.pages[request][at // PAGE] * PAGE + at % PAGE for at in range(start, end)]
        return features[slots]

    close(kept(0, 0, 21), reference_states(folder, first))
    close(kept(1, 0, 9), reference_states(folder, second))
    for node in range(4):
        path = [nodes[n] for n in path_to(parents, node)]
        want = reference_states(folder, first + path)[-1:]
        close(kept(0, 21 + node, 22 + node), want)


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "opt", "phi3", "gpt-neox", "mixtral", "deepseek-v3"])
def test_layers_of_transformers_itself(folder_of: Callable[[str], Path], family: str) -> None:
    told(open_unchecked(folder_of(family), torch.float32, CPU), folder_of(family))


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
@pytest.mark.parametrize("in_one_call", [True, False])
def test_fused_layers(folder_of: Callable[[str], Path], family: str, in_one_call: bool) -> None:
    """By torch, and where it can be, as compiled calls from tap to tap."""
    runner = open_unchecked(folder_of(family), torch.float32, CPU)
    runner.swap(fused=True)
    (trunk,) = (m for m in runner.model.modules() if isinstance(m, FusedTrunk))
    assert not can_compile() or trunk.compiled is not None
    with nullcontext() if in_one_call else in_torch(runner.model):
        told(runner, folder_of(family))


@pytest.mark.parametrize("fused", [True, False])
def test_the_gpus_pass(folder_of: Callable[[str], Path], fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernels' twins, and transformers' layers in it."""
    monkeypatch.setattr("slipstream.kernels.cpu.tiled.tiler", lambda *weights: None)
    monkeypatch.setattr("slipstream.kernels.linear.packs", lambda weight: False)
    loaded = open_unchecked(folder_of("qwen3"), torch.float32, CPU)
    runner = OnDevice(loaded.model, loaded.config)
    if fused:
        assert fuse(runner.model, runner._traits) == 3
        assert install(runner.model, runner.max_positions) == 1
    told(runner, folder_of("qwen3"))


def test_logits_are_the_same_with_taps_and_without(folder_of: Callable[[str], Path]) -> None:
    """To the bit: a pass in stretches adds up as one call does."""
    runner = open_unchecked(folder_of("llama"), torch.float32, CPU)
    runner.swap(fused=True)
    tokens = random_tokens(30, 1)

    def logits() -> Tensor:
        passes = Passes(runner)
        return torch.cat([passes.run([(0, tokens[:20])]), passes.run([(0, tokens[20:])])])

    plain = logits()
    runner.tap(Taps((1, 2)))
    assert torch.equal(logits(), plain)


def test_features_move_with_their_tokens() -> None:
    cache_ = KVCache([LayerShape(1, 2, 2)], 4, 4, torch.float32, CPU, features=3)
    features = cache_.features
    assert features is not None
    features[:] = torch.arange(16.0)[:, None]
    cache_.move(torch.tensor([5, 6]), torch.tensor([4, 5]))
    assert features[:, 0].tolist() == [0, 1, 2, 3, 5, 6, 6, *range(7, 16)]
    cache_.copy_pages([PageCopy(0, 3)])
    assert features[12:, 2].tolist() == [0, 1, 2, 3]
    cache_.clear([0])
    assert not features[:4].any()
    assert cache_.bytes == 16 * (4 + 3) * 4 == 4 * KVCache.bytes_per_page(cache_.layers, 4, torch.float32, 3)
