"""Make a model that computes what a small one computes, at the cost of a large one: a target for benchmarks.

    python tools/widen.py SMALL FOLDER [--hidden 4608 --layers 32 --heads 48 --kv-heads 16 --inner 12288]

SMALL is a Llama-like model: a folder, a hub id, or `default`. The small model's numbers stand in the corner of each
weight; whatever cannot be seen in the result is random, the rest zero. Up to rounding in bf16 the two give the same
tokens, so the small one is a draft that is right nearly always: what an engine then reaches is what it makes of good
drafts, and more than a real pair of models would give. `widen_heads.py` does the same for the small one's drafters.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from slipstream.models.resolve import resolve

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
SHAPE = {"hidden": 4608, "layers": 32, "heads": 48, "kv_heads": 16, "inner": 12288}
"""The default wide model: 13.8 GB in bf16."""


def wide_config(small: LlamaConfig, *, hidden: int, layers: int, heads: int, kv_heads: int, inner: int) -> LlamaConfig:
    """The configuration of the wide model. Raises `ValueError` if the small one does not fit into it."""
    small_kv_heads = small.num_key_value_heads or small.num_attention_heads
    if heads * small_kv_heads != kv_heads * small.num_attention_heads:
        group = small.num_attention_heads // small_kv_heads
        raise ValueError(f"--heads {heads} --kv-heads {kv_heads}: there must be {group} heads to each head of keys")
    for option, wide, narrow in (
        ("--hidden", hidden, small.hidden_size),
        ("--layers", layers, small.num_hidden_layers),
        ("--kv-heads", kv_heads, small_kv_heads),
        ("--inner", inner, small.intermediate_size),
    ):
        if wide < narrow:
            raise ValueError(f"{option} {wide}: must be at least the small model's {narrow}")
    changes: dict[str, Any] = {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim(small),
        "intermediate_size": inner,
        "tie_word_embeddings": False,
        # the mean of the squares is over more numbers, of which all that are new are zero
        "rms_norm_eps": small.rms_norm_eps * small.hidden_size / hidden,
        "architectures": ["LlamaForCausalLM"],
    }
    return LlamaConfig(**{**small.to_dict(), **changes})


def head_dim(config: LlamaConfig) -> int:
    return config.head_dim or config.hidden_size // config.num_attention_heads


def widened(small: Mapping[str, Tensor], config: LlamaConfig, hidden: int, dtype: torch.dtype) -> Iterator[Tensor]:
    """The wide model's tensors in the order of `names`; `hidden`: of the small one."""
    device = next(iter(small.values())).device
    generator = torch.Generator(device).manual_seed(0)
    scale = (hidden / config.hidden_size) ** 0.5
    for name, shape in names(config).items():
        source = small.get(name)
        if source is None and name == "lm_head.weight":
            source = small["model.embed_tokens.weight"]
        is_norm = len(shape) == 1
        # what is written into the residual must leave the new numbers of a row at zero
        if name.endswith(("embed_tokens.weight", "o_proj.weight", "down_proj.weight")):
            wide = torch.zeros(shape, device=device)
        else:
            wide = torch.randn(shape, generator=generator, device=device) * 0.02 + (scale if is_norm else 0.0)
        if source is not None:
            wide[tuple(slice(0, n) for n in source.shape)] = source.float() * (scale if is_norm else 1.0)
        yield wide.to(dtype).cpu()


def names(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """The tensors of a Llama, and their shapes."""
    width, inner, vocab = config.hidden_size, config.intermediate_size, config.vocab_size
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads or config.num_attention_heads
    query, kept = heads * head_dim(config), kv_heads * head_dim(config)
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, width),
        "lm_head.weight": (vocab, width),
        "model.norm.weight": (width,),
    }
    for layer in range(config.num_hidden_layers):
        at = f"model.layers.{layer}"
        found |= {
            f"{at}.input_layernorm.weight": (width,),
            f"{at}.post_attention_layernorm.weight": (width,),
            f"{at}.self_attn.q_proj.weight": (query, width),
            f"{at}.self_attn.k_proj.weight": (kept, width),
            f"{at}.self_attn.v_proj.weight": (kept, width),
            f"{at}.self_attn.o_proj.weight": (width, query),
            f"{at}.mlp.gate_proj.weight": (inner, width),
            f"{at}.mlp.up_proj.weight": (inner, width),
            f"{at}.mlp.down_proj.weight": (width, inner),
        }
    return found


def write(source: Path, folder: Path, shape: dict[str, int], dtype: torch.dtype, shard_bytes: int = 4 << 30) -> int:
    """The wide model in Hugging Face's format; returns its bytes."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    small: Any = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    small.to(device)
    config = wide_config(small.config, **shape)
    config.dtype = dtype
    if strange := sorted(small.state_dict().keys() - names(config).keys()):
        raise ValueError(f"{source}: has {strange[0]}, which a Llama has not; name a Llama-like model without biases")
    folder.mkdir(parents=True, exist_ok=True)
    weight_map: dict[str, str] = {}
    shard: dict[str, Tensor] = {}
    total = held = 0

    def flush() -> None:
        nonlocal held
        name = f"model-{len(set(weight_map.values())):05}.safetensors"
        save_file(shard, folder / name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, name))
        print(f"{total / 1e9:.1f} GB written", flush=True)
        shard.clear()
        held = 0

    for name, tensor in zip(
        names(config), widened(small.state_dict(), config, small.config.hidden_size, dtype), strict=True
    ):
        shard[name] = tensor
        total += tensor.nbytes
        held += tensor.nbytes
        if held >= shard_bytes:
            flush()
    if shard:
        flush()
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config.save_pretrained(folder)
    for file in TOKENIZER_FILES:
        if (source / file).exists():
            shutil.copy(source / file, folder / file)
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("small")
    parser.add_argument("folder", type=Path)
    for name, size in SHAPE.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=size)
    options = parser.parse_args()
    try:
        write(resolve(options.small), options.folder, {name: getattr(options, name) for name in SHAPE}, torch.bfloat16)
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
