"""Targets with multi-token prediction modules in their own checkpoints, and what such a module must compute.

Not a test file. A module's decoder layer has the tensors of one of the target's own layers, so a copy of such a layer
with other numbers is one, under whatever names the family gives it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from conftest import VOCAB, save_tokenizer
from families import save_random, tiny_config

LAYERS = 3


@dataclass(frozen=True)
class Family:
    """How a family names what its modules have beside a decoder layer; {i} is the module, {n} its layer."""

    target: Callable[[], PreTrainedConfig]
    like: str  # a layer of the target whose tensors a module has too
    layer: str
    shared: str
    token_norm: str
    hidden_norm: str
    projection: str
    last_norm: str
    hidden_first: bool = False
    key: str = "num_nextn_predict_layers"


_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 40,
    "moe_intermediate_size": 24,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 96,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GLM: dict[str, Any] = {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "use_qk_norm": True}
_LITE: dict[str, Any] = {  # it lists the kind of every layer's MLP
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}
_QWEN3_NEXT: dict[str, Any] = {
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    "shared_expert_intermediate_size": 24,
    "num_experts": 4,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_NEXTN = {
    "like": "model.layers.2.",
    "layer": "model.layers.{n}.",
    "shared": "model.layers.{n}.",
    "token_norm": "enorm",
    "hidden_norm": "hnorm",
    "projection": "eh_proj",
    "last_norm": "shared_head.norm",
}
MTP: dict[str, Family] = {
    "deepseek": Family(lambda: tiny_config("deepseek-v3", vocab_size=VOCAB), **_NEXTN),  # type: ignore[arg-type]
    "glm": Family(lambda: CONFIG_MAPPING["glm4_moe"](**_SIZES, **_GLM), **_NEXTN),  # type: ignore[arg-type]
    "glm-lite": Family(lambda: CONFIG_MAPPING["glm4_moe_lite"](**_SIZES | _LITE), **_NEXTN),  # type: ignore[arg-type]
    "mimo": Family(
        lambda: tiny_config("qwen2", vocab_size=VOCAB),
        like="model.layers.2.",
        layer="model.mtp_layers.{i}.",
        shared="model.mtp_layers.{i}.",
        token_norm="token_layernorm",
        hidden_norm="hidden_layernorm",
        projection="input_proj",
        last_norm="final_layernorm",
        hidden_first=True,
    ),
    "qwen3-next": Family(
        lambda: CONFIG_MAPPING["qwen3_next"](**_SIZES, **_QWEN3_NEXT),
        like="model.layers.2.",
        layer="mtp.layers.{i}.",
        shared="mtp.",
        token_norm="pre_fc_norm_embedding",
        hidden_norm="pre_fc_norm_hidden",
        projection="fc",
        last_norm="norm",
        key="mtp_num_hidden_layers",
    ),
}


def save_with_modules(folder: Path, family: Family, modules: int = 1, *, copies: bool = False, seed: int = 7) -> Path:
    """A tiny target with `modules` modules. copies: with the embedding and LM head again, as DeepSeek stores them."""
    save_random(folder, family.target())
    save_tokenizer(folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    dice = torch.Generator().manual_seed(seed)
    hidden = tensors["model.embed_tokens.weight"].shape[1]

    def random(*shape: int) -> Tensor:
        noise = torch.randn(shape, generator=dice)
        return 1 + 0.5 * noise if len(shape) == 1 else 1.5 * noise / shape[-1] ** 0.5

    more: dict[str, Tensor] = {}
    for i in range(modules):
        layer, shared = family.layer.format(i=i, n=LAYERS + i), family.shared.format(i=i, n=LAYERS + i)
        for name, tensor in tensors.items():
            if name.startswith(family.like):
                more[layer + name.removeprefix(family.like)] = random(*tensor.shape)
        more[f"{shared}{family.projection}.weight"] = random(hidden, 2 * hidden)
        for norm in (family.token_norm, family.hidden_norm, family.last_norm):
            more[f"{shared}{norm}.weight"] = random(hidden)
        if copies:
            more[f"{layer}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
            more[f"{layer}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file({**tensors, **more}, file, metadata={"format": "pt"})
    change_config(folder, **{family.key: modules})
    return folder


def change_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


class Reference:
    """A module as transformers would run it: a model of one layer, fed with what the projection gives."""

    def __init__(self, target: Path, family: Family, module: int, scratch: Path) -> None:
        tensors = load_file(target / "model.safetensors")
        layer, shared = (
            family.layer.format(i=module, n=LAYERS + module),
            family.shared.format(i=module, n=LAYERS + module),
        )
        self._first = {
            part: tensors[f"{shared}{name}.weight"]
            for part, name in (
                ("token", family.token_norm),
                ("hidden", family.hidden_norm),
                ("projection", family.projection),
            )
        }
        config: Any = AutoConfig.from_pretrained(target)
        config.num_hidden_layers = 1
        if hasattr(config, "first_k_dense_replace"):
            config.first_k_dense_replace = 0
        if getattr(config, "layer_types", None) is not None:
            config.layer_types = ["full_attention"]
        if getattr(config, "mlp_layer_types", None) is not None:
            config.mlp_layer_types = config.mlp_layer_types[-1:]
        only = {
            re.sub(f"^{re.escape(layer)}", "model.layers.0.", name): tensor
            for name, tensor in tensors.items()
            if name.startswith(layer)
            and re.search(r"\.(self_attn|mlp|input_layernorm|post_attention_layernorm)\.", name)
        }
        only |= {name: tensors[name] for name in ("model.embed_tokens.weight", "lm_head.weight")}
        only["model.norm.weight"] = tensors[f"{shared}{family.last_norm}.weight"]
        scratch.mkdir()
        config.save_pretrained(scratch)
        save_file(only, scratch / "model.safetensors", metadata={"format": "pt"})
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            scratch, attn_implementation="eager", dtype=torch.float32
        ).eval()
        self._family = family
        self._eps = config.rms_norm_eps
        self._offset = 1.0 if config.model_type == "qwen3_next" else 0.0  # its norms store the weight less one

    @torch.inference_mode()
    def hidden(self, tokens: list[int], features: Tensor) -> Tensor:  # [N, H]
        """The module's hidden states of these tokens, each behind the feature [N, H] of the token before it."""
        embedded = self._model.get_input_embeddings()(torch.tensor(tokens))
        parts = [self._norm(embedded, "token"), self._norm(features, "hidden")]
        if self._family.hidden_first:
            parts.reverse()
        x = torch.cat(parts, dim=1) @ self._first["projection"].T
        out = self._model.model(inputs_embeds=x[None], position_ids=torch.arange(len(tokens))[None], use_cache=False)
        found: Tensor = out.last_hidden_state[0]
        return found

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:  # [N, V]
        found: Tensor = self._model.lm_head(hidden)
        return found

    def _norm(self, x: Tensor, part: str) -> Tensor:
        weight = self._first[part] + self._offset
        normed: Tensor = x / (x.pow(2).mean(-1, keepdim=True) + self._eps).sqrt() * weight
        return normed
