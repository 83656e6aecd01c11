"""Answers of a form, and tools that are called, as the official client asks for them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI

from conftest import CHAT_TEMPLATE, save_model, tiny_llama
from serving import MODEL, client_of, engine_process, serving

ASKED: list[Any] = [{"role": "user", "content": "what now?"}]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["Ann", "Bob"]},
        "wins": {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 3},
    },
    "required": ["name", "wins"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "score", "description": "Scores.", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "stop"}},
]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAI]:
    """A model whose template knows tools."""
    folder = save_model(tmp_path_factory.mktemp("models") / "tools", tiny_llama(max_position_embeddings=2048))
    config = folder / "tokenizer_config.json"
    template = "{% if tools %}<|system|>{{ tools | tojson }} <tool_call>{% endif %}" + CHAT_TEMPLATE
    config.write_text(json.dumps({**json.loads(config.read_text()), "chat_template": template}))
    with engine_process(folder) as process, serving(process) as server, client_of(server) as made:
        yield made


def ask(client: OpenAI, **options: Any) -> Any:
    return client.chat.completions.create(model=MODEL, messages=ASKED, max_tokens=200, **options)


def check(value: Any) -> None:
    assert value["name"] in ("Ann", "Bob")
    assert len(value["wins"]) <= 3
    assert set(value["wins"]) <= {1, 2}


@pytest.mark.parametrize("stream", [False, True])
def test_json_of_a_schema(client: OpenAI, stream: bool) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "score", "schema": SCHEMA, "strict": True}}
    for seed in range(4):
        if stream:
            chunks = ask(client, response_format=wanted, seed=seed, stream=True)
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        else:
            text = ask(client, response_format=wanted, seed=seed).choices[0].message.content
        check(json.loads(text))


def test_a_json_object_with_a_schema(client: OpenAI) -> None:
    """llama.cpp's way of asking for a schema."""
    for seed in range(3):
        wanted: Any = {"type": "json_object", "schema": SCHEMA}
        check(json.loads(ask(client, response_format=wanted, seed=seed).choices[0].message.content))
    wrong: Any = {"type": "json_object", "schema": {"type": "nonsense"}}
    with pytest.raises(openai.BadRequestError, match=r"response_format\.schema: at #"):
        ask(client, response_format=wrong)


def test_other_forms(client: OpenAI) -> None:
    for field in ({"structured_outputs": {"regex": "[ab]{3,9}"}}, {"guided_regex": "[ab]{3,9}"}):
        text = ask(client, extra_body=field).choices[0].message.content
        assert re.fullmatch("[ab]{3,9}", text)
    assert ask(client, extra_body={"guided_choice": ["yes", "no"]}).choices[0].message.content in ("yes", "no")
    answer = client.completions.create(
        model=MODEL, prompt="a", max_tokens=50, extra_body={"structured_outputs": {"grammar": 'root ::= "x" [yz]'}}
    )
    assert answer.choices[0].text in ("xy", "xz")


def test_a_prediction_and_a_form(client: OpenAI) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "score", "schema": SCHEMA}}
    plain = ask(client, response_format=wanted, temperature=0).choices[0].message.content
    predicted = ask(client, response_format=wanted, temperature=0, prediction={"type": "content", "content": plain})
    assert predicted.choices[0].message.content == plain


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("chosen", ["required", {"type": "function", "function": {"name": "score"}}])
def test_a_tool_that_must_be_called(client: OpenAI, chosen: Any, stream: bool) -> None:
    options: dict[str, Any] = {"tools": TOOLS, "tool_choice": chosen, "parallel_tool_calls": False, "seed": 3}
    if stream:
        choices = [chunk.choices[0] for chunk in ask(client, stream=True, **options)]
        calls = [call for choice in choices for call in choice.delta.tool_calls or ()]
        reason = choices[-1].finish_reason
    else:
        answer = ask(client, **options).choices[0]
        calls, reason = answer.message.tool_calls, answer.finish_reason
        assert answer.message.content is None
    (call,) = calls
    assert reason == "tool_calls"
    assert call.id.startswith("call_")
    if call.function.name == "score":
        check(json.loads(call.function.arguments))
    else:
        assert json.loads(call.function.arguments) == {}


@pytest.mark.parametrize("wanted", [None, {"type": "json_schema", "json_schema": {"name": "score", "schema": SCHEMA}}])
def test_strict_tools_may_be_called_or_not(client: OpenAI, wanted: Any) -> None:
    strict = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}, TOOLS[1]]
    options: dict[str, Any] = {"tools": strict, "tool_choice": "auto", "parallel_tool_calls": False}
    seen = set()
    for seed in range(4):
        told = ask(client, seed=seed, **options, **({"response_format": wanted} if wanted else {})).choices[0]
        for call in told.message.tool_calls or ():
            if call.function.name == "score":
                check(json.loads(call.function.arguments))
        if wanted and told.finish_reason == "stop":
            check(json.loads(told.message.content))
        seen.add(told.finish_reason)
    assert seen <= {"stop", "length", "tool_calls"}


@pytest.mark.parametrize("stream", [False, True])
def test_calls_that_max_tokens_cuts_are_left_out_and_whole_ones_told(client: OpenAI, stream: bool) -> None:
    options: dict[str, Any] = {"tools": TOOLS[:1], "tool_choice": "required", "seed": 1, "messages": ASKED}
    whole = client.chat.completions.create(model=MODEL, max_tokens=1000, **options)
    assert whole.usage is not None
    for short in (10, max(11, whole.usage.completion_tokens - 12)):
        answer: Any = client.chat.completions.create(model=MODEL, max_tokens=short, stream=stream, **options)
        choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
        told = [choice.delta if stream else choice.message for choice in choices]
        assert not any(part.content for part in told), "what is no whole call is no content"
        calls = [call for part in told for call in part.tool_calls or ()]
        for call in calls:
            check(json.loads(call.function.arguments))
        assert choices[-1].finish_reason == "length"
        assert len(calls) < len(whole.choices[0].message.tool_calls or ()) or short > 10


def test_a_tool_that_speaks_of_itself(client: OpenAI) -> None:
    """References in a tool's schema are to that schema, wherever it is put."""
    leaf = {"type": "object", "properties": {"end": {"const": 7}}, "required": ["end"], "additionalProperties": False}
    tree = {
        "type": "object",
        "properties": {"below": {"anyOf": [{"$ref": "#"}, {"$ref": "#/$defs/leaf"}]}},
        "required": ["below"],
        "additionalProperties": False,
        "$defs": {"leaf": leaf},
    }
    tools = [{"type": "function", "function": {"name": name, "parameters": tree}} for name in ("grow", "cut")]
    for seed in range(3):
        choice = ask(client, tools=tools, tool_choice="required", parallel_tool_calls=False, seed=seed).choices[0]
        if choice.finish_reason == "length":
            continue
        (call,) = choice.message.tool_calls
        value = json.loads(call.function.arguments)
        while "below" in value:
            value = value["below"]
        assert value == {"end": 7}


@pytest.mark.parametrize("stream", [False, True])
def test_calls_are_found_in_text(client: OpenAI, stream: bool) -> None:
    """What this model says is made up, so a grammar makes it write a call."""
    call_text = r"<tool_call>{\"name\": \"stop\", \"arguments\": {\"now\": "
    said = f'root ::= "Well. {call_text}" ("true" | "false") "}}}}</tool_call>"'
    options: dict[str, Any] = {"tools": TOOLS, "extra_body": {"structured_outputs": {"grammar": said}}}
    if stream:
        choices = [chunk.choices[0] for chunk in ask(client, stream=True, **options)]
        text = "".join(choice.delta.content or "" for choice in choices)
        (call,) = [call for choice in choices for call in choice.delta.tool_calls or ()]
        assert call.index == 0
        assert choices[-1].finish_reason == "tool_calls"
    else:
        answer = ask(client, **options).choices[0]
        text, (call,) = answer.message.content, answer.message.tool_calls
        assert answer.finish_reason == "tool_calls"
    assert text == "Well. "
    assert call.function.name == "stop"
    assert set(json.loads(call.function.arguments)) == {"now"}
    history: list[Any] = [
        *ASKED,
        {"role": "assistant", "content": None, "tool_calls": [json.loads(call.to_json()) | {"id": "call_1"}]},
        {"role": "tool", "tool_call_id": "call_1", "content": "done"},
    ]
    for part in history[1]["tool_calls"]:
        part.pop("index", None)
    assert client.chat.completions.create(model=MODEL, messages=history, tools=TOOLS, max_tokens=5).choices


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "schema: is missing"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"extra_body": {"guided_regex": "(" * 50}}, "regex"),
        ({"extra_body": {"guided_regex": "a{1000000}"}}, "regex"),
        ({"extra_body": {"guided_json": {"type": "nonsense"}}}, "json"),
        ({"extra_body": {"guided_grammar": "no grammar"}}, "grammar"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "none of the tools"),
        ({"tool_choice": "required"}, "needs tools"),
    ],
)
def test_forms_that_cannot_be(client: OpenAI, options: dict[str, Any], message: str) -> None:
    with pytest.raises(openai.BadRequestError, match=message):
        ask(client, **options)
