"""Drafters that come with Slipstream: found by their bare names for the default model, and missed with good advice."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors import safe_open

from medusa_checkpoints import tiny_medusa
from slipstream import LLM, CompletionOutput, SamplingParams, SpeculationParams, drafters
from slipstream.core.errors import ConfigError
from slipstream.drafters import DrafterSpec, parse_spec, register, shipped, shipped_as
from slipstream.drafters.shipped import with_shipped
from slipstream.models.heads.checkpoint import TargetShape
from slipstream.models.heads.medusa import check_medusa

MOST_BYTES = 64 * 2**20
QUESTIONS = ("What are the three primary colours?", "Tom has 3 apples and buys 4 more. How many has he now?")


@pytest.fixture
def heads(tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The tiny target is the default model, and only Medusa heads are shipped for it."""
    monkeypatch.setattr(shipped, "HEADS", tmp_path / "heads")
    monkeypatch.setattr(shipped, "default_folder", lambda: tiny_target)
    tiny_medusa(tmp_path / "heads" / "medusa")
    return tmp_path / "heads"


def test_a_bare_name_means_what_is_shipped(heads: Path, tiny_target: Path, tmp_path: Path) -> None:
    found = DrafterSpec("medusa", str(heads / "medusa"))
    assert with_shipped(parse_spec("medusa"), tiny_target) == found
    assert with_shipped(parse_spec("medusa"), "default") == found
    assert with_shipped(parse_spec("medusa:own"), tmp_path) == DrafterSpec("medusa", "own")
    assert with_shipped(parse_spec("ngram"), tmp_path) == DrafterSpec("ngram")
    (heads / "eagle3").mkdir()
    (heads / "eagle3" / "config.json").write_text("{}")
    with_options = with_shipped(parse_spec("eagle3:?depth=2&width=3"), "default")
    assert str(with_options) == f"eagle3:{heads / 'eagle3'}?depth=2&width=3"
    assert [shipped_as(name) for name in ("eagle", "medusa", "model", "ngram")] == ["eagle3", "medusa", "draft", None]


def test_what_is_missing_says_how_to_have_it(heads: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"'eagle3' without a path: its weights are not in this installation"
    ) as error:
        with_shipped(parse_spec("eagle3"), "default")
    assert "`slipstream train eagle3 --target default --out runs/eagle3 --self-prompts 20000`" in str(error.value)
    assert "then eagle3:runs/eagle3/drafter" in str(error.value)
    other = tmp_path / "other"
    with pytest.raises(ConfigError, match=rf"'draft' without a path: .* not for {other}; name .* draft:PATH") as error:
        with_shipped(parse_spec("draft"), other)
    assert f"slipstream train draft --target {other} " in str(error.value)


def test_an_engine_opens_them(heads: Path, tiny_target: Path, open_llm: Callable[..., LLM], tmp_path: Path) -> None:
    llm = open_llm(tiny_target, drafter=["medusa", "medusa+ngram"], planner="fixed")
    answer = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=6, ignore_eos=True))[0].outputs[0]
    assert answer.speculation.by_drafter["medusa"].drafted > 0
    with pytest.raises(ConfigError, match="its weights are not in this installation"):
        open_llm(tiny_target, drafter="eagle3")
    with pytest.raises(ConfigError, match="'medusa' is given twice"):
        open_llm(tiny_target, drafter=["medusa", "medusa:elsewhere"])


def test_a_drafter_that_ships_nothing_needs_a_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafters, "_entries", dict(drafters._entries))
    register("homegrown", "nowhere:Nobody", takes_path=True)
    with pytest.raises(ConfigError, match="drafter 'homegrown' needs a model: write homegrown:PATH"):
        parse_spec("homegrown")


def test_it_is_found_without_torch() -> None:
    code = "import sys, slipstream.drafters.shipped; sys.exit('torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0


def test_the_package_holds_no_more_than_it_may() -> None:
    """Whatever is shipped has weights in fp16 or less, a card that names its data, and 64 MiB at most in all."""
    files = [file for file in shipped.HEADS.rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) <= MOST_BYTES
    folders = {file.parent for file in files}
    assert folders == {shipped.HEADS / name for name in ("eagle3", "medusa", "draft")}
    for folder in folders:
        json.loads((folder / "config.json").read_text())
        card = (folder / "README.md").read_text()
        assert "## Data" in card
        assert "| tau by task |" in card
        assert not re.search(r"[`: ]/\w", card)  # where things lay when it was made is nobody's business
        for weights in folder.glob("*.safetensors"):
            with safe_open(weights, "pt") as tensors:
                kinds = {tensors.get_slice(name).get_dtype() for name in tensors.keys()}  # noqa: SIM118
            assert not kinds & {"F32", "F64"}


def test_the_medusa_heads_fit_the_default_model() -> None:
    found = with_shipped(parse_spec("medusa"), "default")
    assert found == DrafterSpec("medusa", str(shipped.HEADS / "medusa"))
    check_medusa(shipped.HEADS / "medusa", TargetShape(hidden=576, vocab=49152, layers=30, max_positions=8192))
    assert json.loads((shipped.HEADS / "medusa" / "config.json").read_text())["medusa_chained"] is True


@pytest.mark.slow
def test_the_default_model_answers_with_them() -> None:
    """What is shipped is what the code computes: heads that were trained otherwise are seldom right."""
    least = {"eagle3": 3.0, "medusa": 2.0, "draft": 2.0}
    with LLM("default", drafter=[*least], device="cpu", planner="fixed", max_num_seqs=2, max_model_len=256) as llm:
        prompts = [llm.chat_prompt([{"role": "user", "content": question}]) for question in QUESTIONS]

        def answered(how: SpeculationParams) -> list[CompletionOutput]:
            params = SamplingParams(temperature=0, max_tokens=32, speculation=how)
            return [output.outputs[0] for output in llm.generate(prompts, params)]

        plain = answered(SpeculationParams(enabled=False))
        for name, tau in least.items():
            answers = answered(SpeculationParams(drafter=name))
            assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in plain]
            did = [answer.speculation for answer in answers]
            assert sum(one.emitted for one in did) > tau * sum(one.rounds for one in did), name
