"""Strangers at the door: keys, hostile bodies, too many at once, clients that go away, a server that is told to end."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from conftest import CHAT_TEMPLATE, save_model, tiny_llama
from serving import MODEL, client_of, serving
from slipstream import LLM, SamplingParams
from slipstream.core.draft import Tree
from slipstream.core.errors import ConfigError
from slipstream.drafters.base import HostDrafter
from slipstream.serve.config import ApiKey, Limits, ServeConfig
from slipstream.serve.logs import PlainLines
from slipstream.serve.server import HttpServer
from test_async import Gate, everything_is_free

LONG: dict[str, Any] = {"model": MODEL, "prompt": "abc", "max_tokens": 200, "ignore_eos": True}


@pytest.fixture(scope="module")
def roomy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a long context: its answers can take a while."""
    return save_model(tmp_path_factory.mktemp("models") / "roomy", tiny_llama(max_position_embeddings=8192))


@pytest.fixture
def llm(open_llm: Callable[..., LLM]) -> LLM:
    return open_llm()


def post(server: HttpServer, body: Any, path: str = "/v1/completions", **more: Any) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body, timeout=60, **more)


class TestKeys:
    @pytest.fixture
    def server(self, llm: LLM) -> Iterator[HttpServer]:
        with serving(llm, keys=(ApiKey.of("ann=one-key"), ApiKey.of("bob=other-key"), ApiKey.of("bare-key"))) as made:
            yield made

    def test_only_who_has_one_comes_in(self, server: HttpServer, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO, "slipstream.serve")
        for key in ("one-key", "other-key", "bare-key"):
            with client_of(server, key) as client:
                assert client.completions.create(model=MODEL, prompt="a", max_tokens=2).choices
        for key in ("one-kez", "ann=one-key", "one-key "[:-2], "x" * 10_000):
            with client_of(server, key) as client, pytest.raises(openai.AuthenticationError, match="not known here"):
                client.completions.create(model=MODEL, prompt="a", max_tokens=2)
        assert [r.status_code for r in (httpx.get(f"{server.url}{p}") for p in ("/metrics", "/live", "/version"))] == [
            401
        ] * 3
        assert httpx.get(f"{server.url}/openapi.json").status_code == 401
        assert httpx.get(f"{server.url}/health").status_code == 200
        fields = [getattr(record, "fields", {}) for record in caplog.records]
        assert [f["tenant"] for f in fields if f.get("status") == 200][:2] == ["ann", "bob"]
        assert not any("-key" in str(f) and "key-" not in str(f) for f in fields)

    def test_a_tenant_is_the_keys(self, server: HttpServer, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        seen: list[str] = []
        prepare = llm.prepare

        def noted(prompt: Any, params: Any, **more: Any) -> Any:
            seen.append(params.speculation.tenant)
            return prepare(prompt, params, **more)

        monkeypatch.setattr(llm, "prepare", noted)
        for key in ("one-key", "other-key"):
            post(server, {"model": MODEL, "prompt": "a"}, headers={"Authorization": f"Bearer {key}"})
        assert seen == ["ann", "bob"]


def test_keys_as_base64_writes_them() -> None:
    """`openssl rand -base64 16` ends with `==`: no part of a key may become a name, which the log shows."""
    bare = ApiKey.of("c2VjcmV0LXNlY3JldA==")
    assert bare.tenant.startswith("key-")
    assert bare == ApiKey.of(" c2VjcmV0LXNlY3JldA== ")
    named = ApiKey.of("ann=c2VjcmV0LXNlY3JldA==")
    assert (named.tenant, named.digest) == ("ann", bare.digest)
    for wrong in ("", "=", "==", "ann=", "a b", "ann=a b", "an/n=key"):
        with pytest.raises(ConfigError, match="API key"):
            ApiKey.of(wrong)
    with pytest.raises(ConfigError, match="twice"):
        ServeConfig(keys=(ApiKey.of("ann=one-key"), ApiKey.of("bob=one-key")))


def test_a_line_of_the_log_is_one_line() -> None:
    """Paths come from clients, who would write lines of their own, or to the terminal."""
    for value in ("/a\n12:00:00 INFO request status=200", "/\x1b[2J", "/\u2028"):
        entry = logging.LogRecord("slipstream.serve", logging.INFO, "", 0, "request", None, None)
        entry.fields = {"path": value}
        assert PlainLines().format(entry).isprintable()


def test_the_log_has_no_text_of_clients(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "slipstream")
    with serving(llm) as server:
        for body in (
            {"model": MODEL, "prompt": "XSECRET", "user": "XSECRET"},
            {"model": "XSECRET", "prompt": "a"},
            {"model": MODEL, "prompt": "a", "XSECRET": 1},
            {"model": MODEL, "prompt": "a", "stop": ["XSECRET" * 1000]},
            {"model": MODEL, "prompt": "a", "logit_bias": {"XSECRET": 1}},
            {"model": MODEL, "prompt": "a", "speculation": {"drafter": "XSECRET"}},
            {"model": MODEL, "prompt": "XSECRET" * 1000},
        ):
            post(server, body)
        post(server, {"model": MODEL, "messages": [{"role": "XSECRET", "content": "XSECRET"}]}, "/v1/chat/completions")
    fields = [getattr(record, "fields", {}) for record in caplog.records]
    assert len([f for f in fields if "status" in f]) == 8
    assert len(fields[0]["user"]) == 12
    assert "XSECRET" not in str(fields) + caplog.text


def hostile() -> dict[str, bytes]:
    def body(**fields: Any) -> bytes:
        return json.dumps({"model": MODEL, "prompt": "a", **fields}).encode()

    deep: Any = {}
    for _ in range(300):
        deep = {"properties": {"a": deep}}

    def tool(parameters: Any) -> dict[str, Any]:
        return {"type": "function", "function": {"name": "f", "parameters": parameters}}

    def chat(**fields: Any) -> bytes:
        return json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "a"}], **fields}).encode()

    long_text = "word " * 200_000
    return {
        "no JSON": b"{",
        "nothing": b"",
        "not UTF-8": b'{"model": "tiny", "prompt": "\xff\xfe"}',
        "half a character": b'{"model": "tiny", "prompt": "\\ud800"}',
        "deep": b'{"model": "tiny", "prompt": ' + b"[" * 200_000 + b"]" * 200_000 + b"}",
        "a huge number": b'{"model": "tiny", "prompt": "a", "seed": ' + b"9" * 100_000 + b"}",
        "no number": b'{"model": "tiny", "prompt": "a", "temperature": NaN}',
        "infinity": b'{"model": "tiny", "prompt": "a", "temperature": 1e999}',
        "a long text": body(prompt="word " * 200_000),
        "many ids": body(prompt=[1] * 350_000),
        "many wrong ids": body(prompt=[[1, "x", None]] * 60_000),
        "many prompts": body(prompt=["a"] * 100_000),
        "many fields": body(**{f"f{i}": i for i in range(60_000)}),
        "many biases": body(logit_bias={str(i): 1 for i in range(60_000)}),
        "many stops": body(stop=["x"] * 100_000),
        "a long stop": body(stop="x" * 1_000_000),
        "long bad words": body(bad_words=["x" * 10_000] * 64),
        "too many answers": body(n=128, prompt=["a"] * 64),
        "a long user": body(user="x" * 1_000_000),
        "too large": b" " * 5_000_000,
        "deep tools": chat(tools=[tool(deep)]),
        "deep tools that must be called": chat(tools=[tool(deep)], tool_choice="required"),
        "definitions that are none": chat(tools=[tool({"$defs": []})], tool_choice="required"),
        "long tools": chat(tools=[tool({"description": long_text})]),
        "a long prediction": body(prediction={"type": "content", "content": long_text}),
        "long material": body(speculation={"drafter": "suffix", "material": long_text}),
        "many messages": chat(messages=[{"role": "user", "content": "a"}] * 30_000),
    }


def test_hostile_bodies_are_refused_at_once_while_others_go_on(roomy: Path, open_llm: Callable[..., LLM]) -> None:
    llm, bodies = open_llm(roomy, drafter=("ngram", "suffix")), hostile()
    llm.tokenizer.chat_template = "{{ tools }}" + CHAT_TEMPLATE
    with serving(llm) as server:
        beats: list[float] = []
        done = threading.Event()

        def listen() -> None:
            with httpx.stream(
                "POST", f"{server.url}/v1/completions", json={**LONG, "max_tokens": 7000, "stream": True}
            ) as s:
                for line in s.iter_lines():
                    beats.append(time.perf_counter())
                    if done.is_set() or line == "data: [DONE]":
                        return

        other = threading.Thread(target=listen)
        other.start()
        took: dict[str, float] = {}
        client = httpx.Client(base_url=server.url, headers={"Content-Type": "application/json"}, timeout=60)
        try:
            for name, body in bodies.items():
                path = "/v1/chat/completions" if b'"messages"' in body else "/v1/completions"
                for _ in range(3):  # the machine may be busy with something else
                    begun = time.perf_counter()
                    answer = client.post(path, content=body)
                    took[name] = time.perf_counter() - begun
                    assert 400 <= answer.status_code < 500, (name, answer.text[:300])
                    assert answer.json()["error"]["message"], name
                    assert len(answer.content) < 2000, name
                    if took[name] < 1.0:
                        break
        finally:
            done.set()
            other.join(60)
            client.close()
        assert max(took.values()) < 1.0, took
        assert max(later - earlier for earlier, later in itertools.pairwise(beats)) < 1.0


def test_a_body_that_does_not_end(llm: LLM) -> None:
    """One that is sent in pieces, with no length said before."""

    def pieces() -> Iterator[bytes]:
        for _ in range(100):
            yield b" " * 10_000

    with serving(llm, limits=Limits(body_bytes=100_000)) as server:
        answer = httpx.post(f"{server.url}/tokenize", content=pieces())
        assert answer.status_code == 413
    with serving(llm, limits=Limits(body_s=0.2)) as server:

        async def slowly() -> bytes:
            host, port = server.url.removeprefix("http://").split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
            line = await reader.readline()
            writer.close()
            return line

        assert b"408" in asyncio.run(asyncio.wait_for(slowly(), 30))


def test_a_page_from_elsewhere_cannot_ask(llm: LLM) -> None:
    """A browser sends a plain form to any address, but JSON only where the server agrees."""
    with serving(llm) as server:
        body = json.dumps({"model": MODEL, "prompt": "a"})
        answer = httpx.post(f"{server.url}/v1/completions", content=body, headers={"Content-Type": "text/plain"})
        assert answer.status_code == 400
        assert httpx.options(f"{server.url}/v1/completions").status_code == 405


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
    prepare, released = llm.prepare, threading.Event()

    def slowly(prompt: Any, params: Any, **more: Any) -> Any:
        if params.structured_outputs is not None:
            released.wait(60)
        return prepare(prompt, params, **more)

    monkeypatch.setattr(llm, "prepare", slowly)
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
        assert answer.json()["error"]["code"] == "timeout"
        with httpx.stream(
            "POST", f"{server.url}/v1/completions", json={**LONG, "max_tokens": 8000, "stream": True}
        ) as s:
            lines = [line for line in s.iter_lines() if line]
        assert s.status_code == 200
        assert '"code": "timeout"' in lines[-1]
        everything_is_free(llm)


async def leave(url: str, body: bytes, after: int) -> None:
    """Ask for a stream, read some of it, and hang up."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    for _ in range(after):
        await reader.read(256)
    writer.transport.abort()


def test_a_thousand_clients_that_go_away_leave_nothing_behind(roomy: Path, open_llm: Callable[..., LLM]) -> None:
    llm = open_llm(roomy, max_num_seqs=32)
    body = json.dumps({**LONG, "max_tokens": 4000, "stream": True}).encode()
    with serving(llm, max_queue=64) as server:

        async def crowd(count: int) -> None:
            waiting = asyncio.Semaphore(32)

            async def one(after: int) -> None:
                async with waiting:
                    await leave(server.url, body, after)

            await asyncio.gather(*(one(i % 3) for i in range(count)))

        def gone() -> None:
            until = time.monotonic() + 30
            while server.service.admission.inside and time.monotonic() < until:
                llm._loop.call(lambda: None)
            assert server.service.admission.inside == 0
            everything_is_free(llm)

        asyncio.run(asyncio.wait_for(crowd(500), 120))
        gone()
        before = _resident()
        asyncio.run(asyncio.wait_for(crowd(500), 120))
        gone()
        assert _resident() < 1.05 * before
        assert post(server, {**LONG, "max_tokens": 3}).status_code == 200


def _resident() -> int:
    """Bytes of memory that this process has."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


class Bad(HostDrafter):
    """Answers for a while, then hangs or raises."""

    name = "bad"

    def __init__(self, *, hangs: bool) -> None:
        self._hangs = hangs
        self._asked = 0
        self.released = threading.Event()

    def propose(self, requests: Any, budgets: Any) -> list[Tree]:
        self._asked += 1
        if self._asked > 3:
            if self._hangs:
                self.released.wait(60)
            raise RuntimeError("killed")
        return [Tree() for _ in requests]


@pytest.mark.parametrize("hangs", [True, False])
def test_a_drafter_that_dies_loses_no_request(open_llm: Callable[..., LLM], hangs: bool) -> None:
    bad = Bad(hangs=hangs)
    llm = open_llm(drafter=bad)
    params = SamplingParams(max_tokens=100, ignore_eos=True, temperature=0)
    with serving(llm) as server:

        async def main() -> list[httpx.Response]:
            async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
                bodies = [{**LONG, "prompt": "x" * i, "max_tokens": 100, "temperature": 0} for i in range(1, 9)]
                return await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies))

        answers = asyncio.run(asyncio.wait_for(main(), 120))
        bad.released.set()
        assert {answer.status_code for answer in answers} == {200}
        expected = [out.outputs[0].text for out in llm.generate(["x" * i for i in range(1, 9)], params)]
        assert [answer.json()["choices"][0]["text"] for answer in answers] == expected
        assert httpx.get(f"{server.url}/health").status_code == 200


def test_health_tells_a_round_that_hangs(open_llm: Callable[..., LLM]) -> None:
    llm = open_llm()
    gate = Gate(llm)
    with serving(llm, stall_s=0.05) as server:
        waiting = threading.Thread(target=post, args=(server, LONG))
        waiting.start()
        gate.reached.wait(30)
        until = time.monotonic() + 30
        while (answer := httpx.get(f"{server.url}/health")).status_code == 200 and time.monotonic() < until:
            pass
        assert answer.status_code == 503
        assert answer.json()["status"] == "stalled"
        gate.open.set()
        waiting.join(60)


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


def test_a_server_that_is_told_to_end_lets_answers_finish(roomy: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "slipstream", "serve", "--model", str(roomy), "--port", "0", "--device", "cpu"]
    command += ["--served-model-name", MODEL, "--memory", "64MiB", "--log-format", "json"]
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
        with httpx.stream("POST", f"{url}/v1/completions", json=asked, timeout=60) as stream:
            events = stream.iter_lines()
            assert next(events).startswith("data: {")
            process.send_signal(signal.SIGTERM)
            rest = [line for line in events if line]
        assert rest[-1] == "data: [DONE]"
        assert '"finish_reason":"length"' in rest[-2]
        said = process.stderr.read()
        assert process.wait(60) == 0
    logged = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    assert [entry["event"] for entry in logged] == ["draining", "request"]
    assert logged[1]["completion_tokens"] == 1500
    assert "abc" not in said
