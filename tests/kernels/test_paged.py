"""Attention over pages: the kernel against its twin, the twin against a walk over plain data, rows against themselves.

Slots that nobody owns hold NaN, so that a key too many shows; padding rows and padding tiles are in every scene.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from interpreted import DEVICE
from slipstream.core.errors import UnsupportedModel
from slipstream.kernels.paged import SPLIT_KEYS, RowLayout, _launch, attend, attend_twin

CLOSE = {torch.float32: 2e-5, torch.float16: 4e-3}


@dataclass(frozen=True)
class Part:
    """What one request brings: rows behind a prefix. No parents: a chain, or a chunk of a prompt."""

    prefix: int
    rows: int
    parents: tuple[int, ...] | None = None  # of each row, -1 for the first

    def above(self, row: int) -> list[int]:
        """The row's ancestors, itself last."""
        if self.parents is None:
            return list(range(row + 1))
        return [*(self.above(self.parents[row]) if row else []), row]


def tree(prefix: int, rows: int, seed: int, reach: int) -> Part:
    """Random parents among the `reach` rows before: 1 is a chain, many is a bush."""
    dice = Random(seed)
    return Part(prefix, rows, (-1, *(dice.randint(max(0, row - reach), row - 1) for row in range(1, rows))))


class Scene:
    """A cache with these requests on scattered pages, and more lanes than requests."""

    def __init__(
        self, *parts: Part, heads: int = 4, kv_heads: int = 2, dim: int = 16, page: int = 4, padding: int = 3,
        dtype: torch.dtype = torch.float32, seed: int = 0,
    ) -> None:  # fmt: skip
        generator = torch.Generator().manual_seed(seed)

        def numbers(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        self.parts, self.page = parts, page
        counts = [-(-(p.prefix + p.rows) // page) for p in parts]
        ids = torch.randperm(sum(counts) + 3, generator=generator).tolist()
        *self.pages, spare = ([ids.pop() for _ in range(count)] for count in (*counts, 1))
        self.lanes = [2 * i + 1 for i in range(len(parts))]  # lane 0 and the even ones are somebody else's
        self.trash = spare[0] * page
        rows = sum(p.rows for p in parts) + padding
        self.query = numbers(rows, heads, dim).to(dtype).to(DEVICE)
        slots = (sum(counts) + 3) * page
        self.keys = torch.full((slots, kv_heads, dim), math.nan)
        self.values = torch.full((slots, kv_heads, dim), math.nan)
        own = [self.slot(i, at) for i, p in enumerate(parts) for at in range(p.prefix + p.rows)] + [self.trash]
        self.keys[own], self.values[own] = numbers(len(own), kv_heads, dim), numbers(len(own), kv_heads, dim)
        self.keys, self.values = self.keys.to(dtype).to(DEVICE), self.values.to(dtype).to(DEVICE)
        self.real = rows - padding
        self.scaling = dim**-0.5

    def slot(self, request: int, at: int) -> int:
        return self.pages[request][at // self.page] * self.page + at % self.page

    def layout(self, *, as_tree: bool | None = None, max_keys: int | None = None) -> RowLayout:
        parts, padding = self.parts, self.query.shape[0] - self.real
        starts = [0]
        for part in parts:
            starts.append(starts[-1] + part.rows)
        ancestors = None
        if any(p.parents for p in parts) if as_tree is None else as_tree:
            above = [[s + a for a in p.above(r)] for s, p in zip(starts, parts, strict=False) for r in range(p.rows)]
            width = max(map(len, above)) + 1
            lines = [[*line, *([-1] * (width - len(line)))] for line in above] + [[-1] * width] * padding
            ancestors = torch.tensor(lines, dtype=torch.int32, device=DEVICE)
        positions = [p.prefix + len(p.above(r)) - 1 for p in parts for r in range(p.rows)]
        lengths = torch.zeros(2 * len(parts) + 1, dtype=torch.int64)
        pages = torch.zeros(lengths.shape[0], max(map(len, self.pages)), dtype=torch.int32)
        for lane, part, own in zip(self.lanes, parts, self.pages, strict=True):
            lengths[lane] = part.prefix
            pages[lane, : len(own)] = torch.tensor(own)
        slots = [self.slot(i, p.prefix + r) for i, p in enumerate(parts) for r in range(p.rows)]
        return RowLayout(
            positions=torch.tensor(positions + [0] * padding, device=DEVICE),
            slots=torch.tensor(slots + [self.trash] * padding, device=DEVICE),
            starts=torch.tensor([*starts, starts[-1]], dtype=torch.int32, device=DEVICE),  # a request that brings none
            lanes=torch.tensor([*self.lanes, 0], device=DEVICE),
            lengths=lengths.to(DEVICE),
            pages=pages.to(DEVICE),
            ancestors=ancestors,
            page_size=self.page,
            max_keys=max_keys or max(p.prefix + p.rows for p in parts),
        )

    def kernel(self, layout: RowLayout | None = None, *, wide: bool = False, **traits: Any) -> Tensor:
        given = {"window": None, "softcap": None, "sinks": None, **traits}
        layout = layout or self.layout()
        out = _launch(self.query, self.keys, self.values, layout, self.scaling, *given.values(), False, wide)
        return out[: self.real]

    def twin(self, **traits: Any) -> Tensor:
        return attend_twin(self.query, self.keys, self.values, self.layout(), scaling=self.scaling, **traits)[
            : self.real
        ]

    def check(self, *, wide: bool = False, max_keys: int | None = None, **traits: Any) -> Tensor:
        ours, close = self.kernel(self.layout(max_keys=max_keys), wide=wide, **traits), CLOSE[self.query.dtype]
        assert ours.isfinite().all()
        torch.testing.assert_close(ours, self.twin(**traits), rtol=close, atol=close)
        return ours

    def walk(self, window: int | None, softcap: float | None, sinks: Tensor | None) -> Tensor:
        """Row by row, head by head, in fp64."""
        lines = []
        heads, group = self.query.shape[1], self.query.shape[1] // self.keys.shape[1]
        row_of_all = 0
        for i, part in enumerate(self.parts):
            for row in range(part.rows):
                seen = [self.slot(i, at) for at in range(part.prefix)]
                seen += [self.slot(i, part.prefix + above) for above in part.above(row)]
                seen = seen if window is None else seen[-window:]
                for head in range(heads):
                    scores = self.keys[seen, head // group].double() @ self.query[row_of_all, head].double()
                    scores *= self.scaling
                    if softcap is not None:
                        scores = softcap * torch.tanh(scores / softcap)
                    total = scores.exp().sum() + (0 if sinks is None else sinks[head].double().exp())
                    lines.append(scores.exp() @ self.values[seen, head // group].double() / total)
                row_of_all += 1
        return torch.stack(lines).view(self.real, heads, -1).float()


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


@pytest.mark.parametrize("dim", [8, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_head_sizes(dim: int, dtype: torch.dtype) -> None:
    Scene(tree(37, 6, 3, 4), Part(70, 1), Part(3, 9), dim=dim, dtype=dtype).check()


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (3, 1), (9, 3), (20, 1), (4, 4)])
@pytest.mark.parametrize("parts", [MIXED[2:], (Part(17, 1), Part(0, 8))], ids=["trees", "chains"])
def test_heads_in_groups(heads: int, kv_heads: int, parts: tuple[Part, ...]) -> None:
    Scene(*parts, heads=heads, kv_heads=kv_heads).check()


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("window", [None, 40])
def test_chunks_of_prompts(wide: bool, window: int | None) -> None:
    Scene(Part(0, 70), Part(50, 33), Part(129, 1)).check(wide=wide, window=window)


@pytest.mark.parametrize("seed", [1, 2, 4])
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
def test_a_long_context_is_read_in_runs(window: int | None) -> None:
    """By several programs, of which the last adds up: trees and chains, some of whose rows cross into the next run."""
    near = SPLIT_KEYS - 4
    parts = (Part(near, 9), tree(near, 12, 5, 2), Part(2 * SPLIT_KEYS + 10, 2), Part(3, 1))
    scene = Scene(*parts, page=16, heads=2, kv_heads=1)
    once = scene.check(window=window)
    again = scene.check(window=window, max_keys=4 * SPLIT_KEYS)  # the counters are zero again, and more does nothing
    assert torch.equal(once, again)


def test_heads_of_two_sizes_are_refused() -> None:
    scene = Scene(Part(0, 1))
    scene.values = scene.values[..., :8].contiguous()
    with pytest.raises(UnsupportedModel, match="16 numbers .* values have 8: .* device=cpu"):
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
                None, None, None, False, False,
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
        tiles = layout.tiles(5)
        assert layout.tiles(5) is tiles  # once a pass
        found = [line for line in tiles.tolist() if line[0] >= 0]
        covered = [row for _, start, end, _ in found for row in range(start, end)]
        assert covered == list(range(sum(p.rows for p in MIXED)))
        assert all(0 < end - start <= 5 for _, start, end, _ in found)
        for lane, start, end, keys in found:
            assert keys == int(layout.positions[start:end].max()) + 1
            assert lane in (1, 3, 5, 7, 9)


def test_on_the_cpu_the_twin_runs() -> None:
    scene = Scene(*MIXED)
    cpu = [t.cpu() for t in (scene.query, scene.keys, scene.values)]
    if DEVICE.type == "cpu":
        out = attend(*cpu, scene.layout(), scaling=scene.scaling)
        assert torch.equal(out[: scene.real], scene.twin())
        assert not out[scene.real :].any()
