"""Which models are run, and which drafter was trained for which of them."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING
from transformers.models.auto.configuration_auto import model_type_to_module_name
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from conftest import save_model, tiny_llama
from medusa_checkpoints import tiny_medusa
from slipstream import LLM, SamplingParams
from slipstream.cli.main import main
from slipstream.core.errors import DrafterError, UnsupportedModel
from slipstream.drafters.opening import HEADS
from slipstream.models.default import default_folder, default_model
from slipstream.models.describe import ENCODERS, OWN_ATTENTION, STATEFUL, check_supported
from slipstream.models.gguf import ORIGIN
from slipstream.models.identity import TRAINED_FOR, check_pair, identity_of, larger_draft, record_base
from slipstream.models.resolve import shown_name

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


def copied(folder: Path, to: Path, dtype: torch.dtype) -> Path:
    """The same model with its weights in another dtype."""
    shutil.copytree(folder, to)
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors, to / "model.safetensors", {"format": "pt"})
    return to


def test_identity_is_of_the_numbers_and_the_vocabulary(tiny_target: Path, tmp_path: Path) -> None:
    own = identity_of(tiny_target)
    assert all(own.values())
    rounded = copied(tiny_target, tmp_path / "bf16", torch.bfloat16)
    assert identity_of(rounded)["weights"] != own["weights"]
    assert identity_of(copied(rounded, tmp_path / "wide", torch.float32)) == identity_of(rounded)
    tokenizer = json.loads((rounded / "tokenizer.json").read_text())
    tokenizer["added_tokens"][0]["content"] = "<other>"
    (rounded / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert identity_of(rounded)["tokenizer"] != own["tokenizer"]
    assert identity_of(tmp_path) == {"weights": None, "tokenizer": None}


def test_a_head_of_another_model_is_refused_unless_forced(
    open_llm: Callable[..., LLM], tiny_target: Path, tmp_path: Path
) -> None:
    other = save_model(tmp_path / "other", tiny_llama(), seed=7)
    head = tiny_medusa(tmp_path / "head")
    record_base(head, other)
    with pytest.raises(DrafterError, match=r"head: it was trained for another model .*weights .*--force-pair"):
        open_llm(drafter=f"medusa:{head}")
    forced = open_llm(drafter=f"medusa:{head}", force_pair=True)
    assert "another model than target" in forced.remarks[0]
    params = SamplingParams(temperature=0, max_tokens=8)
    assert forced.generate("Hi", params)[0].outputs[0].token_ids == (
        open_llm(drafter=None).generate("Hi", params)[0].outputs[0].token_ids
    )
    record_base(head, tiny_target)
    assert open_llm(drafter=f"medusa:{head}").remarks == ()


def test_the_command_line_forces_a_pair(tiny_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    head = tiny_medusa(tmp_path / "head")
    record_base(head, save_model(tmp_path / "other", tiny_llama(), seed=7))
    command = ["generate", "Hi", "--model", str(tiny_target), "--device", "cpu", "--memory", "64MiB"]
    command += ["--max-tokens", "4", "--drafter", f"medusa:{head}"]
    for more, code, said in (([], 1, "--force-pair"), (["--force-pair"], 0, "expect few right guesses")):
        with pytest.raises(SystemExit) as ended:
            main([*command, *more])
        assert (ended.value.code or 0) == code
        assert said in capsys.readouterr().err


def test_remarks_name_models_as_people_do(tiny_target: Path, tmp_path: Path, own_cache: Path) -> None:
    head = tiny_medusa(tmp_path / "models--me--head" / "snapshots" / "0123abc")
    record_base(head, tiny_target)
    copy = copied(tiny_target, tmp_path / "bf16", torch.bfloat16)
    assert check_pair(head, copy, force=True).startswith("me/head was trained for another model than bf16")
    (copy / ORIGIN).write_text(json.dumps({"source": "/far/small.Q4_0.gguf"}))
    assert "than small.Q4_0.gguf: " in check_pair(head, copy, force=True)
    assert shown_name(default_folder()) == "default"


def test_another_tokenizer_over_the_same_weights_is_told_of(tiny_target: Path, tmp_path: Path) -> None:
    head = tiny_medusa(tmp_path / "head")
    record_base(head, tiny_target)
    padded = copied(tiny_target, tmp_path / "padded", torch.float32)
    tokenizer = json.loads((padded / "tokenizer.json").read_text())
    tokenizer["added_tokens"].append({**tokenizer["added_tokens"][0], "id": 10**6, "content": "<pad>"})
    (padded / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert "padded's weights with another tokenizer (tokenizer " in check_pair(head, padded)


def test_weights_that_cannot_be_compared_are_told_of(tiny_target: Path, tmp_path: Path) -> None:
    head = tiny_medusa(tmp_path / "head")
    record_base(head, tiny_target)
    pickled = copied(tiny_target, tmp_path / "pickled", torch.float32)
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    assert check_pair(head, pickled).startswith("head could not be compared with pickled: ")


def test_where_weights_cannot_be_counted_bytes_are_compared(tiny_target: Path, tmp_path: Path) -> None:
    pickled = copied(tiny_target, tmp_path / "pickled", torch.float32)
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    narrow = copied(tiny_target, tmp_path / "narrow", torch.bfloat16)
    assert larger_draft(narrow, pickled) == ""
    assert "MB; the weights of one cannot be counted" in larger_draft(pickled, narrow)
    half = copied(tiny_target, tmp_path / "half", torch.float16)
    (half / "model.safetensors").rename(half / "pytorch_model.bin")
    assert larger_draft(half, tiny_target) == ""  # fewer bytes, though more than the target has weights


def test_a_head_that_does_not_say_is_told_of(open_llm: Callable[..., LLM], tmp_path: Path) -> None:
    told: list[str] = []
    llm = open_llm(drafter=f"medusa:{tiny_medusa(tmp_path / 'head')}", on_progress=told.append)
    (remark,) = llm.remarks
    assert remark.startswith("head does not say for which model it was trained")
    assert f"note: {remark}" in told


def test_a_draft_that_is_larger_than_its_target_is_told_of(
    open_llm: Callable[..., LLM], tiny_target: Path, tiny_draft: Path
) -> None:
    assert open_llm(tiny_target, drafter=f"model:{tiny_draft}").remarks == ()
    (remark,) = open_llm(tiny_draft, drafter=f"model:{tiny_target}").remarks
    assert "target is larger than its target draft" in remark


@pytest.mark.slow
def test_what_is_shipped_says_that_it_is_the_default_models() -> None:
    own = identity_of(default_model())
    for folder in HEADS.iterdir():
        assert json.loads((folder / "config.json").read_text())[TRAINED_FOR] == own
