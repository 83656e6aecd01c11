"""EAGLE heads: one decoder layer that continues from the target's hidden states instead of from tokens alone.

A row reads a token and a feature. The first feature is the target's (EAGLE-1: its last hidden state; EAGLE-3: an early,
a middle and a late one, combined by `fc`); later ones are the head's own hidden states.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from slipstream.kernels.cpu.arena import Arena
from slipstream.kernels.cpu.tiled import join
from slipstream.kernels.gpu.jit import has_kernels
from slipstream.kernels.gpu.norms import add_norm, add_norm_at, join_feature
from slipstream.kernels.gpu.row_linear import row_linear
from slipstream.kernels.linear import PackedLinear, narrow_join
from slipstream.kv.cache import LayerShape
from slipstream.models.attention import AttentionTraits, PassContext
from slipstream.models.build import prepare
from slipstream.models.fused import FusedNorm
from slipstream.models.gpu import WIDE_ROWS, DevicePass, GpuLayer, Product
from slipstream.models.heads.base import HeadStates, Weights
from slipstream.models.heads.checkpoint import HeadFiles, TargetShape
from slipstream.models.heads.eagle_files import EagleCheckpoint, EagleShape, read_eagle
from slipstream.models.runner import Runner
from slipstream.models.taps import Taps

_LARGE = 64 << 20
"""Bytes of a head's products from which on reading takes longer than launching."""
_WORTH_WIDENING = 1024
"""With more rows, a product takes longer than widening an 8-bit weight to 16 bits."""
_TABLE = "embed_tokens.weight"
"""Looked up, so its size does not count as read."""


class EagleHead(nn.Module):
    """A `Head` of either generation, on the target's device and in its dtype.

    embedding, lm_head: the target's, for tensors that the checkpoint lacks. kept: the format of its products' weights:
    8 bits (fp8), the target's dtype (plain), or 8 bits if reading them dominates the time (auto).
    """

    def __init__(
        self, checkpoint: EagleCheckpoint, embedding: nn.Module, lm_head: nn.Module, kept: Weights = "auto"
    ) -> None:
        super().__init__()
        shape = self.shape = checkpoint.shape
        table = cast(Tensor, embedding.weight)
        self.dtype, self._device = table.dtype, table.device
        weights = {
            name: tensor.to(self._device, self.dtype)
            for name, tensor in checkpoint.tensors.items()
            if name not in ("d2t", "t2d")
        }
        read = sum(_bytes(name, tensor, False) for name, tensor in weights.items() if name != _TABLE)
        self.narrow = kept == "fp8" or (kept == "auto" and has_kernels(self._device) and read >= _LARGE)
        self.weights_bytes = sum(_bytes(name, tensor, self.narrow) for name, tensor in weights.items())
        self.vocab = _target_ids(checkpoint, self._device)
        if self._device.type == "cpu" and self.dtype == torch.float32:
            prepare()
        arena = Arena()
        self.fc = _join(weights, "fc", arena=arena, narrow=self.narrow)
        self._embedding = embedding
        if _TABLE in weights:
            self._embedding = nn.Embedding.from_pretrained(weights[_TABLE], freeze=True)
        self._last_id = cast(Tensor, self._embedding.weight).shape[0] - 1
        self._lm_head = lm_head
        if "lm_head.weight" in weights:
            self._lm_head = _join(weights, "lm_head", arena=arena, narrow=self.narrow)
        self._layers = nn.ModuleList(
            EagleLayer(i, shape, _below(weights, f"layers.{i}."), arena, narrow=self.narrow)
            for i in range(shape.num_layers)
        )
        norms = {
            name: FusedNorm(weights[f"{name}.weight"], shape.norm_eps) if f"{name}.weight" in weights else None
            for name in ("layers.0.hidden_norm", "norm", "input_norm")
        }
        self.hidden_norm, self.norm, self.input_norm = norms.values()
        self.fc_norms = nn.ModuleList(
            FusedNorm(weights[f"fc_norm.{i}.weight"], shape.norm_eps) for i in range(shape.num_taps * shape.fc_norm)
        )
        self._rotary = _rotary(shape).to(self._device)
        self._kernels = _Kernels(self) if has_kernels(self._device) else None

    @staticmethod
    def open(folder: Path, target: Runner, kept: Weights = "auto") -> EagleHead:
        """The head in `folder`, in any known layout, for this target."""
        checkpoint = read_eagle(HeadFiles.read(folder), TargetShape.of(target))
        embedding, lm_head = target.model.get_input_embeddings(), target.model.get_output_embeddings()
        return EagleHead(checkpoint, embedding, lm_head, kept)

    @property
    def taps(self) -> Taps:
        return self.shape.taps

    @property
    def layers(self) -> list[LayerShape]:
        return [LayerShape(self.shape.kv_heads, self.shape.head_dim, self.shape.head_dim)] * self.shape.num_layers

    @property
    def max_positions(self) -> int:
        return self.shape.max_positions

    def combine(self, taps: Tensor) -> Tensor:  # [N, F] -> [N, H]
        if self.shape.generation == 1:
            return taps
        if self.fc_norms:
            parts = taps.chunk(len(self.fc_norms), dim=1)
            taps = torch.cat([norm(part) for norm, part in zip(self.fc_norms, parts, strict=True)], dim=1)
        if self.input_norm is not None:
            taps = self.input_norm(taps)
        return self._product(self.fc, taps)

    def run(
        self,
        ids: Tensor,
        features: Tensor,
        context: PassContext,
        positions: Tensor,
        step: int,
        *,
        behind: Tensor | None = None,
        wanted: Tensor | None = None,
    ) -> HeadStates:
        """As `Head.run`. EAGLE has one module for all steps."""
        if self._kernels is not None and isinstance(context, DevicePass):
            return self._kernels.run(ids, features, context, positions, behind, wanted)
        embedded = self._embed(ids)
        turns = self._rotary(embedded, positions[None])
        x, normed = self._first(embedded, features if behind is None else features[behind])
        for i, layer in enumerate(self._layers):
            block = cast(EagleLayer, layer)
            if i:
                assert block.input_norm is not None
                normed = block.input_norm(x)
            x = block.run(x, normed, context, turns)
        x = x if wanted is None else x[wanted]
        return self._states(x, x if self.norm is None else self.norm(x))

    def logits(self, read: Tensor) -> Tensor:  # [R, H] -> [R, Vd] fp32
        head = self._lm_head
        if self._kernels is not None and isinstance(head, PackedLinear):
            return row_linear(
                read.contiguous(), head.weight, head.bias, scale=head.scale, out_dtype=torch.float32, overlap=True
            )
        return cast(Tensor, head(read)).float()

    def refill(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace the weights of a head in training. Vocabulary and biases stay.

        tensors: by our names, all that the shape requires. On a GPU they are written in place, where captured graphs
        read them.
        """
        weights = {name: tensor.to(self._device, self.dtype) for name, tensor in tensors.items()}
        for name, linear in (("fc", self.fc), ("lm_head", self._lm_head)):
            if f"{name}.weight" in weights and isinstance(linear, PackedLinear):
                linear.refill(weights[f"{name}.weight"])
        for i, layer in enumerate(self._layers):
            cast(EagleLayer, layer).refill(_below(weights, f"layers.{i}."))
        norms = {"layers.0.hidden_norm": self.hidden_norm, "norm": self.norm, "input_norm": self.input_norm}
        norms |= {f"fc_norm.{i}": cast(FusedNorm, norm) for i, norm in enumerate(self.fc_norms)}
        for name, norm in norms.items():
            if norm is not None:
                norm.weight.copy_(weights[f"{name}.weight"])

    def _states(self, x: Tensor, normed: Tensor) -> HeadStates:
        """EAGLE-1 has no last norm. Most others norm for the LM head alone, some for the next row as well."""
        if self.norm is None:
            return HeadStates(x, x)
        return HeadStates(normed if self.shape.norm_output else x, normed)

    def _embed(self, ids: Tensor) -> Tensor:  # [N] -> [N, H]
        """Embeddings; ids of padding rows may be anything."""
        return cast(Tensor, self._embedding(ids.clamp(0, self._last_id)))

    def _first(self, embedded: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:  # [N, H], [N, W]
        """The first layer's residual, and the input of its attention."""
        if self.shape.generation == 1:
            x = self._product(self.fc, torch.cat((embedded, features), dim=1))
            return x, x
        input_norm = cast(EagleLayer, self._layers[0]).input_norm
        assert input_norm is not None
        assert self.hidden_norm is not None
        normed = self.hidden_norm(features)
        x = normed if self.shape.norm_before_residual else features
        return x, torch.cat((input_norm(embedded), normed), dim=1)

    def _product(self, linear: PackedLinear, x: Tensor) -> Tensor:
        """The product by our kernel for few rows, by cuBLAS for a prompt's, even if 8 bits must be widened first."""
        if self._kernels is None or x.shape[0] > (_WORTH_WIDENING if self.narrow else WIDE_ROWS):
            return cast(Tensor, linear(x))
        return row_linear(x.contiguous(), linear.weight, linear.bias, scale=linear.scale, overlap=True)


class _Kernels:
    """A head's pass by the kernels of the GPU trunk, ready to be captured."""

    def __init__(self, head: EagleHead) -> None:
        self._head = head
        self._layers: list[GpuLayer] = [cast(EagleLayer, layer).on_gpu() for layer in head._layers]
        every = torch.arange(head.shape.max_positions, device=head._device)
        cos, sin = head._rotary(torch.empty(0, dtype=head.dtype, device=head._device), every[None])
        self._cos, self._sin = cos[0].contiguous(), sin[0].contiguous()  # [positions, R]

    def run(
        self,
        ids: Tensor,
        features: Tensor,
        context: DevicePass,
        positions: Tensor,
        behind: Tensor | None,
        wanted: Tensor | None,
    ) -> HeadStates:
        head, overlap = self._head, not context.wide
        context.prepare(head.shape.heads)
        first, *rest = self._layers
        x, read = self._first(ids, features, behind, overlap)
        turn = (positions, self._cos, self._sin, overlap)
        delta = first.run_normed(read, x, context, *turn)
        for layer in rest:
            delta = layer.run(x, delta, context, *turn)
        # EAGLE-1 has no last norm: the result of this one is not read
        last, eps = first.post_norm if head.norm is None else head.norm.weight, head.shape.norm_eps
        if wanted is None:
            normed = add_norm(x, delta, last, eps, overlap=overlap)
            return head._states(x, normed)  # x contains the sum now
        return head._states(*add_norm_at(x, delta, wanted, last, eps, overlap=overlap))

    def _first(self, ids: Tensor, features: Tensor, behind: Tensor | None, overlap: bool) -> tuple[Tensor, Tensor]:
        """As `EagleHead._first`, in one launch; the layers may write to the residual."""
        head = self._head
        plain = type(head._embedding) is nn.Embedding  # another module may scale its embeddings
        table = cast(Tensor, head._embedding.weight) if plain else head._embed(ids)
        if not plain:
            ids = torch.arange(len(ids), device=ids.device)
        norms = None if head.hidden_norm is None else (self._layers[0].input_norm, head.hidden_norm.weight)
        joined = join_feature(
            ids,
            table,
            features,
            norms,
            head.shape.norm_eps,
            behind=behind,
            normed_beside=head.shape.norm_before_residual,
            overlap=overlap,
        )
        if norms is not None:
            return joined
        x = head._product(head.fc, joined.read)
        return x, x


class EagleLayer(nn.Module):
    """A decoder layer after its first norm: Llama's, but the head makes the input of its attention.

    Products are joined as in the target's fused layers. weights: the layer's, on the target's device and in its dtype.
    """

    def __init__(
        self, index: int, shape: EagleShape, weights: Mapping[str, Tensor], arena: Arena, *, narrow: bool = False
    ) -> None:
        """narrow: its products have 8-bit weights."""
        super().__init__()
        self.index, self.head_dim = index, shape.head_dim
        self.heads, self.kv_heads = shape.heads, shape.kv_heads
        self.traits = AttentionTraits(shape.head_dim**-0.5)
        attention = [f"self_attn.{name}_proj" for name in "qkv"]
        self.qkv = _join(weights, *attention, arena=arena, narrow=narrow)
        self.o = _join(weights, "self_attn.o_proj", arena=arena, narrow=narrow)
        self.gate_up = _join(weights, "mlp.gate_proj", "mlp.up_proj", arena=arena, narrow=narrow)
        self.down = _join(weights, "mlp.down_proj", arena=arena, narrow=narrow)
        norms = {
            name: FusedNorm(weights[f"{name}.weight"], shape.norm_eps) if f"{name}.weight" in weights else None
            for name in ("input_layernorm", "self_attn.q_norm", "self_attn.k_norm")
        }
        self.input_norm, self.q_norm, self.k_norm = norms.values()
        self.post_norm = FusedNorm(weights["post_attention_layernorm.weight"], shape.norm_eps)
        self._eps = shape.norm_eps

    def run(
        self,
        x: Tensor,  # [N, H]: the residual
        normed: Tensor,  # [N, W]: the input of attention
        context: PassContext,
        position_embeddings: tuple[Tensor, Tensor],  # each [1, N, R]
    ) -> Tensor:  # [N, H]
        heads = self.qkv(normed).view(x.shape[0], -1, self.head_dim)
        turned, value = heads.split((self.heads + self.kv_heads, self.kv_heads), dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = turned.split((self.heads, self.kv_heads), dim=1)
            turned = torch.cat((self.q_norm(query), self.k_norm(key)), dim=1)
        query, key = context.rotate(turned, position_embeddings).split((self.heads, self.kv_heads), dim=1)
        x = x + self.o(context.attend(self.index, query, key, value, self.traits).flatten(1))
        gate, up = self.gate_up(self.post_norm(x)).chunk(2, dim=-1)
        out: Tensor = x + self.down(F.silu(gate) * up)
        return out

    def refill(self, weights: Mapping[str, Tensor]) -> None:
        """Replace the weights, under the same names."""
        qkv = [weights[f"self_attn.{name}_proj.weight"] for name in "qkv"]
        gate_up = [weights[f"mlp.{name}_proj.weight"] for name in ("gate", "up")]
        self.qkv.refill(torch.cat(qkv))
        self.gate_up.refill(torch.cat(gate_up))
        self.o.refill(weights["self_attn.o_proj.weight"])
        self.down.refill(weights["mlp.down_proj.weight"])
        norms = {
            "input_layernorm": self.input_norm,
            "self_attn.q_norm": self.q_norm,
            "self_attn.k_norm": self.k_norm,
            "post_attention_layernorm": self.post_norm,
        }
        for name, norm in norms.items():
            if norm is not None:
                norm.weight.copy_(weights[f"{name}.weight"])

    def on_gpu(self) -> GpuLayer:
        """The layer for the GPU's kernels. Without a first norm, `input_norm` is not used."""
        return GpuLayer(
            index=self.index,
            traits=self.traits,
            heads=self.heads,
            input_norm=(self.input_norm or self.post_norm).weight,
            post_norm=self.post_norm.weight,
            norm_eps=(self._eps, self._eps),
            q_norm=None if self.q_norm is None else self.q_norm.weight,
            k_norm=None if self.k_norm is None else self.k_norm.weight,
            head_eps=self._eps,
            qkv=Product.of(self.qkv),
            o=Product.of(self.o),
            gate_up=Product.of(self.gate_up),
            down=Product.of(self.down),
        )


def _join(weights: Mapping[str, Tensor], *names: str, arena: Arena, narrow: bool = False) -> PackedLinear:
    """One product from the products with these weights. narrow: in 8 bits."""
    linears = []
    for name in names:
        weight, bias = weights[f"{name}.weight"], weights.get(f"{name}.bias")
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
        linear.weight = nn.Parameter(weight, requires_grad=False)
        if bias is not None:
            linear.bias = nn.Parameter(bias, requires_grad=False)
        linears.append(linear)
    return narrow_join(*linears) if narrow else join(*linears, arena=arena)


def _bytes(name: str, weight: Tensor, narrow: bool) -> int:
    """Bytes of a tensor; a narrow head's products have 8 bits and a scale for each row."""
    if narrow and weight.dim() == 2 and name != _TABLE:
        return weight.numel() + 4 * weight.shape[0]
    return weight.numel() * weight.element_size()


def _below(weights: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}


def _target_ids(checkpoint: EagleCheckpoint, device: torch.device) -> Tensor | None:  # [Vd]
    """The target's id of each of the head's ids: d2t holds the differences."""
    offsets = checkpoint.tensors.get("d2t")
    if offsets is None or not offsets.any():
        return (
            None
            if checkpoint.shape.draft_vocab == checkpoint.shape.vocab
            else torch.arange(checkpoint.shape.draft_vocab, device=device)
        )
    return (torch.arange(len(offsets)) + offsets.long()).to(device)


def _rotary(shape: EagleShape) -> LlamaRotaryEmbedding:
    config: Any = LlamaConfig(
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.trained_positions,
        rope_parameters=dict(shape.rope),
    )
    return LlamaRotaryEmbedding(config)
