"""Refusals by configuration: what we could not run truly is named before any weights are read."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers import CONFIG_MAPPING
from transformers.models.auto.configuration_auto import model_type_to_module_name
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from slipstream.core.errors import UnsupportedModel
from slipstream.models.describe import ENCODERS, OWN_ATTENTION, STATEFUL, check_supported

# fmt: off
PASSING = {
    "cohere2", "deepseek_v3", "gemma2", "gemma3_text", "gpt2", "gpt_neox", "gpt_oss", "granite", "llama", "mistral",
    "mixtral", "olmo2", "opt", "phi3", "qwen2", "qwen3", "qwen3_moe", "smollm3", "stablelm", "starcoder2",
}
# fmt: on
MODELS = Path(transformers.__file__).parent / "models"


def config(model_type: str, **options: Any) -> Any:
    return CONFIG_MAPPING[model_type](**options)


@pytest.mark.parametrize(
    "model_type",
    sorted(PASSING),
)
def test_decoders_pass(model_type: str) -> None:
    check_supported(config(model_type))


@pytest.mark.parametrize(
    ("model_type", "why"),
    [
        ("bloom", "attention interface"),
        ("mamba", "linear_attention|recurrent"),
        ("recurrent_gemma", "recurrent"),
        ("qwen3_next", "linear_attention"),
        ("llama4_text", "chunks"),
        ("t5", "encoder-decoder"),
        ("bert", "both ways"),
        ("gemma3", "multimodal.*text_config"),
    ],
)
def test_others_are_refused_with_the_reason(model_type: str, why: str) -> None:
    with pytest.raises(UnsupportedModel, match=why) as caught:
        check_supported(config(model_type))
    assert f"model_type {model_type}" in str(caught.value)
    assert re.search(r"\. (Choose|Use) ", str(caught.value))


@pytest.mark.parametrize("scheme", ["gptq", "fp8"])
def test_quantized_checkpoints_are_refused_by_scheme(scheme: str) -> None:
    with pytest.raises(UnsupportedModel, match=scheme):
        check_supported(config("llama", quantization_config={"quant_method": scheme}))


def test_a_foreign_layer_type_is_refused_in_any_family() -> None:
    mixed = config("qwen3", num_hidden_layers=2)
    mixed.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(UnsupportedModel, match="linear_attention"):
        check_supported(mixed)


def test_bidirectional_decoders_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match="both ways"):
        check_supported(config("gemma3_text", use_bidirectional_attention=True))


def modeling_source(model_type: str, class_name: str) -> str:
    folder = MODELS / model_type_to_module_name(model_type)
    sources = [file.read_text() for file in folder.glob("modeling_*.py")]
    return next((source for source in sources if re.search(rf"^class {class_name}\b", source, re.M)), "")


def test_the_list_of_own_attention_agrees_with_this_transformers() -> None:
    """Every causal LM whose source never names the attention interface is refused, and no other one is on that list."""
    without = set()
    for model_type, class_name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        source = modeling_source(model_type, class_name)
        if source and "ALL_ATTENTION_FUNCTIONS" not in source:
            without.add(model_type)
    assert without, "transformers keeps its sources elsewhere now: this test looks at nothing"
    assert set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) & OWN_ATTENTION <= without
    by_other_rules = {
        "fuyu",
        "got_ocr2",
        "gemma4_assistant",
        "gemma4_unified_assistant",
    }  # multimodal, or parts of such
    assert without - by_other_rules <= OWN_ATTENTION | STATEFUL | ENCODERS


@pytest.mark.parametrize("model_type", sorted(STATEFUL & set(CONFIG_MAPPING)))
def test_stateful_families_are_refused(model_type: str) -> None:
    with pytest.raises(UnsupportedModel):
        check_supported(config(model_type))
