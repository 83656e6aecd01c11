"""Captured passes have the same logits and cache for any padding, and compiling and recording are counted."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from families import CPU, save_random, tiny_config
from slipstream.drafters.model import ModelDrafter
from slipstream.kernels.gpu.jit import recording
from slipstream.kernels.gpu.layout import RowLayout
from slipstream.kv.cache import KVCache
from slipstream.models import build, graphs
from slipstream.models.batch import PassBatch
from slipstream.models.gpu import layout_of
from slipstream.models.graphs import PromptGraphs, WidePromptGraphs
from slipstream.models.runner import Runner, open_unchecked

PAGE, PAGES = 4, 40
TRASH = (PAGES - 1) * PAGE


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    """With the trunk of a GPU, whose kernels' twins run here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("slipstream.kernels.cpu.tiled.tiler", lambda *weights: None)
        patch.setattr("slipstream.kernels.linear.packs", lambda weight: False)
        folder = save_random(tmp_path_factory.mktemp("models") / "llama", tiny_config("llama"))
        found = open_unchecked(folder, torch.float32, CPU)
        build.fuse(found.model, found._traits)
        build.install(found.model, found.max_positions)
    return found


def prompts(*lengths: int, prefix: int = 0, seed: int = 0) -> PassBatch:
    """These prompts, each behind `prefix` tokens, on pages of their own; the last row of each gets logits."""
    generator = torch.Generator().manual_seed(seed)
    each = -(-(prefix + max(lengths)) // PAGE)
    pages = [tuple(range(i * each, (i + 1) * each)) for i in range(len(lengths))]
    positions = [prefix + j for n in lengths for j in range(n)]
    owners = [i for i, n in enumerate(lengths) for _ in range(n)]
    ends = torch.tensor(lengths).cumsum(0)
    return PassBatch(
        input_ids=torch.randint(0, 90, (sum(lengths),), generator=generator),
        positions=torch.tensor(positions),
        slots=torch.tensor([pages[i][p // PAGE] * PAGE + p % PAGE for i, p in zip(owners, positions, strict=True)]),
        row_starts=(0, *ends.tolist()),
        prefix_lengths=(prefix,) * len(lengths),
        pages=tuple(pages),
        is_tree=(False,) * len(lengths),
        masks=None,
        logit_rows=ends - 1,
    )


def filled(cache: KVCache) -> KVCache:
    for plane in cache.planes:
        plane.normal_(generator=torch.Generator().manual_seed(1))
    return cache


@pytest.fixture
def found(runner: Runner) -> PromptGraphs:
    return PromptGraphs(runner._prompt_pass, runner.new_cache(PAGES, PAGE), TRASH)


def check(runner: Runner, found: PromptGraphs, batch: PassBatch) -> None:
    plain, static = filled(runner.new_cache(PAGES, PAGE)), filled(found.cache)
    assert batch.logit_rows is not None
    expected = runner._prompt_pass(batch.input_ids, batch.positions, layout_of(batch, PAGE), plain, batch.logit_rows)
    ours = found.run(batch, layout_of(batch, PAGE))
    assert ours is not None
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
    for mine, theirs in zip(static.planes, plain.planes, strict=True):
        torch.testing.assert_close(mine[:, :TRASH], theirs[:, :TRASH], rtol=1e-5, atol=1e-5)


def test_a_piece_of_a_prompt_that_has_pages_for_all_of_it(
    runner: Runner, found: PromptGraphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pages are more than the keys that the piece reads, and than the captured size has places for."""
    monkeypatch.setattr(graphs, "_KEYS", (2 * PAGE, 64 * PAGE))
    piece = prompts(2 * PAGE)
    check(runner, found, replace(piece, pages=(tuple(range(8)),)))


@torch.inference_mode()
def test_the_same_logits_and_the_same_cache(runner: Runner, found: PromptGraphs) -> None:
    """Sizes that fit, that are filled up, and that come again after larger ones."""
    for lengths in ((16,), (3,), (1, 9, 5), (30, 2), (2,), (7, 7, 7, 7, 7)):
        check(runner, found, prompts(*lengths, seed=sum(lengths)))
    check(runner, found, prompts(4, 11, prefix=13))
    check(runner, found, replace(prompts(5, 6), logit_rows=torch.tensor([10])))  # the first one goes on later
    check(runner, found, replace(prompts(5, 6), logit_rows=torch.zeros(0, dtype=torch.int64)))
    assert [(shape.rows, shape.requests) for shape in found._graphs] == [(32, 16), (64, 16), (16, 16)]


@torch.inference_mode()
def test_what_is_given_out_is_the_callers_own(found: PromptGraphs) -> None:
    batch, other = prompts(4), prompts(6, seed=3)
    first = found.run(batch, layout_of(batch, PAGE))
    assert first is not None
    kept = first.clone()
    found.run(other, layout_of(other, PAGE))
    assert torch.equal(first, kept)


@torch.inference_mode()
def test_those_not_used_for_longest_are_let_go(found: PromptGraphs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "_MOST", 2)
    for lengths in ((3,), (20,), (3,), (40, 2)):
        batch = prompts(*lengths)
        found.run(batch, layout_of(batch, PAGE))
    assert [(shape.rows, shape.requests) for shape in found._graphs] == [(16, 16), (64, 16)]


@torch.inference_mode()
def test_a_runner_takes_them_for_their_own_cache_and_short_prompts_only(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.models.runner.has_kernels", lambda device: True)
    cache, other = runner.new_cache(PAGES, PAGE), runner.new_cache(PAGES, PAGE)
    runner.capture_prompts(cache, TRASH, None)
    assert runner.prompt_graphs is not None
    batch = prompts(5, 6)
    expected = runner.forward(batch, other)
    assert not runner.prompt_graphs._graphs
    runner.forward(replace(batch, wide=True), cache)
    assert not runner.prompt_graphs._graphs
    assert runner.wide_prompt_graphs is None, "prompts do not share wide passes here"
    torch.testing.assert_close(runner.forward(batch, cache), expected, rtol=1e-5, atol=1e-5)
    assert len(runner.prompt_graphs._graphs) == 1
    runner.prompt_graphs = None


def padded(batch: PassBatch, rows: int) -> PassBatch:
    """Padded with rows that write to a slot that no request uses, as shared passes over prompts are."""
    more = rows - batch.num_rows
    return replace(
        batch,
        input_ids=torch.cat((batch.input_ids, torch.zeros(more, dtype=torch.int64))),
        positions=torch.cat((batch.positions, torch.zeros(more, dtype=torch.int64))),
        slots=torch.cat((batch.slots, torch.full((more,), TRASH))),
        logit_rows=torch.zeros(0, dtype=torch.int64),
        wide=True,
    )


class TestWide:
    """Passes over many rows: the second of a size is captured, if it has the bits of the first."""

    @staticmethod
    def wide(runner: Runner) -> WidePromptGraphs:
        return WidePromptGraphs(
            partial(runner._prompt_pass, wide=True), (24, 32, 2048), filled(runner.new_cache(PAGES, PAGE)), TRASH
        )

    @torch.inference_mode()
    def test_what_fills_up_a_pass_changes_nothing(self, runner: Runner) -> None:
        static = PromptGraphs(runner._prompt_pass, filled(runner.new_cache(PAGES, PAGE)), TRASH)
        plain = filled(runner.new_cache(PAGES, PAGE))
        for lengths in ((13, 9), (7, 3, 2)):  # of the first one something is left in the tensors
            batch = prompts(*lengths)
            runner._prompt_pass(batch.input_ids, batch.positions, layout_of(batch, PAGE), plain, batch.slots[:0])
            filled_up = padded(batch, 24)
            assert static.run(filled_up, layout_of(filled_up, PAGE)) is not None
            for mine, theirs in zip(static.cache.planes, plain.planes, strict=True):
                torch.testing.assert_close(mine[:, :TRASH], theirs[:, :TRASH], rtol=1e-5, atol=1e-5)

    @torch.inference_mode()
    @pytest.mark.parametrize("found", [0, 13])
    def test_a_draft_model_reads_what_is_filled_up(
        self, runner: Runner, monkeypatch: pytest.MonkeyPatch, found: int
    ) -> None:
        """The rest of a long prompt, of which most was found, in a pass of the size that such passes have."""
        monkeypatch.setattr("slipstream.models.runner.has_kernels", lambda device: True)
        drafter = ModelDrafter(runner)
        drafter._cache = filled(runner.new_cache(PAGES, PAGE))
        plain = filled(runner.new_cache(PAGES, PAGE))
        drafter.capture_prompts(TRASH, None)
        assert runner.prompt_graphs is not None
        batch = prompts(9, prefix=found)
        runner._prompt_pass(batch.input_ids, batch.positions, layout_of(batch, PAGE), plain, batch.slots[:0])
        drafter.read(padded(batch, 24))
        assert [shape.rows for shape in runner.prompt_graphs._graphs] == [32]
        for mine, theirs in zip(drafter._cache.planes, plain.planes, strict=True):
            torch.testing.assert_close(mine[:, :TRASH], theirs[:, :TRASH], rtol=1e-5, atol=1e-5)
        runner.prompt_graphs = None

    @torch.inference_mode()
    def test_from_the_second_time_on(self, runner: Runner) -> None:
        found = self.wide(runner)
        batch, other = padded(prompts(13, 9), 24), padded(prompts(5, 4, 8, seed=3), 24)
        assert found.run(batch, layout_of(batch, PAGE)) is None, "the first time as it is"
        assert found.run(padded(prompts(13, 9), 32), layout_of(batch, PAGE)) is None, "and so with another size"
        assert found.run(batch, layout_of(batch, PAGE)) is not None
        assert found.run(other, layout_of(other, PAGE)) is not None
        alone = replace(prompts(22), wide=True)
        for _ in range(3):
            assert found.run(alone, layout_of(alone, PAGE)) is None, "no pass that is shared has such a size"

    @torch.inference_mode()
    def test_one_bit_that_differs_and_nothing_is_captured(self, runner: Runner) -> None:
        found = self.wide(runner)
        run = found._graphs._run

        def other(ids: Tensor, positions: Tensor, layout: RowLayout, cache: KVCache, rows: Tensor) -> Tensor:
            logits = run(ids, positions, layout, cache, rows)
            cache.planes[0][0, layout.slots[0]] *= 1 + 2**-20
            return logits

        found._graphs._run = other
        batch = padded(prompts(13, 9), 24)
        for _ in range(4):
            assert found.run(batch, layout_of(batch, PAGE)) is None
        assert len(found._graphs._graphs) == 1, "it was tried once"

    @torch.inference_mode()
    def test_where_there_is_no_room_to_compare_nothing_is_captured(
        self, runner: Runner, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(graphs_: WidePromptGraphs, batch: PassBatch) -> list[Tensor]:
            raise torch.OutOfMemoryError("no room")

        monkeypatch.setattr(WidePromptGraphs, "_written", full)
        found, batch = self.wide(runner), padded(prompts(13, 9), 24)
        for _ in range(4):
            assert found.run(batch, layout_of(batch, PAGE)) is None

    def test_very_long_ones_are_never(self, runner: Runner) -> None:
        assert self.wide(runner)._sizes == (24, 32)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> graphs.Recorded:
    found = graphs.Recorded()
    monkeypatch.setattr(graphs, "recorded", found)
    return found


def triton_with(listener: Any) -> SimpleNamespace:
    return SimpleNamespace(knobs=SimpleNamespace(compilation=SimpleNamespace(listener=listener)))


def test_kernels_compiled_outside_of_graphs_count(monkeypatch: pytest.MonkeyPatch, counted: graphs.Recorded) -> None:
    heard: list[str] = []
    fake = triton_with(lambda **told: heard.append(told["src"]))
    monkeypatch.setattr(graphs, "triton", fake)
    graphs.count_compiling()
    graphs.count_compiling()  # a second engine
    tell = fake.knobs.compilation.listener
    told: dict[str, Any] = {"metadata": {}, "metadata_group": {}}
    tell(src="one", times=SimpleNamespace(total=250_000), cache_hit=False, **told)
    tell(src="two", times=SimpleNamespace(total=1_000), cache_hit=True, **told)
    assert counted.seconds == pytest.approx(0.251)
    assert (counted.kernels, counted.graphs) == (1, 0)
    with recording():
        tell(src="three", times=SimpleNamespace(total=5_000_000), cache_hit=False, **told)
    assert counted.seconds == pytest.approx(0.251), "a recording is timed as a whole"
    assert heard == ["one", "two", "three"], "the previous listener is still called"


@pytest.mark.parametrize("there", [None, SimpleNamespace()])
def test_without_triton_or_with_an_older_one_nothing_is_asked(there: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "triton", there)
    graphs.count_compiling()
