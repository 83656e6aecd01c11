"""EAGLE heads in every layout compute what their papers say: prompts, step by step from the cache, and trees."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import eagle_scenes
from eagle_scenes import DRAFT_VOCAB, VOCAB, ByHand, H, Stored
from slipstream import LLM, SamplingParams
from slipstream.kernels.gpu.layout import RowLayout
from slipstream.kv.cache import KVCache
from slipstream.models.attention import PassContext
from slipstream.models.batch import PassBatch
from slipstream.models.gpu import DevicePass
from slipstream.models.heads import eagle
from slipstream.models.heads.base import HeadStates, Weights
from slipstream.models.heads.checkpoint import HeadFiles, TargetShape
from slipstream.models.heads.eagle import EagleHead
from slipstream.models.heads.eagle_files import read_eagle
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
