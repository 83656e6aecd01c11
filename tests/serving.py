"""A real server on a free port of this machine, around a tiny model, for tests that talk to it as clients do."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from openai import OpenAI

from slipstream import LLM
from slipstream.serve.config import ServeConfig
from slipstream.serve.server import HttpServer

MODEL = "tiny"


@contextmanager
def serving(llm: LLM, **options: Any) -> Iterator[HttpServer]:
    """A server that runs in a thread of its own, and is drained at the end."""
    server = HttpServer(llm, ServeConfig(**{"models": (MODEL,), "port": 0, **options}))
    thread = threading.Thread(target=server.serve_forever, name="http")
    thread.start()
    try:
        yield server
    finally:
        server.drain()
        thread.join(60)
        assert not thread.is_alive()


def client_of(server: HttpServer, key: str = "none") -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=60)
