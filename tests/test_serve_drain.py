"""A server that is told to end: those inside go on, those who come hear of it, and nobody's answer just breaks off."""

from __future__ import annotations

import json
import logging
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import openai
import pytest

from serving import MODEL, client_of, server_of
from slipstream import LLM
from slipstream.serve.server import HttpServer
from test_async import Gate, everything_is_free

ASKED: dict[str, Any] = {"model": MODEL, "prompt": "abc", "max_tokens": 60, "ignore_eos": True}
SOON_S = 10.0
"""Much more than an end without anybody inside takes, much less than the time that those inside have by default."""


@contextmanager
def ending(llm: LLM, **options: Any) -> Iterator[tuple[HttpServer, threading.Thread]]:
    """A server that the test tells to end; in its own thread."""
    server = server_of(llm, **options)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server, thread
    finally:
        server.drain()
        thread.join(60)
        assert not thread.is_alive()


@pytest.fixture
def llm(open_llm: Callable[..., LLM]) -> LLM:
    return open_llm()


@pytest.fixture
def gate(llm: LLM) -> Iterator[Gate]:
    """Passes run until it is closed: `gate.open.clear()`."""
    made = Gate(llm)
    made.open.set()
    yield made
    made.open.set()


@pytest.fixture(autouse=True)
def nothing_breaks(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    caplog.set_level(logging.INFO)
    yield
    assert not [record.getMessage() for record in caplog.records if record.exc_info or record.levelno >= logging.ERROR]


def test_streams_go_on_and_others_are_told_to_come_again(llm: LLM, gate: Gate) -> None:
    with ending(llm) as (server, thread):
        with httpx.stream("POST", f"{server.url}/v1/completions", json={**ASKED, "stream": True}, timeout=60) as stream:
            events = stream.iter_lines()
            assert next(events).startswith("data: {")
            gate.open.clear()
            server.drain()
            health = httpx.get(f"{server.url}/health")
            assert (health.status_code, health.json()["status"]) == (503, "draining")
            with client_of(server) as client, pytest.raises(openai.APIStatusError) as refused:
                client.completions.create(model=MODEL, prompt="a")
            assert refused.value.status_code == 503
            assert int(refused.value.response.headers["retry-after"]) >= 1
            assert refused.value.response.headers["connection"] == "close"
            assert refused.value.code == "shutting_down"
            gate.open.set()
            rest = [line for line in events if line]
        assert rest[-1] == "data: [DONE]"
        assert '"finish_reason":"length"' in rest[-2]
        assert not any('"error"' in line for line in rest)
        thread.join(SOON_S)
        assert not thread.is_alive()
    everything_is_free(llm)


def test_when_the_time_is_up_each_is_told(llm: LLM, gate: Gate, caplog: pytest.LogCaptureFixture) -> None:
    whole: list[httpx.Response] = []
    with ending(llm, drain_s=0.2) as (server, thread):
        asking = threading.Thread(
            target=lambda: whole.append(httpx.post(f"{server.url}/v1/completions", json=ASKED, timeout=60))
        )
        with httpx.stream("POST", f"{server.url}/v1/completions", json={**ASKED, "stream": True}, timeout=60) as stream:
            events = stream.iter_lines()
            assert next(events).startswith("data: {")
            gate.open.clear()
            asking.start()
            while server.service.admission.inside < 2:
                pass
            server.drain()
            rest = [line for line in events if line]
            thread.join(SOON_S)  # the engine is still at its round
            assert not thread.is_alive()
        asking.join(SOON_S)
        gate.open.set()
    error = json.loads(rest[-2].removeprefix("data: "))["error"]
    assert (error["code"], error["type"], error["param"]) == ("shutting_down", "server_error", None)
    assert rest[-1] == "data: [DONE]"
    assert sum('"error"' in line for line in rest) == 1
    assert whole[0].status_code == 503
    assert whole[0].json()["error"]["code"] == "shutting_down"
    assert [record.getMessage() for record in caplog.records].count("cut off") == 1
    everything_is_free(llm)


def test_the_client_raises_what_it_was_told(llm: LLM, gate: Gate) -> None:
    with ending(llm, drain_s=0.2) as (server, _), client_of(server) as client:
        stream = client.completions.create(
            model=MODEL, prompt="abc", max_tokens=60, stream=True, extra_body={"ignore_eos": True}
        )
        next(stream)
        gate.open.clear()
        server.drain()
        with pytest.raises(openai.APIError, match="shutting down"):
            list(stream)


def test_a_second_signal_waits_for_nobody(llm: LLM, gate: Gate, caplog: pytest.LogCaptureFixture) -> None:
    with (
        ending(llm) as (server, thread),
        httpx.stream("POST", f"{server.url}/v1/completions", json={**ASKED, "stream": True}, timeout=60) as stream,
    ):
        events = stream.iter_lines()
        assert next(events).startswith("data: {")
        gate.open.clear()
        server.handle_exit(signal.SIGINT, None)
        server.handle_exit(signal.SIGINT, None)
        assert [line for line in events if line][-1] == "data: [DONE]"
        thread.join(SOON_S)
        assert not thread.is_alive()
    (cut,) = [record for record in caplog.records if record.getMessage() == "cut off"]
    fields: dict[str, float] = vars(cut)["fields"]
    assert fields["requests"] == 1
    assert fields["drain_s"] < SOON_S, "what they had, not what they might have had"


def test_who_asks_for_nothing_is_not_waited_for(llm: LLM) -> None:
    """Connections that are kept, a body that never comes, one who watches."""
    with ending(llm) as (server, thread), httpx.Client(base_url=server.url) as kept:
        assert kept.get("/version").status_code == 200
        address = server.socket.getsockname()
        with (
            socket.create_connection(address) as half,
            httpx.stream("GET", f"{server.url}/live?stream=true&every=60") as watched,
        ):
            half.sendall(b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
            assert next(watched.iter_lines()).startswith("data: ")
            begun = time.monotonic()
            server.drain()
            thread.join(60)
            assert time.monotonic() - begun < SOON_S
