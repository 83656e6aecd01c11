"""Writes an EAGLE-3 head in a layout that other engines read too: the authors' own, or speculators'."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

from slipstream.core.errors import ConfigError
from slipstream.models.heads.checkpoint import check_tensors
from slipstream.models.heads.eagle_shape import EagleCheckpoint, EagleShape
from slipstream.models.heads.layouts import eagle3, speculators
from slipstream.models.heads.layouts.common import Spelling

Layout = Literal["original", "speculators"]
_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
_VERSION = "0.9.0"
"""Of speculators: whose format this is."""


def save_eagle3(
    head: EagleCheckpoint, folder: Path, layout: Layout = "original", *, target: str | None = None, depth: int = 5
) -> Path:
    """Write the head into `folder`, which may exist. target, depth: what speculators' readers are told of its use.

    `norm_before_residual` and the taps are always written: readers disagree on what holds without.
    """
    shape = head.shape
    if layout not in ("original", "speculators"):
        raise ConfigError(f"layout={layout!r}: must be 'original' or 'speculators'")
    if shape.generation != 3:
        raise ConfigError(f"a head of EAGLE-{shape.generation}: only EAGLE-3 heads can be written")
    check_tensors(folder, head.tensors, shape.wanted, shape.optional)
    tensors = dict(head.tensors)
    if shape.draft_vocab != shape.vocab and "t2d" not in tensors:
        tensors["t2d"] = _known_ids(tensors["d2t"], shape.vocab)
    config = _speculators(shape, target, depth) if layout == "speculators" else _original(shape)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(_named(tensors, layout), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return folder


def _known_ids(d2t: Tensor, vocab: int) -> Tensor:  # [V] bool
    ids = torch.arange(len(d2t)) + d2t.cpu().long()
    return torch.zeros(vocab, dtype=torch.bool).index_fill_(0, ids, True)


def _named(tensors: Mapping[str, Tensor], layout: Layout) -> dict[str, Tensor]:
    """By the layout's names; no two of them share memory, which safetensors would refuse."""
    spelling = Spelling("", "midlayer." if layout == "original" else "layers.0.")
    return {
        spelling.write(name): tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
    }


def _llama(shape: EagleShape) -> dict[str, Any]:
    return {
        "model_type": "qwen3" if shape.head_norms else "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": shape.norm_eps,
        "attention_bias": shape.qkv_bias,
        "max_position_embeddings": shape.trained_positions,
        "vocab_size": shape.vocab,
        "rope_theta": shape.rope["rope_theta"],  # for readers of older configurations
        "rope_parameters": dict(shape.rope),
        "tie_word_embeddings": False,
    }


def _extras(shape: EagleShape) -> dict[str, Any]:
    return {
        "draft_vocab_size": shape.draft_vocab,
        "target_hidden_size": shape.target_hidden,
        eagle3.IDS: list(shape.taps.layers),
        **{flag: getattr(shape, flag) for flag in _FLAGS},
    }


def _original(shape: EagleShape) -> dict[str, Any]:
    return {"architectures": ["LlamaForCausalLM"], **_llama(shape), **_extras(shape)}


def _speculators(shape: EagleShape, target: str | None, depth: int) -> dict[str, Any]:
    return {
        "architectures": ["Eagle3Speculator"],
        speculators.KIND: "eagle3",
        "speculators_version": _VERSION,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": depth}],
            "verifier": {"name_or_path": target, "architectures": []},
        },
        speculators.LAYER: _llama(shape),
        **_extras(shape),
    }
