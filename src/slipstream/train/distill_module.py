"""A small Llama in training, over packed rows, that reads and speaks through the target's embeddings.

Tensors have the names that they are stored with. A draft narrower than its target has a projection behind the
embedding and one before the LM head; when it is stored, each becomes one with the table that it belongs to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor, nn

from slipstream.train.batch import Rows
from slipstream.train.chain_attention import Sequences, attend_chain
from slipstream.train.hasten import Hastened
from slipstream.train.layers import Mlp, Norm, Projections, Rotary


@dataclass(frozen=True, slots=True)
class DraftShape:
    """A Llama for one target."""

    hidden: int
    target_hidden: int
    inner: int  # of its MLPs
    heads: int
    kv_heads: int
    head_dim: int
    num_layers: int
    norm_eps: float
    vocab: int  # the target's
    positions: int
    rope: Mapping[str, Any]  # as transformers' `rope_parameters`

    @property
    def is_reduced(self) -> bool:
        return self.hidden != self.target_hidden


class DraftModule(nn.Module):
    """The draft's own weights, fp32. embedding: the target's, frozen, no part of the state dict."""

    def __init__(self, shape: DraftShape, embedding: nn.Module) -> None:
        super().__init__()
        self.shape = shape
        self._embedding = (embedding,)  # kept from being a child
        self._rotary = Rotary(shape.hidden, shape.heads, shape.head_dim, shape.positions, shape.rope)
        self.layers = nn.ModuleList(DraftLayer(shape) for _ in range(shape.num_layers))
        self.norm = Norm(shape.hidden, shape.norm_eps)
        if shape.is_reduced:
            self.inward = nn.Linear(shape.target_hidden, shape.hidden, bias=False)
            self.outward = nn.Linear(shape.hidden, shape.target_hidden, bias=False)

    def forward(self, rows: Rows, sequences: Sequences) -> Tensor:  # [B * T, h], normed
        """What stands before the LM head: the row at p has read the token at p, and guesses the one at p + 1."""
        x = self.embed(rows.ids.flatten())
        cos, sin = self._rotary(x, rows.positions)
        for layer in self.layers:
            x = layer(x, cos, sin, sequences)
        return cast(Tensor, self.norm(x))

    def hasten(self) -> None:
        """Compile what stands before and behind attention: for passes of one size, on a GPU."""
        for layer in self.layers:
            cast(DraftLayer, layer).hasten()

    def embed(self, ids: Tensor) -> Tensor:  # [N] -> [N, h] fp32
        words = self._embedding[0](ids).float()
        return cast(Tensor, self.inward(words).float() if self.shape.is_reduced else words)

    def widened(self, normed: Tensor) -> Tensor:  # [n, h] -> [n, H]
        """What the target's LM head reads."""
        return cast(Tensor, self.outward(normed) if self.shape.is_reduced else normed)


class DraftLayer(nn.Module):
    """A Llama's decoder layer."""

    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.hidden, shape.norm_eps)
        self.self_attn = Projections(shape.hidden, shape.hidden, shape.heads, shape.kv_heads, shape.head_dim)
        self.post_attention_layernorm = Norm(shape.hidden, shape.norm_eps)
        self.mlp = Mlp(shape.hidden, shape.inner)
        self._read: Callable[..., tuple[Tensor, Tensor, Tensor]] = self._before
        self._go_on: Callable[..., Tensor] = self._behind

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, sequences: Sequences) -> Tensor:  # [N, h]
        query, key, value = self._read(x, cos, sin)
        none = key.new_zeros((0, *key.shape))  # there is no chain beside the text
        return self._go_on(x, attend_chain(query, key, value, none, none, sequences))

    def hasten(self) -> None:
        self._read, self._go_on = Hastened(self._before), Hastened(self._behind)

    def _before(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # each [N, heads, D]
        found: tuple[Tensor, Tensor, Tensor] = self.self_attn(self.input_layernorm(x), cos, sin)
        return found

    def _behind(self, x: Tensor, attended: Tensor) -> Tensor:  # [N, h], [N, heads, D] -> [N, h]
        x = x + self.self_attn.o_proj(attended.flatten(1))
        return cast(Tensor, x + self.mlp(self.post_attention_layernorm(x)))
