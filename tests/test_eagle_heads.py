"""EAGLE heads: every layout computes what its paper says, and files that do not fit are refused by name."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import eagle_scenes
from conftest import save_model, tiny_llama
from eagle_scenes import DRAFT_VOCAB, VOCAB, ByHand, H, Stored
from medusa_checkpoints import head_tensors, save_heads, tiny_medusa
from slipstream import LLM, SamplingParams
from slipstream.core.errors import ConfigError, DrafterError, ModelError, SlipstreamError
from slipstream.engine import build
from slipstream.kernels.gpu.layout import RowLayout
from slipstream.kv.cache import KVCache
from slipstream.models.attention import PassContext
from slipstream.models.batch import PassBatch
from slipstream.models.gpu import DevicePass
from slipstream.models.heads import eagle
from slipstream.models.heads.base import HeadStates, Weights
from slipstream.models.heads.checkpoint import HeadFiles, TargetShape
from slipstream.models.heads.eagle import EagleHead
from slipstream.models.heads.eagle_files import EagleCheckpoint, Layout, read_eagle, save_eagle3
from slipstream.models.taps import Taps

TARGET = TargetShape(hidden=H, vocab=VOCAB, layers=8, max_positions=128)


PAGE = 4


PAGES = (3, 0, 5, 1, 6)


HEADS = {
    "eagle1": eagle_scenes.eagle1(),
    "eagle1, no bias, the target's embedding": eagle_scenes.eagle1(bias=False, embeds=False),
    "eagle1, two layers with biases": eagle_scenes.eagle1(layers=2, qkv_bias=True),
    "eagle3": eagle_scenes.eagle3(),
    "eagle3, own embedding": eagle_scenes.eagle3(embeds=True),
    "speculators": eagle_scenes.speculators(norm_before_residual=True),
    "speculators, after the residual": eagle_scenes.speculators(norm_before_residual=False),
    "speculators, two taps, norm before fc": eagle_scenes.speculators(taps=(0, 8), norm_before_fc=True),
    "specforge": eagle_scenes.specforge(),
    "eagle3.1": eagle_scenes.specforge(fc_norm=True, norm_output=True),
}


class Scene:
    """A head opened from its files, its plain counterpart, and one request whose pages lie scattered."""

    def __init__(self, stored: Stored, folder: Path) -> None:
        torch.manual_seed(11)
        embedding, lm_head = nn.Embedding(VOCAB, H), nn.Linear(H, VOCAB, bias=False)
        self.by_hand = ByHand(stored, embedding.weight.detach(), lm_head.weight.detach())
        checkpoint = read_eagle(HeadFiles.read(stored.write(folder)), TARGET)
        self.head = EagleHead(checkpoint, embedding.requires_grad_(False), lm_head.requires_grad_(False))
        self.cache = KVCache(self.head.layers, 7, PAGE, torch.float32, torch.device("cpu"))
        self.taps = torch.randn(12, self.head.taps.width(H))
        self.ids = torch.randint(0, VOCAB, (12,))

    def slots(self, at: Sequence[int]) -> list[int]:
        return [PAGES[i // PAGE] * PAGE + i % PAGE for i in at]

    def context(self, prefix: int, rows: int, positions: Tensor, masks: list[int] | None = None) -> PassContext:
        batch = PassBatch(
            input_ids=torch.zeros(rows, dtype=torch.int64),
            positions=positions,
            slots=torch.tensor(self.slots(range(prefix, prefix + rows))),
            row_starts=(0, rows),
            prefix_lengths=(prefix,),
            pages=(PAGES,),
            is_tree=(masks is not None,),
            masks=None if masks is None else torch.tensor(masks),
            logit_rows=None,
        )
        return PassContext(batch, self.cache)

    def on_device(self, prefix: int, positions: Tensor) -> DevicePass:
        rows = len(positions)
        layout = RowLayout(
            positions=positions,
            slots=torch.tensor(self.slots(range(prefix, prefix + rows))),
            starts=torch.tensor([0, rows], dtype=torch.int32),
            lanes=torch.tensor([0]),
            lengths=torch.tensor([prefix]),
            pages=torch.tensor([PAGES], dtype=torch.int32),
            ancestors=None,
            page_size=PAGE,
            max_keys=prefix + rows,
        )
        return DevicePass(layout, self.cache)

    def run(self, first: int, ids: Tensor, features: Tensor) -> HeadStates:
        positions = torch.arange(first, first + len(ids))
        return self.head.run(ids, features, self.context(first, len(ids), positions), positions, 0)


@pytest.fixture(params=list(HEADS))
def scene(request: pytest.FixtureRequest, tmp_path: Path) -> Scene:
    return Scene(HEADS[request.param], tmp_path / "head")


def same(ours: Tensor, theirs: Sequence[Tensor] | Tensor) -> None:
    wanted = theirs if isinstance(theirs, Tensor) else torch.stack(list(theirs))
    torch.testing.assert_close(ours, wanted, rtol=1e-3, atol=2e-4)


@torch.inference_mode()
def test_prompts_and_steps_are_as_by_hand(scene: Scene) -> None:
    """Eight rows of a prompt at once, two more, and then the head goes on from its own hidden states."""
    head, by_hand = scene.head, scene.by_hand
    features = head.combine(scene.taps)
    same(features, [by_hand.features(taps) for taps in scene.taps])
    wanted = by_hand.hidden(scene.ids[:10].tolist(), list(features[:10]))
    same(scene.run(0, scene.ids[:8], features[:8]).features, wanted[:8])
    states = scene.run(8, scene.ids[8:10], features[8:10])
    same(states.features, wanted[8:])
    ids, given = scene.ids[:10].tolist(), list(features[:10])
    for step in range(3):
        logits = head.logits(states.read[-1:])
        same(logits[0], by_hand.logits(wanted[-1]))
        assert logits.dtype == torch.float32
        guess = int(logits[0].argmax())
        token = guess if head.vocab is None else int(head.vocab[guess])
        ids.append(token)
        given.append(wanted[-1])
        states = scene.run(10 + step, torch.tensor([token]), states.features[-1:])
        wanted = by_hand.hidden(ids, given)
        same(states.features, wanted[-1:])


@torch.inference_mode()
def test_a_pass_laid_out_on_the_device_gives_the_same(scene: Scene) -> None:
    features = scene.head.combine(scene.taps)
    scene.run(0, scene.ids[:7], features[:7])
    usual = scene.run(7, scene.ids[7:], features[7:]).features
    at = torch.arange(7, 12)
    same(scene.head.run(scene.ids[7:], features[7:], scene.on_device(7, at), at, 0).features, usual)


@pytest.mark.parametrize("name", HEADS)
@torch.inference_mode()
def test_the_way_of_the_gpu_gives_the_same(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernels' twins: the residual in place, norms and rotary with the cache write in one."""
    usual = Scene(HEADS[name], tmp_path / "usual")
    monkeypatch.setattr("slipstream.kernels.cpu.tiled.tiler", lambda *weights: None)
    monkeypatch.setattr("slipstream.kernels.linear.packs", lambda weight: False)
    monkeypatch.setattr("slipstream.models.heads.eagle.has_kernels", lambda device: True)
    scene = Scene(HEADS[name], tmp_path / "scene")
    features = usual.head.combine(usual.taps)
    kept = features.clone()
    same(scene.head.combine(usual.taps), features)
    for first, end in ((0, 7), (7, 11), (11, 12)):
        at = torch.arange(first, end)
        ids = usual.ids[first:end]
        wanted = usual.run(first, ids, features[first:end])
        states = scene.head.run(ids, features[first:end], scene.on_device(first, at), at, 0)
        same(states.features, wanted.features)
        same(scene.head.logits(states.read), usual.head.logits(wanted.read))
    assert torch.equal(features, kept)  # the residual is added to a copy


@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize("name", ["eagle1", "eagle3", "eagle3.1"])
@torch.inference_mode()
def test_rows_read_the_features_named_and_tell_what_is_wanted(
    name: str, kernels: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.kernels.cpu.tiled.tiler", lambda *weights: None)
    monkeypatch.setattr("slipstream.kernels.linear.packs", lambda weight: False)
    monkeypatch.setattr("slipstream.models.heads.eagle.has_kernels", lambda device: kernels)
    scene = Scene(HEADS[name], tmp_path)
    features, at = scene.head.combine(scene.taps), torch.arange(5)
    behind, wanted = torch.tensor([9, 3, 3, 0, 11]), torch.tensor([4, 1])
    ids = scene.ids[:5]
    whole = scene.head.run(ids, features[behind], scene.on_device(0, at), at, 0)
    some = scene.head.run(ids, features, scene.on_device(0, at), at, 0, behind=behind, wanted=wanted)
    assert torch.equal(some.features, whole.features[wanted])
    assert torch.equal(some.read, whole.read[wanted])


@torch.inference_mode()
def test_each_path_of_a_tree_is_a_text_of_its_own(scene: Scene) -> None:
    head, by_hand = scene.head, scene.by_hand
    features = head.combine(scene.taps)
    scene.run(0, scene.ids[:6], features[:6])
    parents = [-1, -1, 0, 0, 1, 3]
    paths: list[list[int]] = []
    for node, parent in enumerate(parents):
        paths.append([*(paths[parent] if parent >= 0 else []), node])
    ids, given = torch.arange(20, 26), torch.randn(6, H)
    positions = torch.tensor([6 + len(path) - 1 for path in paths])
    masks = [sum(1 << node for node in path) for path in paths]
    hidden = head.run(ids, given, scene.context(6, 6, positions, masks), positions, 0).features
    for node, path in enumerate(paths):
        whole = [*scene.ids[:6].tolist(), *ids[path].tolist()]
        same(hidden[node], by_hand.hidden(whole, [*features[:6], *given[path]])[-1])


def test_ids_of_padding_rows_may_be_anything(tmp_path: Path) -> None:
    scene = Scene(HEADS["eagle3"], tmp_path)
    with torch.inference_mode():
        features = scene.head.combine(scene.taps[:2])
        scene.run(0, torch.tensor([-1, VOCAB + 5]), features)


def test_the_draft_vocabulary_is_resolved(tmp_path: Path) -> None:
    """d2t is an offset: target id = i + d2t[i]."""
    stored = eagle_scenes.eagle3()
    vocab = Scene(stored, tmp_path).head.vocab
    assert vocab is not None
    assert vocab.tolist() == stored.of("t2d").nonzero().flatten().tolist()
    assert len(vocab) == DRAFT_VOCAB


def test_taps_are_where_each_layout_says(tmp_path: Path) -> None:
    """Ours count the layers passed. SpecForge's ids name layers, and mean what these give: one more."""
    found = {
        name: Scene(stored, tmp_path / name).head.taps
        for name, stored in (
            ("eagle1", eagle_scenes.eagle1()),
            ("eagle3", eagle_scenes.eagle3()),
            ("speculators", eagle_scenes.speculators(taps=(2, 4, 5))),
            ("specforge", eagle_scenes.specforge(taps=(1, 3, 4))),
        )
    }
    default = Taps((2, 4, 5))  # of a target with 8 layers: 2, n // 2, n - 3
    assert found == {"eagle1": Taps(normed=True), "eagle3": default, "speculators": default, "specforge": default}


def test_a_head_says_what_it_keeps(tmp_path: Path) -> None:
    head = Scene(eagle_scenes.eagle1(layers=2), tmp_path).head
    assert [(layer.kv_heads, layer.key_dim, layer.value_dim) for layer in head.layers] == [(2, 8, 8)] * 2
    assert head.max_positions == TARGET.max_positions  # its own 64 are where training stopped
    assert head.weights_bytes == 4 * sum(tensor.numel() for tensor in eagle_scenes.eagle1(layers=2).tensors.values())


@pytest.fixture(params=["eagle1", "eagle3"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    stored = eagle_scenes.eagle1(embeds=False) if request.param == "eagle1" else eagle_scenes.eagle3()
    return stored.write(tmp_path / "head")


def in_bits(folder: Path, kept: Weights) -> EagleHead:
    torch.manual_seed(11)
    embedding, lm_head = nn.Embedding(VOCAB, H), nn.Linear(H, VOCAB, bias=False)
    checkpoint = read_eagle(HeadFiles.read(folder), TARGET)
    return EagleHead(checkpoint, embedding.requires_grad_(False), lm_head.requires_grad_(False), kept)


@torch.inference_mode()
def test_a_head_in_eight_bits_takes_less_and_says_nearly_the_same(folder: Path) -> None:
    plain, narrow = in_bits(folder, "plain"), in_bits(folder, "fp8")
    assert not plain.narrow
    assert narrow.narrow
    assert not in_bits(folder, "auto").narrow  # small, and no kernels here
    assert narrow.weights_bytes < 0.45 * plain.weights_bytes  # fp32 here
    read = torch.randn(6, H)
    assert (narrow.logits(read) - plain.logits(read)).norm() <= 0.06 * plain.logits(read).norm()
    taps = torch.randn(6, plain.taps.width(H))
    assert (narrow.combine(taps) - plain.combine(taps)).norm() <= 0.06 * plain.combine(taps).norm()


@torch.inference_mode()
def test_large_heads_have_eight_bits_where_there_are_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large by what every level reads: a table of embeddings of its own is not among that."""
    folders = [eagle_scenes.eagle3(embeds=own).write(tmp_path / str(own)) for own in (False, True)]
    products = in_bits(folders[0], "plain").weights_bytes
    assert in_bits(folders[1], "plain").weights_bytes > products
    monkeypatch.setattr(eagle, "has_kernels", lambda _: True)
    monkeypatch.setattr(eagle, "_Kernels", lambda _: None)
    for large, narrow in ((products, True), (products + 1, False)):
        monkeypatch.setattr(eagle, "_LARGE", large)
        assert [in_bits(folder, "auto").narrow for folder in folders] == [narrow, narrow]
        assert not in_bits(folders[0], "plain").narrow


@pytest.mark.parametrize("rounds", ["eager", "queued"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_are_plain_decodings(
    tmp_path: Path, open_llm: Callable[..., LLM], rounds: str, temperature: float
) -> None:
    path = eagle_scenes.eagle3().write(tmp_path / "head")
    params = SamplingParams(temperature=temperature, seed=5, max_tokens=24, ignore_eos=True)
    (want,) = open_llm().generate([[5, 6, 7]], params)
    llm = open_llm(drafter=f"eagle3:{path}?depth=3&width=3&weights=fp8", planner="fixed", rounds=rounds)
    (output,) = llm.generate([[5, 6, 7]], params)
    assert output.outputs[0].token_ids == want.outputs[0].token_ids
    assert output.outputs[0].speculation.drafted


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
    "layers without end": (
        eagle_scenes.eagle1,
        with_key("num_hidden_layers", 10**12),
        ModelError,
        ["num_hidden_layers=1000000000000, must be at most 256"],
    ),
    "an unknown rotary embedding": (
        eagle_scenes.eagle3,
        with_key("rope_scaling", {"type": "spiral"}),
        ModelError,
        ["rope_type='spiral', must be one of default, "],
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


OpenLLM = Callable[..., LLM]


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever loads weights of a model fails."""
    monkeypatch.setattr(build, "open_model", lambda *_, **__: pytest.fail("the target was loaded"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("kinds")
    return {
        "eagle": eagle_scenes.eagle1().write(folder / "eagle1"),
        "eagle3": eagle_scenes.eagle3().write(folder / "eagle3"),
        "speculators": eagle_scenes.speculators().write(folder / "speculators"),
        "medusa": tiny_medusa(folder / "medusa"),
        "vllm": save_heads(folder / "vllm", head_tensors("vllm", heads=2, layers=1), "model.safetensors", num_heads=2),
        "model": save_model(folder / "model", tiny_llama()),
    }


NAMED = {"eagle": "eagle", "eagle3": "eagle", "speculators": "eagle", "medusa": "medusa", "vllm": "medusa"}


@pytest.mark.parametrize("given", [*NAMED, "model"])
@pytest.mark.parametrize("asked", ["eagle", "medusa", "model"])
def test_another_kind_is_told_how_to_name_it(
    open_llm: OpenLLM, unread: None, folders: dict[str, Path], given: str, asked: str
) -> None:
    right = NAMED.get(given, "model")
    if right == asked:
        return
    with pytest.raises(DrafterError) as caught:
        open_llm(drafter=f"{asked}:{folders[given]}")
    assert f"write {right}:{folders[given]}" in str(caught.value)
    start = f"drafter='{asked}:{folders[given]}': {folders[given]}: the folder holds "
    assert str(caught.value).startswith(start)


def spoilt(folder: Path, what: str) -> str:
    """A head that does not fit, as it is named, and what is said of it."""
    if what == "medusa":
        tensors = head_tensors("original")
        return f"medusa:{save_heads(folder, tensors, 'medusa_lm_head.safetensors', medusa_num_heads=9)}"
    if what == "medusa vocabulary":
        tensors = head_tensors("original", vocab=77)
        return f"medusa:{save_heads(folder, tensors, 'medusa_lm_head.pt', medusa_num_heads=3, medusa_num_layers=2)}"
    stored = eagle_scenes.eagle3()
    if what == "eagle tensor":
        del stored.tensors["norm.weight"]
    elif what == "eagle ids":
        stored.tensors["d2t"] = stored.tensors["d2t"] + 1000
    else:
        stored.config["hidden_size"] = 64
        stored.tensors["fc.weight"] = torch.zeros(64, 192)
    return f"eagle:{stored.write(folder)}"


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("medusa", r"missing: .*3\.0\.linear\.weight"),
        ("eagle tensor", r"missing: norm\.weight"),
    ],
)
def test_what_does_not_fit_is_refused_before_weights_are_read(
    open_llm: OpenLLM, unread: None, tmp_path: Path, what: str, said: str
) -> None:
    with pytest.raises((ModelError, DrafterError), match=said):
        open_llm(drafter=spoilt(tmp_path / "head", what))


def test_weights_are_not_read_for_that(
    open_llm: OpenLLM, monkeypatch: pytest.MonkeyPatch, folders: dict[str, Path]
) -> None:
    """Only their shapes: a head may have a billion numbers."""

    class Reached(SlipstreamError):
        pass

    def loads(*_: Any, **__: Any) -> None:
        raise Reached("the target")

    monkeypatch.setattr(build, "open_model", loads)
    monkeypatch.setattr(
        "slipstream.models.heads.checkpoint.load_file", lambda _: pytest.fail("the head's weights were read")
    )
    for name in ("eagle", "eagle3", "medusa"):
        with pytest.raises(Reached):
            open_llm(drafter=f"{NAMED[name]}:{folders[name]}")
