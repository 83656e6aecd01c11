"""Tool calls read out of texts, whole or in pieces, and the forms that make a model write one."""

from __future__ import annotations

import itertools
import json
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.serve.errors import ApiError
from slipstream.serve.forms import form_of
from slipstream.serve.nesting import check_nesting
from slipstream.serve.prompts import PromptMaker
from slipstream.serve.schemas import ChatRequest
from slipstream.serve.tools import HermesParser, LlamaParser, NamedParser, RequiredParser, ToolParser, parser_for

WEATHER = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich <b>"}}\n</tool_call>'
TIME = '<tool_call>{"name": "time", "arguments": {}}</tool_call>'
LLAMA = '{"name": "weather", "parameters": {"city": "Bern"}}'


def read(parser: ToolParser, pieces: list[str]) -> tuple[str, list[tuple[str, Any]]]:
    parsed = [parser.feed(piece, last=False) for piece in pieces] + [parser.feed("", last=True)]
    calls = [(call.name, json.loads(call.arguments)) for part in parsed for call in part.calls]
    return "".join(part.text for part in parsed), calls


@pytest.mark.parametrize(
    ("text", "said", "calls"),
    [
        ("just text", "just text", []),
        (WEATHER, "", [("weather", {"city": "Zürich <b>"})]),
        (f"Let me see.{WEATHER}\n{TIME}", "Let me see.", [("weather", {"city": "Zürich <b>"}), ("time", {})]),
        ("a < b <tool", "a < b <tool", []),
        ("<tool_call>no JSON</tool_call>", "<tool_call>no JSON</tool_call>", []),
        ('<tool_call>{"name": "unknown"}</tool_call>', '<tool_call>{"name": "unknown"}</tool_call>', []),
        ('<tool_call>{"name": ["time"]}</tool_call>', '<tool_call>{"name": ["time"]}</tool_call>', []),
        ('<tool_call>{"name": "time", "arguments": {}}', "", [("time", {})]),  # the end is missing, the call is whole
        ('<tool_call>{"name": "time", "argu', '<tool_call>{"name": "time", "argu', []),
    ],
)
def test_hermes_in_any_pieces(text: str, said: str, calls: list[Any]) -> None:
    @given(st.lists(st.integers(0, len(text)), max_size=6))
    def cut(places: list[int]) -> None:
        edges = [0, *sorted(places), len(text)]
        pieces = [text[a:b] for a, b in itertools.pairwise(edges)]
        got, found = read(HermesParser(["weather", "time"]), pieces)
        assert (got.strip(), found) == (said.strip(), calls)

    cut()


@pytest.mark.parametrize("parser", [HermesParser, LlamaParser, NamedParser, RequiredParser])
def test_a_call_that_goes_on_and_on_costs_the_same_for_every_piece(parser: type[ToolParser]) -> None:
    """Not timed: no text that a parser looks through grows with what it has read."""
    one = parser(["weather"])
    one.feed('<tool_call>{"name": "weather"' if parser is HermesParser else '{"name": "weather"', last=False)
    for _ in range(100):
        one.feed("x" * 1000, last=False)
    held = [value for value in vars(one).values() if isinstance(value, str)]
    assert sum(map(len, held)) < 100
    assert sum(map(len, one._parts)) > 100_000


@pytest.mark.parametrize(
    ("text", "said", "calls"),
    [
        ("just text {", "just text {", []),
        (LLAMA, "", [("weather", {"city": "Bern"})]),
        (f"<|python_tag|>{LLAMA}; {LLAMA}", "", [("weather", {"city": "Bern"})] * 2),
        (f'{LLAMA}; {{"name": "weather", "param', "", [("weather", {"city": "Bern"})]),
        (f'{{"some": "JSON"}} {LLAMA}', f'{{"some": "JSON"}} {LLAMA}', []),
        ('{"some": "JSON"}', '{"some": "JSON"}', []),
        ('{"name": "weather", "param', '{"name": "weather", "param', []),
    ],
)
def test_llama_in_any_pieces(text: str, said: str, calls: list[Any]) -> None:
    for size in (1, 2, 7, 100):
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        assert read(LlamaParser(["weather"]), pieces) == (said, calls)


def test_the_format_is_the_templates() -> None:
    assert parser_for("auto", "… <tool_call> …") is HermesParser
    assert parser_for("auto", 'respond with {"name": function name, "parameters": …}') is LlamaParser
    assert parser_for("llama3_json", "… <tool_call> …") is LlamaParser


def test_calls_that_had_to_come() -> None:
    assert read(NamedParser(["time"]), ['{"zone"', ': "CET"}']) == ("", [("time", {"zone": "CET"})])
    assert read(NamedParser(["time"]), ['{"zone": "C']) == ("", []), "arguments that were cut off are no call"


CALLS = r'[{"name": "time", "parameters": {"zone": "}\\\"{", "of": {}}}, {"name": "time", "parameters": {"zone": 1}}]'


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
@pytest.mark.parametrize(("cut", "whole"), [(0, 2), (1, 2), (2, 1), (50, 0)])
def test_calls_that_are_whole_are_told_when_they_are_and_the_rest_is_no_text(size: int, cut: int, whole: int) -> None:
    text = CALLS[: len(CALLS) - cut]
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    expected = [("time", {"zone": '}\\"{', "of": {}}), ("time", {"zone": 1})]
    assert read(RequiredParser(["time"]), pieces) == ("", expected[:whole])
    parser = RequiredParser(["time"])
    told = [len(parser.feed(letter, last=False).calls) for letter in text]
    assert [at for at, calls in enumerate(told) if calls] == [CALLS.index("}, {"), len(CALLS) - 2][:whole]


@pytest.mark.parametrize(
    ("parser", "text", "said"),
    [
        (HermesParser, f"Well.{WEATHER} And {TIME} more", "Well."),
        (LlamaParser, f"{LLAMA}; {LLAMA}", ""),
        (RequiredParser, f"[{LLAMA}, {LLAMA}]", ""),
    ],
)
def test_one_call_where_several_are_not_wanted(parser: type[ToolParser], text: str, said: str) -> None:
    for size in (1, 5, 1000):
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        got, calls = read(parser(["weather", "time"], 1), pieces)
        assert (got, [name for name, _ in calls]) == (said, ["weather"])


def chat(**fields: Any) -> ChatRequest:
    tools = [
        {
            "type": "function",
            "function": {"name": "a", "parameters": {"$ref": "#/$defs/x", "$defs": {"x": {"type": "object"}}}},
        },
        {"type": "function", "function": {"name": "b"}},
    ]
    return ChatRequest.model_validate(
        {"model": "m", "messages": [{"role": "user", "content": "hi"}], "tools": tools, **fields}
    )


def test_a_template_without_tools_says_what_to_do() -> None:
    maker = PromptMaker(SimpleNamespace(chat_template="{{ messages[0].content }}", all_special_tokens=[]))
    with pytest.raises(ApiError, match=r"^tools: this model's chat template knows no tools; leave them out") as refused:
        maker.conversation(chat())
    assert (refused.value.status, refused.value.param) == (400, "tools")
    assert "or serve a model whose template has tools, such as --model " in refused.value.message


def test_forms_of_tools() -> None:
    assert form_of(chat(), 32) is None
    named = form_of(chat(tool_choice={"type": "function", "function": {"name": "a"}}), 32)
    assert named is not None
    assert json.loads(str(named.json))["$ref"] == "#/$defs/x"
    required = form_of(chat(tool_choice="required", parallel_tool_calls=False), 32)
    assert required is not None
    schema = json.loads(str(required.json))
    assert schema["maxItems"] == 1
    first = schema["items"]["anyOf"][0]["properties"]
    assert first == {"name": {"const": "a"}, "parameters": {"$ref": "#/$defs/tool0"}}
    assert schema["$defs"]["tool0"] == {"$ref": "#/$defs/tool0/$defs/x", "$defs": {"x": {"type": "object"}}}
    with pytest.raises(ApiError, match="'c' is none of the tools"):
        form_of(chat(tool_choice={"type": "function", "function": {"name": "c"}}), 32)
    with pytest.raises(ApiError, match="an answer has one form"):
        form_of(chat(tool_choice="required", guided_regex="a+"), 32)


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "array"}}}},
            "json",
        ),
        ({"structured_outputs": {"regex": "a+"}}, "regex"),
        ({"structured_outputs": {"json": {"type": "array"}}}, "json"),
        ({"guided_choice": ["yes", "no"]}, "choice"),
        ({"guided_grammar": 'root ::= "a"'}, "grammar"),
        ({"guided_json": {"type": "array"}}, "json"),
    ],
)
def test_every_way_to_ask_for_a_form(fields: dict[str, Any], kind: str) -> None:
    form = form_of(chat(**fields), 32)
    assert form is not None
    assert form.kind == kind


def test_nesting_is_counted_without_following_it() -> None:
    deep: Any = {}
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(ApiError, match="at most 32 levels"):
        check_nesting("x", deep, 32)
    check_nesting("x", [[[]]], 3)
    check_nesting("x", "text", 1)
