"""Heads are looked at before the target's weights are read: of which kind they are, and whether they fit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import eagle_scenes
from conftest import save_model, tiny_llama
from medusa_checkpoints import head_tensors, save_heads, tiny_medusa
from slipstream import LLM
from slipstream.core.errors import DrafterError, ModelError, SlipstreamError
from slipstream.engine import build
from slipstream.models.heads.checkpoint import kind_of

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


def test_kinds_by_names() -> None:
    assert kind_of({"transformer.h.0.ln_1.weight", "lm_head.weight"}) == "model"
    assert kind_of({"medusa_head.0.0.linear.weight"}) == "medusa"
    assert kind_of({"model.midlayer.mlp.up_proj.weight"}) == "eagle"
    assert kind_of({"something.weight"}) is None


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
        ("medusa vocabulary", "made for a target with a vocabulary of 77, this one has 300"),
        ("eagle tensor", r"missing: norm\.weight"),
        ("eagle ids", "outside the target's vocabulary"),
        ("eagle size", "made for a target with hidden size 64, this one has 32"),
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
