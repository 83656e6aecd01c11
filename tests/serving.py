"""A real server on a free port of this machine, around a tiny model, for tests that talk to it as clients do."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from openai import OpenAI

import inside
from slipstream import LLM
from slipstream.engine.host import EngineHost
from slipstream.engine.remote.process import EngineProcess
from slipstream.serve.config import ServeConfig
from slipstream.serve.server import HttpServer

MODEL = "tiny"


@contextmanager
def engine_process(model: Path, **options: Any) -> Iterator[EngineProcess]:
    """A tiny engine in a process of its own, which is found whole at the end."""
    with EngineProcess(
        model, **{"device": "cpu", "max_num_seqs": 8, "memory": "64MiB", "threads": 1, **options}
    ) as made:
        yield made
        made.call(inside.everything_is_free)


def server_of(engine: EngineHost | LLM, **options: Any) -> HttpServer:
    """An `LLM` of this process stands in for an engine that cannot hang: it has all but `kill`."""
    return HttpServer(cast(EngineHost, engine), ServeConfig(**{"models": (MODEL,), "port": 0, **options}))


@contextmanager
def serving(engine: EngineHost | LLM, **options: Any) -> Iterator[HttpServer]:
    """A server that runs in a thread of its own, and is drained at the end."""
    server = server_of(engine, **options)
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
