"""A head's files are held to account before serving: what is wrong is named, with what would be right."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import eagle_scenes
from eagle_scenes import DRAFT_VOCAB, VOCAB, H, Stored
from slipstream.core.errors import ConfigError, DrafterError, ModelError, SlipstreamError, UnsupportedModel
from slipstream.models.heads.checkpoint import HeadFiles, TargetShape
from slipstream.models.heads.eagle_files import EagleCheckpoint, Layout, read_eagle, save_eagle3

TARGET = TargetShape(hidden=H, vocab=VOCAB, layers=8, max_positions=128)


def read(folder: Path, target: TargetShape = TARGET) -> EagleCheckpoint:
    return read_eagle(HeadFiles.read(folder), target)


def without(name: str) -> Callable[[Stored], None]:
    def spoil(stored: Stored) -> None:
        del stored.tensors[name]

    return spoil


def with_tensor(name: str, *shape: int) -> Callable[[Stored], None]:
    return lambda stored: stored.tensors.update({name: torch.zeros(shape)})


def with_key(key: str, value: Any) -> Callable[[Stored], None]:
    return lambda stored: stored.config.update({key: value})


SPOILT: dict[str, tuple[Callable[[], Stored], Callable[[Stored], None], type[SlipstreamError], list[str]]] = {
    "a missing tensor": (
        eagle_scenes.eagle3,
        without("midlayer.hidden_norm.weight"),
        ModelError,
        ["missing: midlayer.hidden_norm.weight [32]", "config.json"],
    ),
    "no fc at all": (eagle_scenes.eagle1, without("fc.weight"), ModelError, ["missing: fc.weight [32, 64]"]),
    "a promised bias": (eagle_scenes.eagle1, without("fc.bias"), ModelError, ["missing: fc.bias [32]"]),
    "an unknown tensor": (
        eagle_scenes.eagle3,
        with_tensor("midlayer.self_attn.kv_a_proj.weight", 8, 64),
        ModelError,
        ["unknown: midlayer.self_attn.kv_a_proj.weight [8, 64]"],
    ),
    "a wrong shape": (
        eagle_scenes.eagle3,
        with_tensor("fc.weight", H, 2 * H),
        ModelError,
        ["of the wrong shape: fc.weight [32, 64] instead of [32, 96]", "Fetch the head again"],
    ),
    "a norm that the configuration does not know": (
        eagle_scenes.specforge,
        with_tensor("fc_norm.0.weight", H),
        ModelError,
        ["unknown: fc_norm.0.weight"],
    ),
    "promised norms": (
        eagle_scenes.specforge,
        with_key("fc_norm", True),
        ModelError,
        ["missing: fc_norm.0.weight [32], fc_norm.1.weight [32], fc_norm.2.weight [32]"],
    ),
    "no draft vocabulary": (eagle_scenes.eagle3, without("d2t"), ModelError, ["missing: d2t [41]"]),
    "ids instead of offsets": (
        eagle_scenes.eagle3,
        lambda stored: stored.tensors.update(d2t=stored.of("d2t") + torch.arange(DRAFT_VOCAB) + 200),
        ModelError,
        ["d2t", "target id = i + d2t[i]"],
    ),
    "two ids that are one": (
        eagle_scenes.eagle3,
        lambda stored: stored.tensors.update(d2t=-torch.arange(DRAFT_VOCAB)),
        ModelError,
        ["two of the head's ids", "target id = i + d2t[i]"],
    ),
    "t2d of another head": (
        eagle_scenes.eagle3,
        lambda stored: stored.tensors.update(t2d=~stored.of("t2d")),
        ModelError,
        ["t2d marks other ids"],
    ),
    "a layer that the target has not": (
        lambda: eagle_scenes.speculators(taps=(2, 9, 5)),
        lambda stored: None,
        DrafterError,
        ["layer 9", "8 layers"],
    ),
    "taps in words": (
        eagle_scenes.speculators,
        with_key("eagle_aux_hidden_state_layer_ids", "all"),
        ModelError,
        ["eagle_aux_hidden_state_layer_ids='all'", "[2, 16, 29]"],
    ),
    "another algorithm": (
        eagle_scenes.speculators,
        with_key("speculators_model_type", "dflash"),
        UnsupportedModel,
        ["speculators_model_type='dflash'", "'eagle3'"],
    ),
    "another activation": (
        eagle_scenes.eagle1,
        with_key("hidden_act", "gelu"),
        UnsupportedModel,
        ["hidden_act='gelu'"],
    ),
    "no heads": (eagle_scenes.eagle1, with_key("num_attention_heads", None), ModelError, ["num_attention_heads=None"]),
    "layers without end": (
        eagle_scenes.eagle1,
        with_key("num_hidden_layers", 10**12),
        ModelError,
        ["num_hidden_layers=1000000000000, must be at most 256"],
    ),
    "odd heads": (
        eagle_scenes.eagle3,
        with_key("num_key_value_heads", 3),
        ModelError,
        ["num_attention_heads=4, must be a multiple of num_key_value_heads=3"],
    ),
    "an unknown rotary embedding": (
        eagle_scenes.eagle3,
        with_key("rope_scaling", {"type": "spiral"}),
        ModelError,
        ["rope_type='spiral', must be one of default, "],
    ),
    "a rotary embedding in words": (
        eagle_scenes.eagle3,
        with_key("rope_scaling", "yes"),
        ModelError,
        ["rope_type='yes'"],
    ),
    "another vocabulary": (
        eagle_scenes.eagle3,
        with_key("vocab_size", 128),
        DrafterError,
        ["vocabulary size 128, this one has 300", "trained for this target"],
    ),
}


@pytest.mark.parametrize("how", SPOILT)
def test_what_is_wrong_is_named(how: str, tmp_path: Path) -> None:
    make, spoil, kind, words = SPOILT[how]
    stored = make()
    spoil(stored)
    with pytest.raises(kind) as error:
        read(stored.write(tmp_path / "head"))
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize("make", [eagle_scenes.eagle1, eagle_scenes.eagle3, eagle_scenes.specforge])
def test_a_head_for_another_target_is_refused(make: Callable[[], Stored], tmp_path: Path) -> None:
    folder = make().write(tmp_path / "head")
    with pytest.raises(DrafterError, match="hidden size 32, this one has 64"):
        read(folder, TargetShape(64, VOCAB, 8, 128))
    with pytest.raises(DrafterError, match="vocabulary size 300, this one has 301"):
        read(folder, TargetShape(H, 301, 8, 128))


def test_a_narrow_head_brings_what_it_cannot_share(tmp_path: Path) -> None:
    stored = eagle_scenes.eagle3()
    stored.config["target_hidden_size"] = 48
    stored.tensors["fc.weight"] = torch.randn(H, 3 * 48)
    with pytest.raises(ModelError, match="missing: embed_tokens"):
        read(stored.write(tmp_path / "head"), TargetShape(48, VOCAB, 8, 128))


@pytest.mark.parametrize("kept", [0, 5, 2000])
def test_files_cut_short_are_refused(kept: int, tmp_path: Path) -> None:
    file = eagle_scenes.eagle3().write(tmp_path / "head") / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(ModelError, match=r"model.safetensors: damaged or cut short .*fetch the file again"):
        read(tmp_path / "head")


def test_folders_without_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such folder"):
        read(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"config.json is missing"):
        read(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"no weights; .*model.safetensors, pytorch_model.bin"):
        read(tmp_path)
    (tmp_path / "config.json").write_text("[")
    with pytest.raises(ModelError, match="not readable as JSON"):
        read(tmp_path)


def pickled(folder: Path, value: Any) -> Path:
    stored = eagle_scenes.eagle1()
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(stored.config))
    torch.save(value, folder / "pytorch_model.bin")
    return folder


def test_pickles_of_tensors_are_read(tmp_path: Path) -> None:
    stored = eagle_scenes.eagle1()
    stored.tensors["layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)  # older trainers save it
    found = read(pickled(tmp_path / "head", stored.tensors))
    assert torch.equal(found.tensors["fc.bias"], stored.of("fc.bias"))


class RunsCode:
    """A pickle that would leave a mark."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.mark,)


def test_pickles_that_run_code_are_refused(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    folder = pickled(tmp_path / "head", {"fc.weight": torch.ones(2), "more": RunsCode(mark)})
    with pytest.raises(ModelError, match=r"pytorch_model.bin: holds more than tensors.*Use .* safetensors"):
        read(folder)
    assert not mark.exists()


def test_damaged_pickles_are_refused(tmp_path: Path) -> None:
    file = pickled(tmp_path / "head", eagle_scenes.eagle1().tensors) / "pytorch_model.bin"
    file.write_bytes(file.read_bytes()[:3000])
    with pytest.raises(ModelError, match=r"pytorch_model.bin"):
        read(tmp_path / "head")
    torch.save([1, 2], file)
    with pytest.raises(ModelError, match="must hold a dictionary of tensors"):
        read(tmp_path / "head")


@pytest.mark.filterwarnings("ignore")  # what torch thinks of such files
@pytest.mark.parametrize("kind", ["zip", "older", "safetensors"])
def test_files_with_wrong_bytes_are_read_or_refused(kind: str, tmp_path: Path) -> None:
    tensors = {"fc.weight": torch.ones(4, 8), "layers.0.mlp.up_proj.weight": torch.ones(8, 4)}
    (tmp_path / "config.json").write_text("{}")
    file = tmp_path / ("model.safetensors" if kind == "safetensors" else "pytorch_model.bin")
    if kind == "safetensors":
        save_file(tensors, file)
    else:
        torch.save(tensors, file, _use_new_zipfile_serialization=kind == "zip")
    whole, chance, said = file.read_bytes(), random.Random(1), []
    for _ in range(150):
        spoilt = bytearray(whole)
        for _ in range(chance.randint(1, 3)):
            spoilt[chance.randrange(min(len(whole), 400))] = chance.randrange(256)
        file.write_bytes(spoilt[: chance.choice((len(whole), len(whole), chance.randrange(len(whole))))])
        try:
            HeadFiles.read(tmp_path)
        except ModelError as error:
            said.append(str(error))
    assert len(said) > 50
    assert all(file.name in message for message in said)


@pytest.mark.parametrize("layout", ["original", "speculators"])
@pytest.mark.parametrize(
    "stored",
    [
        eagle_scenes.eagle3(),
        eagle_scenes.speculators(norm_before_residual=True),
        eagle_scenes.specforge(fc_norm=True, norm_output=True),
    ],
    ids=["eagle3", "speculators", "eagle3.1"],
)
def test_what_is_written_is_read_again(stored: Stored, layout: Layout, tmp_path: Path) -> None:
    before = read(stored.write(tmp_path / "given"))
    after = read(save_eagle3(before, tmp_path / "written", layout, target="some/target"))
    assert after.shape == before.shape
    assert after.tensors.keys() == before.tensors.keys()
    assert all(torch.equal(after.tensors[name], before.tensors[name]) for name in before.tensors)
    config = json.loads((tmp_path / "written" / "config.json").read_text())
    assert config["norm_before_residual"] == before.shape.norm_before_residual
    assert ("speculators_config" in config) == (layout == "speculators")


def test_the_writer_makes_t2d_and_checks_what_it_is_given(tmp_path: Path) -> None:
    stored = eagle_scenes.eagle3()
    known = stored.tensors.pop("t2d")
    found = read(stored.write(tmp_path / "given"))
    again = read(save_eagle3(found, tmp_path / "written"))
    assert torch.equal(again.tensors["t2d"], known)
    fewer = {name: tensor for name, tensor in found.tensors.items() if name != "norm.weight"}
    with pytest.raises(ModelError, match=r"missing: norm\.weight"):
        save_eagle3(EagleCheckpoint(found.shape, fewer, found.folder), tmp_path / "not")
    assert not (tmp_path / "not").exists()
    with pytest.raises(ConfigError, match="EAGLE-1"):
        save_eagle3(read(eagle_scenes.eagle1().write(tmp_path / "first")), tmp_path / "not")
    with pytest.raises(ConfigError, match="layout='gguf'"):
        save_eagle3(found, tmp_path / "not", "gguf")  # type: ignore[arg-type]
