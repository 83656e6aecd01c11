"""Requests on scattered pages for the attention kernel: chains, prompt chunks and trees, on any device.

Free slots hold NaN, so that reading a key too many shows. Every scene has padding rows and a request without rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor

from interpreted import DEVICE
from slipstream.kernels.gpu import paged, paged_wide
from slipstream.kernels.gpu.layout import RowLayout
from slipstream.kernels.gpu.paged import attend_twin

CLOSE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


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
        self.pages: list[list[int]]
        *self.pages, spare = ([ids.pop() for _ in range(count)] for count in (*counts, 1))
        self.lanes = [2 * i + 1 for i in range(len(parts))]  # lane 0 and the even ones belong to other requests
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
        given: dict[str, Any] = {"window": None, "softcap": None, "sinks": None, **traits}
        layout = layout or self.layout()
        launch: Any = paged_wide._launch if wide else paged._launch
        out: Tensor = launch(self.query, self.keys, self.values, layout, self.scaling, **given)
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
