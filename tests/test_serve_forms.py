"""Forms of answers and tool calls: as the official client asks for them, and as parsers read them."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai import OpenAI

from conftest import CHAT_TEMPLATE, save_model, tiny_llama
from serving import MODEL, client_of, engine_process, serving
from slipstream.constrain.source import source_of
from slipstream.core.errors import InvalidRequest
from slipstream.core.structured import StructuredOutputsParams
from slipstream.models.load import load_tokenizer
from slipstream.serve.errors import ApiError
from slipstream.serve.params import form_of
from slipstream.serve.prompts import PromptMaker
from slipstream.serve.schemas import ChatRequest, check_nesting
from slipstream.serve.tools import HermesParser, LlamaParser, ToolParser, parser_for

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


@pytest.mark.parametrize("several", [True, False])
def test_a_model_that_calls_twice_is_heard_once_where_one_call_is_wanted(client: OpenAI, several: bool) -> None:
    call = '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>'
    twice = {"guided_choice": [f"{call}\n{call}"]}
    told = ask(client, tools=TOOLS, parallel_tool_calls=several, extra_body=twice).choices[0]
    assert [one.function.name for one in told.message.tool_calls] == ["stop"] * (1 + several)
    assert told.finish_reason == "tool_calls"


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
