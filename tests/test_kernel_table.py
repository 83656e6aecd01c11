"""tools/kernel_table.py without a GPU: its clocks, passes, head and table. What is timed is what a round does."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from conftest import tiny_llama
from gpu_bench import CPU, FakeClock, clocks, kernels, results
from slipstream.core.draft import ROOT, Tree
from slipstream.kernels.gpu.rows import last_rows
from slipstream.models import attention
from slipstream.models.runner import Runner, open_unchecked


@pytest.fixture
def runner(tiny_target: Path) -> Runner:
    return open_unchecked(tiny_target, torch.float32, CPU)


# --- the clock --------------------------------------------------------------------------------------------------------


def test_works_are_done_in_turn() -> None:
    done: list[str] = []
    found = clocks.host_clock({name: lambda name=name: done.append(name) for name in "ab"}, 3)
    assert done == list("ab" * 4), "the first of each warms up"
    assert set(found) == {"a", "b"}
    assert clocks.clock_of(CPU) is clocks.host_clock
    assert clocks.clock_of(torch.device("cuda")) is clocks.graph_clock


def test_bandwidth_counts_what_is_read_and_what_is_written() -> None:
    assert clocks.copy_bandwidth(CPU, FakeClock({"copy": 0.25})) == 2 * 2**26 / 0.25


def test_each_moment_belongs_to_the_kernel_that_ends_next() -> None:
    """One that begins early only waits; a gap belongs to nobody."""
    spans = [(0.0, 4.0, "a"), (1.0, 6.0, "b"), (5.0, 7.0, "a"), (10.0, 11.0, "b")]
    found = clocks.kernel_times([clocks.Span(*span) for span in reversed(spans)], 2)
    assert found == [clocks.KernelTime("a", 1, 2.5), clocks.KernelTime("b", 1, 1.5)]


def test_every_work_that_is_looked_into_runs(runner: Runner) -> None:
    seen: list[int] = []

    def watch(work: Any, repeats: int) -> list[Any]:
        work()
        seen.append(repeats)
        return [clocks.KernelTime(f"k{i}", 1, 30.0 - i) for i in range(14)]

    found = kernels.kernel_part(runner, watch, context=20)
    assert next(iter(found)) == "plain step"
    assert "tree of 64 rows" in found
    assert len(seen) == len(found) == 5
    assert found["plain step"][-1] == {"name": "others", "launches": 2, "us": 18.0 + 17.0}


def test_crowds_are_looked_into_with_a_head_as_it_is_opened(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their trees have 256 rows together; of each request a head reads 8 rows again, or 4 of small trees."""
    read: list[int] = []

    def noted(state: Any, lanes: Tensor, count: int, **options: Any) -> Any:
        read.append(len(lanes) * count)
        return last_rows(state, lanes, count, **options)

    monkeypatch.setattr("slipstream.drafters.heads.last_rows", noted)
    sizes: list[int] = []

    def watch(work: Any, repeats: int) -> list[Any]:
        found = work()
        sizes.append(len(found) if isinstance(found, Tensor) else found.tokens.numel())
        return [clocks.KernelTime("k", 1, 3.0)]

    found = kernels.kernel_part(runner, watch, context=20, requests=(16, 64))
    assert list(found) == [
        *(
            "16 requests: plain step",
            "16 requests: trees of 16 rows",
            "16 requests: EAGLE-3 draft of 15 nodes in 8 bits",
        ),
        *("64 requests: plain step", "64 requests: trees of 4 rows", "64 requests: EAGLE-3 draft of 3 nodes in 8 bits"),
    ]
    assert sizes == [16, 256, 16 * 15, 64, 256, 64 * 4]
    assert read == [16 * 8, 64 * 4]
    assert kernels.EagleDrafter(kernels.random_head(runner, "plain")).depth == kernels.OPENED_DEPTH


# --- passes -----------------------------------------------------------------------------------------------------------


def test_the_tree_is_balanced() -> None:
    tree = kernels.binary_tree(64, 300)
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
    out: Tensor = kernels.lay_out(runner, cache, trees, context).run()
    return out


@pytest.mark.parametrize("fused", [False, True])
def test_a_row_of_the_tree_sees_its_own_path(runner: Runner, fused: bool) -> None:
    if fused:
        runner.swap(fused=True)
    tree, context = kernels.binary_tree(64, runner.vocab_size), 37
    cache = kernels.random_cache(runner, 1, context + 64)
    whole = logits(runner, cache, [tree], context)
    assert whole.shape == (64, runner.vocab_size)
    for node in range(63):
        alone = logits(runner, cache, [Tree.chain(path_to(tree, node))], context)
        torch.testing.assert_close(whole[1 + node], alone[len(path_to(tree, node))], rtol=1e-4, atol=1e-4)
    assert whole.std(dim=0).max() > 0.1, "rows differ"


def test_requests_beside_each_other_are_as_alone(runner: Runner) -> None:
    cache = kernels.random_cache(runner, 5, 33)
    together = kernels.lay_out(runner, cache, [Tree()] * 5, 30)
    assert together.rows.ids.shape == (8,), "as rounds come: in buckets"
    with torch.inference_mode():
        rows = together.run()
        for i in range(5):
            pages = together.state.pages[i, :3].tolist()
            assert pages == [3 * i, 3 * i + 1, 3 * i + 2]
            moved = kernels.random_cache(runner, 1, 33)
            for mine, all_of_them in zip(moved.planes, cache.planes, strict=True):
                mine[:, :48] = all_of_them[:, pages[0] * 16 : pages[0] * 16 + 48]
            alone = kernels.lay_out(runner, moved, [Tree()], 30)
            alone.rows.ids[0] = together.rows.ids[i]
            torch.testing.assert_close(rows[i], alone.run()[0], rtol=1e-4, atol=1e-4)


def test_a_context_that_the_cache_does_not_hold_is_refused(runner: Runner) -> None:
    cache = kernels.random_cache(runner, 2, 33)
    kernels.lay_out(runner, cache, [Tree()] * 2, 47)
    with pytest.raises(AssertionError, match="48 tokens and 1 rows in 3 pages"):
        kernels.lay_out(runner, cache, [Tree()] * 2, 48)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("swapped", [False, True])
def test_bytes_of_a_step(tied: bool, swapped: bool) -> None:
    config = tiny_llama(tie_word_embeddings=tied)
    runner = kernels.random_runner(config, torch.float32, CPU, 64) if swapped else plain_runner(config)
    attention, mlp = 32 * (32 + 16 + 16) + 32 * 32, 3 * 32 * 48
    weights = 3 * (attention + mlp + 2 * 32) + 32 + 300 * 32  # layers with their norms, last norm, LM head
    keys_and_values = 3 * 2 * (2 * 8)
    assert kernels.step_bytes(runner, 100) == 4 * (weights + 100 * keys_and_values)
    assert kernels.step_bytes(runner, 100, 8) == 4 * (weights + 800 * keys_and_values)


def plain_runner(config: Any) -> Runner:
    attention.register()
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME)
    return Runner(model, config)


def test_times_of_a_tree_and_of_many_requests(runner: Runner) -> None:
    clock = FakeClock({"1": 0.004, "4": 0.005, "tree": 0.006})
    size = kernels.step_bytes(runner, 20)
    found = kernels.tree_part(runner, size / 0.002, clock, context=20, tree_rows=16, requests=(1, 4))
    assert found.rows_ms == {"1": 4.0, "4": 5.0}
    assert (found.tree_rows, found.tree_ms, found.context) == (16, 6.0, 20)
    assert (found.tree_over_plain, found.step_over_bytes) == (pytest.approx(1.5), pytest.approx(2.0))
    assert {name: len(out) for name, out in clock.seen[0].items()} == {"1": 1, "4": 4, "tree": 16}


def test_long_contexts_read_their_cache() -> None:
    runner = kernels.random_runner(tiny_llama(), torch.float32, CPU, 600)
    assert runner.max_positions == 600
    clock = FakeClock({"40": 0.002, "520": 0.003})
    short, long = kernels.long_part(runner, 1e9, clock, (40, 520))
    assert long.step_bytes - short.step_bytes == 480 * 4 * 3 * 2 * 2 * 8
    assert long.over_bytes == pytest.approx(0.003 / (long.step_bytes / 1e9))
    assert (short.context, short.ms, long.ms) == (40, 2.0, 3.0)
    assert not torch.equal(clock.seen[0]["40"], clock.seen[0]["520"])


def test_the_draft_of_a_head_and_its_bytes() -> None:
    runner = kernels.random_runner(tiny_llama(), torch.float32, CPU, 128)
    clock = FakeClock({"1": 0.002, "3": 0.003})
    found = kernels.head_part(runner, 1e6, clock, context=40, depth=2, width=3, nodes=9, requests=(1, 3))
    head = kernels.random_head(runner, "plain")
    fc, cache = 4 * 32 * 96, 4 * 40 * head.layers[0].numel
    assert found.ms == {"1": 2.0, "3": 3.0}
    assert found.over_bytes == pytest.approx(0.002 / (found.bytes / 1e6))
    assert found.bytes == fc + 2 * (head.weights_bytes - fc + cache)
    for name, tree in clock.seen[0].items():
        assert tree.tokens.shape == tree.parents.shape == (int(name), 9)
    narrow = kernels.head_part(runner, 1e6, clock, context=40, depth=2, width=3, nodes=9, requests=(1, 3), kept="fp8")
    assert narrow.bytes == (found.bytes - 2 * cache) // 4 + 2 * cache


def test_every_way_to_choose_by_two_vocabularies() -> None:
    runner = kernels.random_runner(tiny_llama(), torch.float32, CPU, 64)
    clock = FakeClock({"greedy": 0.002, "T=1": 0.0025, "T=1 top-p 0.95": 0.003})
    own, large = kernels.sampling_part(runner, clock, context=20, large=1000)
    assert (own.vocab_size, large.vocab_size) == (300, 1000)
    assert large.ms == {"greedy": 2.0, "T=1": 2.5, "T=1 top-p 0.95": 3.0}
    assert own.over_greedy == pytest.approx({"greedy": 1, "T=1": 1.25, "T=1 top-p 0.95": 1.5})
    for size, seen in zip((300, 1000), clock.seen, strict=True):
        assert all(out.shape == (1,) and 0 <= int(out) < size for out in seen.values())
    assert runner.vocab_size == 1000
    cache = kernels.random_cache(runner, 1, 20)
    step = kernels.lay_out(runner, cache, [Tree()], 10)
    table = kernels.SamplingTable(2, 1000)
    table.add(1, kernels.CHOICES["greedy"], seed=1)
    with torch.inference_mode():
        assert torch.equal(kernels.ChosenStep(step, table, 1).run(), step.run().argmax(dim=1))


# --- the command ------------------------------------------------------------------------------------------------------


def test_all_parts_from_end_to_end(tiny_target: Path, tmp_path: Path) -> None:
    """Every part that a CPU can do, on a tiny model."""
    report = results.Report({}, tmp_path / "results.json")
    parts = [part for part in kernels.PARTS if part != "kernels"]
    kernels.measure(str(tiny_target), parts, (1,), CPU, report, FakeClock())
    found = json.loads((tmp_path / "results.json").read_text())
    assert "failed" not in found
    assert set(parts) == set(found["seconds"])
    assert [step["context"] for step in found["long"]] == [8000, 32000]
    assert found["heads"]["nodes"] == found["heads_fp8"]["nodes"] == 63
    assert [step["vocab_size"] for step in found["sampling"]] == [300, 151936]
    assert kernels.markdown(found).count("\n") == 1 + 6 + 2 + 6 + 6


@pytest.mark.parametrize("wrong", [["--parts", "leaf"], ["--requests", "leaf"]])
def test_a_wrong_name_is_refused_before_anything_runs(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        kernels.main(["--target", "t", *wrong])
    assert f"{wrong[0]}='leaf'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        kernels.main([])
    assert "--target is needed" in capsys.readouterr().err
