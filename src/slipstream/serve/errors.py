"""Errors as clients of OpenAI's API expect them: a status and a JSON object with the message and the field."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

from starlette.responses import Response

from slipstream.core.errors import Aborted, CapacityError, EngineDied, InvalidRequest, QueueFull

UNSUPPORTED = "unsupported_field"
"""pydantic's error type for a known field whose value is not supported (`schemas.Neutral`)."""
_NAMED = re.compile(r"([a-z][a-z0-9_]*(?:\.[a-z0-9_]+)*)[=:]|(structured_outputs(?:\.\w+)?)")
_PROMPT_IDS = "prompt_token_ids: "
_TYPES = {401: "authentication_error", 408: "timeout_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """Ends an HTTP request with this status."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @property
    def for_log(self) -> str:
        """The field and the code only: the message can quote the client's text."""
        where = "request" if self.param is None or self.code == "unknown_field" else self.param.split(".")[0]
        return f"{where}: {self.code or self.status}"

    @property
    def json(self) -> bytes:
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return json.dumps({"error": error}, ensure_ascii=False).encode("utf-8", "replace")

    def response(self) -> Response:
        return Response(self.json, self.status, self.headers, "application/json")


def refused(param: str, remedy: str) -> ApiError:
    """A 400 for a field with a wrong value."""
    return ApiError(400, f"{param}: {remedy}", param=param, code="invalid_value")


@contextmanager
def about(param: str) -> Iterator[None]:
    """Name this field in errors of the engine that name none, or name the prompt in the engine's own words."""
    try:
        yield
    except InvalidRequest as error:
        message = str(error)
        if message.startswith(_PROMPT_IDS):
            raise refused(param, message.removeprefix(_PROMPT_IDS)) from error
        if _NAMED.match(message):
            raise
        raise refused(param, message) from error


def from_exception(error: Exception) -> ApiError:
    """The error for the client: the whole message if the request is wrong, no details if the server failed."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, InvalidRequest | CapacityError):
        named = _NAMED.match(str(error))
        return ApiError(400, str(error), param=(named[1] or named[2]) if named else None, code="invalid_value")
    if isinstance(error, QueueFull):
        wait = {"Retry-After": str(max(1, math.ceil(error.retry_after_s)))}
        return ApiError(429, f"too many requests: {error}", code="rate_limit_exceeded", headers=wait)
    if isinstance(error, Aborted):
        return ApiError(503, "the server is shutting down", code="shutting_down", headers={"Retry-After": "5"})
    if isinstance(error, EngineDied):
        return ApiError(503, "the engine has ended, and the server with it; ask another", code="engine_dead")
    return ApiError(500, "internal error: the server's log has it under this request's id", code="internal_error")


def for_log(error: Exception) -> str:
    """The error for the log: the field name if the request is wrong, the whole message if the server failed."""
    shown = from_exception(error)
    return shown.for_log if shown is error or shown.status < 500 else f"{type(error).__name__}: {error}"


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
    "greater_than": ("gt", "above {}"),
    "greater_than_equal": ("ge", "at least {}"),
    "less_than": ("lt", "below {}"),
    "less_than_equal": ("le", "at most {}"),
    "string_too_long": ("max_length", "at most {} characters long"),
    "string_too_short": ("min_length", "at least {} characters long"),
    "too_long": ("max_length", "at most {} long"),
    "too_short": ("min_length", "at least {} long"),
    "literal_error": ("expected", "{}"),
    "string_pattern_mismatch": ("pattern", "a text of the form {}"),
}


@dataclass(frozen=True, slots=True)
class _Complaint:
    """One error of pydantic. For a union pydantic reports one for every branch."""

    path: tuple[str | int, ...]
    value: Any
    must_be: str
    whole: str | None = None  # the whole message, instead of "must be …"
    code: str = "invalid_value"

    @property
    def depth(self) -> tuple[int, list[int]]:
        """The branch that matched furthest is taken for the one that the client meant."""
        return len(self.path), [part for part in self.path if isinstance(part, int)]


def from_validation(errors: Sequence[Any], body: Any = None) -> ApiError:
    """The first error of pydantic in a body or a query, with the client's path, the value and the remedy."""
    first = errors[0]
    if first["type"] == "json_invalid":
        what, at = first.get("ctx", {}).get("error", "it cannot be read"), first["loc"][-1]
        where = f" at character {at + 1}" if isinstance(at, int) else ""
        return ApiError(400, f"the body is not JSON: {what}{where}; {_BODY}", code="invalid_json")
    if first["type"] == "missing" and len(first["loc"]) <= 1:
        return ApiError(400, f"the body is missing: {_BODY}", code="invalid_json")
    found = [_complaint(error, body) for error in errors]
    meant = max(found, key=lambda one: one.depth)  # the first of equals
    if not meant.path:
        kind = _NAMES.get(type(meant.value), "text that is not declared as JSON")
        return ApiError(400, f"the body is {kind}, not a JSON object: {_BODY}", code="invalid_json")
    param = ".".join(map(str, meant.path))
    if meant.whole is not None:
        return ApiError(400, f"{param}{meant.whole}", param=param, code=meant.code)
    remedies = dict.fromkeys(one.must_be for one in found if one.path == meant.path and one.whole is None)
    message = f"{param}={_shown(meant.value)}: must be {' or '.join(remedies)}"
    return ApiError(400, message, param=param, code=meant.code)


def _shown(value: Any) -> str:
    """A value as JSON, cut after some characters."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        text = repr(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"


def _complaint(error: Mapping[str, Any], body: Any) -> _Complaint:
    kind, context, value = error["type"], error.get("ctx", {}), error.get("input")
    path = _path(error["loc"], body, missing=kind == "missing")
    if kind == UNSUPPORTED:
        given = f"={_shown(context['value'])}: {context['remedy']}"
        return _Complaint((*path, context["name"]), None, "", given, "unsupported_value")
    if kind == "union_tag_not_found":
        path = (*path, str(context["discriminator"]).strip("'"))
    if kind in ("missing", "union_tag_not_found"):
        return _Complaint(path, None, "", ": required field is missing", "missing_field")
    if kind == "union_tag_invalid":
        name = str(context["discriminator"]).strip("'")
        return _Complaint((*path, name), context["tag"], f"one of {context['expected_tags']}")
    if kind in _BOUNDS:
        key, words = _BOUNDS[kind]
        return _Complaint(path, value, words.format(context[key]))
    return _Complaint(path, value, _KINDS.get(kind, f"another value ({error['msg']})"))


def _path(place: Sequence[str | int], body: Any, *, missing: bool) -> tuple[str | int, ...]:
    """The path as the client knows it: pydantic's also has the names of union branches."""
    if place and place[0] != "body":
        return tuple(place[1:])  # of the query
    path: list[str | int] = []
    here = body
    for index, part in enumerate(place[1:], 1):
        if (isinstance(here, dict) and part in here) or (isinstance(here, list) and part in range(len(here))):
            here = cast(Any, here)[part]
        elif not (missing and index == len(place) - 1):
            continue
        path.append(part)
    return tuple(path)
