"""How EAGLE heads are stored: the layouts of checkpoints that are read, and the two of EAGLE-3 that are written.

A head's tensors go by speculators' names (`layers.0.*`) inside the program. Four layouts are read:

* speculators (vLLM's format): EAGLE-3 with its Llama part in `transformer_layer_config`. Its tap ids count the layers
  that were passed, as ours do. Where `norm_before_residual` is missing, readers disagree; the library's default is
  False.
* SpecForge (SGLang's format): EAGLE-3 with tap ids in `eagle_config`. There id i is the output of layer i, which is the
  residual stream after i + 1 layers: one more than in the other formats. EAGLE-3.1 heads come in this format too.
* EAGLE-3 as its authors store it: `midlayer.*`, `fc` over three tapped states, an LM head over a draft vocabulary.
* EAGLE-1 and EAGLE-2 as their authors store them: `fc` over embedding and hidden state, then Llama layers, the first of
  which has no norm before it. The hidden state is the target's last one after its final norm; the LM head is the
  target's, and so is the embedding if the checkpoint has none.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from slipstream.core.errors import ConfigError, ModelError, UnsupportedModel
from slipstream.models.heads.checkpoint import (
    AGAIN,
    MOST_PARTS,
    HeadFiles,
    TargetShape,
    check_kind,
    check_target,
    check_tensors,
    number,
)
from slipstream.models.taps import Taps

Layout = Literal["original", "speculators"]
"""The layouts that are written."""

_Shapes = dict[str, tuple[int, ...]]
_Names = Mapping[str, Tensor]

_LAYER = "layers.0."
_BOUNDED = ("longrope", "dynamic")
"""Kinds of rotary embedding whose frequencies change with the length of the text: used up to their first length."""
_TAP_IDS = "eagle_aux_hidden_state_layer_ids"
_SPECFORGE, _SPECFORGE_PART = "LlamaForCausalLMEagle3", "eagle_config"
_SPECULATORS, _SPECULATORS_PART = "speculators_model_type", "transformer_layer_config"
_SPECULATORS_VERSION = "0.9.0"
_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


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
    draft_vocab: int  # of its LM head
    taps: Taps
    max_positions: int  # up to which it is used
    trained_positions: int  # of its training; some rotary embeddings depend on it
    rope: Mapping[str, Any]  # rotary frequencies, written as transformers' `rope_parameters`
    fc_bias: bool = False
    qkv_bias: bool = False
    head_norms: bool = False  # norms on queries and keys, as in Qwen3
    fc_norm: bool = False  # EAGLE-3.1: a norm on each tapped state before fc
    norm_before_fc: bool = False  # one norm on all tapped states together
    norm_before_residual: bool = False  # the residual of the first layer is the normed feature
    norm_output: bool = False  # EAGLE-3.1: the next row reads the normed hidden state

    @property
    def num_taps(self) -> int:
        return len(self.taps.layers) + self.taps.normed

    @property
    def wanted(self) -> _Shapes:
        """Required tensors."""
        h, query, kv = self.hidden, self.heads * self.head_dim, self.kv_heads * self.head_dim
        found: _Shapes = {}
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
    def optional(self) -> _Shapes:
        """Optional tensors; the target's embedding and LM head stand in for missing ones."""
        return {
            "embed_tokens.weight": (self.vocab, self.hidden),
            "lm_head.weight": (self.draft_vocab, self.hidden),
            "d2t": (self.draft_vocab,),
            "t2d": (self.vocab,),
        }


@dataclass(frozen=True, slots=True)
class EagleCheckpoint:
    """A head as stored: its shape, and its tensors under our names. Errors name `folder`."""

    shape: EagleShape
    tensors: Mapping[str, Tensor]
    folder: Path


def read_eagle(files: HeadFiles, target: TargetShape) -> EagleCheckpoint:
    """The head in these files, checked against its own configuration and against the target."""
    check_kind(files.folder, files.tensors.keys(), "eagle")
    spelling = _Spelling.of(files.tensors)
    names = spelling.read(files.tensors)
    shape = _shape_of(files, names, target)
    check_target(files.folder, "hidden size", shape.target_hidden, target.hidden)
    check_target(files.folder, "vocabulary size", shape.vocab, target.vocab)
    shape.taps.check(target.layers)
    check_tensors(files.folder, names, shape.wanted, shape.optional, spelling.write)
    _check_vocabulary(files.folder, names, shape)
    return EagleCheckpoint(shape, names, files.folder)


@dataclass(frozen=True, slots=True)
class _Spelling:
    """How a folder's names differ from ours: a trainer's `model.` before them, `midlayer.*` for `layers.0.*`."""

    prefix: str
    layer: str

    @staticmethod
    def of(tensors: _Names) -> _Spelling:
        prefix = "model." if any(name.startswith("model.") for name in tensors) else ""
        is_mid = any(name.removeprefix(prefix).startswith("midlayer.") for name in tensors)
        return _Spelling(prefix, "midlayer." if is_mid else _LAYER)

    def read(self, tensors: _Names) -> dict[str, Tensor]:
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


def _shape_of(files: HeadFiles, names: _Names, target: TargetShape) -> EagleShape:
    config = files.config
    if _SPECULATORS in config:
        kind, layer = config[_SPECULATORS], config.get(_SPECULATORS_PART)
        if kind != "eagle3":
            raise UnsupportedModel(
                f"{files.folder}: {_SPECULATORS}={kind!r}; of this format only 'eagle3' can be run. Use another head"
            )
        if not isinstance(layer, dict):
            raise ModelError(f"{files.folder / 'config.json'}: {_SPECULATORS_PART} is missing. Fetch the file again")
        return _eagle3(files, layer, names, target)
    nested = (config.get(_SPECFORGE_PART) or {}).get(_TAP_IDS)
    if nested is not None:
        taps = _given_taps(files.folder, f"{_SPECFORGE_PART}.{_TAP_IDS}", nested, target, shift=1)
        return _eagle3(files, config, names, target, taps)
    is_specforge = _SPECFORGE in (config.get("architectures") or ()) or _SPECFORGE_PART in config
    if is_specforge or "draft_vocab_size" in config or "layers.0.hidden_norm.weight" in names:
        return _eagle3(files, config, names, target)
    return _eagle1(files, names, target)


def _eagle1(files: HeadFiles, names: _Names, target: TargetShape) -> EagleShape:
    parts = _llama_parts(files, files.config, names, target)
    vocab = number(files.config, "vocab_size", files.folder, target.vocab)
    return EagleShape(
        **parts,
        generation=1,
        target_hidden=parts["hidden"],
        vocab=vocab,
        draft_vocab=vocab,
        taps=Taps(normed=True),
        fc_bias=bool(files.config.get("bias", "fc.bias" in names)),
    )


def _eagle3(
    files: HeadFiles, llama: Mapping[str, Any], names: _Names, target: TargetShape, taps: Taps | None = None
) -> EagleShape:
    """llama: the part of the configuration that describes its layer. taps: None if they stand under the usual key."""
    given = files.config
    vocab = number(llama, "vocab_size", files.folder, target.vocab)
    check_target(files.folder, "vocabulary size", vocab, target.vocab)
    if taps is None:
        ids = given.get(_TAP_IDS)
        taps = default_taps(target) if ids is None else _given_taps(files.folder, _TAP_IDS, ids, target)
    flags: dict[str, Any] = {flag: bool(given.get(flag, False)) for flag in _FLAGS}
    return EagleShape(
        **_llama_parts(files, llama, names, target),
        generation=3,
        target_hidden=number(given, "target_hidden_size", files.folder, number(llama, "hidden_size", files.folder)),
        vocab=vocab,
        draft_vocab=number(given, "draft_vocab_size", files.folder, vocab),
        fc_bias="fc.bias" in names,
        **flags,
        taps=taps,
    )


def _llama_parts(files: HeadFiles, config: Mapping[str, Any], names: _Names, target: TargetShape) -> dict[str, Any]:
    """What every head has in common with a Llama: sizes, norms, rotary embedding. config: where they are written."""
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
        # its own number is the length of training; the head works beyond, and the planner measures if it pays
        "max_positions": min(target.max_positions, bound or target.max_positions),
        "trained_positions": number(config, "max_position_embeddings", folder, target.max_positions),
        "rope": rope,
        "qkv_bias": attention + "q_proj.bias" in names,
        "head_norms": attention + "q_norm.weight" in names,
    }


def default_taps(target: TargetShape) -> Taps:
    """Early, middle and late: the residual stream after 2, n // 2 and n - 3 layers."""
    return Taps((2, target.layers // 2, target.layers - 3))


def _given_taps(folder: Path, key: str, ids: object, target: TargetShape, shift: int = 0) -> Taps:
    """The taps that a configuration names. shift: 1 if an id means the output of that layer."""
    if not isinstance(ids, list) or not ids or not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise ModelError(f"{folder / 'config.json'}: {key}={ids!r}, must be a list of layers, such as [2, 16, 29]")
    taps = Taps(tuple(i + shift for i in ids))
    taps.check(target.layers)
    return taps


def _check_vocabulary(folder: Path, names: _Names, shape: EagleShape) -> None:
    """Raise `ModelError` unless d2t maps each of the head's ids to a different one of the target's, as t2d says."""
    offsets = names.get("d2t")
    if offsets is None:
        return
    ids = torch.arange(shape.draft_vocab) + offsets.long()
    if int(ids.min()) < 0 or int(ids.max()) >= shape.vocab:
        wrong = int(((ids < 0) | (ids >= shape.vocab)).nonzero()[0])
        raise ModelError(
            f"{folder}: d2t maps the head's id {wrong} to {int(ids[wrong])}, outside the target's vocabulary of "
            f"{shape.vocab}. d2t must hold offsets: target id = i + d2t[i]"
        )
    if ids.unique().numel() != ids.numel():
        raise ModelError(
            f"{folder}: d2t maps two of the head's ids to one of the target's. d2t must hold offsets: "
            "target id = i + d2t[i]"
        )
    known = names.get("t2d")
    if known is not None and not torch.equal(known.bool().nonzero().flatten(), ids.sort().values):
        raise ModelError(f"{folder}: t2d marks other ids than d2t names. Fetch the head again, or leave t2d out")


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


def save_eagle3(
    head: EagleCheckpoint, folder: Path, layout: Layout = "original", *, target: str | None = None, depth: int = 5
) -> Path:
    """Write the head into `folder`, which may exist. target, depth: written for the readers of speculators.

    `norm_before_residual` and the taps are always written: readers disagree on the defaults.
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
    """The tensors by the layout's names; copies, because safetensors refuses tensors that share memory."""
    spelling = _Spelling("", "midlayer." if layout == "original" else "layers.0.")
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
        _TAP_IDS: list(shape.taps.layers),
        **{flag: getattr(shape, flag) for flag in _FLAGS},
    }


def _original(shape: EagleShape) -> dict[str, Any]:
    return {"architectures": ["LlamaForCausalLM"], **_llama(shape), **_extras(shape)}


def _speculators(shape: EagleShape, target: str | None, depth: int) -> dict[str, Any]:
    return {
        "architectures": ["Eagle3Speculator"],
        _SPECULATORS: "eagle3",
        "speculators_version": _SPECULATORS_VERSION,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": depth}],
            "verifier": {"name_or_path": target, "architectures": []},
        },
        _SPECULATORS_PART: _llama(shape),
        **_extras(shape),
    }
