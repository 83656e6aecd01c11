"""Fused decoder layers and their trunk, for layers of Llama's shape; on a CPU as one compiled call for all layers.

A fused layer has joined QKV and gate-up products, one rotary step for queries and keys, and no bookkeeping between the
parts. Module names do not prove what a layer computes (Granite scales its residuals, SmolLM3 has layers without rotary
embedding), so a swap stays only if `parity.py` finds the same logits.

On a CPU a plain step is some 500 calls of torch around 120 products, and the calls take half as long as the products.
`CompiledTrunk` collects the addresses of the trunk's tensors once and those of a pass when it comes, and the team of
threads runs through all layers without returning to Python (`kernels/cpu/decoder.py`).
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from slipstream.kernels.cpu.arena import Arena
from slipstream.kernels.cpu.compiled import Compiled, address, bits_of, panel_size
from slipstream.kernels.cpu.interface import CROWD, LANES, LAYER, PASS, STAGE, STAGES
from slipstream.kernels.cpu.tiled import TiledLinear, join
from slipstream.kv.cache import KVCache
from slipstream.models.attention import AttentionTraits, PassContext, running_pass
from slipstream.models.batch import PassBatch

_TRUNK = {"embed_tokens", "layers", "norm", "rotary_emb"}
_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
_MLP = {"gate_proj", "up_proj", "down_proj"}
_PRODUCTS = ("qkv", "o", "gate_up", "down")


class FusedNorm(nn.Module):
    """RMS norm in few operations, in fp32 inside as in the models."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight = weight.detach().clone()  # a copy: a view keeps a page of the mapped file resident
        self.eps = torch.tensor(eps, dtype=torch.float32, device=weight.device)

    def forward(self, x: Tensor) -> Tensor:
        wide = x if x.dtype == torch.float32 else x.float()
        norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        scaled = wide * torch.addcmul(self.eps, norm, norm, value=1 / x.shape[-1]).rsqrt_()
        return (scaled if wide is x else scaled.to(x.dtype)) * self.weight


class FusedLayer(nn.Module):
    """A decoder layer of Llama's shape (also Mistral's, Qwen2's and Qwen3's, which norms queries and keys).

    traits: the attention parameters that a probe saw in the replaced layer.
    """

    def __init__(self, layer: nn.Module, traits: AttentionTraits, arena: Arena) -> None:
        super().__init__()
        attention, mlp = _child(layer, "self_attn"), _child(layer, "mlp")
        self.layer_idx = cast(int, attention.layer_idx)
        self.head_dim = cast(int, attention.head_dim)
        self.traits = traits
        q, k, v = (cast(nn.Linear, _child(attention, name)) for name in ("q_proj", "k_proj", "v_proj"))
        self.heads, self.kv_heads = q.out_features // self.head_dim, k.out_features // self.head_dim
        self.qkv = join(q, k, v, arena=arena)
        self.o = join(cast(nn.Linear, _child(attention, "o_proj")), arena=arena)
        gate, up = (cast(nn.Linear, _child(mlp, name)) for name in ("gate_proj", "up_proj"))
        self.gate_up = join(gate, up, arena=arena)
        self.down = join(cast(nn.Linear, _child(mlp, "down_proj")), arena=arena)
        self.input_norm = _norm(layer, "input_layernorm")
        self.post_norm = _norm(layer, "post_attention_layernorm")
        self.q_norm = _norm(attention, "q_norm") if hasattr(attention, "q_norm") else None
        self.k_norm = _norm(attention, "k_norm") if hasattr(attention, "k_norm") else None
        # looked up once: finding a module and calling it takes longer than a small product on a CPU
        self._parts = [
            part.forward for part in (self.input_norm, self.qkv, self.o, self.post_norm, self.gate_up, self.down)
        ]

    def forward(self, hidden: Tensor, *, position_embeddings: tuple[Tensor, Tensor], **_: Any) -> Tensor:
        """Called by transformers: hidden is [1, N, D]."""
        return self.run(hidden[0], running_pass(), position_embeddings)[None]

    def run(self, x: Tensor, current: PassContext, position_embeddings: tuple[Tensor, Tensor]) -> Tensor:  # [N, D]
        input_norm, qkv, o, post_norm, gate_up, down = self._parts
        heads = qkv(input_norm(x)).view(x.shape[0], -1, self.head_dim)
        turned, value = heads.split((self.heads + self.kv_heads, self.kv_heads), dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = turned.split((self.heads, self.kv_heads), dim=1)
            turned = torch.cat((self.q_norm(query), self.k_norm(key)), dim=1)
        query, key = current.rotate(turned, position_embeddings).split((self.heads, self.kv_heads), dim=1)
        x = x + o(current.attend(self.layer_idx, query, key, value, self.traits).flatten(1))
        gate, up = gate_up(post_norm(x)).chunk(2, dim=-1)
        return x + down(F.silu(gate) * up)

    @staticmethod
    def fits(layer: nn.Module) -> bool:
        """Whether `layer` has the parts of a decoder layer of Llama's shape, and no others."""
        if {name for name, _ in layer.named_children()} != _LAYER:
            return False
        attention, mlp = _child(layer, "self_attn"), _child(layer, "mlp")
        activation = getattr(mlp, "act_fn", None)
        return (
            {name for name, child in attention.named_children()} in (_ATTENTION, _ATTENTION | {"q_norm", "k_norm"})
            and {name for name, child in mlp.named_children()} - {"act_fn"} == _MLP
            and all(type(_child(attention, name)) is nn.Linear for name in _ATTENTION)
            and all(type(_child(mlp, name)) is nn.Linear for name in _MLP)
            and "silu" in type(activation).__name__.lower()
            and hasattr(attention, "layer_idx")
            and all(_is_norm(norm) for norm in (*layer.children(), *attention.children()) if hasattr(norm, "eps"))
            and all(_is_norm(_child(layer, name)) for name in ("input_layernorm", "post_attention_layernorm"))
        )


class CompiledTrunk:
    """Runs the layers of a trunk and its last norm. Holds no weights: the caller keeps the layers alive."""

    def __init__(self, code: Compiled, layers: Sequence[FusedLayer], last: FusedNorm) -> None:
        first = layers[0]
        self._code = code
        self._indices = [layer.layer_idx for layer in layers]
        self._layers = np.zeros(len(layers), LAYER)
        for record, layer in zip(self._layers, layers, strict=True):
            _describe(record, layer)
        self._cache: weakref.ref[KVCache] | None = None  # the cache whose addresses are in the records
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
        """A compiled trunk of these layers, or None if they are not of its kind."""
        if not layers or not all(_alike(layer, layers[0]) for layer in layers):
            return None
        product = layers[0].qkv
        return CompiledTrunk(product.code, layers, last) if isinstance(product, TiledLinear) else None

    def serves(self, current: PassContext) -> bool:
        """Whether this pass can be run."""
        return type(current) is PassContext and current.batch.num_rows > 0 and current.cache.dtype == torch.float32

    def run(self, x: Tensor, current: PassContext, position_embeddings: tuple[Tensor, Tensor]) -> Tensor:  # [N, D]
        """The trunk's last hidden state. Writes K and V; overwrites x [N, D], the embedded tokens."""
        batch, cache = current.batch, current.cache
        if self._cache is None or self._cache() is not cache:
            self._use(cache)
        cos, sin = (part[0].contiguous() for part in position_embeddings)  # [N, R]
        x = x.contiguous()
        out = torch.empty_like(x)
        requests = _requests(batch)  # a local name keeps it alive, as all tensors whose address is taken
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
        """Run all layers, in stretches that end at layers whose hidden states are kept: usually one stretch.

        Each stretch ends like a pass: its output is added to x, and the norm of x is computed, which the next stretch
        overwrites.
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
            longest = max(1024, longest + longest // 4)
            self._seen = torch.empty(threads, longest, dtype=torch.int64)
            self._scores = torch.empty(threads * CROWD * (longest + 2 * int(self._job["head_dim"])))
            self._panels = torch.empty(threads, self._panels.shape[1])
            _fill(self._job, panels=self._panels.data_ptr(), panel_size=self._panels.shape[1])
            _fill(self._job, seen=self._seen.data_ptr(), scores=self._scores.data_ptr(), longest=longest)


def _requests(batch: PassBatch) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Numbers by request, end to end: 4 lists of B + 1 numbers, then all pages."""
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
    """Whether a layer has the first layer's sizes, and nothing that the compiled code lacks."""
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


class FusedTrunk(nn.Module):
    """Embedding, fused layers and last norm of a decoder, without the generic steps of transformers between them."""

    def __init__(self, trunk: nn.Module) -> None:
        super().__init__()
        self.embed_tokens = _child(trunk, "embed_tokens")
        self.rotary_emb = _child(trunk, "rotary_emb")
        self.layers = cast(nn.ModuleList, _child(trunk, "layers"))
        self.norm = _norm(trunk, "norm")
        fused = [cast(FusedLayer, layer) for layer in self.layers]
        self._runs = [layer.run for layer in fused]
        self.compiled = CompiledTrunk.of(fused, self.norm)

    def forward(self, input_ids: Tensor, position_ids: Tensor, **_: Any) -> BaseModelOutputWithPast:  # both [1, N]
        current = running_pass()
        x = self.embed_tokens(input_ids[0])
        position_embeddings = self.rotary_emb(x, position_ids)
        if self.compiled is not None and self.compiled.serves(current):
            x = self.compiled.run(x, current, position_embeddings)
        else:
            for depth, run in enumerate(self._runs):
                current.keep(depth, x)
                x = run(x, current, position_embeddings)
            current.keep(len(self._runs), x)
            x = self.norm(x)
            current.keep_normed(x)
        return BaseModelOutputWithPast(last_hidden_state=x[None])

    def get_input_embeddings(self) -> nn.Module:
        return self.embed_tokens

    @staticmethod
    def fits(module: nn.Module) -> bool:
        """Whether `module` is the trunk of a decoder whose layers are all fused already."""
        return (
            {name for name, _ in module.named_children()} == _TRUNK
            and isinstance(module.layers, nn.ModuleList)
            and all(isinstance(layer, FusedLayer) for layer in module.layers)
            and _is_norm(_child(module, "norm"))
            and not isinstance(module, FusedTrunk)
        )


def _is_norm(module: nn.Module) -> bool:
    return hasattr(module, "variance_epsilon") and hasattr(module, "weight")


def _norm(parent: nn.Module, name: str) -> FusedNorm:
    norm = _child(parent, name)
    return FusedNorm(cast(Tensor, norm.weight), float(cast(float, norm.variance_epsilon)))


def _child(module: nn.Module, name: str) -> nn.Module:
    return cast(nn.Module, getattr(module, name))
