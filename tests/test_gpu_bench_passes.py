"""The passes of the GPU benchmark without a GPU: what is timed is what a round does. Only the time is another's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from conftest import tiny_llama
from gpu_bench import CPU, FakeClock, heads, passes
from slipstream.core.draft import ROOT, Tree
from slipstream.models import attention
from slipstream.models.runner import Runner, open_unchecked


@pytest.fixture
def runner(tiny_target: Path) -> Runner:
    return open_unchecked(tiny_target, torch.float32, CPU)


def test_the_tree_is_balanced() -> None:
    tree = passes.binary_tree(64, 300)
    tree.check(300, 63)
    assert len(tree) == 63
    assert tree.parents[:6] == (ROOT, ROOT, 0, 0, 1, 1)
    assert max(len(path_to(tree, node)) for node in range(63)) == 6
    assert {tree.parents.count(parent) for parent in range(ROOT, 30)} == {2}


def path_to(tree: Tree, node: int) -> list[int]:
    path: list[int] = []
    while node != ROOT:
        path.insert(0, tree.tokens[node])
        node = tree.parents[node]
    return path


@torch.inference_mode()
def logits(runner: Runner, cache: Any, trees: Sequence[Tree], context: int) -> Tensor:
    out: Tensor = passes.lay_out(runner, cache, trees, context).run()
    return out


@pytest.mark.parametrize("fused", [False, True])
def test_a_row_of_the_tree_sees_its_own_path(runner: Runner, fused: bool) -> None:
    if fused:
        runner.swap(fused=True)
    tree, context = passes.binary_tree(64, runner.vocab_size), 37
    cache = passes.random_cache(runner, 1, context + 64)
    whole = logits(runner, cache, [tree], context)
    assert whole.shape == (64, runner.vocab_size)
    for node in range(63):
        alone = logits(runner, cache, [Tree.chain(path_to(tree, node))], context)
        torch.testing.assert_close(whole[1 + node], alone[len(path_to(tree, node))], rtol=1e-4, atol=1e-4)
    assert whole.std(dim=0).max() > 0.1, "rows differ"


def test_requests_beside_each_other_are_as_alone(runner: Runner) -> None:
    cache = passes.random_cache(runner, 5, 33)
    together = passes.lay_out(runner, cache, [Tree()] * 5, 30)
    assert together.rows.ids.shape == (8,), "as rounds come: in buckets"
    with torch.inference_mode():
        rows = together.run()
        for i in range(5):
            pages = together.state.pages[i, :3].tolist()
            assert pages == [3 * i, 3 * i + 1, 3 * i + 2]
            moved = passes.random_cache(runner, 1, 33)
            for mine, all_of_them in zip(moved.planes, cache.planes, strict=True):
                mine[:, :48] = all_of_them[:, pages[0] * 16 : pages[0] * 16 + 48]
            alone = passes.lay_out(runner, moved, [Tree()], 30)
            alone.rows.ids[0] = together.rows.ids[i]
            torch.testing.assert_close(rows[i], alone.run()[0], rtol=1e-4, atol=1e-4)


def test_a_context_that_the_cache_does_not_hold_is_refused(runner: Runner) -> None:
    cache = passes.random_cache(runner, 2, 33)
    passes.lay_out(runner, cache, [Tree()] * 2, 47)
    with pytest.raises(AssertionError, match="48 tokens and 1 rows in 3 pages"):
        passes.lay_out(runner, cache, [Tree()] * 2, 48)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("swapped", [False, True])
def test_bytes_of_a_step(tied: bool, swapped: bool) -> None:
    config = tiny_llama(tie_word_embeddings=tied)
    runner = passes.random_runner(config, torch.float32, CPU, 64) if swapped else plain_runner(config)
    attention, mlp = 32 * (32 + 16 + 16) + 32 * 32, 3 * 32 * 48
    weights = 3 * (attention + mlp + 2 * 32) + 32 + 300 * 32  # layers with their norms, last norm, LM head
    keys_and_values = 3 * 2 * (2 * 8)
    assert passes.step_bytes(runner, 100) == 4 * (weights + 100 * keys_and_values)
    assert passes.step_bytes(runner, 100, 8) == 4 * (weights + 800 * keys_and_values)


def plain_runner(config: Any) -> Runner:
    attention.register()
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME)
    return Runner(model, config)


def test_times_of_a_tree_and_of_many_requests(runner: Runner) -> None:
    clock = FakeClock({"1": 0.004, "4": 0.005, "tree": 0.006})
    size = passes.step_bytes(runner, 20)
    found = passes.tree_part(runner, size / 0.002, clock, context=20, tree_rows=16, requests=(1, 4))
    assert found.rows_ms == {"1": 4.0, "4": 5.0}
    assert (found.tree_rows, found.tree_ms, found.context) == (16, 6.0, 20)
    assert (found.tree_over_plain, found.step_over_bytes) == (pytest.approx(1.5), pytest.approx(2.0))
    assert {name: len(out) for name, out in clock.seen[0].items()} == {"1": 1, "4": 4, "tree": 16}


def test_long_contexts_read_their_cache() -> None:
    runner = passes.random_runner(tiny_llama(), torch.float32, CPU, 600)
    assert runner.max_positions == 600
    clock = FakeClock({"40": 0.002, "520": 0.003})
    short, long = passes.long_part(runner, 1e9, clock, (40, 520))
    assert long.step_bytes - short.step_bytes == 480 * 4 * 3 * 2 * 2 * 8
    assert long.over_bytes == pytest.approx(0.003 / (long.step_bytes / 1e9))
    assert (short.context, short.ms, long.ms) == (40, 2.0, 3.0)
    assert not torch.equal(clock.seen[0]["40"], clock.seen[0]["520"])


def test_the_draft_of_a_head_and_its_bytes() -> None:
    runner = passes.random_runner(tiny_llama(), torch.float32, CPU, 128)
    clock = FakeClock({"1": 0.002, "3": 0.003})
    found = heads.head_part(runner, 1e6, clock, context=40, depth=2, width=3, nodes=9, requests=(1, 3))
    head = heads.random_head(runner, "plain")
    fc, cache = 4 * 32 * 96, 4 * 40 * head.layers[0].numel
    assert found.ms == {"1": 2.0, "3": 3.0}
    assert found.over_bytes == pytest.approx(0.002 / (found.bytes / 1e6))
    assert found.bytes == fc + 2 * (head.weights_bytes - fc + cache)
    for name, tree in clock.seen[0].items():
        assert tree.tokens.shape == tree.parents.shape == (int(name), 9)
    narrow = heads.head_part(runner, 1e6, clock, context=40, depth=2, width=3, nodes=9, requests=(1, 3), kept="fp8")
    assert narrow.bytes == (found.bytes - 2 * cache) // 4 + 2 * cache


def test_every_way_to_choose_by_two_vocabularies() -> None:
    runner = passes.random_runner(tiny_llama(), torch.float32, CPU, 64)
    clock = FakeClock({"greedy": 0.002, "T=1": 0.0025, "T=1 top-p 0.95": 0.003})
    own, large = passes.sampling_part(runner, clock, context=20, large=1000)
    assert (own.vocab_size, large.vocab_size) == (300, 1000)
    assert large.ms == {"greedy": 2.0, "T=1": 2.5, "T=1 top-p 0.95": 3.0}
    assert own.over_greedy == pytest.approx({"greedy": 1, "T=1": 1.25, "T=1 top-p 0.95": 1.5})
    for size, seen in zip((300, 1000), clock.seen, strict=True):
        assert all(out.shape == (1,) and 0 <= int(out) < size for out in seen.values())
    assert runner.vocab_size == 1000
    cache = passes.random_cache(runner, 1, 20)
    step = passes.lay_out(runner, cache, [Tree()], 10)
    table = passes.SamplingTable(2, 1000)
    table.add(1, passes.CHOICES["greedy"], seed=1)
    with torch.inference_mode():
        assert torch.equal(passes.ChosenStep(step, table, 1).run(), step.run().argmax(dim=1))
