"""A real server on a free port of this machine, around a tiny model, for tests that talk to it as clients do."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import httpx
from openai import OpenAI

import inside
from slipstream import LLM, SamplingParams
from slipstream.core.errors import InvalidRequest
from slipstream.core.outputs import Pulse
from slipstream.engine.remote import EngineProcess
from slipstream.engine.requests import Prompt, Request, Requests
from slipstream.engine.state import Job
from slipstream.engine.streams import OutputStream
from slipstream.serve.config import ServeConfig
from slipstream.serve.server import HttpServer

MODEL = "tiny"
LONG: dict[str, Any] = {"model": MODEL, "prompt": "abc", "max_tokens": 200, "ignore_eos": True}


@contextmanager
def engine_process(model: Path, **options: Any) -> Iterator[EngineProcess]:
    """A tiny engine in a process of its own, which is found whole at the end."""
    with EngineProcess(
        model, **{"device": "cpu", "max_num_seqs": 8, "memory": "64MiB", "threads": 1, **options}
    ) as made:
        yield made
        made.call(inside.everything_is_free)


class InProcess:
    """Stands in for an `EngineProcess`, around an `LLM` that a test can look into and change."""

    def __init__(self, llm: LLM) -> None:
        self.llm, self.tokenizer = llm, llm.tokenizer
        self.max_model_len, self.max_num_seqs, self.drafters = llm.max_model_len, llm.max_num_seqs, llm.drafters
        self._requests = Requests(llm.tokenizer, llm._intake.loaded)
        self._numbers = itertools.count()
        self._jobs: dict[int, Job] = {}

    def prepare(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        streaming: bool = True,
        compiling: Any = None,
    ) -> Request:
        params = sampling_params or SamplingParams()
        request = self._requests.make(prompt, params, streaming=streaming, request_id=request_id)
        job = self.llm._intake.job_of(request, compiling=compiling)
        number, unenforced = next(self._numbers), tuple(job.answers[0].output.unenforced)
        self._jobs[number] = job
        return replace(request, number=number, unenforced=unenforced)

    def start(self, *requests: Request) -> OutputStream:
        return self.llm._start(*[self._jobs.pop(request.number) for request in requests])

    def expect_forms(self) -> None:
        with suppress(InvalidRequest):
            self.llm._intake.grammars.warm()

    def pulse(self) -> Pulse:
        return self.llm._loop.pulse()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.llm, name)


def server_of(engine: EngineProcess | LLM, **options: Any) -> HttpServer:
    host = InProcess(engine) if isinstance(engine, LLM) else engine
    return HttpServer(cast(Any, host), ServeConfig(**{"models": (MODEL,), "port": 0, **options}))


@contextmanager
def serving(engine: EngineProcess | LLM, **options: Any) -> Iterator[HttpServer]:
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


def post(server: HttpServer, body: Any, path: str = "/v1/completions", **more: Any) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body, timeout=60, **more)


def client_of(server: HttpServer, key: str = "none") -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=60)
