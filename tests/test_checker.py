"""Schemas as pydantic makes them: what no grammar holds is named, and looked at in the finished answer."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Annotated, Any, Literal

import httpx
import jsonschema
import pytest
from pydantic import (
    AnyUrl,
    BaseModel,
    Field,
    FilePath,
    HttpUrl,
    IPvAnyAddress,
    Json,
    SecretStr,
    StringConstraints,
    TypeAdapter,
)

from constrain_scenes import start
from serving import MODEL, serving
from slipstream import LLM, SamplingParams, StructuredOutputsParams
from slipstream.constrain.checker import Checker
from slipstream.constrain.compiler import Grammars


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int


class Dog(BaseModel):
    kind: Literal["dog"]


Name = Annotated[str, StringConstraints(pattern="^[a-z]+$", max_length=3)]
Price = Annotated[float, Field(multiple_of=0.01)]
Pet = Annotated[Cat | Dog, Field(discriminator="kind")]


@pytest.mark.parametrize(
    ("kind", "left_out", "good", "bad"),
    [
        (AnyUrl, (), "https://a.b/", None),
        (HttpUrl, ("maxLength at #",), "https://a.b/", "https://" + "a" * 2100),
        (Name, ("maxLength at #",), "abc", "abcd"),
        (set[int], ("uniqueItems at #",), [1, 2], [1, 1]),
        (set[tuple[int, float]], ("uniqueItems at #",), [[1, 2.0], [1, 2.5]], [[1, 2], [1, 2.0]]),
        (Price, ("multipleOf at #",), 17.4, 17.405),
        (list[Price], ("multipleOf at #/items",), [0.01, 1e2], [0.01, 1e-3]),
        (dict[str, Price], ("multipleOf at #/additionalProperties",), {"a": 0.3}, {"a": 0.301}),
        (int | Name, ("maxLength at #/anyOf/1",), 1234, "abcd"),
        (Pet, (), {"kind": "cat", "lives": 9}, None),
        (SecretStr, ("format at #: password is not checked",), "x", None),
        (bytes, ("format at #: binary is not checked",), "x", None),
        (FilePath, ("format at #: file-path is not checked",), __file__, None),
        (IPvAnyAddress, (), "::1", None),
        (Json, (), "{}", None),
    ],
)
def test_what_pydantic_asks_for(kind: Any, left_out: tuple[str, ...], good: Any, bad: Any, grammars: Grammars) -> None:
    schema = TypeAdapter(kind).json_schema()
    assert start(grammars, json=schema).left_out == left_out
    checker = Checker(json.dumps(schema))
    assert checker.fault(json.dumps(good)) is None
    TypeAdapter(kind).validate_json(json.dumps(good))
    if bad is not None:
        assert checker.fault(json.dumps(bad))
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(bad, schema)


def test_work_on_an_answer_is_bounded() -> None:
    schema: Any = {"$ref": "#/$defs/k0", "$defs": {"k30": {"const": 1, "uniqueItems": True}}}
    for level in range(30):
        schema["$defs"][f"k{level}"] = {"anyOf": [{"$ref": f"#/$defs/k{level + 1}"}] * 8}
    assert "more than 5,000 steps" in str(Checker(json.dumps(schema)).fault("2"))
    steep = Checker('{"type": "number", "multipleOf": 0.01}')
    assert "too long" in str(steep.fault("1e999999999"))
    assert "not checked" in str(steep.fault("[" * 100_000))


@pytest.mark.parametrize(
    ("schema", "answer"),
    [
        ({"type": "array", "uniqueItems": True}, [[[i] * 10] for i in range(2_000)]),
        ({"type": "array", "items": {"enum": list(range(1_000))}}, [999] * 4_000),
        ({"type": "array", "items": {"enum": [[1] * 300] * 10}}, [[1] * 300] * 1_000),
        ({"type": "array", "items": {"required": ["a"] * 256}}, [{"a": 1}] * 4_000),
        ({"type": "number", "multipleOf": 0.01}, "0." + "3" * 400_000),
    ],
)
def test_values_are_not_compared_for_long(schema: dict[str, Any], answer: Any) -> None:
    """The engine's thread checks answers: within 0.2 s where nothing else runs, whatever the schema is."""
    text = answer if isinstance(answer, str) else json.dumps(answer)
    checker = Checker(json.dumps(schema))
    began = time.thread_time()
    fault = str(checker.fault(text))
    assert time.thread_time() - began < 1
    assert "not checked" in fault or fault == "None"


TWICE = {"type": "array", "items": {"enum": [7]}, "minItems": 2, "maxItems": 2, "uniqueItems": True}
BROKEN = "$: its items are not all different"


def test_an_answer_says_what_it_breaks(open_llm: Callable[..., LLM]) -> None:
    params = SamplingParams(max_tokens=40, structured_outputs=StructuredOutputsParams(json=TWICE))
    answer = open_llm().generate([[1]], params)[0].outputs[0]
    assert (answer.text, answer.finish_reason) == ("[7, 7]", "stop")
    assert (answer.unenforced, answer.violation) == (("uniqueItems at #",), BROKEN)


@pytest.mark.parametrize("stream", [False, True])
def test_over_http_a_header_says_so(open_llm: Callable[..., LLM], stream: bool) -> None:
    asked = {"model": MODEL, "prompt": "a", "max_tokens": 40, "structured_outputs": {"json": TWICE}, "stream": stream}
    with serving(open_llm()) as server:
        answer = httpx.post(f"{server.url}/v1/completions", json=asked)
    assert answer.headers["X-Slipstream-Unenforced"] == "uniqueItems at #"
    assert f'"violation":"{BROKEN}"' in answer.text.replace('": "', '":"')
