"""What form an answer must have: from the fields by which clients say so to the engine's own.

OpenAI has `response_format`, vLLM `structured_outputs` and before that `guided_…`; a tool that must be called is a
form, too. A request may ask for one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from slipstream.core.errors import InvalidRequest
from slipstream.core.structured import StructuredOutputsParams, renamed
from slipstream.serve.errors import ApiError, refused
from slipstream.serve.nesting import check_nesting
from slipstream.serve.schemas import ChatRequest, JsonFormat, NamedTool, SamplingFields, SchemaFormat, TextFormat, Tool
from slipstream.serve.tools import ToolParser

_OLD_NAMES = ("json", "regex", "choice", "grammar")
_ANY_OBJECT = {"type": "object", "additionalProperties": True}


def form_of(asked: SamplingFields, nesting: int, parser: type[ToolParser]) -> StructuredOutputsParams | None:
    """The form that a request asks for, at most so many levels deep; None: any text. Tools were looked at before.

    parser: reads the calls that the model writes, in the format that a form of calls must have.
    """
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
    """What is wrong with a form is said of the field that asked for it."""
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
    """The field; None: `structured_outputs`, by whose name errors go anyway."""
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
    if isinstance(wanted, SchemaFormat):
        if wanted.json_schema.schema_ is None:
            raise refused("response_format.json_schema.schema", "is missing")
        return {"json": wanted.json_schema.schema_}
    return {"json": wanted.schema_} if wanted.schema_ else {"json_object": True}


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
    """Calls in the model's own way of writing them, with JSON of a schema inside; None: nothing is promised of them.

    wanted: the form of an answer that calls nothing.
    """
    offered, must = _offered(asked), _must_call(asked)
    if not offered or not (must or wanted or any(tool.function.strict for tool in offered)):
        return None
    one = asked.parallel_tool_calls is False or isinstance(asked.tool_choice, NamedTool)
    tags = [parser.tag(tool.function.name, _arguments(tool, strict=must)) for tool in offered]
    calls = {"type": "tags_with_separator", "tags": tags, "separator": parser.separator, "at_least_one": True}
    calls["stop_after_first"] = one
    if must:
        format = calls
    elif wanted is not None:
        format = {
            "type": "or",
            "elements": [calls, {"type": "json_schema", "json_schema": wanted.get("json", _ANY_OBJECT)}],
        }
    else:
        format = parser.among_text(calls)
    return {"type": "structural_tag", "format": format}


def _arguments(tool: Tool, *, strict: bool) -> dict[str, Any]:
    if not (strict or tool.function.strict):
        return _ANY_OBJECT
    return tool.function.parameters or {"type": "object", "properties": {}, "additionalProperties": False}
