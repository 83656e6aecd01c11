"""Reading a model folder: what loads is whole and quiet, what is broken is named, memory is given back."""

from __future__ import annotations

import json
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

from families import CPU, save_random, tiny_config
from slipstream.core.errors import ConfigError, ModelError, UnsupportedModel
from slipstream.kernels.linear import packs
from slipstream.models import build, headers
from slipstream.models import load as loading
from slipstream.models.build import release
from slipstream.models.default import default_model
from slipstream.models.headers import weights_bytes
from slipstream.models.load import (
    load_config,
    load_tokenizer,
    load_weights,
    naming_model,
    pick_device,
    pick_dtype,
    quiet_transformers,
)
from slipstream.models.resolve import resolve
from slipstream.models.runner import open_unchecked

LAYER = "model.layers.0.mlp.up_proj.weight"


def small_config(**options: Any) -> LlamaConfig:
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaConfig(**{"vocab_size": 24, "num_key_value_heads": 1, **shape, **options})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    LlamaForCausalLM(small_config()).save_pretrained(tmp_path / "m")
    return tmp_path / "m"


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    return load_weights(folder, dtype=dtype, device=CPU, attention="eager")


def rewrite(folder: Path, **changes: torch.Tensor | None) -> None:
    """Change the stored tensors; None removes one."""
    stored = {**load_file(folder / "model.safetensors"), **changes}
    save_file({k: v for k, v in stored.items() if v is not None}, folder / "model.safetensors", {"format": "pt"})


def test_weights_come_back_ready_to_run(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = load(folder)
    assert capfd.readouterr() == ("", "")
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    for name, tensor in load_file(folder / "model.safetensors").items():
        assert torch.equal(model.state_dict()[name], tensor)
    assert model.config._attn_implementation == "eager"


def test_tied_embeddings_are_not_missing(tmp_path: Path) -> None:
    LlamaForCausalLM(small_config(tie_word_embeddings=True)).save_pretrained(tmp_path / "m")
    assert "lm_head.weight" not in load_file(tmp_path / "m" / "model.safetensors")
    model = load(tmp_path / "m")
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_sharded_weights_load(tmp_path: Path) -> None:
    model = LlamaForCausalLM(small_config())
    model.save_pretrained(tmp_path / "m", max_shard_size="6KB")
    assert len(list((tmp_path / "m").glob("*.safetensors"))) > 1
    assert torch.equal(load(tmp_path / "m").state_dict()[LAYER], model.state_dict()[LAYER])
    assert weights_bytes(tmp_path / "m") == sum(4 * p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({LAYER: None}, rf"1 tensors are missing: {LAYER}"),
        ({"model.stray.weight": torch.zeros(2)}, r"belong to no part of the model: model\.stray\.weight"),
        ({LAYER: torch.zeros(3, 16)}, rf"wrong shape: {LAYER} \(3, 16\) instead of \(32, 16\)"),
    ],
)
def test_weights_that_do_not_fit_are_named(folder: Path, changes: dict[str, torch.Tensor | None], says: str) -> None:
    rewrite(folder, **changes)
    with pytest.raises(ModelError, match=says):
        load(folder)


def test_draft_heads_that_ride_along_are_no_error(folder: Path) -> None:
    rewrite(folder, **{"mtp.fc.weight": torch.zeros(2), "model.mtp_layers.0.norm.weight": torch.zeros(2)})
    load(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    rewrite(folder, **{"model.layers.2.eh_proj.weight": torch.zeros(2)})
    load(folder)


@pytest.mark.parametrize("damage", [lambda b: b[:-8], lambda b: b + b"x"])
def test_a_damaged_file_is_named(folder: Path, damage: Any) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(ModelError, match=r"model\.safetensors: damaged or cut short"):
        load(folder)


def test_a_folder_without_weights_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="no weights"):
        load(folder)


class Bomb:
    """A pickle that would run code when loaded."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


def test_a_pickle_cannot_run_code(folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(tmp_path / "ran")))
    with pytest.raises(ModelError):
        load(folder)
    assert not (tmp_path / "ran").exists()


def test_a_pickle_of_plain_tensors_loads(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    assert torch.equal(load(folder).state_dict()[LAYER], tensors[LAYER])
    assert weights_bytes(folder) == (folder / "pytorch_model.bin").stat().st_size


def test_configs(folder: Path, tmp_path: Path) -> None:
    assert load_config(folder).model_type == "llama"
    file = folder / "config.json"
    file.write_text("{")
    with pytest.raises(ModelError, match=r"config\.json"):
        load_config(folder)
    file.write_text(json.dumps({"model_type": "llama9000"}))
    with pytest.raises(UnsupportedModel, match="does not know its model_type"):
        load_config(folder)
    file.write_text(json.dumps({"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}}))
    with pytest.raises(ModelError, match="trust_remote_code"):
        load_config(folder)


def test_tokenizers(tmp_path: Path) -> None:
    backend = Tokenizer(WordLevel({"hello": 0, "world": 1, "?": 2}, unk_token="?"))
    backend.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="?").save_pretrained(tmp_path / "t")
    assert load_tokenizer(tmp_path / "t")("world hello x")["input_ids"] == [1, 0, 2]
    (tmp_path / "t" / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path / "t")


@pytest.mark.parametrize(
    ("name", "device", "stored", "expected"),
    [
        ("auto", "cpu", torch.bfloat16, torch.float32),
        ("auto", "cuda", torch.float32, torch.bfloat16),
        ("auto", "cuda", torch.float16, torch.float16),
        ("fp32", "cuda", None, torch.float32),
        ("bfloat16", "cpu", None, torch.bfloat16),
        ("fp16", "cpu", None, torch.float16),
    ],
)
def test_dtypes(name: str, device: str, stored: torch.dtype | None, expected: torch.dtype) -> None:
    assert pick_dtype(name, torch.device(device), small_config(dtype=stored)) == expected


def test_wrong_dtypes_and_devices_say_what_would_be_right(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="dtype='int8': must be auto or one of float32"):
        pick_dtype("int8", CPU, small_config())
    for name in ("gpu", "cuda:", "cuda:x", "cpu:0", ""):
        with pytest.raises(ConfigError, match="must be auto, cpu, cuda or cuda:N"):
            pick_device(name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="sees no CUDA GPU"):
        pick_device("cuda")
    assert pick_device("auto") == pick_device("cpu") == CPU


def test_devices_where_there_are_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert pick_device("auto") == pick_device("cuda") == torch.device("cuda", 0)
    assert pick_device("cuda:1") == torch.device("cuda", 1)
    with pytest.raises(ConfigError, match="there are 2 GPUs"):
        pick_device("cuda:2")


def test_quiet_transformers_puts_things_back() -> None:
    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    with quiet_transformers():
        assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == (40, False)  # 40: errors only
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before


@pytest.mark.parametrize(
    "error",
    [
        ImportError("No module named 'mamba_ssm'"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator: can't allocate memory: you tried"),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        type("OutOfResources", (Exception,), {"__module__": "triton.runtime.errors"})("shared memory"),
    ],
)
def test_what_the_machine_fails_at_is_not_blamed_on_the_model(
    folder: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    with pytest.raises(type(error)) as caught, naming_model(folder):
        fail()
    assert caught.value is error
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", fail)
    with pytest.raises(type(error)) as caught:
        load(folder)
    assert caught.value is error


def test_what_else_fails_names_the_model(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"cannot be built or run .*KeyError: 'rope'"), naming_model(tmp_path):
        raise KeyError("rope")


@pytest.mark.slow
def test_the_default_model_speaks() -> None:
    folder = default_model()
    tokenizer, config = load_tokenizer(folder), load_config(folder)
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.eos_token_id == config.eos_token_id == 2
    assert tokenizer.convert_ids_to_tokens(tokenizer("x  20")["input_ids"]) == ["x", "ĠĠ", "2", "0"]
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = cast(str, tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False))
    assert prompt.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert prompt.endswith("<|im_start|>assistant\n")
    model: Any = load_weights(folder, dtype=torch.float32, device=CPU, attention="sdpa")
    assert weights_bytes(folder) == 538_060_032
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    answer = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)[0]
    assert tokenizer.decode(answer[ids.shape[1] :]) == "The capital of France is Paris.<|im_end|>"


def test_names_are_refused_as_torch_would_have_it() -> None:
    """`headers.py` refuses before torch is there, `load.py` with it: the two must say the same."""
    config = cast(Any, None)
    for name in ("int8", "half", "", "Auto"):
        with pytest.raises(ConfigError) as early:
            headers.check_dtype_name(name)
        with pytest.raises(ConfigError, match=re.escape(str(early.value))):
            loading.pick_dtype(name, torch.device("cpu"), config)
    for name in ("tpu", "cuda:", "cuda:x", "cpu:0", "", "cuda0"):
        with pytest.raises(ConfigError) as early:
            headers.check_device_name(name)
        with pytest.raises(ConfigError, match=re.escape(str(early.value))):
            loading.pick_device(name)
    for name in ("auto", *headers.DTYPE_NAMES):
        headers.check_dtype_name(name)
        assert isinstance(loading.pick_dtype(name, torch.device("cpu"), config), torch.dtype)
    for name in ("auto", "cpu", "cuda", "cuda:0", "cuda:12"):
        headers.check_device_name(name)


def test_replaced_weights_are_given_back_as_they_are_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[set[str]] = []
    runner = open_unchecked(save_random(tmp_path, tiny_config("llama")), torch.float32, CPU)
    names = {weight.data_ptr(): name for name, weight in runner.model.named_parameters()}
    packed = packs(runner.model.get_output_embeddings().weight)
    monkeypatch.setattr(build, "release", lambda tensors: given.append({names[t.data_ptr()] for t in tensors}))
    runner.swap(fused=True)
    parts = [f"self_attn.{p}_proj" for p in "qkvo"] + [f"mlp.{p}_proj" for p in ("gate", "up", "down")]
    layers = [{f"model.layers.{i}.{p}.weight" for p in parts} for i in range(3)]
    head = {"lm_head.weight"}  # is packed, where products can be
    assert given == ([*layers, head] if packed else layers)
    left = {name for name, _ in runner.model.named_parameters()}
    assert left == {"model.embed_tokens.weight", *(() if packed else head)}


def test_releasing_shared_or_unmapped_weights_changes_nothing(tmp_path: Path) -> None:
    """A tied embedding is released with the head that was packed from it, and is read again."""
    torch.manual_seed(0)
    weights = {"a": torch.randn(300, 64), "b": torch.randn(7, 3)}
    save_file(weights, tmp_path / "w.safetensors")
    mapped = load_file(tmp_path / "w.safetensors")
    owned = torch.randn(300, 64)
    copy = owned.clone()
    release([mapped["a"], mapped["b"], owned, owned.T])
    assert torch.equal(mapped["a"], weights["a"])
    assert torch.equal(mapped["b"], weights["b"])
    assert torch.equal(owned, copy)


MEASURE = """
import sys
from pathlib import Path
import torch, transformers.models.llama.modeling_llama
from slipstream.models.build import prepare
from slipstream.models.parity import open_model

def status(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))

prepare()  # what a compiler takes, and the code that it made, are there whatever the model
before = status("VmRSS")
Path("/proc/self/clear_refs").write_text("5")  # the peak so far is no business of the model's
runner = open_model(Path(sys.argv[1]), torch.float32, torch.device("cpu"))
assert "fused" in runner.swaps, runner.swaps
print(status("VmHWM") - before, status("VmRSS") - before, runner.weights_bytes)
"""


@pytest.mark.slow
def test_opening_the_default_model_takes_little_more_than_its_weights(tmp_path: Path) -> None:
    """The tied head is packed beside the embedding, a fifth of the weights; nothing else is ever there twice.

    But for what products without MKL keep by them while the model is checked against transformers.
    """
    most = 1.35 if torch.backends.mkl.is_available() else 1.45
    command = [sys.executable, "-c", MEASURE, str(resolve("default"))]
    at_once = {"MIMALLOC_PURGE_DELAY": "0"}  # torch's allocator on ARM gives memory back when it pleases, else
    surroundings = {**os.environ, **at_once, "SLIPSTREAM_CACHE": str(tmp_path)}
    for _ in range(2):  # with the check against transformers, and without
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=surroundings)
        peak, after, weights = map(int, done.stdout.split())
        assert peak < most * weights
        assert after < 1.3 * weights
