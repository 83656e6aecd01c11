"""What the tests of whole engines on a GPU share. Not a test file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from conftest import save_model, tiny_llama
from exactness import Case, cases
from slipstream import LLM


def save_real_heads(folder: Path, positions: int) -> Path:
    """A small target with heads as real models have them."""
    config = tiny_llama(
        hidden_size=128,
        intermediate_size=192,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=positions,
        initializer_range=0.15,
    )
    return save_model(folder, config)


def some_cases() -> list[Case]:
    """Greedy, sampled, top-p, penalties, bad words; each set of features is captured by itself."""
    return [cases()[i] for i in (0, 1, 2, 4, 13, 14, 19)]


def open_on_gpu(target: Path, dtype: str, **options: Any) -> LLM:
    common: dict[str, Any] = {"device": "cuda", "memory": "1GiB", "max_num_seqs": 8, "planner": "fixed"}
    common["prefix_caching"] = False  # each is to be computed, in whatever company
    return LLM(target, dtype=dtype, **{**common, **options})
