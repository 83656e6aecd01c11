"""What a client is told: the field as it was sent, its value, what to do; and the events of streams."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from conftest import CHAT_TEMPLATE, save_model, tiny_llama
from serving import MODEL, serving
from slipstream import LLM
from slipstream.core.outputs import CompletionOutput, DrafterStats, Logprob, RequestOutput, SpeculationStats
from slipstream.models.load import load_tokenizer
from slipstream.serve.admission import Drain
from slipstream.serve.gate import IGNORED_FIELDS
from slipstream.serve.prompts import PromptMaker
from slipstream.serve.responses import (
    ChatWriter,
    CompletionWriter,
    ResponseOptions,
    ResponseWriter,
    quoted,
    speculation_report,
)
from slipstream.serve.schemas import ChatRequest, CompletionRequest, Neutral, StreamOptions
from slipstream.serve.server import HttpServer
from slipstream.serve.streaming import EngineResponse
from slipstream.serve.telemetry import AnswerRecord, Record
from slipstream.serve.tools import HermesParser

ASKED = [{"role": "user", "content": "what now?"}]


TOOL = {"type": "function", "function": {"name": "go", "parameters": {"type": "object", "not": {}}}}


BAD = {"type": "object", "properties": {"a": {"not": {}}}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpServer]:
    """A model whose template knows tools."""
    folder = save_model(tmp_path_factory.mktemp("models") / "tools", tiny_llama())
    config = folder / "tokenizer_config.json"
    template = "{% if tools %}{{ tools | tojson }} <tool_call>{% endif %}" + CHAT_TEMPLATE
    config.write_text(json.dumps({**json.loads(config.read_text()), "chat_template": template}))
    with LLM(folder, device="cpu", max_num_seqs=4, memory="64MiB") as llm, serving(llm) as made:
        yield made


def post(server: HttpServer, body: Any, endpoint: str = "") -> httpx.Response:
    if not endpoint:
        endpoint = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
        body = {"model": MODEL, "max_tokens": 3, **({} if "prompt" in body else {"messages": ASKED}), **body}
    return httpx.post(f"{server.url}{endpoint}", json=body, timeout=60)


def format_of(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"temperature": -1}, "temperature=-1: must be at least 0"),
        ({"temperature": "hot"}, 'temperature="hot": must be a number'),
        ({"top_p": 0}, "top_p=0: must be above 0"),
        ({"max_tokens": 2.5}, "max_tokens=2.5: must be a whole number"),
        ({"stream": 1}, "stream=1: must be true or false"),
        ({"n": 0}, "n=0: must be at least 1"),
        ({"min_gain": 1.2}, "min_gain=1.2: an option of the server for all requests (--min-gain); leave it out"),
        ({"speculation": {"min_gain": 1.2}}, "speculation.min_gain=1.2: an option of the server for all requests"),
        ({"messages": []}, "messages=[]: must be at least 1 long"),
        ({"messages": "hello"}, 'messages="hello": must be a list'),
        ({"messages": [{"content": "a"}]}, "messages.0.role: required field is missing"),
        ({"messages": [{"role": "user"}]}, "messages.0.content: required field is missing"),
        (
            {"messages": [{"role": "cat", "content": "a"}]},
            "messages.0.role=\"cat\": must be one of 'system', 'developer', 'user', 'assistant', 'tool'",
        ),
        ({"messages": [{"role": "user", "content": 3}]}, "messages.0.content=3: must be a text or a list"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages.0.content.0.type=\"image_url\": must be 'text'",
        ),
        ({"stop": 3}, "stop=3: must be a text or a list"),
        ({"logit_bias": {"5": 200}}, "logit_bias.5=200: must be at most 100"),
        ({"speculation": "on"}, "speculation=\"on\": must be an object or 'off'"),
        ({"speculation": {"verifier": "lax"}}, "speculation.verifier=\"lax\": must be 'exact' or 'rejection'"),
        (
            {"speculation": {"drafter": "eagle3"}},
            "speculation.drafter='eagle3' is not loaded: must be one of auto, suffix,",
        ),
        (
            {"response_format": {"type": "xml"}},
            "response_format.type=\"xml\": must be one of 'text', 'json_object', 'json_s",
        ),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.name: required"),
        (
            {"tools": [{"type": "function", "function": {"name": "a b"}}]},
            'tools.0.function.name="a b": must be a text of',
        ),
        ({"prompt": 3}, "prompt=3: must be a text or a list"),
        ({"prompt": "a", "best_of": 2}, "best_of: answers are not ranked"),
        ({"prompt": "a", "stop": ["x"] * 17}, "stop: must be at most"),
        ({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias: 'x' must be a token id"),
        ({"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options: needs stream: true"),
        ({"tool_choice": "required"}, "tool_choice: needs tools"),
        ({"prompt": ["a", 3]}, "prompt.1=3: must be a text"),
        ({"prompt": "a", "user": "x" * 600}, 'user="' + "x" * 59 + "…: must be at most 512 characters long"),
    ],
)
def test_fields_values_and_remedies(server: HttpServer, body: dict[str, Any], message: str) -> None:
    answer = post(server, body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["message"].startswith(message), error["message"]
    assert error["param"] == re.split(r"[=:]", message)[0]
    assert "Input" not in error["message"]


@pytest.mark.parametrize(
    ("body", "param", "prompt"),
    [
        ({"prompt": "abc", "max_tokens": 254}, "max_tokens", 3),
        ({"prompt": [[1, 2], [1, 2, 3, 4]], "max_tokens": 253}, "max_tokens", 4),
        ({"max_tokens": 8000}, "max_tokens", 12),
        ({"max_tokens": None, "max_completion_tokens": 8000}, "max_completion_tokens", 12),
    ],
)
def test_an_answer_longer_than_the_context(server: HttpServer, body: dict[str, Any], param: str, prompt: int) -> None:
    answer = post(server, body)
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert (error["param"], error["code"]) == (param, "context_length_exceeded")
    room = 256 - prompt
    assert error["message"] == (
        f"{param}={body[param]}: too many, the prompt has {prompt} tokens, and both together may have 256; "
        f"must be at most {room}, or left out"
    )
    fitting = post(server, {**body, param: 1, "logit_bias": {"257": 100}})
    assert fitting.status_code == 200


def test_the_last_place_of_the_context_counts_and_nobody_needs_to_ask_for_it(server: HttpServer) -> None:
    asked = {"prompt": [7] * 250, "ignore_eos": True}
    assert post(server, {**asked, "max_tokens": 6}).json()["usage"]["completion_tokens"] == 6
    assert post(server, {**asked, "max_tokens": 7}).status_code == 400
    for absent in ({"max_tokens": None}, {}):
        body = {"model": MODEL, **asked, **absent}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()
        assert answer["usage"]["completion_tokens"] == 6, "16 are asked for where nobody says how many; 6 are left"
        assert answer["choices"][0]["finish_reason"] == "length"


def test_what_the_engine_says_has_a_field(server: HttpServer) -> None:
    for body, message in (
        ({"prompt": ""}, "prompt: the prompt is empty"),
        ({"prompt": [99999]}, "prompt: token id 99999 must be"),
        ({"prompt": "a", "stop_token_ids": [99999]}, "stop_token_ids: token id 99999 must be"),
        ({"prompt": "a", "logit_bias": {"99999": 1}}, "logit_bias: token id 99999 must be"),
    ):
        error = post(server, body).json()["error"]
        assert error["message"].startswith(message)
        assert error["param"] == message.split(":")[0]
    for endpoint, half in (("completions", '"prompt": "\\ud800"'), ("chat/completions", '"messages": [%s]')):
        text = half.replace("%s", '{"role": "user", "content": "\\ud800"}')
        answer = httpx.post(
            f"{server.url}/v1/{endpoint}",
            content=f'{{"model": "{MODEL}", {text}}}',
            headers={"content-type": "application/json"},
        )
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == half.split('"')[1]


def test_arguments_of_calls_are_not_followed_down(server: HttpServer) -> None:
    def asked(deep: int) -> httpx.Response:
        call = {"id": "a", "function": {"name": "go", "arguments": '{"a": ' + "[" * deep + "]" * deep + "}"}}
        return post(server, {"messages": [*ASKED, {"role": "assistant", "tool_calls": [call]}, *ASKED]})

    assert asked(20).status_code == 200
    assert asked(600).status_code == 400
    assert (
        asked(600).json()["error"]["message"] == "messages: nested too deep: must have at most 64 levels on this server"
    )


def test_a_form_that_nothing_fits_is_the_clients_mistake(server: HttpServer) -> None:
    """Which is seen only on the way."""
    body = {"prompt": "abc", "guided_choice": ["a"], "bad_words": ["a"]}
    whole = post(server, body)
    assert whole.status_code == 400
    assert whole.json()["error"]["param"] == "structured_outputs"
    assert "no token is left that the form and the other parameters allow" in whole.json()["error"]["message"]
    lines = [line for line in post(server, {**body, "stream": True}).text.splitlines() if line]
    assert json.loads(lines[-2].removeprefix("data: "))["error"] == whole.json()["error"]
    assert lines[-1] == "data: [DONE]"


@pytest.mark.parametrize(
    "body",
    [
        {"user": "\ud800"},
        {"chat_template_kwargs": {"\ud800": []}},
        {"logit_bias": {"\ud800": 1000}},
        {"response_format": {"type": "\ud800"}},
        {"messages": [{"role": "\ud800"}]},
    ],
)
def test_half_a_character_is_a_mistake_of_the_client(server: HttpServer, body: dict[str, Any]) -> None:
    whole = json.dumps({"model": MODEL, "max_tokens": 3, "messages": ASKED, **body})  # which writes it as an escape
    json_type = {"content-type": "application/json"}
    answer = httpx.post(f"{server.url}/v1/chat/completions", content=whole, headers=json_type, timeout=60)
    assert answer.status_code == 400, answer.text
    assert "internal" not in answer.json()["error"]["message"]


@pytest.mark.parametrize("text", ["🌟 é", "plain", "a\ufffdb"])
def test_bytes_of_tokens_are_those_of_the_text(text: str, tiny_target: Path) -> None:
    """Also where a character has several tokens: none of them can be read by itself."""
    tokenizer = load_tokenizer(tiny_target)
    maker = PromptMaker(tokenizer)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert b"".join(maker.bytes_of(token, str(tokenizer.decode([token]))) for token in ids) == text.encode()


def test_a_byte_that_is_spelt_as_such() -> None:
    spelt = SimpleNamespace(convert_ids_to_tokens=lambda ids: [f"<0x{number:02X}>" for number in ids])
    maker = PromptMaker.__new__(PromptMaker)
    maker._tokenizer = spelt
    assert [maker.bytes_of(number, "\ufffd") for number in (0xF0, 0x0A)] == [b"\xf0", b"\n"]
    spelt.convert_ids_to_tokens = lambda ids: ["\u4e2d"]  # no letter of a byte
    assert maker.bytes_of(1, "\ufffd") == "\ufffd".encode()


def test_bodies_that_are_no_objects(server: HttpServer) -> None:
    expected = 'send a JSON object such as {"model": "…"}, with content-type application/json'
    for content, message in (
        (b"[1]", f"the body is a list, not a JSON object: {expected}"),
        (b'"a"', f"the body is a text, not a JSON object: {expected}"),
        (b"null", "the body is null, not a JSON object"),
        (b"{", "the body is not JSON"),
        (b'{"model": ,}', f"the body is not JSON: Expecting value at character 11; {expected}"),
        (b'{"colour": 1}', "messages: required field is missing"),
        (b"", "the body is missing"),
        (b'{"model": 3, "messages": []}', "model=3: must be a text"),
    ):
        headers = {"content-type": "application/json"}
        answer = httpx.post(f"{server.url}/v1/chat/completions", content=content, headers=headers)
        assert answer.status_code == 400
        assert answer.json()["error"]["message"].startswith(message)
    answer = httpx.get(f"{server.url}/live?every=soon")
    assert answer.json()["error"]["message"].startswith('every="soon": must be a number')


@pytest.mark.parametrize(
    ("form", "param", "message"),
    [
        (format_of(BAD), "response_format.json_schema.schema", ": at #/properties/a: 'not' cannot be followed"),
        (format_of({"type": "string", "pattern": "a{"}), "response_format.json_schema.schema", ": at #: pattern='a{'"),
        ({"guided_json": BAD}, "guided_json", ": at #/properties/a: 'not'"),
        ({"guided_regex": "a{"}, "guided_regex", ": at character 1"),
        ({"guided_regex": "("}, "guided_regex", " cannot be followed: "),
        ({"guided_choice": []}, "guided_choice", "=[]: must be a list"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex", " cannot be followed: "),
        ({"structured_outputs": {}}, "structured_outputs", " has none: give exactly one of"),
        (
            {"tools": [TOOL], "tool_choice": "required"},
            "tools.0.function.parameters",
            ": at #: 'not' cannot be followed",
        ),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "go"}}},
            "tools.0.function.parameters",
            ": at #: 'not' cannot be followed",
        ),
    ],
)
def test_a_form_is_called_what_the_client_called_it(
    server: HttpServer, form: dict[str, Any], param: str, message: str
) -> None:
    error = post(server, form).json()["error"]
    assert error["param"] == param
    assert error["message"].startswith(param + message), error["message"]


TABLES: list[tuple[str, str, Neutral]] = [
    *(("/v1/chat/completions", name, one) for name, one in ChatRequest.neutral.items()),
    *(("/v1/completions", name, one) for name, one in CompletionRequest.neutral.items()),
]


@pytest.mark.parametrize(("endpoint", "name", "one"), TABLES)
def test_fields_that_ask_for_nothing(server: HttpServer, endpoint: str, name: str, one: Neutral) -> None:
    base: dict[str, Any] = {"prompt": "a"} if endpoint == "/v1/completions" else {"messages": ASKED}
    for value in (None, *(({"a": 1}, 3, "high") if one.values is None else one.values)):
        answer = post(server, {"model": MODEL, "max_tokens": 1, **base, name: value}, endpoint)
        assert answer.status_code == 200, answer.text
    if one.values is None:
        return
    other: Any = {bool: True, dict: {"a": "b"}, str: "high", int: 5, float: 0.5, list: ["audio"]}
    wrong = other[type(one.values[0])] if one.values else 3
    error = post(
        server, {"model": MODEL, "max_tokens": 1, **base, name: not wrong if wrong in one.values else wrong}, endpoint
    )
    assert error.status_code == 400
    told = error.json()["error"]
    assert (told["param"], told["code"]) == (name, "unsupported_value")
    assert told["message"].endswith(one.remedy)


def test_what_identifies_a_user_is_taken(server: HttpServer) -> None:
    assert post(server, {"safety_identifier": "someone", "prompt_cache_key": "a"}).status_code == 200


def test_an_answer_can_be_sent_back_as_the_client_has_it(server: HttpServer) -> None:
    said = {"role": "assistant", "content": "a", "refusal": None, "audio": None, "function_call": None}
    body = {"messages": [*ASKED, {**said, "annotations": [], "tool_calls": None}, *ASKED]}
    assert post(server, body).status_code == 200
    call = {
        "id": "a",
        "function": {"name": "go", "arguments": "{}", "parsed_arguments": {}},
        "index": 0,
        "type": "function",
    }
    more: dict[str, Any] = {
        "parsed": None,
        "provider_specific_fields": {},
        "reasoning": "hm",
        "reasoning_content": "hm",
    }
    cached = {"type": "text", "text": "hello", "cache_control": {"type": "ephemeral"}}
    turns = [
        {"role": "user", "content": [cached]},
        {**said, **more, "content": None, "refusal": "no", "annotations": [{}], "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "done", "cache_control": {}},
    ]
    answer = post(server, {"messages": turns, "tools": [{**TOOL, "cache_control": {}}]})
    assert answer.status_code == 200, answer.text
    assert IGNORED_FIELDS not in answer.headers
    error = post(server, {"messages": [*ASKED, {**said, "audio": {"id": "x"}}, *ASKED]}).json()["error"]
    assert error["param"] == "messages.1.audio"


def test_parts_of_an_answer_that_are_no_text(server: HttpServer) -> None:
    def count(content: Any) -> httpx.Response:
        turns = [*ASKED, {"role": "assistant", "content": content}, *ASKED]
        return post(server, {"messages": turns})

    text = {"type": "text", "text": "I am "}
    refusal = {"type": "refusal", "refusal": "sorry"}
    thought = {"type": "thinking", "thinking": "hm", "signature": "abc"}
    told = count([thought, text, refusal])
    assert told.json()["usage"]["prompt_tokens"] == count("I am sorry").json()["usage"]["prompt_tokens"]
    assert told.headers[IGNORED_FIELDS] == "messages.content.thinking"
    error = count([{"type": "image_url"}]).json()["error"]["message"]
    assert error.endswith("must be one of 'text', 'refusal', 'thinking'")
    asked = {"messages": [{"role": "user", "content": [refusal]}]}
    assert post(server, asked).json()["error"]["param"] == "messages.0.content.0.type"


def test_stream_options(server: HttpServer) -> None:
    told = {"stream": True, "stream_options": {"include_usage": True, "include_obfuscation": False}}
    assert post(server, told).status_code == 200
    wrong = {"stream": True, "stream_options": {"include_obfuscation": True}}
    assert post(server, wrong).json()["error"]["param"] == "stream_options.include_obfuscation"


def test_the_docs_have_the_same_table() -> None:
    text = (Path(__file__).parents[1] / "docs" / "serving.md").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line.startswith("| `")]
    rows = {name: line for line in lines for name in line.split("|")[1].split("`")[1::2]}
    tables = (ChatRequest.neutral, CompletionRequest.neutral, StreamOptions.neutral)
    for name, one in {name: one for table in tables for name, one in table.items()}.items():
        key = f"stream_options.{name}" if name in StreamOptions.neutral else name
        assert key in rows, name
        for value in one.values or ():
            assert f"`{json.dumps(value)}`" in rows[key], (name, value)


UNKNOWN = {"temprature": 1, "messages": [{**ASKED[0], "colour": 1, "\n": 2}], "speculation": {"drafters": "a"}}


def test_unknown_fields_are_ignored_and_named(server: HttpServer, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", "slipstream.serve"):
        for stream in (False, True, False):
            answer = post(server, {**UNKNOWN, "stream": stream})
            assert answer.status_code == 200
            named = answer.headers[IGNORED_FIELDS].split(", ")
            assert sorted(named) == ["(no name)", "messages.colour", "speculation.drafters", "temprature"]
    told = {entry.fields["field"]: entry.fields["remedy"] for entry in caplog.records}  # type: ignore[attr-defined]
    assert told["temprature"] == "did you mean 'temperature'?"
    assert len(told) == len(caplog.records) == 4, "each once"
    many = post(server, {"prompt": "a", **{f"f{i}": i for i in range(5000)}})
    assert len(many.headers[IGNORED_FIELDS].split(", ")) <= 16


def test_fields_of_vllms_forms_that_nothing_reads_are_named(server: HttpServer) -> None:
    form = {"regex": "[ab]", "whitespace_pattern": " ?", "disable_fallback": True}
    answer = post(server, {"structured_outputs": form})
    assert answer.status_code == 200
    named = answer.headers[IGNORED_FIELDS].split(", ")
    assert sorted(named) == ["structured_outputs.disable_fallback", "structured_outputs.whitespace_pattern"]


def test_strict_fields_refuse_what_is_unknown(server: HttpServer) -> None:
    service = server.service
    kept, service.config = service.config, replace(service.config, strict_fields=True)
    try:
        answer = post(server, UNKNOWN)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (400, "unknown_field", "temprature")
        assert error["message"] == (
            "temprature: unknown or unsupported field 'temprature'; did you mean 'temperature'?"
        )
        assert post(server, {"metadata": {"a": "b"}}).status_code == 200, "what is known and changes no answer"
    finally:
        service.config = kept


@pytest.mark.parametrize(
    "fields",
    [
        {"best_of": 2, "n": 2},
        {"reasoning_effort": "high", "verbosity": "low", "metadata": {"run": "7"}, "service_tier": "flex"},
        {"parallel_tool_calls": False, "tools": [TOOL]},
        {"tool_choice": "auto"},
        {"max_tokens": 3, "max_completion_tokens": 3},
        {"add_special_tokens": True},
    ],
)
def test_what_clients_send(server: HttpServer, fields: dict[str, Any]) -> None:
    answer = post(server, fields)
    assert answer.status_code == 200, answer.text
    assert IGNORED_FIELDS not in answer.headers


def test_a_missing_model_is_the_first(server: HttpServer) -> None:
    answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "a", "max_tokens": 1})
    assert answer.json()["model"] == MODEL


@pytest.mark.parametrize(("kept", "left"), [(3, 3), (100, 100), (-1, 253), (500, 400)])
def test_a_prompt_is_cut_at_its_beginning(server: HttpServer, kept: int, left: int) -> None:
    length = min(400, 400 if kept != 500 else 200)
    answer = post(server, {"prompt": [7] * length, "truncate_prompt_tokens": kept, "return_token_ids": True})
    assert answer.json()["usage"]["prompt_tokens"] == min(left, length)
    assert len(answer.json()["choices"][0]["token_ids"]) == answer.json()["usage"]["completion_tokens"]
    assert post(server, {"prompt": [7] * 9, "truncate_prompt_tokens": 0}).json()["error"]["param"] == "prompt"


def test_a_prompt_that_is_too_long_is_cut_too(server: HttpServer) -> None:
    """Texts of more characters than the context could hold are refused only if they are not cut."""
    cut = {"truncate_prompt_tokens": 8, "temperature": 0}
    text = "x" * 9000 + "the end"
    whole = post(server, {"prompt": text, **cut}).json()
    assert whole["usage"]["prompt_tokens"] == 8
    assert whole["choices"] == post(server, {"prompt": "xthe end", "temperature": 0}).json()["choices"]
    assert post(server, {"prompt": [7] * 9000, **cut}).json()["usage"]["prompt_tokens"] == 8
    turns = [{"role": "user", "content": text}] * 2
    assert post(server, {"messages": turns, **cut}).json()["usage"]["prompt_tokens"] == 8
    for body in ({"prompt": text}, {"messages": turns}):
        assert post(server, body).json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("body", [{"prompt": "abc"}, {"messages": ASKED}])
def test_usage_and_token_ids_in_every_event(server: HttpServer, body: dict[str, Any]) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    asked = {**body, "max_tokens": 6, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    whole = post(server, asked).json()["choices"][0]["token_ids"]
    text = post(server, {**asked, "stream": True, "stream_options": options}).text
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == 6
    assert [token for event in events for one in event["choices"] for token in one.get("token_ids", ())] == whole


def test_a_request_keeps_its_name(server: HttpServer) -> None:
    for given, echoed in (("trace-1:a/b", True), ("x" * 200, False), ("a b", False)):
        answer = httpx.get(f"{server.url}/v1/models", headers={"X-Request-Id": given})
        assert (answer.headers["x-request-id"] == given) is echoed


def test_head_is_get_without_the_body(server: HttpServer) -> None:
    answer = httpx.head(f"{server.url}/metrics")
    assert (answer.status_code, answer.content) == (200, b"")
    assert httpx.head(f"{server.url}/live").status_code == 405


@pytest.mark.parametrize(
    ("method", "path", "status", "code", "said"),
    [
        ("GET", "/nope", 404, "not_found", "GET /nope: there is no such endpoint; /openapi.json lists them"),
        ("GET", "/v1/nope", 404, "not_found", "GET /v1/nope: there is no such endpoint"),
        ("DELETE", "/v1/completions", 405, "method_not_allowed", "does not know the method; use POST"),
        ("POST", "/", 405, "method_not_allowed", "POST /: this endpoint does not know the method; use GET"),
        ("OPTIONS", "/v1/chat/completions", 405, "method_not_allowed", "use POST"),
    ],
)
def test_paths_and_methods_that_there_are_not(
    server: HttpServer, method: str, path: str, status: int, code: str, said: str
) -> None:
    answer = httpx.request(method, f"{server.url}{path}")
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["type"]) == (status, code, "invalid_request_error")
    assert said in error["message"]
    assert status == 404 or answer.headers["allow"]


@pytest.mark.parametrize("raw", [b"GARBAGE\r\n\r\n", b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: a\r\n\r\n"])
def test_what_is_no_http_is_refused_in_the_same_shape(server: HttpServer, raw: bytes) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as wire:
        wire.sendall(raw)
        told = b"".join(iter(lambda: wire.recv(4096), b""))
    head, _, body = told.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert b"application/json" in head
    assert json.loads(body)["error"]["type"] == "invalid_request_error"


TEXTS = [" hello", 'a "quoted"\nline\t\\', "schön 😀", "\u2028\x85"]


def options(**changes: Any) -> ResponseOptions:
    return ResponseOptions("cmpl-1", 7, "tiny", **changes)


@pytest.mark.parametrize("kind", [CompletionWriter, ChatWriter])
@pytest.mark.parametrize("usage", [True, False])
@pytest.mark.parametrize("text", TEXTS)
def test_the_short_way_writes_the_same_bytes(kind: type[ResponseWriter], usage: bool, text: str) -> None:
    around = kind(options(usage=usage)).around_text(3)
    assert around is not None
    told = f"{around[0]}{quoted(text)}{around[1]}"
    assert told == kind(options(usage=usage)).events(CompletionOutput(3, text))
    assert json.loads(told.removeprefix("data: "))["choices"][0]["index"] == 3


def test_events_with_more_than_text_have_no_short_way() -> None:
    assert CompletionWriter(options(), ["echo"]).around_text(0) is None
    assert CompletionWriter(options(chunk_chars=4)).around_text(0) is None
    assert ChatWriter(options(chunk_chars=4)).around_text(0) is None
    assert ChatWriter(options(), lambda: HermesParser(["go"])).around_text(0) is None


class Scripted:
    """A stream that brings these outputs, one list at a time."""

    finished = False

    def __init__(self, arrivals: list[list[RequestOutput]]) -> None:
        self._arrivals = iter(arrivals)

    async def take(self) -> list[RequestOutput]:
        return next(self._arrivals, [])

    def close(self) -> None:
        pass

    fail = close


class Counting(CompletionWriter):
    """Counts the events that went the long way."""

    long = 0

    def events(self, delta: CompletionOutput, report: Any = None) -> str:
        self.long += 1
        return super().events(delta, report)


def sent_for(arrivals: list[list[RequestOutput]]) -> tuple[list[str], int]:
    """What a client reads, event by event, and how many of them went the long way."""
    bodies: list[bytes] = []

    async def send(message: Any) -> None:
        bodies.append(message.get("body", b""))

    async def receive() -> Any:
        return await asyncio.get_running_loop().create_future()

    writer: Any = Counting(options(usage=False))
    job: Any = SimpleNamespace(id="r", prompt_ids=[1])
    llm: Any = SimpleNamespace(start=lambda *_: Scripted(arrivals))
    response = EngineResponse(llm, [job], 1, writer, streamed=True, timeout_s=60, done=lambda _: None, drain=Drain(5))
    scope: dict[str, Any] = {}
    Record().attach(scope)
    asyncio.run(response(scope, receive, send))
    return b"".join(bodies).decode().split("\n\n")[:-1], writer.long


def output(text: str, token: int, **more: Any) -> RequestOutput:
    finished = more.get("finish_reason") is not None
    return RequestOutput("r", None, [1], [CompletionOutput(0, text, [token], **more)], finished)


def test_only_text_goes_the_short_way_and_nothing_is_lost() -> None:
    rare = output("d", 4, logprobs=[{4: Logprob(-1.0, 1, "d")}])
    last = output("e", 5, finish_reason="length")
    rounds = [[output("a", 1)], [output("b", 2)], [output("", 9)], [output("c", 3), output("C", 3)], [rare], [last]]
    told, long = sent_for(rounds)
    texts = [json.loads(event.removeprefix("data: "))["choices"][0]["text"] for event in told[:-1]]
    assert texts == ["a", "b", "cC", "d", "e"]
    assert told[-1] == "data: [DONE]"
    assert long == 3, "the first, the one with more to say, the last"


OFF = "off: batch 48 leaves no spare arithmetic"


@pytest.mark.parametrize(
    ("plan", "drafted", "why"),
    [
        ({"ngram": "off: it had no guess", "suffix": "off: it had no guess"}, 0, "off: it had no guess"),
        ({"ngram": OFF}, 0, OFF),
        ({"ngram": OFF, "suffix": OFF}, 0, OFF),
        ({"ngram": "off: 0.90x expected", "suffix": OFF}, 0, f"ngram off: 0.90x expected; suffix {OFF}"),
        ({"ngram": "ngram 5: 1.30x expected"}, 8, "ngram 5: 1.30x expected; 6 of 8 guesses stood, 2.50 tokens a pass"),
        (
            {"bad": "off: it raised KeyError"},
            8,
            "bad off: it raised KeyError; 6 of 8 guesses stood, 2.50 tokens a pass",
        ),
        ({}, 8, "on: 6 of 8 guesses stood, 2.50 tokens a pass"),
        ({}, 0, "off: it had no drafter: none was named, or speculation is switched off"),
    ],
)
def test_why(plan: dict[str, str], drafted: int, why: str) -> None:
    drafters = {"ngram": DrafterStats(drafted=drafted)} if drafted else {}
    stats = SpeculationStats(4, 10, drafted, min(6, drafted), by_drafter=drafters, plan=plan)
    told = speculation_report(AnswerRecord(10, "stop", speculation=stats))
    assert told["why"] == why
    assert told["plan"] == plan


def test_an_answer_of_one_token_had_no_round_to_draft_in() -> None:
    told = speculation_report(AnswerRecord(1, "length", speculation=SpeculationStats(rounds=1, emitted=1)))
    assert told["why"] == "off: the answer ended with its first token"


def test_what_is_known_beforehand_comes_first() -> None:
    assert speculation_report(AnswerRecord(), "this server has no drafter")["why"] == "off: this server has no drafter"
