"""What an EAGLE head looks like, whichever layout it was stored in, and the tensors that such a head has.

Inside the program its tensors go by speculators' names (`layers.0.*`); each layout says how its own become these.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from slipstream.models.taps import Taps

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class EagleShape:
    """An EAGLE head. Generation 1 covers EAGLE-2, whose module is the same; 3 covers EAGLE-3.1."""

    generation: Literal[1, 3]
    hidden: int
    target_hidden: int
    inner: int  # of its MLP
    heads: int
    kv_heads: int
    head_dim: int
    num_layers: int
    norm_eps: float
    vocab: int  # the target's
    draft_vocab: int  # what its LM head knows
    taps: Taps
    max_positions: int  # that it is used for
    trained_positions: int  # that it was made for; some rotary embeddings depend on it
    rope: Mapping[str, Any]  # rotary frequencies, as transformers' `rope_parameters`
    fc_bias: bool = False
    qkv_bias: bool = False
    head_norms: bool = False  # queries and keys are normed, as Qwen3's
    fc_norm: bool = False  # EAGLE-3.1: each tapped state is normed before fc
    norm_before_fc: bool = False  # all of them together are
    norm_before_residual: bool = False  # the normed feature goes on beside attention, not the feature itself
    norm_output: bool = False  # EAGLE-3.1: the next row's feature is the normed hidden state

    @property
    def num_taps(self) -> int:
        return len(self.taps.layers) + self.taps.normed

    @property
    def wanted(self) -> Shapes:
        """The tensors that it must have."""
        h, query, kv = self.hidden, self.heads * self.head_dim, self.kv_heads * self.head_dim
        found: Shapes = {}
        for i in range(self.num_layers):
            first = i == 0
            width = 2 * h if first and self.generation == 3 else h
            layer = f"layers.{i}."
            for name, rows in (("q", query), ("k", kv), ("v", kv)):
                found[f"{layer}self_attn.{name}_proj.weight"] = (rows, width)
                if self.qkv_bias:
                    found[f"{layer}self_attn.{name}_proj.bias"] = (rows,)
            if self.head_norms:
                found[f"{layer}self_attn.q_norm.weight"] = found[f"{layer}self_attn.k_norm.weight"] = (self.head_dim,)
            found[layer + "self_attn.o_proj.weight"] = (h, query)
            found[layer + "mlp.gate_proj.weight"] = found[layer + "mlp.up_proj.weight"] = (self.inner, h)
            found[layer + "mlp.down_proj.weight"] = (h, self.inner)
            found[layer + "post_attention_layernorm.weight"] = (h,)
            if not first or self.generation == 3:
                found[layer + "input_layernorm.weight"] = (h,)
            if first and self.generation == 3:
                found[layer + "hidden_norm.weight"] = (h,)
        tapped = self.num_taps * self.target_hidden
        found["fc.weight"] = (h, tapped if self.generation == 3 else 2 * h)
        if self.fc_bias:
            found["fc.bias"] = (h,)
        if self.generation == 3:
            found["norm.weight"] = (h,)
        if self.fc_norm:
            found.update({f"fc_norm.{i}.weight": (self.target_hidden,) for i in range(self.num_taps)})
        if self.norm_before_fc:
            found["input_norm.weight"] = (tapped,)
        if self.draft_vocab != self.vocab:
            found["lm_head.weight"] = (self.draft_vocab, h)
            found["d2t"] = (self.draft_vocab,)
        if h != self.target_hidden:  # the target's own do not fit
            found["embed_tokens.weight"] = (self.vocab, h)
            found["lm_head.weight"] = (self.draft_vocab, h)
        return found

    @property
    def optional(self) -> Shapes:
        """The tensors that it may have; where it has none, the target's embedding and LM head are used."""
        return {
            "embed_tokens.weight": (self.vocab, self.hidden),
            "lm_head.weight": (self.draft_vocab, self.hidden),
            "d2t": (self.draft_vocab,),
            "t2d": (self.vocab,),
        }


@dataclass(frozen=True, slots=True)
class EagleCheckpoint:
    """A head as stored: its shape, and its tensors under our names. `folder` is named where something is wrong."""

    shape: EagleShape
    tensors: Mapping[str, Tensor]
    folder: Path
