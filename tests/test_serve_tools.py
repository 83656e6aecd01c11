"""Tool calls read out of texts, whole or in pieces, and the forms that make a model write one."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.constrain.source import source_of
from slipstream.core.errors import InvalidRequest
from slipstream.core.structured import StructuredOutputsParams
from slipstream.models.load import load_tokenizer
from slipstream.serve.errors import ApiError
from slipstream.serve.forms import form_of
from slipstream.serve.nesting import check_nesting
from slipstream.serve.prompts import PromptMaker
from slipstream.serve.schemas import ChatRequest
from slipstream.serve.tools import HermesParser, LlamaParser, ToolParser, parser_for

TOOL = {"type": "function", "function": {"name": "b"}}
WEATHER = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich <b>"}}\n</tool_call>'
TIME = '<tool_call>{"name": "time", "arguments": {}}</tool_call>'
QUOTING = rf'<tool_call>{{"name": "time", "arguments": {{"zone": "</tool_call>\"\\<tool_call>"}}}}</tool_call>{TIME}'
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
        (QUOTING, "", [("time", {"zone": '</tool_call>"\\<tool_call>'}), ("time", {})]),
        (f'<tool_call>no "JSON</tool_call>{TIME}', '<tool_call>no "JSON</tool_call>', [("time", {})]),
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


@pytest.mark.parametrize("parser", [HermesParser, LlamaParser])
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


CALLS = r'{"name": "time", "parameters": {"zone": "}\"{\\", "of": {}}}; {"name": "time", "parameters": {"zone": 1}}'
TAGGED = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
@pytest.mark.parametrize(
    ("parser", "text", "whole", "ends"),
    [
        (LlamaParser, CALLS, [{"zone": '}"{\\', "of": {}}, {"zone": 1}], [CALLS.index("; "), len(CALLS)]),
        (LlamaParser, CALLS[:-1], [{"zone": '}"{\\', "of": {}}], [CALLS.index("; ")]),
        (LlamaParser, CALLS[:30], [], []),
        (HermesParser, f"{TAGGED}\n{TAGGED}", [{}, {}], [len(TAGGED), 2 * len(TAGGED) + 1]),
        (HermesParser, f"{TAGGED}\n{TAGGED}"[:-20], [{}], [len(TAGGED)]),
        (HermesParser, TAGGED[:20], [], []),
    ],
)
def test_calls_are_told_when_they_are_whole_and_the_rest_is_no_text(
    parser: type[ToolParser], text: str, whole: list[Any], ends: list[int], size: int
) -> None:
    """Where an answer was made to be calls, and may be cut off."""
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    assert read(parser(["time"], quiet=True), pieces) == ("", [("time", arguments) for arguments in whole])
    one = parser(["time"], quiet=True)
    told = [len(one.feed(letter, last=False).calls) for letter in text]
    assert [at + 1 for at, calls in enumerate(told) if calls] == ends


@pytest.mark.parametrize(
    ("parser", "text", "said"),
    [
        (HermesParser, f"Well.{WEATHER} And {TIME} more", "Well."),
        (LlamaParser, f"{LLAMA}; {LLAMA}", ""),
    ],
)
def test_one_call_where_several_are_not_wanted(parser: type[ToolParser], text: str, said: str) -> None:
    for size in (1, 5, 1000):
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        got, calls = read(parser(["weather", "time"], 1), pieces)
        assert (got, [name for name, _ in calls]) == (said, ["weather"])


def chat(**fields: Any) -> ChatRequest:
    schema = {"$ref": "#/$defs/x", "$defs": {"x": {"type": "object"}}}
    tools = [{"type": "function", "function": {"name": "a", "parameters": schema}}, TOOL]
    return ChatRequest.model_validate(
        {"model": "m", "messages": [{"role": "user", "content": "hi"}], "tools": tools, **fields}
    )


def test_a_template_without_tools_gets_a_plain_prompt(tiny_target: Path) -> None:
    maker = PromptMaker(load_tokenizer(tiny_target))
    assert not maker.takes_tools
    call = {"id": "x", "type": "function", "function": {"name": "a", "arguments": '{"now": true}'}}
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "x", "content": "done<eos>"},
        {"role": "user", "content": "and?"},
    ]
    text = "".join(maker.conversation(chat(messages=turns)))
    assert text.index('{"name": "a", "parameters": {"$ref"') < text.index("Be brief.") < text.index("hi")
    assert text.count("<|system|>") == 1
    assert '<tool_call>\n{"name": "a", "arguments": {"now": true}}\n</tool_call>' in text
    assert "<tool_response>\ndone<eos>\n</tool_response>\n\nand?" in text
    assert '"name": "a"' not in "".join(maker.conversation(chat(tool_choice="none")))
    eos = maker._tokenizer.eos_token_id
    assert maker.joined(maker.conversation(chat(messages=turns))).count(eos) == text.count("<eos>") - 1


def test_a_conversation_without_tools_is_the_templates_own(tiny_target: Path) -> None:
    """Messages of one role stay apart, and thoughts stay, whatever the template makes of them."""
    tokenizer = load_tokenizer(tiny_target)
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m.role }}|{{ m.reasoning_content }}|{{ m.content }}]{% endfor %}"
    )
    turns = [
        {"role": "user", "content": "one"},
        {"role": "user", "content": "two"},
        {"role": "assistant", "content": "three", "reasoning_content": "why"},
        {"role": "assistant", "content": "four", "reasoning_content": "how"},
        {"role": "user", "content": "five"},
    ]
    expected = tokenizer.apply_chat_template(turns, tokenize=False)
    maker = PromptMaker(tokenizer)
    assert "".join(maker.conversation(chat(messages=turns, tools=None))) == expected
    assert "".join(maker.conversation(chat(messages=turns, tool_choice="none"))) == expected


def form(parser: type[ToolParser] = HermesParser, **fields: Any) -> Any:
    found = form_of(chat(**fields), 32, parser)
    return None if found is None else json.loads(found.rule)["format"]


def test_forms_of_tools() -> None:
    assert form() is None
    named = form(tool_choice={"type": "function", "function": {"name": "a"}})
    assert named["stop_after_first"]
    (tag,) = named["tags"]
    assert tag["begin"] == '<tool_call>\n{"name": "a", "arguments": '
    assert tag["content"]["json_schema"]["$ref"] == "#/$defs/x"
    required = form(tool_choice="required", parallel_tool_calls=False)
    assert (required["at_least_one"], required["stop_after_first"], len(required["tags"])) == (True, True, 2)
    llama = form(LlamaParser, tool_choice="required")
    assert (llama["separator"], llama["tags"][0]["begin"]) == ("; ", '{"name": "a", "parameters": ')
    strict = {"type": "function", "function": {"name": "s", "strict": True, "parameters": {"type": "array"}}}
    free = form(tools=[strict, TOOL])
    assert (free["type"], free["triggers"]) == ("triggered_tags", ["<tool_call>"])
    assert [tag["content"]["json_schema"]["type"] for tag in free["tags"]] == ["array", "object"]
    assert free["tags"][1]["content"]["json_schema"]["additionalProperties"] is True, "nothing is promised of it"
    assert form(LlamaParser, tools=[strict])["type"] == "or"
    both = form(response_format={"type": "json_object"})
    assert [part["type"] for part in both["elements"]] == ["tags_with_separator", "json_schema"]
    assert form_of(chat(tools=[strict], guided_regex="a"), 32, HermesParser).kind == "regex"  # type: ignore[union-attr]
    with pytest.raises(ApiError, match="'c' is none of the tools"):
        form(tool_choice={"type": "function", "function": {"name": "c"}})
    with pytest.raises(ApiError, match="an answer has one form"):
        form(tool_choice="required", guided_regex="a+")


@pytest.mark.parametrize(
    ("tag", "message"),
    [
        ("{}", "must be {"),
        ({"type": "structural_tag", "format": {"type": "any_tokens"}}, "at #/format: its type must be one of"),
        ({"type": "structural_tag", "format": {"type": "or", "elements": []}}, "elements must be a list of 1 to 128"),
        (
            {"type": "structural_tag", "format": {"type": "regex", "pattern": "a", "excludes": []}},
            "'excludes' cannot be",
        ),
        ({"type": "structural_tag", "format": {"type": "json_schema", "json_schema": {"not": {}}}}, "'not' cannot"),
        ({"type": "structural_tag", "format": {"type": "regex", "pattern": "a{99999}"}}, "pattern"),
    ],
)
def test_structural_tags_that_are_not_taken(tag: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(message)):
        source_of(StructuredOutputsParams(structural_tag=tag))


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
    found = form_of(chat(tools=[], **fields), 32, HermesParser)
    assert found is not None
    assert found.kind == kind


def test_nesting_is_counted_without_following_it() -> None:
    deep: Any = {}
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(ApiError, match="at most 32 levels"):
        check_nesting("x", deep, 32)
    check_nesting("x", [[[]]], 3)
    check_nesting("x", "text", 1)
