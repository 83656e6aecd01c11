"""Every bound of a request's parameters: errors name the key, the value and the remedy."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from slipstream import LLM, SamplingParams, SpeculationParams, StructuredOutputsParams
from slipstream.core.errors import InvalidRequest, RequestError
from slipstream.core.params import MAX_BIAS, MAX_REPETITION, MAX_TEMPERATURE, MIN_REPETITION, SETTINGS
from slipstream.core.structured import MAX_CHOICES, MAX_REGEX_CHARACTERS, MAX_RULE_CHARACTERS

RIGHT: dict[str, list[Any]] = {
    "n": [1, 128],
    "temperature": [0, 0.0, 1e-9, 1, 100.0, np.float32(0.5)],
    "top_p": [1e-9, 0.5, 1],
    "top_k": [0, -1, 1, 10**9],
    "min_p": [0, 1, 0.5],
    "presence_penalty": [-2, 0, 2],
    "frequency_penalty": [-2.0, 2.0],
    "repetition_penalty": [0.01, 1, 10],
    "logit_bias": [{}, None, {3: -100}, {0: 1.5, 7: np.float32(2)}],
    "bad_words": [(), None, ["a", "b c"], "word"],
    "min_tokens": [0, 256],
    "max_tokens": [1, 10**6, None],
    "stop": ["x", (), None, ["a", "b"], ["s"] * 64],
    "stop_token_ids": [(), None, [1, 2]],
    "seed": [None, 0, 2**64 - 1, np.int64(3)],
    "logprobs": [None, 0, 20],
    "output_kind": ["cumulative", "delta", "final_only"],
}


WRONG: list[tuple[str, Any, str]] = [
    ("n", 0, "1 to 128"),
    ("n", 129, "1 to 128"),
    ("n", 1.5, "a whole number"),
    ("temperature", -0.1, "0 to 1e+06 (0 is greedy)"),
    ("temperature", math.nan, "0 to 1e+06 (0 is greedy)"),
    ("temperature", "hot", "a number"),
    ("top_p", 0, "above 0, at most 1"),
    ("top_p", 1.01, "above 0, at most 1"),
    ("top_k", -2, "-1 or more (0 and -1 are off)"),
    ("top_k", 2.5, "a whole number"),
    ("min_p", -0.1, "0 to 1"),
    ("min_p", 1.1, "0 to 1"),
    ("presence_penalty", 2.1, "-2 to 2"),
    ("frequency_penalty", -2.1, "-2 to 2"),
    ("repetition_penalty", 5e-324, "0.01 to 10"),
    ("repetition_penalty", 11, "0.01 to 10"),
    ("repetition_penalty", "1", "a number"),
    ("min_tokens", -1, "0 or more"),
    ("min_tokens", 257, "at most max_tokens=256"),
    ("max_tokens", 0, "1 or more"),
    ("max_tokens", 7.0, "a whole number"),
    ("seed", -1, f"0 to {2**64 - 1} (None draws a fresh one)"),
    ("seed", 2**64, f"0 to {2**64 - 1} (None draws a fresh one)"),
    ("logprobs", -1, "0 to 20"),
    ("logprobs", 21, "0 to 20"),
    ("stop", "", "non-empty strings"),
    ("stop", [3], "non-empty strings"),
    ("stop", ["s"] * 65, "at most 64 strings"),
    ("bad_words", [""], "non-empty strings"),
    ("logit_bias", {3: math.nan}, "by token id"),
    ("logit_bias", {3: math.inf}, "by token id"),
    ("logit_bias", {3: "much"}, "by token id"),
    ("logit_bias", {3: True}, "by token id"),
    ("allowed_token_ids", [], "one at least"),
    ("allowed_token_ids", 3, "a list of token ids"),
    ("allowed_token_ids", [[1]], "a list of token ids"),
    ("output_kind", "all", "one of cumulative, delta, final_only"),
    ("ignore_eos", "no", "True or False"),
    *((key, True, "a whole number") for key in ("n", "top_k", "min_tokens", "max_tokens", "seed", "logprobs")),
    *((key, True, "a number") for key in ("temperature", "top_p", "min_p", "presence_penalty", "repetition_penalty")),
]


@pytest.mark.parametrize(("key", "value"), [(k, v) for k, values in RIGHT.items() for v in values])
def test_what_is_right_passes(key: str, value: Any) -> None:
    SamplingParams(**{key: value})


@pytest.mark.parametrize(("key", "value", "remedy"), WRONG)
def test_what_is_wrong_explains_itself(key: str, value: Any, remedy: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(f"{key}=")) as caught:
        SamplingParams(**{key: value})
    assert remedy in str(caught.value)
    assert isinstance(caught.value, RequestError)
    assert isinstance(caught.value, ValueError)  # what callers of other engines catch
    if not isinstance(value, (str, list)):
        assert f"{key}={value!r}" in str(caught.value)


def test_speculation_is_not_turned_off_by_none() -> None:
    nothing: Any = None
    with pytest.raises(InvalidRequest, match=r"speculation=None: must be .*enabled=False\) for plain decoding"):
        SamplingParams(speculation=nothing)


def test_each_setting_is_declared_once() -> None:
    """What the command line and HTTP need of a setting is in its declaration."""
    assert SETTINGS.keys() >= {"temperature", "top_p", "top_k", "min_p", "seed", "n", "min_tokens", "ignore_eos"}
    for name, setting in SETTINGS.items():
        assert setting.default == getattr(SamplingParams(), name)
        assert setting.fault(setting.default) is None
        assert setting.help or not (setting.metavar or setting.http)
    assert (SETTINGS["min_p"].kind, SETTINGS["min_p"].low, SETTINGS["min_p"].high) == (float, 0, 1)
    assert SETTINGS["top_p"].above


def test_an_unknown_key_is_refused() -> None:
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=1)  # type: ignore[call-arg]


def test_what_was_given_is_kept_in_one_shape() -> None:
    words, bias = ["bad"], {1: 2.0}
    params = SamplingParams(stop="END", bad_words=words, logit_bias=bias, stop_token_ids=[5], top_k=-1)
    words.append("worse")
    bias[2] = 3.0
    assert params.stop_strings == ("END",)
    assert params.bad_words == ("bad",)
    assert params.logit_bias == {1: 2.0}
    assert params.stop_token_ids == (5,)
    assert params.top_k == 0
    assert SamplingParams(bad_words="word").bad_words == ("word",)  # one word, not its letters
    once: Any = (token for token in [1, 2, 1])
    assert SamplingParams(allowed_token_ids=once).allowed_token_ids == (1, 2)


def test_what_follows_from_it() -> None:
    assert SamplingParams(temperature=0).greedy
    assert not SamplingParams(temperature=1e-6).greedy
    assert not SamplingParams().penalized
    assert SamplingParams(presence_penalty=0.1).penalized
    assert SamplingParams(frequency_penalty=-0.1).penalized
    assert SamplingParams(repetition_penalty=1.1).penalized


@pytest.mark.parametrize("nodes", [-1, 64, 1.5, "3", True])
def test_wrong_draft_sizes(nodes: Any) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(f"draft_tokens={nodes!r}: must be 0 to 63")):
        SpeculationParams(draft_tokens=nodes)


@pytest.mark.parametrize(
    ("given", "message"),
    [({"tenant": 3}, "tenant=3: must be a text"), ({"material": [3]}, "material=.* must be a text or a list of texts")],
)
def test_tenant_and_material_are_texts(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        SpeculationParams(**given)
    assert SpeculationParams(material="one").material == ("one",)
    assert SpeculationParams(material=["one", "two"]).material == ("one", "two")


PROMPT = [5, 6, 7, 5, 6, 7, 5, 6]


TINY = 5e-324


EDGES: list[dict[str, Any]] = [
    {"temperature": MAX_TEMPERATURE},
    {"top_p": TINY},
    {"top_p": 1 - 1e-16},
    {"min_p": TINY},
    {"min_p": 1.0},
    {"top_k": 1},
    {"top_k": 2**62},
    {"presence_penalty": -2, "frequency_penalty": -2},
    {"presence_penalty": 2, "frequency_penalty": 2},
    {"repetition_penalty": MIN_REPETITION},
    {"repetition_penalty": MAX_REPETITION},
    {"repetition_penalty": MIN_REPETITION, "temperature": TINY, "top_p": TINY},
    {"logit_bias": {5: MAX_BIAS, 6: -MAX_BIAS}},
    {"logit_bias": {5: MAX_BIAS}, "repetition_penalty": MIN_REPETITION, "temperature": TINY},
    {"logit_bias": {5: -MAX_BIAS}, "repetition_penalty": MIN_REPETITION, "temperature": 1e-38},
]


@pytest.mark.parametrize("rounds", ["eager", "queued"])
@pytest.mark.parametrize("verifier", ["exact", "rejection"])
def test_at_the_edges_there_is_an_answer(open_llm: Callable[..., LLM], rounds: str, verifier: Any) -> None:
    llm = open_llm(drafter="ngram", rounds=rounds, planner="fixed")
    speculation = SpeculationParams(verifier=verifier)
    params = [SamplingParams(seed=3, max_tokens=8, ignore_eos=True, speculation=speculation, **edge) for edge in EDGES]
    for edge, output in zip(EDGES, llm.generate([PROMPT] * len(EDGES), params), strict=True):
        answer = output.outputs[0]
        assert (answer.error, len(answer.token_ids)) == (None, 8), edge


def test_temperatures_too_small_to_divide_by_are_greedy(open_llm: Callable[..., LLM]) -> None:
    llm = open_llm(drafter="ngram")
    temperatures = [0.0, TINY, 1e-45, 1e-40, 1e-38, 1e-30, 1e-9]
    params = [SamplingParams(temperature=t, seed=3, max_tokens=12, ignore_eos=True) for t in temperatures]
    tokens = [output.outputs[0].token_ids for output in llm.generate([PROMPT] * len(params), params)]
    assert tokens == [tokens[0]] * len(tokens)


@pytest.mark.parametrize("wrong", [0, TINY, 1e-39, 0.0099, 10.1, float("nan"), float("inf")])
def test_what_would_make_logits_infinite_is_refused(wrong: float) -> None:
    with pytest.raises(InvalidRequest, match=r"repetition_penalty=.*: must be 0\.01 to 10"):
        SamplingParams(repetition_penalty=wrong)


def test_a_schema_is_kept_as_text_in_the_order_of_its_keys() -> None:
    schema = {"type": "object", "properties": {"z": {"type": "integer"}, "a": {"const": "é"}}}
    form = StructuredOutputsParams(json=schema)
    assert form.kind == "json"
    assert list(json.loads(form.rule)["properties"]) == ["z", "a"]
    schema["type"] = "array"
    assert json.loads(form.rule)["type"] == "object"


def test_each_kind_says_its_rule() -> None:
    assert StructuredOutputsParams(regex="a+").rule == "a+"
    assert StructuredOutputsParams(choice=["a", "b"]).rule == '["a", "b"]'
    assert StructuredOutputsParams(grammar='root ::= "a"').kind == "grammar"
    assert StructuredOutputsParams(json_object=True).kind == "json_object"


def test_a_mapping_is_taken_and_its_unknown_keys_are_named() -> None:
    params = SamplingParams(structured_outputs={"regex": "a"})  # type: ignore[arg-type]
    assert params.structured_outputs == StructuredOutputsParams(regex="a")
    with pytest.raises(InvalidRequest, match="rexeg"):
        SamplingParams(structured_outputs={"rexeg": "a"})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "none"),
        ({"regex": "a", "choice": ["b"]}, "regex and choice"),
        ({"choice": []}, "one at least"),
        ({"choice": "abc"}, "list of texts"),
        ({"choice": ["a", ""]}, "non-empty"),
        ({"choice": ["a"] * (MAX_CHOICES + 1)}, f"at most {MAX_CHOICES}"),
        ({"regex": 3}, "non-empty text"),
        ({"regex": "a" * (MAX_REGEX_CHARACTERS + 1)}, f"at most {MAX_REGEX_CHARACTERS} characters"),
        ({"grammar": "x" * (MAX_RULE_CHARACTERS + 1)}, f"at most {MAX_RULE_CHARACTERS} characters"),
        ({"json": 5}, "JSON schema"),
        ({"json": {"const": float("nan")}}, "no JSON"),
        ({"json": {"const": {1, 2}}}, "no JSON"),
        ({"regex": "\ud800"}, "not UTF-8"),
        ({"json_object": "yes"}, "True or False"),
    ],
)
def test_what_is_wrong_is_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        StructuredOutputsParams(**given)


@pytest.mark.parametrize("change", [{"ignore_eos": True}, {"min_tokens": 3}])
def test_where_an_answer_ends_is_said_once(change: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="with structured_outputs"):
        SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"), **change)


def test_something_else_is_no_form() -> None:
    with pytest.raises(InvalidRequest, match="structured_outputs"):
        SamplingParams(structured_outputs="a+")  # type: ignore[arg-type]
