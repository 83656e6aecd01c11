"""Turns the fields of a request into `SamplingParams`, within the limits of this server.

The form of an answer has several fields: OpenAI's `response_format`, vLLM's `structured_outputs` and its older
`guided_…`; tools that must be called are a form as well. A request may ask for one form.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from slipstream.core.errors import InvalidRequest
from slipstream.core.params import SETTINGS, SamplingParams, SpeculationParams
from slipstream.core.structured import StructuredOutputsParams, renamed
from slipstream.serve.config import Limits
from slipstream.serve.errors import ApiError, refused
from slipstream.serve.schemas import (
    ChatRequest,
    CompletionRequest,
    JsonFormat,
    NamedTool,
    SamplingFields,
    SchemaFormat,
    SpeculationFields,
    TextFormat,
    Tool,
    check_nesting,
    text_of,
)
from slipstream.serve.tools import ToolParser

_SAME = [name for name, setting in SETTINGS.items() if setting.http]
_SAME += ["allowed_token_ids", "bad_words", "stop_token_ids"]
"""Fields with the same meaning in `SamplingParams`; None is its default."""
_OLD_NAMES = ("json", "regex", "choice", "grammar")
_ANY_OBJECT = {"type": "object", "additionalProperties": True}


def params_of(
    asked: CompletionRequest | ChatRequest, limits: Limits, tenant: str, *, drafts: bool, parser: type[ToolParser]
) -> SamplingParams:
    """drafts: the server has a drafter. parser: reads tool calls in the format that the model writes."""
    max_tokens, logprobs = _lengths(asked)
    if asked.best_of not in (None, asked.n or 1):
        raise refused("best_of", "answers are not ranked; ask for n, and choose")
    if asked.stream_options is not None and not asked.stream:
        raise refused("stream_options", "needs stream: true")
    if logprobs is not None and logprobs > limits.top_logprobs:
        raise refused("top_logprobs", f"must be at most {limits.top_logprobs} on this server")
    if asked.prediction is not None and not drafts:
        raise refused("prediction", "this server has no drafter that could use it; leave it out")
    stops = (asked.stop,) if isinstance(asked.stop, str) else tuple(asked.stop or ())
    if len(stops) > limits.stops:
        raise refused("stop", f"must be at most {limits.stops} strings on this server")
    for name, texts in (("bad_words", asked.bad_words or ()), ("stop", stops)):
        if any(len(text) > limits.stop_chars for text in texts):
            raise refused(name, f"must be strings of at most {limits.stop_chars} characters on this server")
    for key in asked.logit_bias or ():
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise refused("logit_bias", f"{key[:20]!r} must be a token id")
    same: dict[str, Any] = {key: value for key in _SAME if (value := getattr(asked, key)) is not None}
    return SamplingParams(
        **same,
        logit_bias={int(key): value for key, value in (asked.logit_bias or {}).items()},
        stop=stops,
        seed=None if asked.seed is None else asked.seed % 2**64,
        max_tokens=max_tokens,  # type: ignore[arg-type]  # None: up to the context's end
        logprobs=logprobs,
        prediction=None if asked.prediction is None else text_of(asked.prediction.content),
        speculation=_speculation(asked, tenant),
        structured_outputs=form_of(asked, limits.nesting, parser),
        cache_salt=asked.cache_salt or "",
        output_kind="delta" if asked.stream else "cumulative",
    )


def _lengths(asked: CompletionRequest | ChatRequest) -> tuple[int | None, int | None]:
    """max_tokens and logprobs, as each endpoint names them."""
    if isinstance(asked, CompletionRequest):
        return asked.max_tokens, asked.logprobs
    if len({asked.max_tokens, asked.max_completion_tokens} - {None}) > 1:
        raise refused("max_tokens", "give either it or max_completion_tokens, which is its new name")
    if asked.top_logprobs and not asked.logprobs:
        raise refused("top_logprobs", "needs logprobs: true")
    return asked.max_completion_tokens or asked.max_tokens, (asked.top_logprobs or 0) if asked.logprobs else None


def _speculation(asked: SamplingFields, tenant: str) -> SpeculationParams:
    if not isinstance(asked.speculation, SpeculationFields):
        return SpeculationParams(enabled=asked.speculation != "off", tenant=tenant)
    return SpeculationParams(**asked.speculation.model_dump(exclude={"report"}), tenant=tenant)


def form_of(asked: SamplingFields, nesting: int, parser: type[ToolParser]) -> StructuredOutputsParams | None:
    """The form that a request asks for, at most `nesting` levels deep; None: any text. Tools are checked elsewhere."""
    found: dict[str, dict[str, Any]] = {}
    if asked.response_format is not None and not isinstance(asked.response_format, TextFormat):
        found["response_format"] = _of_format(asked.response_format)
    if asked.structured_outputs is not None:
        found["structured_outputs"] = asked.structured_outputs.model_dump(by_alias=True)
    for name in _OLD_NAMES:
        if (value := getattr(asked, f"guided_{name}")) is not None:
            found[f"guided_{name}"] = {name: value}
    must = _must_call(asked)
    if len(found) > 1 or (must and found.keys() - {"response_format"}):
        first, *others = [*(["tool_choice"] if must else []), *found]
        raise refused(others[0], f"cannot go with {first}: an answer has one form")
    for param, form in found.items():
        check_nesting(param, form.get("json") or form.get("structural_tag"), nesting)
    if isinstance(asked, ChatRequest) and not found.keys() - {"response_format"}:
        tools = _of_tools(asked, parser, found.get("response_format"))
        found = {"tools": {"structural_tag": tools}} if tools is not None else found
    return StructuredOutputsParams.of(next(iter(found.values()))) if found else None


@contextmanager
def naming_form(asked: SamplingFields) -> Iterator[None]:
    """Name the field that asked for the form in errors about the form."""
    try:
        yield
    except InvalidRequest as error:
        about_form = renamed(str(error), "")
        name = None if about_form is None else _form_name(asked, str(error))
        if about_form is None or name is None:
            raise
        about_form = re.sub(r"^: at #/format[\w/]*(?=: at #)", "", about_form)
        raise ApiError(400, f"{name}{about_form}", param=name, code="invalid_value") from error


def _form_name(asked: SamplingFields, message: str) -> str | None:
    """The field of the form; None: `structured_outputs`, which errors name anyway."""
    if (found := re.search(r"structural_tag: at #/format\S*/tags/(\d+)", message)) and asked.structured_outputs is None:
        assert isinstance(asked, ChatRequest)
        tools = asked.tools or []
        return f"tools.{tools.index(_offered(asked)[int(found[1])])}.function.parameters"
    if isinstance(asked.response_format, SchemaFormat):
        return "response_format.json_schema.schema"
    if isinstance(asked.response_format, JsonFormat):
        return "response_format.schema" if asked.response_format.schema_ else "response_format"
    for name in _OLD_NAMES:
        if getattr(asked, f"guided_{name}") is not None:
            return f"guided_{name}"
    return "tools" if asked.structured_outputs is None else None


def _of_format(wanted: JsonFormat | SchemaFormat) -> dict[str, Any]:
    if isinstance(wanted, JsonFormat):
        return {"json": wanted.schema_} if wanted.schema_ else {"json_object": True}
    if wanted.json_schema.schema_ is None:
        raise refused("response_format.json_schema.schema", "is missing")
    return {"json": wanted.json_schema.schema_}


def _must_call(asked: SamplingFields) -> bool:
    return isinstance(asked, ChatRequest) and (
        asked.tool_choice == "required" or isinstance(asked.tool_choice, NamedTool)
    )


def _offered(asked: ChatRequest) -> Sequence[Tool]:
    """The tools that an answer may call."""
    tools = asked.tools or []
    if isinstance(asked.tool_choice, NamedTool):
        name = asked.tool_choice.function.name
        tools = [tool for tool in tools if tool.function.name == name][:1]
        if not tools:
            raise refused("tool_choice", f"{name!r} is none of the tools")
    return [] if asked.tool_choice == "none" else tools


def _of_tools(asked: ChatRequest, parser: type[ToolParser], wanted: dict[str, Any] | None) -> dict[str, Any] | None:
    """A structural tag for calls in the model's own format; None: no constraint applies.

    wanted: the form of an answer without calls.
    """
    offered, must = _offered(asked), _must_call(asked)
    if not offered or not (must or wanted or any(tool.function.strict for tool in offered)):
        return None
    calls: dict[str, Any] = {
        "type": "tags_with_separator",
        "tags": [parser.tag(tool.function.name, _arguments(tool, strict=must)) for tool in offered],
        "separator": parser.separator,
        "at_least_one": True,
        "stop_after_first": asked.parallel_tool_calls is False or isinstance(asked.tool_choice, NamedTool),
    }
    if must:
        format = calls
    elif wanted is not None:
        schema = wanted.get("json", _ANY_OBJECT)
        format = {"type": "or", "elements": [calls, {"type": "json_schema", "json_schema": schema}]}
    else:
        format = parser.among_text(calls)
    return {"type": "structural_tag", "format": format}


def _arguments(tool: Tool, *, strict: bool) -> dict[str, Any]:
    if not (strict or tool.function.strict):
        return _ANY_OBJECT
    return tool.function.parameters or {"type": "object", "properties": {}, "additionalProperties": False}
