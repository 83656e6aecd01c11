"""Runs the service: a uvicorn server that drains when it is told to end."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from types import FrameType

import uvicorn

from slipstream.core.errors import ConfigError, EngineDied
from slipstream.core.responsive import responsive, tidy
from slipstream.engine.remote import EngineProcess
from slipstream.serve.app import make_gate
from slipstream.serve.config import ServeConfig
from slipstream.serve.logs import log
from slipstream.serve.protocol import Connections, HttpProtocol

_BACKLOG = 2048
_PARTING_S = 2.0
"""What clients have to read the end of their answers when the server ends; who reads nothing is not waited for."""
_QUIET, _AGAIN = 5, 600
"""Ticks, of a tenth of a second, without anybody inside, after which there is time to tidy up; and again after so many,
for those who came and went between two of them."""
_LOOK_S = 0.02
_TICKS_S = 10
"""Of `on_tick`, a second. What hangs is told by ticks: after a pause of the whole machine the engine has its time."""


class HttpServer(uvicorn.Server):
    """One engine behind one port. The socket is bound when it is made, so that its address is known."""

    server_state: Connections

    def __init__(self, llm: EngineProcess, config: ServeConfig) -> None:
        self.socket = _bound(config.host, config.port)
        self._sockets = [self.socket]
        if config.metrics_port is not None:
            self._sockets.append(_bound(config.host, config.metrics_port))
            config = replace(config, metrics_port=self._sockets[1].getsockname()[1])
        gate, self.service = make_gate(llm, config)
        self._llm = llm
        self._died = ""  # why the engine is no more, where nobody closed it
        self._quiet = 0  # ticks since somebody was inside
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
        self.server_state = self.service.connections
        allowed, room = llm.max_num_seqs + config.max_queue, self.server_state.most
        if allowed > room:
            log.warning("few descriptors", extra={"fields": {"limit": self.server_state.limit, "answers": allowed}})
        host, port = self.socket.getsockname()[:2]
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def serve_forever(self) -> None:
        """Until SIGTERM or SIGINT; then what runs has time to end. Raises `EngineDied` where the engine ended first."""
        with ExitStack() as stack, responsive():
            for bound in self._sockets:
                stack.enter_context(bound)
            if self.service.config.key_file is not None and threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGHUP, lambda *_: self.read_keys())
            self.run(sockets=self._sockets)
        if self._died:
            raise EngineDied(self._died)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """On a signal; a second Ctrl-C does not wait. uvicorn would raise it again, with the engine still open."""
        if self.service.drain.begun and sig == signal.SIGINT:
            self.service.drain.hurry()
        self.drain()

    def drain(self) -> None:
        """Take nobody in any more, end when those inside have their answers."""
        if self.service.drain.begin():
            log.info("draining", extra={"fields": {"answers": self.service.admission.inside}})

    def read_keys(self) -> None:
        """Read the file of keys again. Any thread, or a signal."""
        self._keys_changed = True

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second: is it time to end?"""
        drain, inside = self.service.drain, self.service.admission.inside
        self.service.connections.check()
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
        """Close what is open. Left to uvicorn, a client that does not read would be waited for, and then cancelled with
        a traceback in the log."""
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
