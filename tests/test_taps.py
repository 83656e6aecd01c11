"""Taps: the hidden states that drafters read, and their columns in the cache's features."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from families import CPU, PAGE, Passes, in_torch, load_reference, path_to, random_tokens, save_random, tiny_config
from slipstream.core.errors import DrafterError
from slipstream.kernels.cpu.compiled import can_compile
from slipstream.kv.cache import KVCache, LayerShape
from slipstream.kv.pages import PageCopy
from slipstream.models.build import fuse, install
from slipstream.models.fused import FusedTrunk
from slipstream.models.runner import Runner, open_unchecked
from slipstream.models.taps import Taps, TapView
from test_gpu_pass import OnDevice

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
