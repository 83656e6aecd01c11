"""Passes of a small model over one or two rows as one launch: where a relay can run its layers, and does it right.

A relay must give the bits of the kernels that serve larger passes. That rests on this chip, its compiler and this
model's shape; so before the first pass of a size both are run on random rows, and a relay that differs, or cannot be
launched, is not used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from slipstream.kernels.jit import on_gpu
from slipstream.kernels.layout import RowLayout
from slipstream.kernels.relay import RelayShape, relay, takes
from slipstream.kv.cache import KVCache, LayerShape
from slipstream.models.device_pass import DevicePass

if TYPE_CHECKING:
    from slipstream.models.gpu import GpuLayer

ByLayers = Callable[[Tensor, DevicePass, Tensor], tuple[Tensor, Tensor]]
"""Rows, their pass and their positions: the rows after all layers, and what is still to be added to them."""

_CONTEXT, _PAGE = 21, 16  # of the trial: on two pages


class Relayed:
    """The layers of one model as a relay."""

    @staticmethod
    def of(layers: Sequence[GpuLayer], cos: Tensor, sin: Tensor) -> Relayed | None:
        """None: too large, or a kind of layer that it does not know. cos, sin: of the kind that rows come in."""
        first = layers[0]
        shape, dtype = first.relay_shape, first.qkv.weight.dtype
        if (
            not on_gpu(first.qkv.weight)
            or dtype not in (torch.bfloat16, torch.float16)
            or cos.dtype != dtype
            or not all(layer.is_plain and layer.relay_shape == shape for layer in layers)
            or any(layer.traits.scaling != first.traits.scaling or layer.norm_eps != first.norm_eps for layer in layers)
            or not all(_is_as(tensors_of(layer), shape, dtype) for layer in layers)
            or not shape.fits(first.qkv.weight.device)
        ):
            return None
        return Relayed(layers, shape, cos, sin)

    def __init__(self, layers: Sequence[GpuLayer], shape: RelayShape, cos: Tensor, sin: Tensor) -> None:
        self._layers, self._shape, self._cos, self._sin = layers, shape, cos, sin
        self._tables: WeakKeyDictionary[KVCache, Tensor] = WeakKeyDictionary()
        self._agrees: dict[int, bool] = {}  # by rows

    def takes(self, rows: int, layout: RowLayout, by_layers: ByLayers) -> bool:
        """Is this a pass for it? The first of a size is tried both ways, which cannot be done while it is captured."""
        if not takes(self._shape, rows, layout):
            return False
        if rows not in self._agrees:
            if torch.cuda.is_current_stream_capturing():
                return False
            self._agrees[rows] = self.agrees(rows, by_layers)
        return self._agrees[rows]

    def run(self, x: Tensor, current: DevicePass, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The same by the relay."""
        cache, first = current.cache, self._layers[0]
        if cache not in self._tables:
            self._tables[cache] = self._table(cache)
        return relay(
            self._shape,
            self._tables[cache],
            x,
            positions,
            current.layout,
            self._cos,
            self._sin,
            scaling=first.traits.scaling,
            norm_eps=first.norm_eps,
            slots=cache.keys(0).shape[0],
        )

    def agrees(self, rows: int, by_layers: ByLayers) -> bool:
        """Are the rows, and what they leave in the cache, the same to the bit both ways?"""
        device, dtype = self._cos.device, self._layers[0].qkv.weight.dtype
        generator = torch.Generator(device).manual_seed(rows)

        def numbers(*size: int) -> Tensor:
            return torch.randn(size, generator=generator, device=device).to(dtype)

        kept = LayerShape(self._shape.kv_heads, self._shape.head_dim, self._shape.head_dim)
        at = torch.arange(_CONTEXT, _CONTEXT + rows, device=device)
        pages = -(-(_CONTEXT + rows) // _PAGE)
        layout = RowLayout(
            positions=at,
            slots=at,
            starts=torch.tensor([0, rows], dtype=torch.int32, device=device),
            lanes=torch.zeros(1, dtype=torch.int64, device=device),
            lengths=at[:1],
            pages=torch.arange(pages, dtype=torch.int32, device=device)[None],
            ancestors=None,
            page_size=_PAGE,
            max_keys=_CONTEXT + rows,
        )
        caches = [KVCache([kept] * len(self._layers), pages, _PAGE, dtype, device) for _ in range(2)]
        x = numbers(rows, self._shape.width)
        before = numbers(pages * _PAGE, kept.kv_heads, kept.key_dim)
        found = []
        for cache, way in zip(caches, (by_layers, self.run), strict=True):
            for layer in range(len(self._layers)):
                cache.keys(layer)[:] = before
                cache.values(layer)[:] = before
            try:
                found.append(way(x.clone(), DevicePass(layout, cache), at))
            except RuntimeError:  # a launch for which there is no room after all
                return False
        (ours, our_delta), (theirs, their_delta) = found
        return (
            torch.equal(ours, theirs)
            and torch.equal(our_delta, their_delta)
            and all(torch.equal(a, b) for a, b in zip(caches[0].planes, caches[1].planes, strict=True))
        )

    def _table(self, cache: KVCache) -> Tensor:  # [L, 8] int64
        """Where everything lies. The cache is as the layers are: they made it."""
        lines = []
        for layer in self._layers:
            tensors = [*tensors_of(layer), cache.keys(layer.index), cache.values(layer.index)]
            lines.append([tensor.data_ptr() for tensor in tensors])
        assert all(address % 16 == 0 for line in lines for address in line), "a cache that begins at an odd place"
        return torch.tensor(lines, dtype=torch.int64, device=cache.device)


def tensors_of(layer: GpuLayer) -> list[Tensor]:
    """A layer's norms and weights in the order of a relay's table."""
    products = (layer.qkv, layer.o, layer.gate_up, layer.down)
    qkv, o, gate_up, down = (product.weight for product in products)
    return [layer.input_norm, qkv, o, layer.post_norm, gate_up, down]


def _is_as(tensors: Sequence[Tensor], shape: RelayShape, dtype: torch.dtype) -> bool:
    """Are a layer's tensors what the kernel takes them for?"""
    width, query = shape.width, shape.heads * shape.head_dim
    sizes = [(width,), (shape.joined, width), (width, query), (width,), (2 * shape.inner, width), (width, shape.inner)]
    return all(
        tuple(t.shape) == size and t.dtype == dtype and t.is_contiguous() and t.data_ptr() % 16 == 0
        for t, size in zip(tensors, sizes, strict=True)
    )
