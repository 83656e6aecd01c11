"""HTTP as uvicorn reads it, but what cannot be read or has no room is refused in the same shape as everything else."""

from __future__ import annotations

import asyncio
import errno
import os
import sys
import time
from http import HTTPStatus
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.auto import AutoHTTPProtocol
from uvicorn.server import ServerState

from slipstream.serve.errors import ApiError
from slipstream.serve.logs import log

_RESERVE = 64
"""File descriptors that are no connections: the engine's channel, logs, models that are being read."""
_PROBES = 16
"""Of the reserve: connections beyond the limit that may still ask how the server is doing."""
_PROBE_S = 5.0
"""How long one of those may stay."""
_PROBED = frozenset({"/health", "/ping"})
_MOST = 1 << 20
"""Descriptors are not asked for beyond these: some systems name no limit at all."""
_AFTER_S = 10.0
"""How long it is told that there was no room, and how rarely it is logged."""


class Connections(ServerState):
    """Those that are open, and how many may be: a process without file descriptors hears of no one any more, and says
    nothing of it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.limit = _descriptors()
        self.most = max(1, self.limit - _RESERVE)
        self._refused, self._why = 0, ""
        self._last = self._told = -_AFTER_S

    @property
    def crowded(self) -> str:
        """Why there was no room for a connection within the last seconds; empty: there was."""
        return self._why if time.monotonic() - self._last < _AFTER_S else ""

    def check(self) -> None:
        """Can this process open anything at all? Others may have what it needs, or the whole system."""
        try:
            os.close(os.dup(sys.__stderr__.fileno() if sys.__stderr__ else 2))
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self.note(f"no file descriptor is left ({error.strerror})")

    def note(self, why: str) -> None:
        """There was no room."""
        now = time.monotonic()
        self._refused, self._last, self._why = self._refused + 1, now, why
        if now - self._told >= _AFTER_S:
            log.error("no room for connections", extra={"fields": {"why": why, "times": self._refused}})
            self._refused, self._told = 0, now


def _descriptors() -> int:
    """How many this process may have, when it has asked for all that it can get."""
    try:
        import resource
    except ImportError:  # Windows, which has no such limit
        return _MOST
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
        except (OSError, ValueError):  # it is not allowed after all (macOS has a limit of its own)
            pass
    return _MOST if soft == resource.RLIM_INFINITY else soft


def _whole(error: ApiError) -> bytes:
    """The answer, where there is no application to give it."""
    headers = {"content-type": "application/json", "connection": "close", "content-length": len(error.json)}
    told = "".join(f"{key}: {value}\r\n" for key, value in {**headers, **error.headers}.items())
    return f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\n{told}\r\n".encode() + error.json


_UNREADABLE = _whole(ApiError(400, "this is no HTTP request that can be read; mend its first line and headers"))
_NO_ROOM = ApiError(503, "too many connections; try again", code="too_many_connections", headers={"retry-after": "5"})
_FULL = _whole(_NO_ROOM)


def _only_probes(app: ASGIApp) -> ASGIApp:
    """For a connection beyond the limit: whoever watches the server hears how it is, and would start it again if not;
    everybody else is refused. Then it is over."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        async def closing(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
            await send(message)

        if scope["type"] == "http" and scope["path"] in _PROBED:
            await app(scope, receive, closing)
            return
        told = {"content-type": "application/json", "content-length": str(len(_NO_ROOM.json)), **_NO_ROOM.headers}
        headers = [(key.encode(), value.encode()) for key, value in told.items()]
        await closing({"type": "http.response.start", "status": _NO_ROOM.status, "headers": headers})
        await send({"type": "http.response.body", "body": _NO_ROOM.json})

    return answer


class HttpProtocol(AutoHTTPProtocol):  # type: ignore[misc,valid-type]  # whichever parser is installed
    transport: asyncio.Transport
    app: ASGIApp

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        state: Connections = self.server_state
        if len(self.connections) > state.most:
            state.note(f"{state.most} connections are open, and the limit is {state.limit} file descriptors")
            if len(self.connections) <= state.most + _PROBES:
                self.app = _only_probes(self.app)
                self.loop.call_later(_PROBE_S, transport.close)
            else:
                transport.write(_FULL)
                transport.close()

    def send_400_response(self, msg: str) -> None:
        """Called where the parser gave up: no request has begun, so there is nobody else to answer."""
        self.transport.write(_UNREADABLE)
        self.transport.close()
