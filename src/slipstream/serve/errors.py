"""Errors as clients of OpenAI's interface know them: a status, and a JSON object that says what and which field."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from starlette.responses import Response

from slipstream.core.errors import Aborted, CapacityError, EngineDied, InvalidRequest, QueueFull

_NAMED = re.compile(r"([a-z][a-z0-9_]*(?:\.[a-z0-9_]+)*)[=:]|(structured_outputs(?:\.\w+)?)")
_PROMPT_IDS = "prompt_token_ids: "
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
}


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
        """What the log may say of it: messages can quote what a client wrote."""
        where = "request" if self.param is None or self.code == "unknown_field" else self.param.split(".")[0]
        return f"{where}: {self.code or self.status}"

    @property
    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def json(self) -> bytes:
        return json.dumps(self.body, ensure_ascii=False).encode("utf-8", "replace")

    def response(self) -> Response:
        return Response(self.json, self.status, self.headers, "application/json")


def refused(param: str, remedy: str) -> ApiError:
    """A field that has a wrong value."""
    return ApiError(400, f"{param}: {remedy}", param=param, code="invalid_value")


@contextmanager
def about(param: str) -> Iterator[None]:
    """What is wrong without a name is wrong with this field: the engine has other names for a prompt, or none."""
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
    """What a client is told of an error inside: of its own request everything, of ours only that there was one."""
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
    """An error in the words of a log: of a client's mistake only where it was, of ours everything."""
    told = from_exception(error)
    return told.for_log if told is error or told.status < 500 else f"{type(error).__name__}: {error}"
