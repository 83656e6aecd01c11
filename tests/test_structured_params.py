"""The field that says what form an answer must have: what it takes, and what it refuses by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from slipstream import SamplingParams, StructuredOutputsParams
from slipstream.core.errors import InvalidRequest
from slipstream.core.structured import MAX_CHOICES, MAX_REGEX_CHARACTERS, MAX_RULE_CHARACTERS


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
