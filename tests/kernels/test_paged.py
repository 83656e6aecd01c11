"""Attention over pages: the kernel and its twin against a walk over plain data, and rows against themselves."""

from __future__ import annotations

from random import Random

import pytest
import torch

from interpreted import DEVICE
from paged_scenes import Part, Scene, tree
from slipstream.core.errors import UnsupportedModel
from slipstream.kernels.gpu import paged
from slipstream.kernels.gpu.layout import RowLayout
from slipstream.kernels.gpu.paged import SPLIT_KEYS, _launch, attend, attend_twin

MIXED = (Part(0, 5), Part(21, 1), tree(9, 8, 1, 8), tree(30, 4, 2, 3), Part(6, 2))


@pytest.mark.parametrize(
    ("window", "softcap", "with_sinks"),
    [(None, None, False), (1, None, False), (6, 0.7, False), (None, 0.7, True), (6, None, True), (6, 0.7, True)],
)
def test_the_twin_and_the_kernel_match_the_walk(window: int | None, softcap: float | None, with_sinks: bool) -> None:
    scene = Scene(*MIXED)
    sinks = torch.randn(4, generator=torch.Generator().manual_seed(9)).to(DEVICE) if with_sinks else None
    expected = scene.walk(window, softcap, sinks)
    torch.testing.assert_close(scene.twin(window=window, softcap=softcap, sinks=sinks), expected, rtol=1e-5, atol=1e-5)
    ours = scene.check(window=window, softcap=softcap, sinks=sinks)
    torch.testing.assert_close(ours, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("dim", "dtype"),
    [*((dim, torch.float32) for dim in (8, 64, 80, 96, 128, 256)), (64, torch.float16), (256, torch.float16)],
)
def test_head_sizes(dim: int, dtype: torch.dtype) -> None:
    Scene(tree(37, 6, 3, 4), Part(70, 1), Part(3, 9), dim=dim, dtype=dtype).check()


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (9, 3), (20, 1)])
@pytest.mark.parametrize("parts", [MIXED[2:], (Part(17, 1), Part(0, 8))], ids=["trees", "chains"])
def test_heads_in_groups(heads: int, kv_heads: int, parts: tuple[Part, ...]) -> None:
    Scene(*parts, heads=heads, kv_heads=kv_heads).check()


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("window", [None, 40])
def test_chunks_of_prompts(wide: bool, window: int | None) -> None:
    Scene(Part(0, 64), Part(50, 33), Part(129, 1)).check(wide=wide, window=window)


@pytest.mark.parametrize("seed", [1, 4])
def test_random_trees(seed: int) -> None:
    """The largest ones too: 64 rows, bushy or deep."""
    dice = Random(seed)
    parts = [
        tree(dice.randrange(90), dice.choice((1, 2, 17, 64)), dice.randrange(99), dice.choice((1, 3, 63)))
        for _ in range(3)
    ]
    Scene(*parts, page=dice.choice((1, 3, 16)), seed=seed, padding=dice.choice((0, 1, 20))).check(
        window=dice.choice((None, 50))
    )


@pytest.mark.parametrize("window", [None, 300])
def test_a_long_context_is_read_in_runs(monkeypatch: pytest.MonkeyPatch, window: int | None) -> None:
    """By several programs, of which the last adds up, or by one: trees and chains, some with rows across a border."""
    near = SPLIT_KEYS - 4
    parts = (Part(near, 9), tree(near, 12, 5, 2), Part(2 * SPLIT_KEYS + 10, 2), Part(3, 1))
    scene = Scene(*parts, page=16, heads=2, kv_heads=1)
    once = scene.check(window=window)
    again = scene.check(window=window, max_keys=4 * SPLIT_KEYS)  # the counters are zero again, and more does nothing
    assert torch.equal(once, again)
    monkeypatch.setattr(paged, "_MANY_PROGRAMS", 1)
    monkeypatch.setattr(paged, "_MOST_RUNS", 1)  # one program reads them all, and adds up alike
    assert torch.equal(once, scene.check(window=window))


def test_the_size_of_tiles_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows of trees are divided among many programs: to the bit the same as in whole tiles."""
    scene = Scene(tree(21, 8, 1, 8), tree(9, 5, 2, 3))
    small, tables = scene.check(), scene.layout()
    assert paged._tile_rows(tables, 4, 2) == 1
    monkeypatch.setattr(paged, "_MANY_PROGRAMS", 0)
    assert paged._tile_rows(tables, 4, 2) == 8
    assert torch.equal(scene.check(), small)


def test_heads_of_two_sizes_are_refused() -> None:
    scene = Scene(Part(0, 1))
    scene.values = scene.values[..., :8].contiguous()
    with pytest.raises(UnsupportedModel, match=r"size 16 and values of size 8: .* device=cpu"):
        scene.kernel()


def test_with_sinks_a_row_that_sees_only_itself() -> None:
    scene = Scene(Part(0, 1), padding=0)
    sinks = torch.full((4,), 50.0, device=DEVICE)
    assert scene.check(sinks=sinks).abs().max() < 1e-15 < scene.check().abs().max()


class TestRowIndependence:
    """To the last bit, in whatever company: the interpreter adds up in the kernel's order."""

    @pytest.mark.parametrize("prefix", [0, 126, SPLIT_KEYS - 3])
    def test_a_chain_its_rows_one_by_one_and_the_same_as_a_tree(self, prefix: int) -> None:
        scene = Scene(Part(prefix, 6), padding=0, page=16, heads=2, kv_heads=1)
        chain = scene.kernel(scene.layout(max_keys=2 * SPLIT_KEYS))
        as_tree = scene.kernel(scene.layout(as_tree=True, max_keys=2 * SPLIT_KEYS))
        assert torch.equal(chain, as_tree)
        for row in range(6):
            alone = scene.layout(max_keys=2 * SPLIT_KEYS)
            step = RowLayout(
                positions=alone.positions[row : row + 1],
                slots=alone.slots[row : row + 1],
                starts=torch.tensor([0, 1], dtype=torch.int32, device=DEVICE),
                lanes=alone.lanes[:1],
                lengths=alone.lengths + row,
                pages=alone.pages,
                ancestors=None,
                page_size=16,
                max_keys=2 * SPLIT_KEYS,
            )
            out = _launch(
                scene.query[row : row + 1].contiguous(), scene.keys, scene.values, step, scene.scaling,
                None, None, None,
            )  # fmt: skip
            assert torch.equal(out[0], chain[row])

    def test_a_branch_is_what_its_path_would_be_as_a_chain(self) -> None:
        """Node 2 hangs from node 0: its row is that of a chain of three, whose entries lie elsewhere."""
        bushy = Scene(Part(13, 5, (-1, 0, 0, 2, 1)), padding=0)
        out = bushy.kernel()
        path = (0, 2, 3)
        chain = Scene(Part(13, 3), padding=0)
        chain.query = bushy.query[list(path)].contiguous()
        for at in range(13):
            self._copy(bushy, bushy.slot(0, at), chain, chain.slot(0, at))
        for place, row in enumerate(path):
            self._copy(bushy, bushy.slot(0, 13 + row), chain, chain.slot(0, 13 + place))
        assert torch.equal(chain.kernel(), out[list(path)])

    @staticmethod
    def _copy(source: Scene, src: int, target: Scene, dst: int) -> None:
        target.keys[dst], target.values[dst] = source.keys[src], source.values[src]


def test_tiles_cover_every_row_once() -> None:
    layout = Scene(*MIXED).layout()
    if DEVICE.type == "cpu":
        tiles = layout.table(5, 16).tiles
        assert layout.table(5, 16).tiles is tiles  # once a pass
        found = [line for line in tiles.tolist() if line[0] >= 0]
        covered = [row for _, start, end, _ in found for row in range(start, end)]
        assert covered == list(range(sum(p.rows for p in MIXED)))
        assert all(0 < end - start <= 5 for _, start, end, _ in found)
        for lane, start, end, keys in found:
            assert keys == int(layout.positions[start:end].max()) + 1
            assert lane in (1, 3, 5, 7, 9)


def test_on_the_cpu_the_twin_runs() -> None:
    scene = Scene(*MIXED)
    if DEVICE.type == "cpu":
        out = attend(scene.query, scene.keys, scene.values, scene.layout(), scaling=scene.scaling)
        assert torch.equal(out[: scene.real], scene.twin())
        assert not out[scene.real :].any()


@pytest.mark.parametrize("window", [None, 9])
def test_rows_whose_ancestors_were_in_earlier_passes(window: int | None) -> None:
    """The last rows of trees alone, the others being guests of the cache: as all of them together."""
    scene = Scene(tree(9, 8, 1, 8), tree(30, 5, 2, 3), tree(0, 6, 4, 2), padding=0)
    whole = scene.layout()
    assert whole.ancestors is not None
    kept = torch.tensor([5, 6, 7, 11, 12, 17], device=DEVICE)  # of 8, 5 and 6 rows
    some = RowLayout(
        positions=whole.positions[kept],
        slots=whole.slots[kept],
        starts=torch.tensor([0, 3, 5, 6, 6], dtype=torch.int32, device=DEVICE),
        lanes=whole.lanes,
        lengths=whole.lengths,
        pages=whole.pages,
        ancestors=whole.ancestors[kept],
        page_size=whole.page_size,
        max_keys=whole.max_keys,
        guests=whole.slots,
    )
    expected = scene.walk(window, None, None)[kept]
    query, scaling = scene.query[kept], scene.scaling
    twin = attend_twin(query, scene.keys, scene.values, some, scaling=scaling, window=window)
    torch.testing.assert_close(twin, expected, rtol=1e-5, atol=1e-5)
    ours = _launch(query, scene.keys, scene.values, some, scaling, window, None, None)
    torch.testing.assert_close(ours, expected, rtol=2e-5, atol=2e-5)
    assert torch.equal(ours, scene.kernel(window=window)[kept])  # to the bit
