"""Tiny models of many families, with weights random enough that a wrong forward shows in the logits.

Not a test file: the tests that compare our passes with transformers share it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from slipstream.kernels.cpu.compiled import can_compile
from slipstream.models.batch import PassBatch
from slipstream.models.fused import FusedTrunk
from slipstream.models.runner import Runner

VOCAB = 97
WINDOW = 7
"""Shorter than the prompts, so that it hides something."""
CPU = torch.device("cpu")
PAGE = 4


def same_numbers(ours: Tensor, theirs: Tensor) -> bool:
    """To the bit where layers and products are compiled; where they cannot be, up to the rounding of fp32."""
    return torch.equal(ours, theirs) if can_compile() else torch.allclose(ours, theirs, rtol=1e-5, atol=1e-5)


@contextmanager
def in_torch(model: nn.Module) -> Iterator[None]:
    """Inside, fused layers run one by one, by operations of torch, as where nothing can be compiled."""
    (trunk,) = (module for module in model.modules() if isinstance(module, FusedTrunk))
    compiled, trunk.compiled = trunk.compiled, None
    try:
        yield
    finally:
        trunk.compiled = compiled


_BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
_SLIDES = ["sliding_attention", "full_attention", "sliding_attention"]

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    # name -> model type, what differs from the base
    "llama": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-yarn": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 24,
            }
        },
    ),
    "mistral": ("mistral", {"sliding_window": WINDOW, "head_dim": 8}),
    "ministral3": (
        "ministral3",
        {
            "head_dim": 8,
            "sliding_window": None,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 2.0,
                "original_max_position_embeddings": 48,
                "llama_4_scaling_beta": 0.5,
            },
        },
    ),
    "qwen2": ("qwen2", {}),
    "qwen2-slides": ("qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}),
    "qwen2-moe": (
        "qwen2_moe",
        {
            **_EXPERTS,
            "num_experts": 4,
            "shared_expert_intermediate_size": 24,
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "max_window_layers": 1,
        },
    ),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3-moe": ("qwen3_moe", {**_EXPERTS, "num_experts": 4, "head_dim": 8}),
    "gemma": ("gemma", {"head_dim": 8}),
    "gemma2": (
        "gemma2",
        {
            "head_dim": 8,
            "sliding_window": WINDOW,
            "attn_logit_softcapping": 1.5,
            "final_logit_softcapping": 5.0,
            "query_pre_attn_scalar": 20,
            "layer_types": _SLIDES,
        },
    ),
    "gemma3": (
        "gemma3_text",
        {"head_dim": 8, "sliding_window": WINDOW, "layer_types": _SLIDES, "query_pre_attn_scalar": 20},
    ),
    "phi": ("phi", {"partial_rotary_factor": 0.5}),
    "phi3": ("phi3", {"partial_rotary_factor": 0.5, "sliding_window": WINDOW}),
    "phi3-longrope": (
        "phi3",
        {
            "original_max_position_embeddings": 40,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.0, 1.1, 1.2, 1.3],
                "long_factor": [2.0, 3.0, 4.0, 5.0],
                "original_max_position_embeddings": 40,
            },
        },
    ),
    "gpt2": ("gpt2", {"n_inner": 40, "scale_attn_by_inverse_layer_idx": True}),
    "gpt-neox": ("gpt_neox", {"rotary_pct": 0.5}),
    "gpt-oss": (
        "gpt_oss",
        {
            "head_dim": 8,
            "sliding_window": WINDOW,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "layer_types": _SLIDES,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW}),
    "granite": (
        "granite",
        {
            "embedding_multiplier": 2.0,
            "residual_multiplier": 0.6,
            "attention_multiplier": 0.25,
            "logits_scaling": 1.7,
        },
    ),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0, 1]}),
    "opt": ("opt", {"ffn_dim": 40, "word_embed_proj_dim": 32}),
    "cohere": ("cohere", {"logit_scale": 0.5, "use_qk_norm": True}),
    "cohere2": ("cohere2", {"logit_scale": 0.5, "sliding_window": WINDOW, "layer_types": _SLIDES, "head_dim": 8}),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", {"sliding_window": WINDOW, "layer_types": _SLIDES}),
    "stablelm": ("stablelm", {"partial_rotary_factor": 0.5, "qk_layernorm": True, "use_qkv_bias": True}),
    "starcoder2": ("starcoder2", {"sliding_window": WINDOW}),
    "glm4": ("glm4", {"head_dim": 8, "partial_rotary_factor": 0.5, "attention_bias": True}),
    "deepseek-v3": (
        "deepseek_v3",
        {
            **_EXPERTS,
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "n_group": 2,
            "topk_group": 1,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "kv_lora_rank": 16,
            "q_lora_rank": 24,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 12,
        },
    ),
    "nemotron": ("nemotron", {"head_dim": 8}),
    "seed-oss": ("seed_oss", {"head_dim": 8}),
    "hunyuan": ("hunyuan_v1_dense", {"head_dim": 8}),
    "exaone4": ("exaone4", {"sliding_window": WINDOW, "layer_types": _SLIDES}),
    "ernie4.5": ("ernie4_5", {"head_dim": 8}),
}


def tiny_config(family: str, **changes: Any) -> PreTrainedConfig:
    model_type, differs = FAMILIES[family]
    return CONFIG_MAPPING[model_type](**{**_BASE, **differs, **changes})


@torch.no_grad()
def save_random(folder: Path, config: PreTrainedConfig, seed: int = 0) -> Path:
    """A checkpoint in which nothing is 0 or 1: norms, biases and sinks are random too."""
    generator = torch.Generator().manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        if weight.ndim > 1:
            weight.copy_(noise if "embed" in name else 1.5 * noise / weight.shape[-1] ** 0.5)
        else:
            weight.add_(0.5 * noise)
    model.save_pretrained(folder)
    return folder


def load_reference(folder: Path) -> PreTrainedModel:
    """The model as transformers runs it."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    return cast(PreTrainedModel, model.eval())


@torch.inference_mode()
def plain_logits(model: PreTrainedModel, tokens: Sequence[int], start: int = 0) -> Tensor:  # [len(tokens), V]
    """One sequence through transformers, without a cache; `start` is the position of its first token."""
    positions = torch.arange(start, start + len(tokens))[None] if start else None
    out: Any = model(input_ids=torch.tensor([list(tokens)]), position_ids=positions, use_cache=False)
    return cast(Tensor, out.logits[0])


def random_tokens(count: int, seed: int) -> list[int]:
    return torch.randint(3, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def path_to(parents: Sequence[int], node: int) -> list[int]:
    """The nodes from the root's child down to `node`."""
    return [*path_to(parents, parents[node]), node] if node >= 0 else []


class Passes:
    """Passes of one runner over a few requests whose pages lie scattered and out of order. Commits all but trees."""

    def __init__(self, runner: Runner, requests: int = 2, pages_each: int = 12) -> None:
        self.runner = runner
        ids = torch.randperm(requests * pages_each, generator=torch.Generator().manual_seed(5)).tolist()
        self.pages = [tuple(ids[r::requests]) for r in range(requests)]
        self.pages[-1] = tuple(sorted(self.pages[-1]))
        self.cache = runner.new_cache(requests * pages_each, PAGE)
        self.lengths = [0] * requests

    @torch.inference_mode()
    def run(
        self,
        parts: Sequence[tuple[int, Sequence[int]]],  # request, its tokens in this pass
        parents: Sequence[int] | None = None,  # the first part is this tree
        rows: Sequence[int] | None = None,
        start: int = 0,  # position of a request's first token
    ) -> Tensor:  # [R, V]
        starts, slots, positions, masks = [0], [], [], []
        for i, (request, tokens) in enumerate(parts):
            first = self.lengths[request]
            starts.append(starts[-1] + len(tokens))
            slots += [self.pages[request][at // PAGE] * PAGE + at % PAGE for at in range(first, first + len(tokens))]
            if parents is not None and i == 0:
                paths = [path_to(parents, node) for node in range(len(tokens))]
                positions += [start + first + len(path) - 1 for path in paths]
                masks += [sum(1 << node for node in path) for path in paths]
            else:
                positions += range(start + first, start + first + len(tokens))
                masks += [0] * len(tokens)
        batch = PassBatch(
            input_ids=torch.tensor([token for _, tokens in parts for token in tokens]),
            positions=torch.tensor(positions),
            slots=torch.tensor(slots),
            row_starts=tuple(starts),
            prefix_lengths=tuple(self.lengths[request] for request, _ in parts),
            pages=tuple(self.pages[request] for request, _ in parts),
            is_tree=tuple(parents is not None and i == 0 for i in range(len(parts))),
            masks=None if parents is None else torch.tensor(masks),
            logit_rows=None if rows is None else torch.tensor(rows, dtype=torch.int64),
        )
        logits = self.runner.forward(batch, self.cache)
        for i, (request, tokens) in enumerate(parts):
            if parents is None or i > 0:
                self.lengths[request] += len(tokens)
        return logits
