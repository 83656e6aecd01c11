"""What the layouts of EAGLE heads share: a Llama-like configuration, and names that differ by a word."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from slipstream.core.errors import ModelError, UnsupportedModel
from slipstream.models.heads.checkpoint import AGAIN, MOST_PARTS, HeadFiles, TargetShape, check_target, number
from slipstream.models.heads.eagle_shape import EagleShape
from slipstream.models.taps import Taps

Names = Mapping[str, Tensor]

_LAYER = "layers.0."

_BOUNDED = ("longrope", "dynamic")
"""Kinds of rotary embedding whose frequencies change with the length of the text: used up to their first length."""


@dataclass(frozen=True, slots=True)
class Spelling:
    """How a folder's names differ from ours: a trainer's `model.` before them, `midlayer.*` for `layers.0.*`."""

    prefix: str
    layer: str

    @staticmethod
    def of(tensors: Names) -> Spelling:
        prefix = "model." if any(name.startswith("model.") for name in tensors) else ""
        is_mid = any(name.removeprefix(prefix).startswith("midlayer.") for name in tensors)
        return Spelling(prefix, "midlayer." if is_mid else _LAYER)

    def read(self, tensors: Names) -> dict[str, Tensor]:
        """The tensors by our names."""
        found: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            if not name.endswith("rotary_emb.inv_freq"):  # computed from the configuration
                found[_swapped(name.removeprefix(self.prefix), self.layer, _LAYER)] = tensor
        return found

    def write(self, name: str) -> str:
        """One of our names as the folder writes it."""
        return self.prefix + _swapped(name, _LAYER, self.layer)


def _swapped(name: str, old: str, new: str) -> str:
    return new + name.removeprefix(old) if name.startswith(old) else name


def llama_parts(files: HeadFiles, config: Mapping[str, Any], names: Names, target: TargetShape) -> dict[str, Any]:
    """What every head has of a Llama: sizes, norms, rotary embedding. `config` is where they are written."""
    folder = files.folder
    heads = number(config, "num_attention_heads", folder)
    hidden = number(config, "hidden_size", folder)
    act = config.get("hidden_act", "silu")
    if act != "silu":
        raise UnsupportedModel(f"{folder}: hidden_act={act!r}; heads with silu can be run. Use another head")
    eps = config.get("rms_norm_eps", 1e-6)
    if not isinstance(eps, float | int) or eps <= 0:
        raise ModelError(f"{folder / 'config.json'}: rms_norm_eps={eps!r}, must be a positive number")
    kv_heads = number(config, "num_key_value_heads", folder, heads)
    if heads % kv_heads:
        raise ModelError(
            f"{folder / 'config.json'}: num_attention_heads={heads}, must be a multiple of "
            f"num_key_value_heads={kv_heads}"
        )
    attention = "layers.0.self_attn."
    rope = _rope(config, folder)
    bound = rope.get("original_max_position_embeddings") if rope.get("rope_type") in _BOUNDED else None
    return {
        "hidden": hidden,
        "inner": number(config, "intermediate_size", folder),
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": number(config, "head_dim", folder, max(hidden // heads, 1)),
        "num_layers": number(config, "num_hidden_layers", folder, 1, MOST_PARTS),
        "norm_eps": float(eps),
        # its own number is where training stopped; rotary embedding goes on, and the planner sees whether it pays
        "max_positions": min(target.max_positions, bound or target.max_positions),
        "trained_positions": number(config, "max_position_embeddings", folder, target.max_positions),
        "rope": rope,
        "qkv_bias": attention + "q_proj.bias" in names,
        "head_norms": attention + "q_norm.weight" in names,
    }


def eagle3_parts(files: HeadFiles, config: Mapping[str, Any], names: Names, target: TargetShape) -> dict[str, Any]:
    """What every EAGLE-3 head has beside. `config` is its Llama-like part."""
    given = files.config
    vocab = number(config, "vocab_size", files.folder, target.vocab)
    check_target(files.folder, "vocabulary size", vocab, target.vocab)
    return {
        **llama_parts(files, config, names, target),
        "generation": 3,
        "target_hidden": number(given, "target_hidden_size", files.folder, number(config, "hidden_size", files.folder)),
        "vocab": vocab,
        "draft_vocab": number(given, "draft_vocab_size", files.folder, vocab),
        "fc_bias": "fc.bias" in names,
        "fc_norm": bool(given.get("fc_norm", False)),
        "norm_before_fc": bool(given.get("norm_before_fc", False)),
        "norm_before_residual": bool(given.get("norm_before_residual", False)),
        "norm_output": bool(given.get("norm_output", False)),
    }


def default_taps(target: TargetShape) -> Taps:
    """Early, middle and late: the residual stream after 2, n // 2 and n - 3 layers."""
    return Taps((2, target.layers // 2, target.layers - 3))


def given_taps(folder: Path, key: str, ids: object, target: TargetShape, shift: int = 0) -> Taps:
    """The taps that a configuration names. shift: 1 where its ids name layers whose output is meant."""
    if not isinstance(ids, list) or not ids or not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise ModelError(f"{folder / 'config.json'}: {key}={ids!r}, must be a list of layers, such as [2, 16, 29]")
    taps = Taps(tuple(i + shift for i in ids))
    taps.check(target.layers)
    return taps


def check_vocabulary(folder: Path, names: Names, shape: EagleShape) -> None:
    """Raise `ModelError` unless d2t leads each of the head's ids to another of the target's, as t2d says."""
    offsets = names.get("d2t")
    if offsets is None:
        return
    ids = torch.arange(shape.draft_vocab) + offsets.long()
    if int(ids.min()) < 0 or int(ids.max()) >= shape.vocab:
        wrong = int(((ids < 0) | (ids >= shape.vocab)).nonzero()[0])
        raise ModelError(
            f"{folder}: d2t leads the head's id {wrong} to {int(ids[wrong])}, outside the target's vocabulary of "
            f"{shape.vocab}. d2t must hold offsets: target id = i + d2t[i]"
        )
    if ids.unique().numel() != ids.numel():
        raise ModelError(
            f"{folder}: d2t leads two of the head's ids to one of the target's. d2t must hold offsets: "
            "target id = i + d2t[i]"
        )
    known = names.get("t2d")
    if known is not None and not torch.equal(known.bool().nonzero().flatten(), ids.sort().values):
        raise ModelError(f"{folder}: t2d marks other ids than d2t leads to. Fetch the head again, or leave t2d out")


def _rope(config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Rotary frequencies as transformers 5 writes them, from that or from the older two keys."""
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    found = dict(given) if isinstance(given, dict) else {"rope_type": given}
    found.setdefault("rope_type", found.pop("type", "default"))
    found.setdefault("rope_theta", config.get("rope_theta") or 10000.0)
    if config.get("partial_rotary_factor") is not None:
        found.setdefault("partial_rotary_factor", config["partial_rotary_factor"])
    if found["rope_type"] not in ("default", *ROPE_INIT_FUNCTIONS):
        known = ", ".join(("default", *sorted(set(ROPE_INIT_FUNCTIONS) - {"default"})))
        raise ModelError(f"{folder / 'config.json'}: rope_type={found['rope_type']!r}, must be one of {known}. {AGAIN}")
    if isinstance(found["rope_theta"], bool) or not isinstance(found["rope_theta"], int | float):
        raise ModelError(f"{folder / 'config.json'}: rope_theta={found['rope_theta']!r}, must be a number. {AGAIN}")
    found["rope_theta"] = float(found["rope_theta"])
    return found
