"""Tiny EAGLE heads as their trainers write them, and what they compute, written plainly and sharing no code with ours.

Not a test file: the tests of heads, of their drafter and of the writer share it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

H, INNER, HEADS, KV, DIM = 32, 24, 4, 2, 8
VOCAB, DRAFT_VOCAB = 300, 41
EPS = 1e-5
THETA = 5000.0

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": H,
    "intermediate_size": INNER,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "head_dim": DIM,
    "vocab_size": VOCAB,
    "rms_norm_eps": EPS,
    "rope_theta": THETA,
    "max_position_embeddings": 64,
    "hidden_act": "silu",
}


@dataclass
class Stored:
    """A checkpoint before it is written: a test may spoil it."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    layer: str = "midlayer."
    generation: int = 3
    flags: dict[str, bool] = field(default_factory=dict)

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        save_file({name: tensor.contiguous() for name, tensor in self.tensors.items()}, folder / "model.safetensors")
        return folder

    def of(self, name: str) -> Tensor:
        return self.tensors[name]


def randoms(shapes: Mapping[str, Sequence[int]], seed: int) -> dict[str, Tensor]:
    """Nothing is 0 or 1, so that whatever is left out shows."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, shape in shapes.items():
        noise = torch.randn(tuple(shape), generator=generator)
        if len(shape) == 1 and "norm" in name:
            found[name] = 1 + 0.3 * noise
        else:
            found[name] = noise if "embed" in name else 1.5 * noise / shape[-1] ** 0.5
    return found


def eagle1(seed: int = 1, *, bias: bool = True, qkv_bias: bool = False, embeds: bool = True, layers: int = 1) -> Stored:
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (H, 2 * H)}
    if bias:
        shapes["fc.bias"] = (H,)
    if embeds:
        shapes["embed_tokens.weight"] = (VOCAB, H)
    for i in range(layers):
        at = f"layers.{i}."
        shapes |= _llama_layer(at, H, qkv_bias)
        if i:
            shapes[at + "input_layernorm.weight"] = (H,)
    config = {**LLAMA, "num_hidden_layers": layers, "bias": bias, "architectures": ["LlamaForCausalLM"]}
    return Stored(config, randoms(shapes, seed), "layers.0.", 1)


def eagle3(seed: int = 3, *, taps: int = 3, embeds: bool = False, layer: str = "midlayer.", **flags: bool) -> Stored:
    shapes: dict[str, tuple[int, ...]] = {
        **_llama_layer(layer, 2 * H, False),
        layer + "hidden_norm.weight": (H,),
        layer + "input_layernorm.weight": (H,),
        "fc.weight": (H, taps * H),
        "norm.weight": (H,),
        "lm_head.weight": (DRAFT_VOCAB, H),
    }
    if embeds:
        shapes["embed_tokens.weight"] = (VOCAB, H)
    if flags.get("fc_norm"):
        shapes |= {f"fc_norm.{i}.weight": (H,) for i in range(taps)}
    if flags.get("norm_before_fc"):
        shapes["input_norm.weight"] = (taps * H,)
    tensors = randoms(shapes, seed)
    known = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(seed))[:DRAFT_VOCAB].sort().values
    tensors["d2t"] = known - torch.arange(DRAFT_VOCAB)
    tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, known, True)
    config = {**LLAMA, "draft_vocab_size": DRAFT_VOCAB, "architectures": ["LlamaForCausalLM"], **flags}
    return Stored(config, tensors, layer, 3, flags)


def speculators(seed: int = 5, *, taps: Sequence[int] = (2, 4, 5), **flags: bool) -> Stored:
    found = eagle3(seed, taps=len(taps), embeds=True, layer="layers.0.", **flags)
    found.config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": "some/target", "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": LLAMA,
        "draft_vocab_size": DRAFT_VOCAB,
        "eagle_aux_hidden_state_layer_ids": list(taps),
        **flags,
    }
    return found


def specforge(seed: int = 7, *, taps: Sequence[int] = (1, 3, 4), **flags: bool) -> Stored:
    found = eagle3(seed, taps=len(taps), embeds=False, layer="midlayer.", **flags)
    found.config |= {
        "architectures": ["LlamaForCausalLMEagle3"],
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(taps), "use_aux_hidden_state": True},
    }
    return found


def _llama_layer(at: str, width: int, qkv_bias: bool) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        at + "self_attn.q_proj.weight": (HEADS * DIM, width),
        at + "self_attn.k_proj.weight": (KV * DIM, width),
        at + "self_attn.v_proj.weight": (KV * DIM, width),
        at + "self_attn.o_proj.weight": (H, HEADS * DIM),
        at + "mlp.gate_proj.weight": (INNER, H),
        at + "mlp.up_proj.weight": (INNER, H),
        at + "mlp.down_proj.weight": (H, INNER),
        at + "post_attention_layernorm.weight": (H,),
    }
    if qkv_bias:
        for part, rows in (("q", HEADS * DIM), ("k", KV * DIM), ("v", KV * DIM)):
            shapes[f"{at}self_attn.{part}_proj.bias"] = (rows,)
    return shapes


# what a head computes, a row at a time, without a cache


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return weight * x / (x.pow(2).mean() + EPS).sqrt()


def turned(vector: Tensor, position: int) -> Tensor:
    """Rotary embedding of one head, pair by pair."""
    out = torch.empty_like(vector)
    half = len(vector) // 2
    for i in range(half):
        angle = position * THETA ** (-2 * i / len(vector))
        a, b = vector[i], vector[i + half]
        out[i] = a * math.cos(angle) - b * math.sin(angle)
        out[i + half] = b * math.cos(angle) + a * math.sin(angle)
    return out


def layer_by_hand(t: Mapping[str, Tensor], at: str, xs: list[Tensor], read: list[Tensor]) -> list[Tensor]:
    """A decoder layer over a sequence: xs go on beside attention, which reads `read`."""

    def project(name: str, x: Tensor) -> Tensor:
        out = t[f"{at}self_attn.{name}_proj.weight"] @ x
        bias = t.get(f"{at}self_attn.{name}_proj.bias")
        return out if bias is None else out + bias

    keys = [[turned(h, p) for h in project("k", x).split(DIM)] for p, x in enumerate(read)]
    values = [list(project("v", x).split(DIM)) for x in read]
    out = []
    for p, (x, seen) in enumerate(zip(xs, read, strict=True)):
        heads = []
        for h, query in enumerate(project("q", seen).split(DIM)):
            group = h // (HEADS // KV)
            query = turned(query, p)
            scores = torch.stack([query @ keys[j][group] / DIM**0.5 for j in range(p + 1)]).softmax(0)
            heads.append(sum((scores[j] * values[j][group] for j in range(p + 1)), torch.zeros(DIM)))
        y = x + t[f"{at}self_attn.o_proj.weight"] @ torch.cat(heads)
        normed = rms(y, t[f"{at}post_attention_layernorm.weight"])
        gate = t[f"{at}mlp.gate_proj.weight"] @ normed
        up = t[f"{at}mlp.up_proj.weight"] @ normed
        out.append(y + t[f"{at}mlp.down_proj.weight"] @ (gate / (1 + (-gate).exp()) * up))
    return out


@dataclass(frozen=True)
class ByHand:
    """A head in plain words."""

    stored: Stored
    embedding: Tensor  # [V, H], the target's
    lm_head: Tensor  # [V, H], the target's

    def features(self, taps: Tensor) -> Tensor:  # [H]
        """What a row reads of the target, from the tapped states of one position side by side."""
        t, flags = self.stored.tensors, self.stored.flags
        if self.stored.generation == 1:
            return taps
        if flags.get("fc_norm"):
            taps = torch.cat([rms(part, t[f"fc_norm.{i}.weight"]) for i, part in enumerate(taps.split(H))])
        if flags.get("norm_before_fc"):
            taps = rms(taps, t["input_norm.weight"])
        return t["fc.weight"] @ taps

    def hidden(self, ids: Sequence[int], features: Sequence[Tensor]) -> list[Tensor]:
        """The hidden states of rows at positions 0, 1, ...: each the next row's feature."""
        t, at = self.stored.tensors, self.stored.layer
        table = t.get("embed_tokens.weight", self.embedding)
        words = [table[i] for i in ids]
        if self.stored.generation == 1:
            xs = [
                t["fc.weight"] @ torch.cat((word, feature)) + t.get("fc.bias", torch.zeros(H))
                for word, feature in zip(words, features, strict=True)
            ]
            xs = layer_by_hand(t, "layers.0.", xs, xs)
            for i in range(1, self.stored.config["num_hidden_layers"]):
                normed = [rms(x, t[f"layers.{i}.input_layernorm.weight"]) for x in xs]
                xs = layer_by_hand(t, f"layers.{i}.", xs, normed)
            return xs
        normed = [rms(feature, t[at + "hidden_norm.weight"]) for feature in features]
        read = [
            torch.cat((rms(word, t[at + "input_layernorm.weight"]), n)) for word, n in zip(words, normed, strict=True)
        ]
        beside = normed if self.stored.flags.get("norm_before_residual") else list(features)
        out = layer_by_hand(t, at, beside, read)
        if self.stored.flags.get("norm_output"):
            out = [rms(x, t["norm.weight"]) for x in out]
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        t = self.stored.tensors
        if self.stored.generation == 3 and not self.stored.flags.get("norm_output"):
            hidden = rms(hidden, t["norm.weight"])
        return t.get("lm_head.weight", self.lm_head) @ hidden
