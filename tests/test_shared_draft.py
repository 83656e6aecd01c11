"""Drafts without embeddings of their own: they run with the target's, the very same tensors, and with no others."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from conftest import VOCAB, save_model, save_tokenizer, tiny_llama
from exactness import cases, differences, plain, run
from families import CPU, Passes, random_tokens
from shared_drafts import tiny_shared, with_words
from slipstream import LLM
from slipstream.core.errors import ModelError, UnsupportedModel
from slipstream.drafters import opening
from slipstream.drafters.model import ModelDrafter
from slipstream.kernels.cpu.compiled import can_compile
from slipstream.kernels.cpu.interface import Codes
from slipstream.kernels.cpu.tiled import CODES_PAY, TiledLinear
from slipstream.models.parity import open_model
from slipstream.models.runner import Runner
from slipstream.train.teacher import Teacher
from test_linear import quantized


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_shared(tmp_path_factory.mktemp("shared") / "draft")


def drafter_of(llm: LLM, name: str = "model") -> ModelDrafter:
    return cast(ModelDrafter, llm.engine.drafting.drafters[name])


def words_of(runner: Runner) -> Tensor:
    return cast(Tensor, runner.model.get_input_embeddings().weight)


def test_it_has_the_targets_own_tensors(tiny_target: Path, draft: Path, open_llm: Callable[..., LLM]) -> None:
    llm = open_llm(drafter=f"model:{draft}")
    drafter, target = drafter_of(llm), llm.engine.target
    assert words_of(drafter.runner).data_ptr() == words_of(target).data_ptr()
    assert drafter.runner.model.get_output_embeddings() is target.model.get_output_embeddings()
    own = sum(t.numel() * 4 for t in load_file(draft / "model.safetensors").values())
    assert drafter.weights_bytes == own  # planned beside the target: what is shared is counted once
    assert "fused" in drafter.runner.swaps


@pytest.mark.parametrize("tied", [False, True])
def test_it_is_the_model_with_the_words_written_out(tied: bool, draft: Path, tmp_path: Path) -> None:
    folder = save_model(tmp_path / "target", tiny_llama(tie_word_embeddings=tied), seed=2)
    target = open_model(folder, torch.float32, CPU)
    shared = open_model(draft, torch.float32, CPU, target=target)
    whole = open_model(with_words(draft, folder, tmp_path / "whole"), torch.float32, CPU)
    assert shared.vocab_size == whole.vocab_size
    first, second = random_tokens(20, 1), random_tokens(80, 2)
    for parts in ([(0, first)], [(1, second[:70])], [(0, first[:3]), (1, second[70:])]):
        found = [Passes(runner, 2, 40).run(parts) for runner in (shared, whole)]
        torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


def test_a_target_in_codes_lends_its_codes(draft: Path, tmp_path: Path) -> None:
    """An LM head that is kept in codes is read in codes by the draft, too."""
    folder = save_model(tmp_path / "target", tiny_llama(tie_word_embeddings=False), seed=2)
    tensors = load_file(folder / "model.safetensors")
    save_file(
        tensors | {"lm_head.weight": quantized(VOCAB, 32, 4)}, folder / "model.safetensors", metadata={"format": "pt"}
    )
    target = open_model(folder, torch.float32, CPU)
    head = target.model.get_output_embeddings()
    assert (isinstance(head, TiledLinear) and isinstance(head.tiles, Codes)) == (can_compile() and CODES_PAY)
    shared = open_model(draft, torch.float32, CPU, target=target)
    whole = open_model(with_words(draft, folder, tmp_path / "whole"), torch.float32, CPU)
    assert shared.model.get_output_embeddings() is head
    found = [Passes(runner).run([(0, random_tokens(9, 1))]) for runner in (shared, whole)]
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rounds", ["eager", "queued"])
def test_the_tokens_are_plain_decodings(rounds: str, draft: Path, open_llm: Callable[..., LLM]) -> None:
    """In rounds that wait and in those that are queued, where the draft's whole loop is one piece."""
    llm = open_llm(drafter=f"model:{draft}", planner="fixed", rounds=rounds)
    batch = [case for case in cases() if not case.params.min_tokens]
    got = run(llm, batch, "model")
    assert not differences(batch, plain(llm, batch), got)
    assert sum(output.speculation.drafted for output in got) > 0


def test_another_target_is_refused(tiny_target: Path, tmp_path: Path, open_llm: Callable[..., LLM]) -> None:
    draft = tiny_shared(tmp_path / "wide", hidden_size=48)
    with pytest.raises(ModelError, match=r"embed_tokens.weight \(300, 48\).*this target's is \(300, 32\)") as told:
        open_llm(drafter=f"model:{draft}")
    assert "slipstream train draft" in str(told.value)
    draft = tiny_shared(tmp_path / "more", vocab_size=301)
    with pytest.raises(ModelError, match=r"embed_tokens.weight \(301, 32\).*this target's is \(300, 32\)"):
        open_llm(drafter=f"model:{draft}")


def test_it_is_no_target(draft: Path, tmp_path: Path, open_llm: Callable[..., LLM]) -> None:
    """Said before a tokenizer is missed, by everything that opens targets."""
    said = "shares its target's embeddings .* Name it as the drafter of the target"
    with pytest.raises(UnsupportedModel, match=said):
        open_llm(draft)
    with pytest.raises(UnsupportedModel, match=said):
        open_model(draft, torch.float32, CPU)
    with pytest.raises(UnsupportedModel, match=said):
        Teacher.open(draft, "cpu")


def test_other_tensors_must_be_there(draft: Path, tmp_path: Path, open_llm: Callable[..., LLM]) -> None:
    folder = tiny_shared(tmp_path / "broken")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"1 tensors are missing: model\.norm\.weight"):
        open_llm(drafter=f"model:{folder}")


def test_a_tokenizer_beside_it_is_not_asked(draft: Path, tmp_path: Path, open_llm: Callable[..., LLM]) -> None:
    """Its vocabulary is the target's by being the target's tensors."""
    folder = tiny_shared(tmp_path / "draft")
    save_tokenizer(folder)
    (folder / "tokenizer.json").write_text("{}")
    assert json.loads((folder / "config.json").read_text())["shares_embeddings"]
    assert isinstance(drafter_of(open_llm(drafter=f"model:{folder}")), ModelDrafter)


def test_it_is_found_by_its_bare_name(
    tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, open_llm: Callable[..., LLM]
) -> None:
    """As the default model's is: without a tokenizer or a path."""
    monkeypatch.setattr(opening, "HEADS", tmp_path)
    monkeypatch.setattr(opening, "default_folder", lambda: tiny_target)
    tiny_shared(tmp_path / "draft")
    assert isinstance(drafter_of(open_llm(tiny_target, drafter="draft"), "draft"), ModelDrafter)
