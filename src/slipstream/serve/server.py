"""Runs the service: a uvicorn server with a limit on connections, which drains on SIGTERM and SIGINT."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import sys
import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from http import HTTPStatus
from types import FrameType
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.auto import AutoHTTPProtocol
from uvicorn.server import ServerState

from slipstream.core.errors import ConfigError, EngineDied
from slipstream.core.interpreter import responsive, tidy
from slipstream.engine.remote import EngineProcess
from slipstream.serve.app import make_gate
from slipstream.serve.config import ServeConfig
from slipstream.serve.errors import ApiError
from slipstream.serve.telemetry import log

_BACKLOG = 2048
_PARTING_S = 2.0
"""Time for clients to read the end of their answers when the server ends."""
_QUIET, _AGAIN = 5, 600
"""Ticks without a request after which garbage is collected, and ticks between later collections."""
_LOOK_S = 0.02
_TICKS_S = 10
"""Calls of `on_tick` a second. A hang is counted in ticks, so that a pause of the whole machine is none."""
_RESERVE = 64
"""File descriptors that are no connections: the engine's channel, logs, model files."""
_PROBES = 16
"""Of the reserve: connections beyond the limit that may still ask for the server's health."""
_PROBE_S = 5.0
_PROBED = frozenset({"/health", "/ping"})
_MOST = 1 << 20
"""Descriptors to ask for at most: some systems name no limit."""
_AFTER_S = 10.0
"""Time for which a refused connection shows in the health, and between log lines about refusals."""


class HttpServer(uvicorn.Server):
    """One engine behind one port. The constructor binds the socket, so the address is known before the server runs."""

    server_state: Connections

    def __init__(self, llm: EngineProcess, config: ServeConfig) -> None:
        self.socket = _bound(config.host, config.port)
        self._sockets = [self.socket]
        if config.metrics_port is not None:
            self._sockets.append(_bound(config.host, config.metrics_port))
            config = replace(config, metrics_port=self._sockets[1].getsockname()[1])
        connections = Connections()
        gate, self.service = make_gate(llm, config, lambda: connections.crowded)
        self._llm = llm
        self._died = ""  # why the engine ended by itself
        self._quiet = 0  # ticks without a request
        self._stalled = 0  # ticks since the engine was found to hang
        self._keys_changed = False
        super().__init__(
            uvicorn.Config(
                gate,
                http=HttpProtocol,
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=75,
                timeout_graceful_shutdown=round(_PARTING_S),  # `shutdown` below leaves nothing to wait for
                lifespan="off",
                ws="none",
            )
        )
        self.server_state = connections
        allowed = llm.max_num_seqs + config.max_queue
        if allowed > connections.most:
            log.warning("few descriptors", extra={"fields": {"limit": connections.limit, "answers": allowed}})
        host, port = self.socket.getsockname()[:2]
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def serve_forever(self) -> None:
        """Run until SIGTERM or SIGINT, then let running requests end. Raises `EngineDied` if the engine ended first."""
        with ExitStack() as stack, responsive():
            for bound in self._sockets:
                stack.enter_context(bound)
            if self.service.config.key_file is not None and threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGHUP, lambda *_: self.read_keys())
            self.run(sockets=self._sockets)
        if self._died:
            raise EngineDied(self._died)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain on a signal; a second Ctrl-C cuts off. uvicorn's own would also raise the signal again."""
        if self.service.drain.begun and sig == signal.SIGINT:
            self.service.drain.hurry()
        self.drain()

    def drain(self) -> None:
        """Admit no more requests, and end when the running ones have."""
        if self.service.drain.begin():
            log.info("draining", extra={"fields": {"answers": self.service.admission.inside}})

    def read_keys(self) -> None:
        """Read the file of keys again. Callable from any thread or a signal handler."""
        self._keys_changed = True

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second: check the engine, the drain and the keys. Returns True when the server must end."""
        drain, inside = self.service.drain, self.service.admission.inside
        self.server_state.check()
        pulse = self._llm.pulse()
        if not self._died and pulse.why:
            self._died = pulse.why
            log.error("engine died", extra={"fields": {"why": pulse.why}})
            drain.hurry()
        found = self.service.health()
        self._stalled = self._stalled + 1 if found.status == "stalled" else 0
        if self._stalled == 1:
            log.error("engine stalled", extra={"fields": {"why": found.reason}})
        elif self._stalled > _TICKS_S * self.service.config.stall_s:
            self._llm.kill(f"{found.reason}, and was killed")
        if drain.begun:
            drain.watchers_end.set()
        if drain.due and (cut := drain.cut_off()):
            log.warning("cut off", extra={"fields": {"requests": cut, "drain_s": round(drain.lasted_s, 1)}})
        if self._keys_changed:
            self._keys_changed = False
            self.service.keys.reload()
        self._quiet = 0 if inside else self._quiet + 1
        if self._quiet % _AGAIN == _QUIET:
            tidy()
        waited = drain.over_at is not None and time.monotonic() > drain.over_at + _PARTING_S
        self.should_exit = drain.begun and (not inside or waited)
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close connections after a limited wait. uvicorn's own would wait for clients that do not read, and then
        cancel them with a traceback in the log."""
        for server in self.servers:
            server.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        until = time.monotonic() + _PARTING_S
        while self.server_state.connections and time.monotonic() < until:
            await asyncio.sleep(_LOOK_S)
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        await super().shutdown(sockets)


def _bound(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind((host, port))
        made.listen(_BACKLOG)
    except OSError as error:
        made.close()
        raise ConfigError(f"host={host!r}, port={port}: cannot listen there ({error}); choose another") from error
    return made


class Connections(ServerState):
    """The open connections and their limit. Without file descriptors uvicorn accepts nothing and says nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.limit = _descriptors()
        self.most = max(1, self.limit - _RESERVE)
        self._refused, self._why = 0, ""
        self._last = self._told = -_AFTER_S

    @property
    def crowded(self) -> str:
        """Why there was lately no room for a connection, or ""."""
        return self._why if time.monotonic() - self._last < _AFTER_S else ""

    def check(self) -> None:
        """Note it if no file can be opened: other parts of this process, or of the system, may hold all descriptors."""
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
    """Raise this process's limit of file descriptors as far as possible, and return it."""
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
        except (OSError, ValueError):  # macOS has a lower limit of its own
            pass
    return _MOST if soft == resource.RLIM_INFINITY else soft


def _raw(error: ApiError) -> bytes:
    """The whole HTTP answer, for connections that no application serves."""
    headers = {"content-type": "application/json", "connection": "close", "content-length": len(error.json)}
    lines = "".join(f"{key}: {value}\r\n" for key, value in {**headers, **error.headers}.items())
    return f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\n{lines}\r\n".encode() + error.json


_UNREADABLE = _raw(ApiError(400, "this is no HTTP request that can be read; mend its first line and headers"))
_NO_ROOM = ApiError(
    503,
    "too many connections; try again",
    code="too_many_connections",
    headers={"retry-after": "5"},
)


def _only_probes(app: ASGIApp) -> ASGIApp:
    """Serves a connection beyond the limit: health checks are answered, since a supervisor would restart a server that
    does not; other requests are refused. Then the connection closes."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        async def closing(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
            await send(message)

        probe = scope["type"] == "http" and scope["path"] in _PROBED
        await (app if probe else _NO_ROOM.response())(scope, receive, closing)

    return answer


class HttpProtocol(AutoHTTPProtocol):  # type: ignore[misc,valid-type]  # the installed parser of uvicorn's two
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
                transport.write(_raw(_NO_ROOM))
                transport.close()

    def send_400_response(self, msg: str) -> None:
        """The parser gave up: no request began, so the application cannot answer."""
        self.transport.write(_UNREADABLE)
        self.transport.close()
