"""Wrong configurations and damaged checkpoints: each is refused by one error that is meant for its user."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from conftest import save_model, save_tokenizer, tiny_llama
from families import save_random, tiny_config
from slipstream import LLM
from slipstream.cli.main import main
from slipstream.core.errors import ConfigError, ModelError, UnsupportedModel
from slipstream.models import parity

Damage = Callable[[Path], object]
VALUES: tuple[Any, ...] = (None, "x", -1, 0, 10**9, [], {}, 1.5, True, "<missing>")
LAYER = "model.layers.1.mlp.up_proj.weight"
FILE, INDEX = "model.safetensors", "model.safetensors.index.json"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = tiny_llama(num_hidden_layers=2, hidden_size=16, intermediate_size=16, num_attention_heads=2)
    return save_model(tmp_path_factory.mktemp("models") / "whole", config)


def outcome(folder: Path) -> str:
    """What opening it says; empty where it opens. Any other exception is the failure of the test."""
    try:
        LLM(folder, device="cpu", memory="16MiB", max_model_len=64).close()
    except (ModelError, ConfigError) as error:
        return str(error)
    return ""


def mutations(config: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for key in config:
        for value in VALUES:
            if value != config[key] or type(value) is not type(config[key]):
                yield key, value


@pytest.fixture(autouse=True)
def _no_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is kept of these models; code that was compiled before is not compiled again."""
    monkeypatch.setattr(parity._Note, "write", lambda *_: None)


def test_a_wrong_configuration_is_refused_or_runs(whole: Path, tmp_path: Path) -> None:
    """Some 250 of them; every third opens, because the key is one that decides nothing."""
    folder = Path(shutil.copytree(whole, tmp_path / "model"))
    config = json.loads((whole / "config.json").read_text())
    refused = 0
    for key, value in mutations(config):
        changed = {name: value if name == key else old for name, old in config.items()}
        if value == "<missing>":
            del changed[key]
        (folder / "config.json").write_text(json.dumps(changed))
        said = outcome(folder)
        refused += bool(said)
        assert not said or str(folder) in said, (key, value, said)
    assert refused > 100


def cut(file: str, keep: float) -> Damage:
    """Keep `keep` bytes, or that part of the file."""

    def damage(folder: Path) -> None:
        content = (folder / file).read_bytes()
        (folder / file).write_bytes(content[: int(keep * len(content) if 0 < keep < 1 else keep)])

    return damage


def write(file: str, content: bytes | str) -> Damage:
    return lambda folder: (folder / file).write_bytes(content if isinstance(content, bytes) else content.encode())


def gone(file: str) -> Damage:
    return lambda folder: (folder / file).unlink()


def a_folder(file: str) -> Damage:
    def damage(folder: Path) -> None:
        (folder / file).unlink()
        (folder / file).mkdir()

    return damage


def header(old: str, new: str) -> Damage:
    """Change the header of the weights without changing its length."""

    def damage(folder: Path) -> None:
        content = (folder / FILE).read_bytes()
        assert old.encode() in content
        assert len(old) == len(new)
        (folder / FILE).write_bytes(content.replace(old.encode(), new.encode(), 1))

    return damage


def tensors(change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Damage:
    return lambda folder: save_file(change(load_file(folder / FILE)), folder / FILE, {"format": "pt"})


def indexed(index: Any) -> Damage:
    """The weights in two files, and an index that is told; LAYER is in the second."""

    def damage(folder: Path) -> None:
        stored = load_file(folder / FILE)
        (folder / FILE).unlink()
        others = {name: tensor for name, tensor in stored.items() if name != LAYER}
        parts = {"a.safetensors": others, "b.safetensors": {LAYER: stored[LAYER]}}
        for name, part in parts.items():
            save_file(part, folder / name, {"format": "pt"})
        whole = {name: file for file, part in parts.items() for name in part}
        (folder / INDEX).write_text(json.dumps(index(whole) if callable(index) else index))

    return damage


def then(*steps: Damage) -> Damage:
    def damage(folder: Path) -> None:
        for step in steps:
            step(folder)

    return damage


WHOLE = indexed(lambda files: {"weight_map": files})
DAMAGE: dict[str, Damage] = {
    **{f"weights cut {keep}": cut(FILE, keep) for keep in (0, 1, 7, 8, 9, 100, 0.1, 0.5, 0.9, 0.9999)},
    "weights are text": write(FILE, "version https://git-lfs.github.com/spec/v1\n"),
    "weights are zeros": write(FILE, b"\0" * 5000),
    "weights are ones": write(FILE, b"\xff" * 5000),
    "weights are a folder": a_folder(FILE),
    "weights are missing": gone(FILE),
    "a pickle that is none": then(gone(FILE), write("pytorch_model.bin", b"nothing")),
    **{f"dtype {kind}": header('"F32"', f'"{kind}"') for kind in ("I32", "U32", "F16", "F64", "F99", "i32")},
    "a shape is wrong": header('"shape":[16]', '"shape":[61]'),
    "a name is wrong": header("layers.1.mlp.up_proj", "layers.1.mlp.up_prox"),
    "offsets are no numbers": header('"data_offsets":[0', '"data_offsets":[x'),
    "a tensor is missing": tensors(lambda t: {n: v for n, v in t.items() if n != LAYER}),
    "a tensor is whole numbers": tensors(lambda t: {**t, LAYER: t[LAYER].int()}),
    "a tensor is flat": tensors(lambda t: {**t, LAYER: t[LAYER].flatten()}),
    "a tensor is turned": tensors(
        lambda t: {**t, "model.embed_tokens.weight": t["model.embed_tokens.weight"].T.contiguous()}
    ),
    "a tensor too many": tensors(lambda t: {**t, "model.layers.2.mlp.up_proj.weight": t[LAYER].clone()}),
    "a tensor is NaN": tensors(lambda t: {**t, LAYER: t[LAYER] * float("nan")}),
    "no tensor": tensors(lambda t: {}),
    "the index is no object": indexed([]),
    "the index is empty": indexed({}),
    "the index lists files": indexed({"weight_map": ["a.safetensors"]}),
    "the index names numbers": indexed({"weight_map": {LAYER: 7}}),
    "the index leaves the folder": indexed({"weight_map": {LAYER: "../b.safetensors"}}),
    "the index names one file": indexed({"weight_map": {LAYER: "b.safetensors"}}),
    "the index is cut": then(WHOLE, cut(INDEX, 0.5)),
    "the index has no bytes": then(WHOLE, write(INDEX, "")),
    "a part is missing": then(WHOLE, gone("b.safetensors")),
    "a part is empty": then(WHOLE, write("b.safetensors", "")),
    "a part is cut": then(WHOLE, cut("b.safetensors", 0.5)),
    "a part is a folder": then(WHOLE, a_folder("b.safetensors")),
    "a part is another": then(
        WHOLE, lambda folder: shutil.copy(folder / "a.safetensors", folder / "b.safetensors") and None
    ),
    **{
        f"config {text!r}": write("config.json", text) for text in ("", "{", "[]", "null", "7", b"\xff\xfe", '{"a": 1}')
    },
    "config is a folder": a_folder("config.json"),
    "config is missing": gone("config.json"),
    **{f"tokenizer {text!r}": write("tokenizer.json", text) for text in ("", "{", "[]", "{}", b"\xff")},
    "tokenizer is a folder": a_folder("tokenizer.json"),
    "tokenizer is missing": gone("tokenizer.json"),
    "an adapter beside it": write("adapter_config.json", "{}"),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_checkpoint_is_refused(whole: Path, tmp_path: Path, damage: Damage) -> None:
    folder = Path(shutil.copytree(whole, tmp_path / "model"))
    damage(folder)
    assert str(folder) in outcome(folder)


@pytest.mark.parametrize("damage", [cut(FILE, 0.5), write("config.json", '{"model_type": "jetmoe"}')])
def test_the_command_line_says_it_in_one_line(
    whole: Path, tmp_path: Path, damage: Damage, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(whole, tmp_path / "model"))
    damage(folder)
    with pytest.raises(SystemExit) as ended:
        main(["generate", "Hi", "--model", str(folder), "--device", "cpu"])
    told = capfd.readouterr()
    lines = [line for line in told.err.splitlines() if line.startswith("error: ")]
    assert (ended.value.code, told.out, len(lines)) == (2, "", 1)
    assert "Traceback" not in told.err


def test_a_family_that_cannot_run_is_named(tmp_path: Path) -> None:
    """JetMoE hands its attention tensors that it cannot put together again."""
    kinds: Any = transformers.CONFIG_MAPPING
    config = kinds["jetmoe"](
        vocab_size=300, hidden_size=32, intermediate_size=40, num_hidden_layers=2, kv_channels=8, num_local_experts=4
    )
    folder = save_random(tmp_path / "model", config)
    save_tokenizer(folder)
    with pytest.raises(UnsupportedModel, match=r"cannot be built or run .*use transformers"):
        LLM(folder, device="cpu", memory="16MiB")


@pytest.mark.parametrize(
    ("family", "key", "said"),
    [
        ("mixtral", "num_hidden_layers", "num_hidden_layers=1000000000 in config.json, but"),
        ("mixtral", "num_local_experts", "num_local_experts=1000000000 in config.json, but"),
        ("deepseek-v3", "head_dim", "model.rotary_emb.inv_freq would have 500000000 numbers by config.json"),
    ],
)
def test_a_number_without_end_is_refused_at_once(tmp_path: Path, family: str, key: str, said: str) -> None:
    """Layers and experts would be built one by one, and rotary frequencies are computed, not stored."""
    folder = save_random(tmp_path / "model", tiny_config(family))
    save_tokenizer(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, key: 10**9, "layer_types": None}))
    assert said in outcome(folder)
