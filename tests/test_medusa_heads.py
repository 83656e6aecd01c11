"""Medusa's heads: both layouts, compared with a plain reference; what does not fit is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from families import CPU
from medusa_checkpoints import HIDDEN, VOCAB, head_tensors, said, save_heads, tiny_medusa
from slipstream.core.errors import DrafterError, ModelError
from slipstream.models.heads.medusa import load_medusa
from slipstream.models.runner import Runner, open_unchecked

FILES = {
    "original": ("medusa_lm_head.pt", "medusa_lm_head.safetensors"),
    "vllm": ("model.safetensors", "pytorch_model.bin"),
}
CONFIGS: dict[str, dict[str, Any]] = {
    "original": {"medusa_num_heads": 3, "medusa_num_layers": 2},
    "vllm": {"num_heads": 3, "num_hidden_layers": 2, "model_type": "medusa"},
}

TOKENS = torch.arange(4)


@pytest.fixture(scope="module")
def target(tiny_target: Path) -> Runner:
    runner = open_unchecked(tiny_target, torch.float32, CPU)
    runner.swap(fused=True)
    return runner


def features(rows: int = 4) -> Tensor:
    return torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(9))


@pytest.mark.parametrize(("layout", "file"), [(layout, file) for layout, files in FILES.items() for file in files])
def test_heads_say_what_the_reference_says(target: Runner, tmp_path: Path, layout: str, file: str) -> None:
    tensors = head_tensors(layout)
    heads = load_medusa(save_heads(tmp_path / "heads", tensors, file, **CONFIGS[layout]), target)
    got = heads.logits(features(), TOKENS)
    assert got.shape == (3, 4, VOCAB)
    assert got.dtype == torch.float32
    for head in range(3):
        own = tensors[f"{head}.2.weight" if layout == "original" else f"lm_heads.{head}.weight"]
        for row, x in enumerate(features()):
            wanted = said(tensors, layout, head, 2, x, own)
            torch.testing.assert_close(got[head, row], wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("layout", ["original", "vllm"])
def test_heads_may_share_the_targets_lm_head(target: Runner, tiny_target: Path, tmp_path: Path, layout: str) -> None:
    tensors = head_tensors(layout, own_heads=False)
    heads = load_medusa(save_heads(tmp_path / "heads", tensors, FILES[layout][0], **CONFIGS[layout]), target)
    lm_head = load_file(tiny_target / "model.safetensors")["lm_head.weight"]
    got = heads.logits(features(), TOKENS)
    for head in range(3):
        wanted = said(tensors, layout, head, 2, features()[1], lm_head)
        torch.testing.assert_close(got[head, 1], wanted, atol=1e-4, rtol=1e-4)
    assert heads.weights_bytes == sum(t.numel() for t in tensors.values()) * 4 + (layout == "vllm") * 3 * 2 * HIDDEN * 4


def test_names_of_a_whole_model(target: Runner, tmp_path: Path) -> None:
    tensors = {f"medusa_head.{name}": tensor for name, tensor in head_tensors("original").items()}
    folder = save_heads(tmp_path / "heads", tensors, "medusa_lm_head.pt", **CONFIGS["original"])
    assert load_medusa(folder, target).heads == 3


def test_more_heads_than_the_configuration_says(target: Runner, tmp_path: Path) -> None:
    """The first published checkpoints have 5, and say 2."""
    config = {"medusa_num_heads": 2, "medusa_num_layers": 2}
    folder = save_heads(tmp_path / "heads", head_tensors("original"), "medusa_lm_head.pt", **config)
    assert load_medusa(folder, target).logits(features(), TOKENS).shape == (3, 4, VOCAB)


def test_one_lm_head_for_all_and_a_smaller_vocabulary(target: Runner, tmp_path: Path) -> None:
    """As vLLM's variant may have them."""
    tensors = head_tensors("vllm", own_heads=False)
    dice = torch.Generator().manual_seed(1)
    tensors["lm_head.weight"] = torch.randn(40, HIDDEN, generator=dice)
    tensors["token_map"] = torch.randperm(VOCAB, generator=dice)[:40]
    heads = load_medusa(save_heads(tmp_path / "heads", tensors, "model.safetensors", **CONFIGS["vllm"]), target)
    got = heads.logits(features(), TOKENS)
    assert got.shape == (3, 4, 40)
    assert heads.vocab is not None
    assert heads.vocab.tolist() == tensors["token_map"].tolist()
    wanted = said(tensors, "vllm", 2, 2, features()[3], tensors["lm_head.weight"])
    torch.testing.assert_close(got[2, 3], wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda t: t.pop("1.0.linear.weight"), ModelError, r"missing: 1\.0\.linear\.weight \[32, 32\]"),
        (lambda t: t.pop("2.2.weight"), ModelError, r"missing: 2\.2\.weight \[300, 32\]"),
        (
            lambda t: t.update({"1.1.linear.bias": torch.zeros(31)}),
            ModelError,
            r"wrong shape: 1\.1\.linear\.bias \[31\] instead of \[32\]",
        ),
        (lambda t: t.update({"2.3.linear.weight": torch.zeros(32, 32)}), ModelError, r"unknown: 2\.3\.linear\.weight"),
        (lambda t: t.update({"3.1.linear.bias": torch.zeros(32)}), ModelError, r"missing: 3\.0\.linear\.weight"),
        (
            lambda t: t.update({f"{h}.2.weight": torch.zeros(200, 32) for h in range(3)}),
            DrafterError,
            r"a vocabulary of 200, this one has 300",
        ),
        (
            lambda t: t.update({"0.0.linear.weight": torch.zeros(48, 48)}),
            DrafterError,
            r"a hidden size of 48, this one has 32",
        ),
    ],
)
def test_heads_that_do_not_fit_are_refused(
    target: Runner, tmp_path: Path, change: Any, error: type[Exception], message: str
) -> None:
    tensors = head_tensors("original")
    change(tensors)
    folder = save_heads(tmp_path / "heads", tensors, "medusa_lm_head.safetensors", **CONFIGS["original"])
    with pytest.raises(error, match=message):
        load_medusa(folder, target)


@pytest.mark.parametrize("ids", [[0, 300], [-1, 5], [0.5, 1.0]])
def test_a_token_map_out_of_range_is_refused(target: Runner, tmp_path: Path, ids: list[float]) -> None:
    tensors = head_tensors("vllm", vocab=2) | {"token_map": torch.tensor(ids)}
    folder = save_heads(tmp_path / "heads", tensors, "model.safetensors", **CONFIGS["vllm"])
    with pytest.raises(ModelError, match="token_map must hold the target's token ids, 0 to 299"):
        load_medusa(folder, target)


def test_a_token_map_needs_heads(target: Runner, tmp_path: Path) -> None:
    tensors = head_tensors("vllm", own_heads=False) | {"token_map": torch.arange(5)}
    folder = save_heads(tmp_path / "heads", tensors, "model.safetensors", **CONFIGS["vllm"])
    with pytest.raises(ModelError, match="token_map without LM heads of its own"):
        load_medusa(folder, target)


@pytest.mark.parametrize("count", [None, 0, "3", True])
def test_the_number_of_heads_must_be_one(target: Runner, tmp_path: Path, count: object) -> None:
    folder = save_heads(tmp_path / "heads", head_tensors("original"), "medusa_lm_head.pt", medusa_num_heads=count)
    with pytest.raises(ModelError, match=r"medusa_num_heads=.*must be a positive whole number"):
        load_medusa(folder, target)


def test_a_folder_of_something_else_is_told_how_to_name_it(target: Runner, tiny_target: Path) -> None:
    with pytest.raises(DrafterError, match=r"holds a whole model, not Medusa heads; write model:"):
        load_medusa(tiny_target, target)


def test_heads_without_end_are_refused(target: Runner, tmp_path: Path) -> None:
    tensors = head_tensors("original")
    folder = save_heads(tmp_path / "many", tensors, "medusa_lm_head.pt", medusa_num_heads=10**12)
    with pytest.raises(ModelError, match="medusa_num_heads=1000000000000, must be at most 256"):
        load_medusa(folder, target)
    tensors["1000000000000.0.linear.weight"] = torch.zeros(32, 32)
    folder = save_heads(tmp_path / "far", tensors, "medusa_lm_head.pt", **CONFIGS["original"])
    with pytest.raises(ModelError, match=r"unknown: 1000000000000\.0"):
        load_medusa(folder, target)


class Evil:
    def __reduce__(self) -> Any:
        return (print, ("code of a stranger",))


def test_a_pickle_with_code_is_refused(target: Runner, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors: Any = {**head_tensors("original"), "evil": Evil()}
    folder = save_heads(tmp_path / "heads", tensors, "medusa_lm_head.pt", **CONFIGS["original"])
    with pytest.raises(ModelError, match="could run code, so it is refused"):
        load_medusa(folder, target)
    assert "stranger" not in capsys.readouterr().out


@pytest.mark.parametrize("file", ["medusa_lm_head.pt", "medusa_lm_head.safetensors"])
def test_a_cut_file_is_refused(target: Runner, tmp_path: Path, file: str) -> None:
    folder = save_heads(tmp_path / "heads", head_tensors("original"), file, **CONFIGS["original"])
    whole = (folder / file).read_bytes()
    (folder / file).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelError, match=file):
        load_medusa(folder, target)


def test_a_folder_without_heads_is_refused(target: Runner, tmp_path: Path) -> None:
    folder = tiny_medusa(tmp_path / "heads")
    (folder / "medusa_lm_head.safetensors").unlink()
    with pytest.raises(ModelError, match=r"no weights; one of these files must be there: .*medusa_lm_head\.pt"):
        load_medusa(folder, target)
    with pytest.raises(ModelError, match="no such folder"):
        load_medusa(tmp_path / "nowhere", target)
