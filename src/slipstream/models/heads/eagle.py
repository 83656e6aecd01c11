"""EAGLE heads: one decoder layer that goes on from the target's hidden states instead of from tokens alone.

A row reads a token and a feature. The first feature is the target's (EAGLE-1: its last hidden state; EAGLE-3: an
early, a middle and a late one, brought together by `fc`); those behind are the head's own hidden states.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from slipstream.kernels.add_norm import add_norm, add_norm_at
from slipstream.kernels.arena import Arena
from slipstream.kernels.jit import has_kernels
from slipstream.kernels.join_feature import join_feature
from slipstream.kernels.linear import PackedLinear
from slipstream.kernels.row_linear import row_linear
from slipstream.kv.cache import LayerShape
from slipstream.models.attention import PassContext
from slipstream.models.device_pass import DevicePass
from slipstream.models.fuse import FusedNorm, prepare
from slipstream.models.gpu import WIDE_ROWS, GpuLayer
from slipstream.models.heads.base import HeadStates, Weights
from slipstream.models.heads.checkpoint import HeadFiles, TargetShape
from slipstream.models.heads.eagle_layer import EagleLayer, product
from slipstream.models.heads.eagle_shape import EagleCheckpoint, EagleShape
from slipstream.models.heads.layouts import read_eagle
from slipstream.models.runner import Runner
from slipstream.models.taps import Taps

_LARGE = 64 << 20
"""Bytes of a head's products from which on reading them takes longer than launching them."""
_WORTH_WIDENING = 1024
"""Rows that take longer than to write a weight of 8 bits out in 16."""
_TABLE = "embed_tokens.weight"
"""Is looked up in, not read."""


class EagleHead(nn.Module):
    """A `Head` of either generation, on the target's device and in its dtype.

    embedding, lm_head: the target's own, for what the checkpoint leaves to it. kept: the weights of its products in
    8 bits (fp8), in the target's dtype (plain), or in 8 bits where reading them is what takes the time (auto).
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
        self.fc = product(weights, "fc", arena=arena, narrow=self.narrow)
        self._embedding = embedding
        if _TABLE in weights:
            self._embedding = nn.Embedding.from_pretrained(weights[_TABLE], freeze=True)
        self._last_id = cast(Tensor, self._embedding.weight).shape[0] - 1
        self._lm_head = lm_head
        if "lm_head.weight" in weights:
            self._lm_head = product(weights, "lm_head", arena=arena, narrow=self.narrow)
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
        """The head in `folder`, in any layout that we know, for this target."""
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
        """Other weights in place of those that it was opened with: for heads in training. Vocabulary, biases stay.

        tensors: by our names, all that the shape wants. On a GPU they are written where captured graphs read them.
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
        """EAGLE-1 has no last norm. Most others norm for the LM head alone, some for what goes on as well."""
        if self.norm is None:
            return HeadStates(x, x)
        return HeadStates(normed if self.shape.norm_output else x, normed)

    def _embed(self, ids: Tensor) -> Tensor:  # [N] -> [N, H]
        """What stands in for nobody may hold anything."""
        return cast(Tensor, self._embedding(ids.clamp(0, self._last_id)))

    def _first(self, embedded: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:  # [N, H], [N, W]
        """What goes on beside the first layer's attention, and what that attention reads."""
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
        """By a kernel for few rows: a prompt's are better off with cuBLAS, though 8 bits are widened for it first."""
        if self._kernels is None or x.shape[0] > (_WORTH_WIDENING if self.narrow else WIDE_ROWS):
            return cast(Tensor, linear(x))
        return row_linear(x.contiguous(), linear.weight, linear.bias, scale=linear.scale, overlap=True)


class _Kernels:
    """A head's pass by the kernels of the target's trunk, ready to be captured."""

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
        # EAGLE-1 has no last norm: by whichever weight, its result is not read
        last, eps = first.post_norm if head.norm is None else head.norm.weight, head.shape.norm_eps
        if wanted is None:
            normed = add_norm(x, delta, last, eps, overlap=overlap)
            return head._states(x, normed)  # the sum stands in x now
        return head._states(*add_norm_at(x, delta, wanted, last, eps, overlap=overlap))

    def _first(self, ids: Tensor, features: Tensor, behind: Tensor | None, overlap: bool) -> tuple[Tensor, Tensor]:
        """As the head's own, in one launch; what goes on is the layers' to write to."""
        head = self._head
        plain = type(head._embedding) is nn.Embedding  # others do something to what they look up
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


def _bytes(name: str, weight: Tensor, narrow: bool) -> int:
    """What this tensor takes; products have 8 bits and a scale for each row where the head is narrow."""
    if narrow and weight.dim() == 2 and name != _TABLE:
        return weight.numel() + 4 * weight.shape[0]
    return weight.numel() * weight.element_size()


def _below(weights: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}


def _target_ids(checkpoint: EagleCheckpoint, device: torch.device) -> Tensor | None:  # [Vd]
    """The target's id of each of the head's: d2t says how far apart the two are."""
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
