"""Medusa heads written by their own names, in both layouts, and what they must say. Not a test file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from conftest import save_model, tiny_llama

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


def chained_medusa(folder: Path, heads: int = 3, layers: int = 1, *, noise: float = 0.0) -> Path:
    """Chained heads that say what the target says next, as `knowing_medusa`'s; with noise, also what they read."""
    dice = torch.Generator().manual_seed(7)
    tensors: dict[str, Tensor] = {}
    for head in range(heads):
        names = [f"{head}.{layer}.linear.weight" for layer in range(layers)]
        for name in (*names, f"{head}.token.weight"):
            tensors[name] = noise * torch.randn(HIDDEN, HIDDEN, generator=dice)
        tensors |= {name.replace("weight", "bias"): noise * torch.randn(HIDDEN, generator=dice) for name in names}
    config = {"medusa_num_heads": heads, "medusa_num_layers": layers, "medusa_chained": True}
    return save_heads(folder, tensors, "medusa_lm_head.safetensors", **config)


def counting_target(folder: Path) -> Path:
    """A target that says behind each token the next one of 32, whatever came before."""
    save_model(folder, tiny_llama(num_hidden_layers=1))
    tensors = load_file(folder / "model.safetensors")
    code = torch.linalg.qr(torch.randn(HIDDEN, HIDDEN, generator=torch.Generator().manual_seed(1)))[0]  # a row a token
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()  # the state is the last token's embedding
        elif name.endswith("norm.weight"):
            tensor.fill_(1.0)
    tensors["model.embed_tokens.weight"].copy_(code.repeat(VOCAB // HIDDEN + 1, 1)[:VOCAB])
    tensors["lm_head.weight"].zero_()[:HIDDEN] = code.roll(1, 0)  # behind token i comes i + 1
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def said_in_chain(
    tensors: dict[str, Tensor], layers: int, x: Tensor, words: list[Tensor], lm_head: Tensor
) -> Tensor:  # [V]
    """The logits of the last chained head behind one hidden state [H] and the embeddings of earlier guesses."""
    for head, word in enumerate(words):
        x = x + tensors[f"{head}.token.weight"] @ word
        for layer in range(layers):
            y = tensors[f"{head}.{layer}.linear.weight"] @ x + tensors[f"{head}.{layer}.linear.bias"]
            x = x + y / (1 + torch.exp(-y))
    return lm_head @ x


def said(tensors: dict[str, Tensor], layout: str, head: int, layers: int, x: Tensor, lm_head: Tensor) -> Tensor:  # [V]
    """What one head says of one hidden state [H], written out."""
    for layer in range(layers):
        name = f"{head}.{layer}.linear" if layout == "original" else f"blocks.{head}.layers.{layer}"
        y = tensors[f"{name}.weight"] @ x + tensors.get(f"{name}.bias", torch.zeros(HIDDEN))
        x = x + y / (1 + torch.exp(-y))
    return lm_head @ x
