"""Modules of multi-token prediction: read from the target's own files, and the same as transformers computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from conftest import VOCAB
from families import CPU, random_tokens
from mtp_checkpoints import MTP, Reference, change_config, save_with_modules
from slipstream.core.errors import DrafterError, ModelError, UnsupportedModel
from slipstream.kv.cache import KVCache
from slipstream.models import attention
from slipstream.models.attention import PassContext
from slipstream.models.batch import PassBatch
from slipstream.models.heads.checkpoint import read_config
from slipstream.models.heads.mtp import MtpHead, build_modules
from slipstream.models.heads.mtp_files import find_modules, read_modules
from slipstream.models.load import load_config
from slipstream.models.runner import Runner, open_unchecked

PAGE = 4


def opened(folder: Path) -> Runner:
    runner = open_unchecked(folder, torch.float32, CPU)
    runner.swap(fused=True)
    return runner


class Rows:
    """Passes of a head over one request."""

    def __init__(self, head: MtpHead) -> None:
        self.head = head
        self.cache = KVCache(head.layers, 8, PAGE, torch.float32, CPU)
        self.length = 0

    @torch.inference_mode()
    def run(self, tokens: list[int], features: Tensor, step: int) -> Tensor:
        positions = torch.arange(self.length, self.length + len(tokens))
        batch = PassBatch(
            input_ids=torch.tensor(tokens),
            positions=positions,
            slots=positions,
            row_starts=(0, len(tokens)),
            prefix_lengths=(self.length,),
            pages=(tuple(range(8)),),
            is_tree=(False,),
            masks=None,
            logit_rows=None,
        )
        self.length += len(tokens)
        return self.head.run(batch.input_ids, features, PassContext(batch, self.cache), positions, step).features


@pytest.mark.parametrize("name", ["deepseek", "glm", "glm-lite", "mimo"])
def test_a_module_computes_what_transformers_computes(tmp_path: Path, name: str) -> None:
    family = MTP[name]
    folder = save_with_modules(tmp_path / "target", family)
    head = MtpHead.open(folder, opened(folder))
    reference = Reference(folder, family, 0, tmp_path / "reference")
    tokens, features = random_tokens(13, 1), torch.randn(13, 32, generator=torch.Generator().manual_seed(2))
    wanted = reference.hidden(tokens, features)
    rows = Rows(head)
    got = torch.cat([rows.run(tokens[:9], features[:9], 0), rows.run(tokens[9:], features[9:], 0)])
    torch.testing.assert_close(got, wanted, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(head.logits(got), reference.logits(wanted), atol=1e-4, rtol=1e-4)
    assert head.logits(got).dtype == torch.float32
    assert head.combine(features) is features
    assert head.taps.normed
    assert not head.taps.layers


def test_each_step_has_its_module_and_the_last_is_repeated(tmp_path: Path) -> None:
    family = MTP["mimo"]
    folder = save_with_modules(tmp_path / "target", family, modules=2)
    head = MtpHead.open(folder, opened(folder))
    references = [Reference(folder, family, i, tmp_path / f"reference-{i}") for i in range(2)]
    assert len(head.layers) == 2
    tokens, features = random_tokens(6, 3), torch.randn(6, 32, generator=torch.Generator().manual_seed(4))
    for step, module in ((0, 0), (1, 1), (2, 1), (5, 1)):
        got = Rows(head).run(tokens, features, step)
        torch.testing.assert_close(got, references[module].hidden(tokens, features), atol=2e-5, rtol=1e-4)


def test_modules_have_places_of_their_own_in_the_cache(tmp_path: Path) -> None:
    family = MTP["mimo"]
    folder = save_with_modules(tmp_path / "target", family, modules=2)
    rows = Rows(MtpHead.open(folder, opened(folder)))
    features = torch.randn(3, 32, generator=torch.Generator().manual_seed(4))
    rows.run([5, 6, 7], features, 0)
    assert bool(rows.cache.keys(0)[:3].any())
    assert not bool(rows.cache.keys(1).any())
    rows.length = 0
    before = rows.cache.keys(0).clone()
    rows.run([5, 6, 7], features, 1)
    assert bool(rows.cache.keys(1)[:3].any())
    assert torch.equal(rows.cache.keys(0), before)


@pytest.mark.parametrize("changed", [False, True])
def test_copies_of_what_the_target_has_are_not_kept(tmp_path: Path, changed: bool) -> None:
    """One that differs is."""
    folder = save_with_modules(tmp_path / "target", MTP["deepseek"], copies=True)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    own = "model.layers.3.shared_head.head.weight"
    if changed:
        tensors[own] = tensors[own] * 2
        save_file(tensors, file, metadata={"format": "pt"})
    runner = opened(folder)
    head = MtpHead.open(folder, runner)
    hidden = torch.randn(2, 32, generator=torch.Generator().manual_seed(1))
    logits = hidden @ tensors[own].T
    torch.testing.assert_close(head.logits(hidden), logits, atol=1e-4, rtol=1e-4)
    assert (head._others[1] is runner.model.get_output_embeddings()) is not changed
    assert head._others[0] is runner.model.get_input_embeddings()


def test_qwen3_next_at_module_level(tmp_path: Path) -> None:
    """Its target is recurrent and refused, but its module is a plain decoder layer."""
    family = MTP["qwen3-next"]
    folder = save_with_modules(tmp_path / "target", family)
    with pytest.raises(UnsupportedModel):
        open_unchecked(folder, torch.float32, CPU)
    from transformers import Qwen3NextForCausalLM

    attention.register()
    config = load_config(folder)
    built = build_modules(read_modules(folder, read_config(folder)), Qwen3NextForCausalLM, config, torch.float32, CPU)
    tensors = load_file(folder / "model.safetensors")
    embedding = torch.nn.Embedding.from_pretrained(tensors["model.embed_tokens.weight"])
    lm_head = torch.nn.Linear(32, VOCAB, bias=False)
    lm_head.weight = torch.nn.Parameter(tensors["lm_head.weight"], requires_grad=False)
    head = MtpHead(built.modules, built.rotary, embedding, lm_head, 96)
    reference = Reference(folder, family, 0, tmp_path / "reference")
    tokens, features = random_tokens(11, 1), torch.randn(11, 32, generator=torch.Generator().manual_seed(2))
    got = Rows(head).run(tokens, features, 0)
    torch.testing.assert_close(got, reference.hidden(tokens, features), atol=2e-5, rtol=1e-4)


def changed(folder: Path, change: Any) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "deepseek",
            lambda t: t.pop("model.layers.3.enorm.weight"),
            r"missing: model\.layers\.3\.enorm\.weight \[32\]",
        ),
        (
            "deepseek",
            lambda t: t.pop("model.layers.3.mlp.experts.2.up_proj.weight"),
            r"missing: model\.layers\.3\.mlp\.experts\.gate_up_proj",
        ),
        (
            "mimo",
            lambda t: t.update({"model.mtp_layers.0.input_proj.weight": torch.zeros(32, 32)}),
            r"wrong shape: model\.mtp_layers\.0\.input_proj\.weight \[32, 32\] instead of \[32, 64\]",
        ),
        (
            "mimo",
            lambda t: t.update({"model.mtp_layers.0.strange.weight": torch.zeros(3)}),
            r"unknown: model\.mtp_layers\.0\.strange\.weight \[3\]",
        ),
    ],
)
def test_broken_modules_are_refused_by_name(tmp_path: Path, name: str, change: Any, message: str) -> None:
    folder = save_with_modules(tmp_path / "target", MTP[name])
    changed(folder, change)
    with pytest.raises(ModelError, match=message):
        MtpHead.open(folder, opened(folder))


def test_fewer_modules_than_promised_are_refused(tmp_path: Path) -> None:
    folder = save_with_modules(tmp_path / "target", MTP["mimo"])
    change_config(folder, num_nextn_predict_layers=2)
    with pytest.raises(ModelError, match=r"promises 2 modules .* module 1 are missing \(model\.mtp_layers\.1\.\*\)"):
        MtpHead.open(folder, opened(folder))


def test_modules_beyond_what_the_configuration_says_are_left_alone(tmp_path: Path) -> None:
    folder = save_with_modules(tmp_path / "target", MTP["mimo"], modules=2)
    change_config(folder, num_nextn_predict_layers=1)
    assert len(MtpHead.open(folder, opened(folder)).layers) == 1


def test_a_cut_file_is_refused(tmp_path: Path) -> None:
    folder = save_with_modules(tmp_path / "target", MTP["mimo"])
    runner = opened(folder)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelError, match="damaged or cut short"):
        MtpHead.open(folder, runner)


def test_a_target_without_modules_is_refused(tiny_target: Path) -> None:
    with pytest.raises(DrafterError, match=r"no tensors of multi-token prediction .*Use another drafter"):
        find_modules(tiny_target, read_config(tiny_target))
