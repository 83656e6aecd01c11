"""Runs the service: a uvicorn server that drains when it is told to end."""

from __future__ import annotations

import gc
import signal
import socket
import sys
from types import FrameType

import uvicorn

from slipstream.core.errors import ConfigError
from slipstream.engine.llm import LLM
from slipstream.serve.app import make_gate
from slipstream.serve.config import ServeConfig
from slipstream.serve.logs import log

_SWITCH_S = 0.0001
"""How long the event loop's thread may compute while the engine's waits for the interpreter; Python's own, 5 ms,
would be a whole round."""
_BACKLOG = 2048


class HttpServer(uvicorn.Server):
    """One engine behind one port. The socket is bound when it is made, so that its address is known."""

    def __init__(self, llm: LLM, config: ServeConfig) -> None:
        gate, self.service = make_gate(llm, config)
        super().__init__(
            uvicorn.Config(
                gate,
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=75,
                timeout_graceful_shutdown=max(1, round(config.drain_s)),
                lifespan="off",
                ws="none",
            )
        )
        self.socket = _bound(config.host, config.port)
        host, port = self.socket.getsockname()[:2]
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def serve_forever(self) -> None:
        """Until SIGTERM or SIGINT; then what runs has time to end."""
        before = sys.getswitchinterval()
        sys.setswitchinterval(min(before, _SWITCH_S))
        gc.collect()
        gc.freeze()  # a large body has Python look for garbage: not among all that torch and the model have brought
        try:
            self.run(sockets=[self.socket])
        finally:
            gc.unfreeze()
            sys.setswitchinterval(before)
            self.socket.close()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """On a signal; a second Ctrl-C does not wait. uvicorn would raise it again, with the engine still open."""
        self.force_exit = self.should_exit and sig == signal.SIGINT
        self.drain()

    def drain(self) -> None:
        """Take nobody in any more, end when those inside have their answers."""
        if not self.service.admission.draining:
            self.service.admission.draining = True
            log.info("draining", extra={"fields": {"answers": self.service.admission.inside}})
        self.should_exit = True


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
