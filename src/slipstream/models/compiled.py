"""All layers of a pass in one compiled call (`kernels/cpu_pass.py`), for a trunk of fused layers.

On the CPU a plain step is some 500 calls of torch around 120 products, and the calls cost half as much as the
products. Here the trunk's tensors are gathered as addresses once, the pass's own as it comes, and the team of threads
runs through all layers without coming back to Python.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from slipstream.kernels.codes import LANES, QUERIES, STAGE
from slipstream.kernels.compiled import Compiled, address, bits_of, panel_size
from slipstream.kernels.cpu_records import LAYER, PASS, STAGES
from slipstream.kernels.tiled import TiledLinear
from slipstream.kv.cache import KVCache
from slipstream.models.attention import PassContext
from slipstream.models.batch import PassBatch

if TYPE_CHECKING:
    from slipstream.models.fuse import FusedLayer, FusedNorm

_PRODUCTS = ("qkv", "o", "gate_up", "down")


class CompiledTrunk:
    """Runs the layers of a trunk and its last norm. Holds no weights: the layers that it was made of must live on."""

    def __init__(self, code: Compiled, layers: Sequence[FusedLayer], last: FusedNorm) -> None:
        first = layers[0]
        self._code = code
        self._indices = [layer.layer_idx for layer in layers]
        self._layers = np.zeros(len(layers), LAYER)
        for record, layer in zip(self._layers, layers, strict=True):
            _describe(record, layer)
        self._cache: weakref.ref[KVCache] | None = None  # the one whose addresses the layers have
        hidden, inner = first.qkv.in_features, first.down.in_features
        self._job = np.zeros((), PASS)
        self._widths = {
            "qkv": first.qkv.out_features,
            "attended": first.o.in_features,
            "delta": hidden,
            "gate_up": 2 * inner,
            "active": inner,
        }
        self._scratch: dict[str, Tensor] = {}  # by name: [rows, width]
        self._seen, self._scores = torch.empty(0, 0, dtype=torch.int64), torch.empty(0)  # [threads, longest]
        size = max(panel_size(getattr(layer, name).tiles) for layer in layers for name in _PRODUCTS)
        self._panels = torch.empty(0, size)  # [threads, panel_size]
        self._stages = np.zeros((len(layers) * STAGES + 1) * STAGE, np.uint8)
        _fill(
            self._job,
            hidden=hidden,
            inner=inner,
            heads=first.heads,
            kv_heads=first.kv_heads,
            head_dim=first.head_dim,
            last_norm=last.weight.data_ptr(),
            last_eps=float(last.eps),
            stages=self._stages.ctypes.data,
        )

    @staticmethod
    def of(layers: Sequence[FusedLayer], last: FusedNorm) -> CompiledTrunk | None:
        """A compiled trunk of these layers, or None where they are not of the kind that it runs."""
        if not layers or not all(_alike(layer, layers[0]) for layer in layers):
            return None
        product = layers[0].qkv
        return CompiledTrunk(product.code, layers, last) if isinstance(product, TiledLinear) else None

    def serves(self, current: PassContext) -> bool:
        """Is it a pass that this is made for?"""
        return type(current) is PassContext and current.batch.num_rows > 0 and current.cache.dtype == torch.float32

    def run(self, x: Tensor, current: PassContext, position_embeddings: tuple[Tensor, Tensor]) -> Tensor:  # [N, D]
        """The trunk's last hidden state. Writes K and V as every pass does; x [N, D], the embedded tokens, is lost."""
        batch, cache = current.batch, current.cache
        if self._cache is None or self._cache() is not cache:
            self._use(cache)
        cos, sin = (part[0].contiguous() for part in position_embeddings)  # [N, R]
        x = x.contiguous()
        out = torch.empty_like(x)
        requests = _requests(batch)  # [5, B + 1] in parts: kept alive here, as everything whose address is taken
        self._make_room(batch.num_rows, max(batch.prefix_lengths) + batch.num_rows + 2 * LANES)  # whole vectors
        job = self._job
        at, width = requests.ctypes.data, 8 * (batch.num_requests + 1)
        _fill(
            job,
            rows=batch.num_rows,
            rotary=cos.shape[-1],
            x=x.data_ptr(),
            normed=out.data_ptr(),
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            slots=batch.slots.data_ptr(),
            positions=batch.positions.data_ptr(),
            masks=0 if batch.masks is None else batch.masks.data_ptr(),
            row_starts=at,
            prefixes=at + width,
            page_starts=at + 2 * width,
            trees=at + 3 * width,
            pages=at + 4 * width,
            page_size=cache.page_size,
        )
        self._run_layers(current, x)
        current.keep(len(self._layers), x)
        current.keep_normed(out)
        return out

    def _run_layers(self, current: PassContext, x: Tensor) -> None:
        """The pass from one layer whose hidden states are kept to the next: mostly all layers at once.

        A stretch ends as the pass does: everything is added to x, and its norm is made, which the next overwrites.
        """
        size = len(self._layers)
        wanted = sorted({depth for depth in current.taps.layers if 0 < depth < size})
        current.keep(0, x)
        for first, end in pairwise((0, *wanted, size)):
            at = self._layers.ctypes.data + first * self._layers.itemsize
            _fill(self._job, layers=at, num_layers=end - first)
            self._stages.fill(0)
            self._code.run_pass(self._job)
            if end < size:
                current.keep(end, x)

    def _use(self, cache: KVCache) -> None:
        for record, layer in zip(self._layers, self._indices, strict=True):
            record["keys"], record["values"] = cache.keys(layer).data_ptr(), cache.values(layer).data_ptr()
        self._cache = weakref.ref(cache)

    def _make_room(self, rows: int, longest: int) -> None:
        threads = torch.get_num_threads()
        if not self._scratch or len(self._scratch["qkv"]) < rows:
            self._scratch = {name: torch.empty(max(rows, 64), width) for name, width in self._widths.items()}
            _fill(self._job, **{name: tensor.data_ptr() for name, tensor in self._scratch.items()})
        if self._seen.shape[0] < threads or self._seen.shape[1] < longest:
            longest = max(1024, 2 * longest)
            self._seen = torch.empty(threads, longest, dtype=torch.int64)
            self._scores = torch.empty(threads * QUERIES * (longest + 2 * int(self._job["head_dim"])))
            self._panels = torch.empty(threads, self._panels.shape[1])
            _fill(self._job, panels=self._panels.data_ptr(), panel_size=self._panels.shape[1])
            _fill(self._job, seen=self._seen.data_ptr(), scores=self._scores.data_ptr(), longest=longest)


def _requests(batch: PassBatch) -> np.ndarray[Any, np.dtype[np.int64]]:
    """What the pass knows by request, one after another: 4 lists of B + 1 numbers, then all pages."""
    page_starts = [0]
    for pages in batch.pages:
        page_starts.append(page_starts[-1] + len(pages))
    all_pages = [page for pages in batch.pages for page in pages]
    return np.array(
        [*batch.row_starts, *batch.prefix_lengths, 0, *page_starts, *batch.is_tree, 0, *all_pages], dtype=np.int64
    )


def _describe(record: Any, layer: FusedLayer) -> None:
    for name in _PRODUCTS:
        product: TiledLinear = getattr(layer, name)
        record[name], record[f"{name}_bits"] = address(product.tiles), bits_of(product.tiles)
        record[f"{name}_bias"] = 0 if product.bias is None else product.bias.data_ptr()
    for name, norm in (
        ("input", layer.input_norm),
        ("post", layer.post_norm),
        ("q", layer.q_norm),
        ("k", layer.k_norm),
    ):
        if norm is not None:
            record[f"{name}_norm"], record[f"{name}_eps"] = norm.weight.data_ptr(), float(norm.eps)
    record["window"] = layer.traits.window or 0
    record["scaling"] = layer.traits.scaling


def _alike(layer: FusedLayer, first: FusedLayer) -> bool:
    """Has it the first layer's sizes, and nothing that the compiled code does not do?"""
    norms = [norm for norm in (layer.input_norm, layer.post_norm, layer.q_norm, layer.k_norm) if norm is not None]
    return (
        all(isinstance(getattr(layer, name), TiledLinear) for name in _PRODUCTS)
        and all(_size(getattr(layer, name)) == _size(getattr(first, name)) for name in _PRODUCTS)
        and (layer.heads, layer.kv_heads, layer.head_dim) == (first.heads, first.kv_heads, first.head_dim)
        and layer.heads % layer.kv_heads == 0
        and layer.traits.softcap is None
        and layer.traits.sinks is None
        and layer.traits.scaling > 0
        and all(norm.weight.dtype == torch.float32 for norm in norms)
    )


def _size(product: TiledLinear) -> tuple[int, int]:
    return product.out_features, product.in_features


def _fill(record: Any, **values: float) -> None:
    for name, value in values.items():
        record[name] = value
