"""Passes of a small model over one or two rows, all layers in one launch: for models that a relay can run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from slipstream.kernels.jit import on_gpu
from slipstream.kernels.layout import RowLayout
from slipstream.kernels.relay import RelayShape, relay, takes
from slipstream.kv.cache import KVCache

if TYPE_CHECKING:
    from slipstream.models.gpu import GpuLayer


class Relayed:
    """The layers of one model, where a relay can run them."""

    @staticmethod
    def of(layers: Sequence[GpuLayer], rotary: Tensor) -> Relayed | None:
        """None: too large, or a kind of layer that it does not know."""
        weight = layers[0].qkv.weight
        shapes = {layer.relay_shape for layer in layers}
        how = {(layer.traits.scaling, layer.norm_eps) for layer in layers}
        plain = all(layer.is_plain for layer in layers) and weight.dtype in (torch.bfloat16, torch.float16)
        if not plain or not on_gpu(weight) or len(shapes) != 1 or len(how) != 1 or rotary.dtype != weight.dtype:
            return None
        shape = shapes.pop()
        return Relayed(layers, shape) if shape.fits(weight.device) else None

    def __init__(self, layers: Sequence[GpuLayer], shape: RelayShape) -> None:
        self._layers = layers
        self._shape = shape
        self._tables: WeakKeyDictionary[KVCache, Tensor] = WeakKeyDictionary()

    def takes(self, rows: int, layout: RowLayout) -> bool:
        return takes(self._shape, rows, layout)

    def run(
        self, x: Tensor, positions: Tensor, layout: RowLayout, cache: KVCache, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The rows after all layers [N, D], and what is still to be added to them [splits, N, D]."""
        if cache not in self._tables:
            self._tables[cache] = self._table(cache)
        first = self._layers[0]
        return relay(
            self._shape,
            self._tables[cache],
            x,
            positions,
            layout,
            cos,
            sin,
            scaling=first.traits.scaling,
            norm_eps=first.norm_eps,
            slots=cache.keys(0).shape[0],
        )

    def _table(self, cache: KVCache) -> Tensor:  # [L, 8] int64
        lines = [
            [
                tensor.data_ptr()
                for tensor in (
                    layer.input_norm,
                    layer.qkv.weight,
                    layer.o.weight,
                    layer.post_norm,
                    layer.gate_up.weight,
                    layer.down.weight,
                    cache.keys(layer.index),
                    cache.values(layer.index),
                )
            ]
            for layer in self._layers
        ]
        return torch.tensor(lines, dtype=torch.int64, device=cache.device)
