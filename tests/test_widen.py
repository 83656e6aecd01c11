"""The benchmark's large target: it computes what the small model computes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from conftest import save_model, tiny_llama
from gpu_bench import widen

SHAPE = {"hidden": 48, "layers": 5, "heads": 8, "kv_heads": 4, "inner": 80}


def test_it_computes_the_same(tiny_target: Path, tmp_path: Path) -> None:
    folder = tmp_path / "wide"
    total = widen.write(tiny_target, folder, SHAPE, torch.float32, shard_bytes=20_000)
    assert len(list(folder.glob("*.safetensors"))) > 2
    small = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32)
    wide = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert sum(p.numel() * 4 for p in wide.parameters()) == total
    assert (wide.config.hidden_size, wide.config.num_hidden_layers) == (48, 5)
    ids = torch.arange(40, 70)[None]
    with torch.inference_mode():
        torch.testing.assert_close(wide(ids).logits, small(ids).logits, rtol=1e-4, atol=1e-4)
    assert AutoTokenizer.from_pretrained(folder).decode([72, 105]) == AutoTokenizer.from_pretrained(tiny_target).decode(
        [72, 105]
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [({"hidden": 16}, "--hidden 16: must be at least"), ({"heads": 6}, "--heads 6 --kv-heads 4: there must be 2")],
)
def test_a_model_that_does_not_fit_is_refused(
    tiny_target: Path, tmp_path: Path, change: dict[str, int], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        widen.write(tiny_target, tmp_path / "wide", SHAPE | change, torch.float32)


def test_a_model_with_more_than_a_llama_has_is_refused(tmp_path: Path) -> None:
    source = save_model(tmp_path / "biased", tiny_llama(attention_bias=True))
    with pytest.raises(ValueError, match=r"has model\.layers\.0\.self_attn\.k_proj\.bias"):
        widen.write(source, tmp_path / "wide", SHAPE, torch.float32)
