"""What is wrong with the fields of a request, in words: the field as the client knows it, its value, and what to do."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from slipstream.serve.errors import ApiError
from slipstream.serve.schemas import UNSUPPORTED

_SHOWN = 60
_BODY = 'send a JSON object such as {"model": "…"}, with content-type application/json'
_NAMES = {list: "a list", str: "a text", int: "a number", float: "a number", bool: "true or false", type(None): "null"}
_KINDS = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "a text",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "none_required": "null",
}
_BOUNDS = {
    "greater_than": ("gt", "above"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "below"),
    "less_than_equal": ("le", "at most"),
}
_SIZES = {
    "string_too_long": ("max_length", "at most {} characters long"),
    "string_too_short": ("min_length", "at least {} characters long"),
    "too_long": ("max_length", "at most {} long"),
    "too_short": ("min_length", "at least {} long"),
}


@dataclass(frozen=True, slots=True)
class _Complaint:
    """One thing that pydantic found wrong. Of a union it finds something wrong with every branch."""

    path: tuple[str | int, ...]
    value: Any
    must_be: str
    told: str | None = None  # the whole message, where it is of another kind
    code: str = "invalid_value"

    @property
    def depth(self) -> tuple[int, list[int]]:
        """How far the branch got: the one that got furthest is the one that was meant."""
        return len(self.path), [part for part in self.path if isinstance(part, int)]


def from_validation(errors: Sequence[Any], body: Any = None) -> ApiError:
    """The first thing that pydantic found wrong with a body (or with what the address says)."""
    first = errors[0]
    if first["type"] == "json_invalid":
        what, at = first.get("ctx", {}).get("error", "it cannot be read"), first["loc"][-1]
        where = f" at character {at + 1}" if isinstance(at, int) else ""
        return ApiError(400, f"the body is not JSON: {what}{where}; {_BODY}", code="invalid_json")
    if first["type"] == "missing" and len(first["loc"]) <= 1:
        return ApiError(400, f"the body is missing: {_BODY}", code="invalid_json")
    found = [_complaint(error, body) for error in errors]
    meant = max(found, key=lambda one: one.depth)  # of equals the first
    if not meant.path:
        kind = _NAMES.get(type(meant.value), "text that is not declared as JSON")
        return ApiError(400, f"the body is {kind}, not a JSON object: {_BODY}", code="invalid_json")
    param = ".".join(map(str, meant.path))
    if meant.told is not None:
        return ApiError(400, f"{param}{meant.told}", param=param, code=meant.code)
    remedies = dict.fromkeys(one.must_be for one in found if one.path == meant.path and one.told is None)
    message = f"{param}={shown(meant.value)}: must be {' or '.join(remedies)}"
    return ApiError(400, message, param=param, code=meant.code)


def shown(value: Any) -> str:
    """A value as the client wrote it, or its beginning."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        text = repr(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"


def _complaint(error: Mapping[str, Any], body: Any) -> _Complaint:
    kind, context, value = error["type"], error.get("ctx", {}), error.get("input")
    path = _path(error["loc"], body, missing=kind == "missing")
    if kind == UNSUPPORTED:
        given = f"={shown(context['value'])}: {context['remedy']}"
        return _Complaint((*path, context["name"]), None, "", given, "unsupported_value")
    if kind == "missing":
        return _Complaint(path, None, "", ": required field is missing", "missing_field")
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        name = str(context["discriminator"]).strip("'")
        if kind == "union_tag_not_found":
            return _Complaint((*path, name), None, "", ": required field is missing", "missing_field")
        return _Complaint((*path, name), context["tag"], f"one of {context['expected_tags']}")
    return _Complaint(path, value, _must_be(kind, context, str(error["msg"])))


def _must_be(kind: str, context: Mapping[str, Any], message: str) -> str:
    if kind in _KINDS:
        return _KINDS[kind]
    if kind in _BOUNDS:
        key, words = _BOUNDS[kind]
        return f"{words} {context[key]}"
    if kind in _SIZES:
        key, words = _SIZES[kind]
        return words.format(context[key])
    if kind == "literal_error":
        return str(context["expected"])
    if kind == "string_pattern_mismatch":
        return f"a text of the form {context['pattern']}"
    return f"another value ({message})"


def _path(place: Sequence[str | int], body: Any, *, missing: bool) -> tuple[str | int, ...]:
    """The path that a client knows: pydantic's has the names of union branches in it."""
    if place and place[0] != "body":
        return tuple(place[1:])  # of the address
    path: list[str | int] = []
    here = body
    for index, part in enumerate(place[1:], 1):
        if (isinstance(here, dict) and part in here) or (isinstance(here, list) and part in range(len(here))):
            here = cast(Any, here)[part]
        elif not (missing and index == len(place) - 1):
            continue
        path.append(part)
    return tuple(path)
