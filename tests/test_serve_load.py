"""Under load, in trouble, and told to end: nobody's answer just breaks off."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from conftest import save_model, tiny_llama
from serving import LONG, MODEL, InProcess, client_of, post, server_of, serving
from slipstream import LLM
from slipstream.serve.admission import Admission, Drain
from slipstream.serve.config import ApiKey, Limits, ServeConfig
from slipstream.serve.errors import ApiError
from slipstream.serve.server import HttpServer
from test_async import Gate, everything_is_free


@pytest.fixture(scope="module")
def roomy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a long context: its answers can take a while."""
    return save_model(tmp_path_factory.mktemp("models") / "roomy", tiny_llama(max_position_embeddings=8192))


@pytest.fixture
def llm(open_llm: Callable[..., LLM]) -> LLM:
    return open_llm()


def test_the_wait_follows_how_fast_answers_leave() -> None:
    now = 100.0
    door = Admission(2, ServeConfig(max_queue=4), Drain(1.0), clock=lambda: now)
    for _ in range(6):
        door.enter("", 1)

    def wait() -> int:
        with pytest.raises(ApiError) as refused:
            door.enter("", 1)
        assert refused.value.status == 429
        assert f"try again in {refused.value.headers['Retry-After']} s" in refused.value.message
        return int(refused.value.headers["Retry-After"])

    assert wait() == 1
    now += 12  # nothing has left for so long
    assert wait() == 12
    for _ in range(10):  # one in eight seconds, while all places are taken
        now += 8
        door.leave("", 1)
        door.enter("", 1)
    assert wait() == 10  # with the twelve before
    for _ in range(100):
        now += 2
        door.leave("", 1)
        door.enter("", 1)
    assert wait() == 2
    for _ in range(5):
        door.leave("", 1, ran=False)
    now += 1000  # with places to spare, answers leave as they come
    for _ in range(5):
        door.enter("", 1)
    assert wait() == 2
    door.leave("", 1)
    with pytest.raises(ApiError), door.brief("other"), door.brief("other"):
        raise AssertionError("there is room for one only")
    assert door.inside == 5


def test_the_flood_of_one_key_leaves_the_queue_to_others(open_llm: Callable[..., LLM]) -> None:
    llm = open_llm(max_num_seqs=2)
    gate = Gate(llm)
    keys = tuple(ApiKey.of(f"{name}={name}-key") for name in ("ann", "bob", "cy"))
    with serving(llm, max_queue=8, keys=keys) as server:

        async def main() -> None:
            async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:

                def ask(name: str, path: str = "/v1/completions", **more: Any) -> asyncio.Task[httpx.Response]:
                    body = {**LONG, **more} if path == "/v1/completions" else {"prompt": "a"}
                    headers = {"Authorization": f"Bearer {name}-key"}
                    return asyncio.create_task(client.post(path, json=body, headers=headers))

                async def fill(name: str, count: int) -> list[asyncio.Task[httpx.Response]]:
                    before = server.service.admission.inside
                    asked = [ask(name) for _ in range(count)]
                    while server.service.admission.inside < before + count:
                        await asyncio.sleep(0)
                    return asked

                inside = await fill("ann", 4)  # two run, and a quarter of the queue waits
                for path in ("/v1/completions", "/tokenize"):
                    refused = await ask("ann", path)
                    assert refused.status_code == 429
                    assert "4 answers of this key run or wait" in refused.json()["error"]["message"]
                    assert int(refused.headers["retry-after"]) >= 1
                assert (await ask("bob", "/tokenize")).status_code == 200
                inside += await fill("bob", 4)
                inside += await fill("cy", 2)
                assert "the queue is full" in (await ask("cy")).json()["error"]["message"]
                gate.open.set()
                assert {answer.status_code for answer in await asyncio.gather(*inside)} == {200}

        asyncio.run(asyncio.wait_for(main(), 120))
    everything_is_free(llm)


@pytest.mark.alone
def test_too_many_at_once_are_told_when_to_come_again(open_llm: Callable[..., LLM]) -> None:
    llm = open_llm(max_num_seqs=2)
    gate = Gate(llm)
    with serving(llm, max_queue=2) as server:

        async def main() -> None:
            async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
                inside = [asyncio.create_task(client.post("/v1/completions", json=LONG)) for _ in range(4)]
                while server.service.admission.inside < 4:
                    await asyncio.sleep(0)
                await client.get("/version")  # a connection that is there already
                took = []
                for _ in range(5):  # the machine may be busy with something else
                    begun = time.perf_counter()
                    refused = await client.post("/v1/completions", json=LONG)
                    took.append(time.perf_counter() - begun)
                    assert refused.status_code == 429
                assert min(took) < 0.1
                assert int(refused.headers["retry-after"]) >= 1
                assert refused.json()["error"]["code"] == "rate_limit_exceeded"
                assert (await client.get("/health")).status_code == 200
                gate.open.set()
                assert {answer.status_code for answer in await asyncio.gather(*inside)} == {200}
                assert (await client.post("/v1/completions", json=LONG)).status_code == 200
                assert "requests_refused_total" in (await client.get("/metrics")).text

        asyncio.run(asyncio.wait_for(main(), 120))
    everything_is_free(llm)


def test_forms_that_take_long_to_compile_hold_up_only_each_other(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare, released = InProcess.prepare, threading.Event()

    def slowly(host: InProcess, prompt: Any, params: Any, **more: Any) -> Any:
        if params.structured_outputs is not None:
            released.wait(60)
        return prepare(host, prompt, params, **more)

    monkeypatch.setattr(InProcess, "prepare", slowly)
    long_body = {"model": MODEL, "prompt": "a", "max_tokens": 2, "stop": ["x" * 250] * 16, "user": "u" * 500}
    with serving(llm, limits=Limits(request_s=2.0)) as server:

        async def main() -> None:
            async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
                form = {"model": MODEL, "prompt": "a", "guided_regex": "a"}
                slow = [asyncio.create_task(client.post("/v1/completions", json=form)) for _ in range(20)]
                while server.service.admission.inside < 20:
                    await asyncio.sleep(0)
                assert (await client.post("/v1/completions", json=long_body)).status_code == 200
                assert {answer.status_code for answer in await asyncio.gather(*slow)} == {408}

        try:
            asyncio.run(asyncio.wait_for(main(), 120))
        finally:
            released.set()
        assert server.service.admission.inside == 0
    everything_is_free(llm)


def test_a_request_that_takes_too_long(roomy: Path, open_llm: Callable[..., LLM]) -> None:
    llm = open_llm(roomy)
    with serving(llm, limits=Limits(request_s=0.3)) as server:
        answer = post(server, {**LONG, "max_tokens": 8000})
        assert answer.status_code == 408
        assert answer.headers["x-should-retry"] == "false"  # OpenAI's clients would ask for as much again
        assert "max_tokens" in answer.json()["error"]["message"]
        assert answer.json()["error"]["code"] == "timeout"
        with httpx.stream(
            "POST", f"{server.url}/v1/completions", json={**LONG, "max_tokens": 8000, "stream": True}
        ) as s:
            lines = [line for line in s.iter_lines() if line]
        assert s.status_code == 200
        assert '"code": "timeout"' in lines[-2]
        assert lines[-1] == "data: [DONE]"
        everything_is_free(llm)


async def leave(url: str, body: bytes, after: int) -> None:
    """Ask for a stream, read some of it, and hang up."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    for _ in range(after):
        await reader.read(256)
    writer.transport.abort()


def test_streams_in_pieces_of_one_size(llm: LLM) -> None:
    with serving(llm, chunk_chars=8) as server:
        asked = {**LONG, "max_tokens": 61, "seed": 4}
        whole = post(server, asked).json()["choices"][0]["text"]
        with httpx.stream("POST", f"{server.url}/v1/completions", json={**asked, "stream": True}) as stream:
            events = [line for line in stream.iter_lines() if line.startswith("data: {")]
        texts = [json.loads(event[6:])["choices"][0]["text"] for event in events]
        assert "".join(texts) == whole
        assert {len(text) for text in texts[:-1]} == {8}
        assert len({len(event.encode()) for event in events}) == 1
        assert post(server, {**asked, "stream": True, "logprobs": 1}).status_code == 400
        sizes = asyncio.run(writes(server.url, {**asked, "stream": True, "speculation": {"report": True}}))
        assert len(sizes) > 5
        assert len(set(sizes[:-1])) == 1  # each event is a write of its own, and the last has the report


async def writes(url: str, body: dict[str, Any]) -> list[int]:
    """Ask for a stream: bytes of each part that the server wrote, but the end of the stream."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    written = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(written)}\r\n"
    writer.write(f"{head}Content-Type: application/json\r\n\r\n".encode() + written)
    await reader.readuntil(b"\r\n\r\n")
    sizes = []
    while size := int(await reader.readline(), 16):
        part = await reader.readexactly(size + 2)
        if b"[DONE]" not in part:
            sizes.append(size)
    writer.close()
    return sizes


def test_a_server_that_is_told_to_end_lets_answers_finish(roomy: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "slipstream", "serve", "--model", str(roomy), "--port", "0", "--device", "cpu"]
    command += ["--served-model-name", MODEL, "--memory", "64MiB", "--log-format", "json"]
    (keys := tmp_path / "keys").write_text("ann=a-good-key\n")
    command += ["--api-keys", str(keys)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr is not None
        lines: list[str] = []
        for line in process.stderr:
            lines.append(line)
            if "serving" in line:
                break
        url = next(word for word in lines[-1].split() if word.startswith("http")).removesuffix("/v1")
        asked = {**LONG, "max_tokens": 1500, "stream": True}
        headers = {"Authorization": "Bearer a-good-key"}
        with httpx.stream("POST", f"{url}/v1/completions", json=asked, timeout=60, headers=headers) as stream:
            events = stream.iter_lines()
            assert next(events).startswith("data: {")
            keys.write_text("ann=a-new-key\n")
            process.send_signal(signal.SIGHUP)
            until = time.monotonic() + 30
            while httpx.get(f"{url}/v1/models", headers=headers).status_code == 200:  # the key that it had
                assert time.monotonic() < until
            process.send_signal(signal.SIGTERM)
            rest = [line for line in events if line]
        assert rest[-1] == "data: [DONE]"
        assert '"finish_reason":"length"' in rest[-2]
        said = process.stderr.read()
        assert process.wait(60) == 0
    logged = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    assert [entry["event"] for entry in logged if entry.get("path") != "/v1/models"] == [
        "keys read",
        "draining",
        "request",
    ]
    assert logged[-1]["completion_tokens"] == 1500
    assert "abc" not in said
    assert "leaked" not in said, "what libraries were loaded is taken down in order"


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
def gate(llm: LLM) -> Iterator[Gate]:
    """Passes run until it is closed: `gate.open.clear()`."""
    made = Gate(llm)
    made.open.set()
    yield made
    made.open.set()


@pytest.fixture
def nothing_breaks(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    caplog.set_level(logging.INFO)
    yield
    assert not [record.getMessage() for record in caplog.records if record.exc_info or record.levelno >= logging.ERROR]


@pytest.mark.usefixtures("nothing_breaks")
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


@pytest.mark.usefixtures("nothing_breaks")
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


@pytest.mark.usefixtures("nothing_breaks")
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


@pytest.mark.usefixtures("nothing_breaks")
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
