"""Medusa heads written by their own names, in both layouts, and what they must say. Not a test file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

HIDDEN, VOCAB = 32, 300
"""Of the tiny target."""


def head_tensors(
    layout: str, heads: int = 3, layers: int = 2, *, own_heads: bool = True, vocab: int = VOCAB, seed: int = 3
) -> dict[str, Tensor]:
    """layout: "original", or "vllm", whose linear layers have no bias."""
    dice = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for head in range(heads):
        for layer in range(layers):
            weight = torch.randn(HIDDEN, HIDDEN, generator=dice) / HIDDEN**0.5
            if layout == "original":
                tensors[f"{head}.{layer}.linear.weight"] = weight
                tensors[f"{head}.{layer}.linear.bias"] = torch.randn(HIDDEN, generator=dice)
            else:
                tensors[f"blocks.{head}.layers.{layer}.weight"] = weight
        if own_heads:
            name = f"{head}.{layers}.weight" if layout == "original" else f"lm_heads.{head}.weight"
            tensors[name] = torch.randn(vocab, HIDDEN, generator=dice)
    return tensors


def save_heads(folder: Path, tensors: dict[str, Tensor], file: str, **config: Any) -> Path:
    """A folder with these heads; `file` ends in .safetensors, .pt or .bin."""
    folder.mkdir(parents=True, exist_ok=True)
    if file.endswith(".safetensors"):
        save_file(tensors, folder / file)
    else:
        torch.save(tensors, folder / file)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def tiny_medusa(folder: Path, heads: int = 3, layers: int = 1, **config: Any) -> Path:
    """Heads that share the tiny target's LM head."""
    tensors = head_tensors("original", heads, layers, own_heads=False)
    return save_heads(
        folder, tensors, "medusa_lm_head.safetensors", medusa_num_heads=heads, medusa_num_layers=layers, **config
    )


def knowing_medusa(folder: Path, target: Path, heads: int = 3) -> Path:
    """Heads that add nothing: each says what the target says next, which is right where a token repeats."""
    zeros = torch.zeros(HIDDEN, HIDDEN)
    lm_head = load_file(target / "model.safetensors")["lm_head.weight"]
    tensors = {f"{head}.0.linear.weight": zeros.clone() for head in range(heads)}
    tensors |= {f"{head}.1.weight": lm_head.clone() for head in range(heads)}
    return save_heads(folder, tensors, "medusa_lm_head.pt", medusa_num_heads=heads, medusa_num_layers=1)


def said(tensors: dict[str, Tensor], layout: str, head: int, layers: int, x: Tensor, lm_head: Tensor) -> Tensor:  # [V]
    """What one head says of one hidden state [H], written out."""
    for layer in range(layers):
        name = f"{head}.{layer}.linear" if layout == "original" else f"blocks.{head}.layers.{layer}"
        y = tensors[f"{name}.weight"] @ x + tensors.get(f"{name}.bias", torch.zeros(HIDDEN))
        x = x + y / (1 + torch.exp(-y))
    return lm_head @ x
