"""What form an answer must have: from the fields by which clients say so to the engine's own.

OpenAI has `response_format`, vLLM `structured_outputs` and before that `guided_…`; a tool that must be called is a
form, too. A request may ask for one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from slipstream.core.errors import InvalidRequest
from slipstream.core.structured import StructuredOutputsParams, renamed
from slipstream.serve.errors import ApiError, refused
from slipstream.serve.nesting import check_nesting
from slipstream.serve.schemas import ChatRequest, NamedTool, SamplingFields, SchemaFormat, TextFormat, Tool

_OLD_NAMES = ("json", "regex", "choice", "grammar")


def form_of(asked: SamplingFields, nesting: int) -> StructuredOutputsParams | None:
    """The form that a request asks for, at most so many levels deep; None: any text. Tools were looked at before."""
    found: dict[str, dict[str, Any]] = {}
    if asked.response_format is not None and not isinstance(asked.response_format, TextFormat):
        found["response_format"] = _of_format(asked.response_format)
    if asked.structured_outputs is not None:
        found["structured_outputs"] = asked.structured_outputs.model_dump(by_alias=True)
    for name in _OLD_NAMES:
        if (value := getattr(asked, f"guided_{name}")) is not None:
            found[f"guided_{name}"] = {name: value}
    if isinstance(asked, ChatRequest) and (tool_form := _of_tools(asked)) is not None:
        found["tool_choice"] = tool_form
    if len(found) > 1:
        raise refused(list(found)[1], f"cannot go with {next(iter(found))}: an answer has one form")
    for param, form in found.items():
        if param != "tool_choice":  # is some levels deeper than the tools
            check_nesting(param, form.get("json"), nesting)
        return StructuredOutputsParams.of(form)
    return None


@contextmanager
def naming_form(asked: SamplingFields) -> Iterator[None]:
    """What is wrong with a form is said of the field that asked for it."""
    try:
        yield
    except InvalidRequest as error:
        about_form = renamed(str(error), "")
        name = None if about_form is None else _form_name(asked)
        if name is None:
            raise
        raise ApiError(400, f"{name}{about_form}", param=name, code="invalid_value") from error


def _form_name(asked: SamplingFields) -> str | None:
    """The field; None: `structured_outputs`, by whose name errors go anyway."""
    if isinstance(asked.response_format, SchemaFormat):
        return "response_format.json_schema.schema"
    if asked.response_format is not None and not isinstance(asked.response_format, TextFormat):
        return "response_format"
    for name in _OLD_NAMES:
        if getattr(asked, f"guided_{name}") is not None:
            return f"guided_{name}"
    if isinstance(asked, ChatRequest) and asked.structured_outputs is None:
        chosen = asked.tool_choice
        if isinstance(chosen, NamedTool):
            names = [tool.function.name for tool in asked.tools or ()]
            return f"tools.{names.index(chosen.function.name)}.function.parameters"
        return "tools" if chosen == "required" else None
    return None


def _of_format(wanted: Any) -> dict[str, Any]:
    if isinstance(wanted, SchemaFormat):
        if wanted.json_schema.schema_ is None:
            raise refused("response_format.json_schema.schema", "is missing")
        return {"json": wanted.json_schema.schema_}
    return {"json_object": True}


def _of_tools(asked: ChatRequest) -> dict[str, Any] | None:
    tools = asked.tools or []
    if isinstance(asked.tool_choice, NamedTool):
        name = asked.tool_choice.function.name
        chosen = next((tool for tool in tools if tool.function.name == name), None)
        if chosen is None:
            raise refused("tool_choice", f"{name!r} is none of the tools")
        return {"json": _arguments(chosen)}
    return {"json": _calls(tools, asked.parallel_tool_calls is not False)} if asked.tool_choice == "required" else None


def _arguments(tool: Tool) -> dict[str, Any]:
    return tool.function.parameters or {"type": "object", "properties": {}, "additionalProperties": False}


def _calls(tools: Sequence[Tool], several: bool) -> dict[str, Any]:
    """A list of calls. The tools' schemas stand beside it, each with all that it defines for itself."""
    definitions: dict[str, Any] = {}
    items = []
    for index, tool in enumerate(tools):
        place = f"#/$defs/tool{index}"
        definitions[f"tool{index}"] = _moved(_arguments(tool), place)
        call = {"name": {"const": tool.function.name}, "parameters": {"$ref": place}}
        items.append(
            {"type": "object", "properties": call, "required": ["name", "parameters"], "additionalProperties": False}
        )
    form: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": items}, "$defs": definitions}
    if not several:
        form["maxItems"] = 1
    return form


def _moved(schema: Any, place: str) -> Any:
    """The same schema for another place in a document: its references are to itself, as before."""
    if isinstance(schema, list):
        return [_moved(part, place) for part in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: _moved(part, place) for key, part in schema.items()}
    reference = moved.get("$ref")
    if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
        moved["$ref"] = place + reference[1:]
    return moved
