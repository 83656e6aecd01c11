"""The first that a request meets and the last that its answer passes: id, key, body, log.

It is plain ASGI around the application: what is wrong with a request is said before anything reads it, and what a
stream sends goes through untouched.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from slipstream.serve.admission import Admission
from slipstream.serve.auth import Keyring
from slipstream.serve.config import ServeConfig
from slipstream.serve.drain import Drain
from slipstream.serve.errors import ApiError, for_log, from_exception
from slipstream.serve.hosts import check_host, checked_names
from slipstream.serve.logs import log, log_failure, log_request
from slipstream.serve.page import PATHS
from slipstream.serve.record import Record

METRICS = "/metrics"
WATCHED = frozenset({METRICS, "/health", "/ping", "/version"})
"""Paths for operators. They show nothing of any client."""
OPEN = WATCHED.union(PATHS)
"""Paths that need no key: those that start, stop and watch servers have none, and the page has to ask for one."""
WORK = frozenset({"/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"})
_NO_HEAD = frozenset({"/live"})
"""Paths whose answer may have no end: everywhere else HEAD is GET without the body, which uvicorn leaves out."""
_REQUEST_ID = re.compile(rb"[\w.:@/+=-]{1,128}")
IGNORED_FIELDS = "X-Slipstream-Ignored-Fields"
UNENFORCED = "X-Slipstream-Unenforced"
_LONGEST_HEADER = 2000
GONE = 499
"""nginx' status for clients that went away before they were answered; it is seen in logs and metrics only."""


class Gate:
    """ended: hears of every request when it is over."""

    def __init__(
        self,
        app: ASGIApp,
        config: ServeConfig,
        keys: Keyring,
        admission: Admission,
        drain: Drain,
        *,
        max_body: int,
        ended: Callable[[Scope, Record], None],
    ) -> None:
        self._app = app
        self._config = config
        self._keys = keys
        self._admission = admission
        self._drain = drain
        self._max_body = max_body
        self._names = checked_names(config)
        self._ended = ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._serve(scope, receive, send)
        elif scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1008})

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        record = Record(method=scope["method"], path=scope["path"])
        record.attach(scope)
        record.send = send
        if scope["method"] == "HEAD" and record.path not in _NO_HEAD:
            scope = {**scope, "method": "GET"}
        asked_id = dict(scope["headers"]).get(b"x-request-id", b"")
        record.asked_id = asked_id.decode() if _REQUEST_ID.fullmatch(asked_id) else ""

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                more = [(b"x-request-id", (record.asked_id or record.id).encode())]
                if record.ignored:
                    more.append((IGNORED_FIELDS.lower().encode(), ", ".join(record.ignored).encode()))
                if record.unenforced:
                    told = json.dumps("; ".join(record.unenforced))[1:-1]  # names of properties may be anything
                    more.append((UNENFORCED.lower().encode(), told[:_LONGEST_HEADER].encode()))
                if self._drain.begun:
                    more.append((b"connection", b"close"))  # whoever asks again should find another server
                message["headers"] = [*message.get("headers", ()), *more]
            await send(message)

        try:
            body = await self._admit(scope, receive, record)
            if body is not None:
                record.body_bytes = len(body)
                await self._app(scope, _replayed(body, receive), answer)
        except asyncio.CancelledError:
            if self._drain.over_at is None:
                raise
            record.error = "cut off"  # the server ends, and its connection is closed: nothing is left to say
        except Exception as error:
            record.error = for_log(error)
            if not isinstance(error, ApiError):
                log_failure(record, error)
            if not record.status:
                await from_exception(error).response()(scope, receive, answer)
        finally:
            if record.disconnected or not record.status:
                record.status = GONE
            self._ended(scope, record)
            if record.path not in OPEN or log.isEnabledFor(logging.DEBUG):
                log_request(record)

    async def _admit(self, scope: Scope, receive: Receive, record: Record) -> bytes | None:
        """The body of a request that may come in; None: its client went away."""
        headers = dict(scope["headers"])
        check_host(headers, self._names)
        self._check_port(scope, record.path)
        if record.path not in OPEN:
            record.tenant = self._keys.tenant_of(headers.get(b"authorization", b"").decode("latin-1"))
        if record.path in WORK:
            self._admission.check(record.tenant)
        return await self._read(receive, _length(headers.get(b"content-length")))

    def _check_port(self, scope: Scope, path: str) -> None:
        """Where metrics have a port of their own, there is nothing else on it, and they are nowhere else."""
        apart = self._config.metrics_port
        at_metrics = apart is not None and (scope.get("server") or ("", None))[1] == apart
        if path not in WATCHED if at_metrics else apart is not None and path == METRICS:
            where = "this port has the metrics alone" if at_metrics else "the metrics have a port of their own"
            raise ApiError(404, f"{path[:200]}: not on this port: {where}", code="not_found")

    async def _read(self, receive: Receive, announced: int) -> bytes | None:
        limit, patience_s = self._max_body, self._config.limits.body_s
        too_long = ApiError(
            413,
            f"the body has more than {limit} bytes; send less, or have the server started with a larger --max-body",
            code="body_too_long",
        )
        if announced > limit:
            raise too_long
        parts: list[bytes] = []
        size, more = 0, True
        try:
            async with asyncio.timeout(patience_s):
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    if size > limit:
                        raise too_long
                    more = message.get("more_body", False)
        except TimeoutError:
            raise ApiError(408, f"the body was not here within {patience_s:g} s", code="timeout") from None
        return b"".join(parts)


def _length(header: bytes | None) -> int:
    return int(header) if header is not None and header.isdigit() and len(header) < 19 else 0


def _replayed(body: bytes, receive: Receive) -> Receive:
    """The body in one piece, then whatever comes."""
    first = True

    async def replay() -> Message:
        nonlocal first
        if first:
            first = False
            return {"type": "http.request", "body": body, "more_body": False}
        return await receive()

    return replay
