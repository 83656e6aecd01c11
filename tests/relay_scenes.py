"""A small model's layers with random weights, on any device: by a relay, and layer by layer."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from interpreted import DEVICE
from slipstream.kernels.add_norm import add_norm
from slipstream.kernels.layout import RowLayout
from slipstream.kernels.paged import attend, prepare
from slipstream.kernels.relay import RelayShape, relay
from slipstream.kernels.rotary_write import rotary_write
from slipstream.kernels.row_linear import row_linear, splits_of

SMALL = RelayShape(width=576, heads=9, kv_heads=3, head_dim=64, inner=1536)
"""The default model's."""
EPS = (1e-5, 2e-5)
PAGE = 16


class Layer(NamedTuple):
    """In the order of a relay's table."""

    input_norm: Tensor
    qkv: Tensor
    o: Tensor
    post_norm: Tensor
    gate_up: Tensor
    down: Tensor
    keys: Tensor
    values: Tensor


class Scene:
    """Requests with so many tokens and rows, on scattered pages, and rows that are nobody's."""

    def __init__(
        self, shape: RelayShape, *, layers: int, contexts: tuple[int, ...], rows: tuple[int, ...], padding: int = 0,
        most_keys: int | None = None, dtype: torch.dtype = torch.float16, turned: float = 1.0,
    ) -> None:  # fmt: skip
        generator = torch.Generator().manual_seed(len(contexts))

        def numbers(*size: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(size, generator=generator) * scale).to(dtype).to(DEVICE)

        self.shape = shape
        width, query, inner = shape.width, shape.heads * shape.head_dim, shape.inner
        longest = max(c + r for c, r in zip(contexts, rows, strict=True))
        pages = 1 + torch.randperm(len(contexts) * (longest // PAGE + 1), generator=generator).view(len(contexts), -1)
        self.slots = (pages.numel() + 1) * PAGE
        kept = (self.slots, shape.kv_heads, shape.head_dim)
        self.layers = [
            Layer(
                1 + numbers(width, scale=0.1),
                numbers(shape.joined, width, scale=width**-0.5),
                numbers(width, query, scale=query**-0.5),
                1 + numbers(width, scale=0.1),
                numbers(2 * inner, width, scale=width**-0.5),
                numbers(width, inner, scale=inner**-0.5),
                numbers(*kept),
                numbers(*kept),
            )
            for _ in range(layers)
        ]
        self.used = sum(rows)
        positions = torch.zeros(self.used + padding, dtype=torch.int64)
        slots = torch.zeros_like(positions)  # of rows that are nobody's: the page that is nobody's
        starts = [0]
        for line, context, count in zip(pages, contexts, rows, strict=True):
            at = torch.arange(context, context + count)
            positions[starts[-1] : starts[-1] + count] = at
            slots[starts[-1] : starts[-1] + count] = line[at // PAGE] * PAGE + at % PAGE
            starts.append(starts[-1] + count)
        self.layout = RowLayout(
            positions=positions.to(DEVICE),
            slots=slots.to(DEVICE),
            starts=torch.tensor(starts, dtype=torch.int32, device=DEVICE),
            lanes=torch.arange(len(contexts), device=DEVICE),
            lengths=torch.tensor(contexts, device=DEVICE),
            pages=pages.int().to(DEVICE),
            ancestors=None,
            page_size=PAGE,
            max_keys=most_keys or longest,
        )
        self.x = numbers(len(positions), width)
        turns = 1e4 ** (-torch.arange(0, int(turned * shape.head_dim), 2) / shape.head_dim)
        angles = (torch.arange(longest)[:, None] * turns).repeat(1, 2)
        self.cos, self.sin = angles.cos().to(dtype).to(DEVICE), angles.sin().to(dtype).to(DEVICE)
        self.table = torch.tensor([[tensor.data_ptr() for tensor in layer] for layer in self.layers], device=DEVICE)
        self._before = [(layer.keys.clone(), layer.values.clone()) for layer in self.layers]

    def forget(self) -> None:
        """The cache as it was before the pass."""
        for layer, (keys, values) in zip(self.layers, self._before, strict=True):
            layer.keys.copy_(keys)
            layer.values.copy_(values)

    def caches(self) -> list[Tensor]:
        return [kept[PAGE:].clone() for layer in self.layers for kept in (layer.keys, layer.values)]

    def relayed(self, *, staged: bool) -> tuple[Tensor, Tensor]:
        """The rows that are someone's, and what is still to be added to them."""
        x, delta = relay(
            self.shape, self.table, self.x, self.layout.positions, self.layout, self.cos, self.sin,
            scaling=self.shape.head_dim**-0.5, norm_eps=EPS, slots=self.slots, staged=staged,
        )  # fmt: skip
        return x[: self.used], delta[:, : self.used]

    def by_layers(self) -> tuple[Tensor, Tensor]:
        """The same by the kernels of larger passes, or their twins."""
        layout, heads = self.layout, self.shape.heads
        prepare(layout, heads, self.layers[0].keys)
        x, delta = self.x.clone(), None
        for layer in self.layers:
            normed = add_norm(x, delta, layer.input_norm, EPS[0])
            qkv = row_linear(normed, layer.qkv, splits=splits_of(*layer.qkv.shape), partial=True)
            query = rotary_write(
                qkv, self.cos, self.sin, layout.positions, layout.slots, None, None, layer.keys, layer.values, heads
            )
            attended = attend(query, layer.keys, layer.values, layout, scaling=self.shape.head_dim**-0.5)
            delta = row_linear(attended.flatten(1), layer.o, splits=splits_of(*layer.o.shape), partial=True)
            normed = add_norm(x, delta, layer.post_norm, EPS[1])
            gated = row_linear(normed, layer.gate_up, gated=True)
            delta = row_linear(gated, layer.down, splits=splits_of(*layer.down.shape), partial=True)
        assert delta is not None
        return x[: self.used], delta[:, : self.used]
