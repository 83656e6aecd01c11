"""API keys, host names, the log, traces, hostile bodies, and limits."""

from __future__ import annotations

import asyncio
import hmac
import itertools
import json
import logging
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from conftest import CHAT_TEMPLATE, save_model, tiny_llama
from serving import LONG, MODEL, InProcess, client_of, post, serving
from slipstream import LLM
from slipstream.core.errors import ConfigError, RequestError
from slipstream.serve import live
from slipstream.serve.config import ApiKey, Limits, ServeConfig
from slipstream.serve.errors import ApiError
from slipstream.serve.gate import Keyring, check_host, checked_names
from slipstream.serve.live import LiveView
from slipstream.serve.server import HttpServer
from slipstream.serve.telemetry import PlainLines, log_to_stderr


@pytest.fixture(scope="module")
def roomy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a long context: its answers can take a while."""
    return save_model(tmp_path_factory.mktemp("models") / "roomy", tiny_llama(max_position_embeddings=8192))


@pytest.fixture
def llm(open_llm: Callable[..., LLM]) -> LLM:
    return open_llm()


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
        for path in ("/live", "/openapi.json", "/v1/models", "/tokenize"):
            assert httpx.get(f"{server.url}{path}").status_code == 401
        for path in ("/health", "/ping", "/version", "/metrics"):  # what watches a server has no key
            seen = httpx.get(f"{server.url}{path}")
            assert seen.status_code == 200
            assert "bob" not in seen.text
        fields = [getattr(record, "fields", {}) for record in caplog.records]
        assert [f["tenant"] for f in fields if f.get("status") == 200][:2] == ["ann", "bob"]
        assert not any("-key" in str(f) and "key-" not in str(f) for f in fields)

    def test_a_tenant_is_the_keys(self, server: HttpServer, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        seen: list[str] = []
        prepare = InProcess.prepare

        def noted(host: InProcess, prompt: Any, params: Any, **more: Any) -> Any:
            seen.append(params.speculation.tenant)
            return prepare(host, prompt, params, **more)

        monkeypatch.setattr(InProcess, "prepare", noted)
        for key in ("one-key", "other-key"):
            post(server, {"model": MODEL, "prompt": "a"}, headers={"Authorization": f"Bearer {key}"})
        assert seen == ["ann", "bob"]


def test_a_key_sees_its_own_requests_alone(llm: LLM) -> None:
    keys = tuple(ApiKey.of(f"{name}={name}-key") for name in ("zoe", "bob"))
    with serving(llm, keys=keys) as server:
        headers = {name: {"Authorization": f"Bearer {name}-key"} for name in ("zoe", "bob")}

        def live(name: str) -> dict[str, Any]:
            answer = httpx.get(f"{server.url}/live", headers=headers[name])
            assert ("bob" if name == "zoe" else "zoe") not in answer.text
            return dict(answer.json()["engine"])

        asked = {**LONG, "max_tokens": 30, "speculation": {"report": True}}
        told = post(server, asked, headers=headers["zoe"]).json()["choices"][0]["speculation"]
        own, other = live("zoe"), live("bob")
        assert own["generated_tokens"] == 30
        assert (own["prompt_tokens"], own["finished"]) == (3, {"length": 1})
        assert (own["rounds"], own["draft_tokens"]) == (told["rounds"], told["drafted"])
        assert own["plan"] == told["plan"]
        assert not any(value for name, value in other.items() if name not in ("drafters", "decisions"))
        assert not any(count for counts in other["drafters"].values() for count in counts.values())
        assert own["pages"] == own["pages_used"] == 0  # they belong to all
        stream = {**LONG, "max_tokens": 200, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=stream, headers=headers["bob"]) as events:
            lines = events.iter_lines()
            while live("bob")["generated_tokens"] == 0:
                next(lines)
        with httpx.stream("GET", f"{server.url}/live?stream=true&every=0.1", headers=headers["zoe"]) as events:
            lines = events.iter_lines()
            next(lines)
            server.service.keys.tenants = frozenset({"bob"})  # zoe's is not known any more
            assert len(list(lines)) < 20


def test_a_disconnect_does_not_lower_the_counts_of_a_key(roomy: Path, open_llm: Callable[..., LLM]) -> None:
    headers = {"Authorization": "Bearer zoe-key"}
    with serving(open_llm(roomy), keys=(ApiKey.of("zoe=zoe-key"),)) as server:

        def generated() -> int:
            return int(httpx.get(f"{server.url}/live", headers=headers).json()["engine"]["generated_tokens"])

        asked = {**LONG, "max_tokens": 7000, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=asked, headers=headers) as events:
            lines = events.iter_lines()
            while (seen := generated()) == 0:
                next(lines)
        while server.service.admission.inside:
            time.sleep(0.01)
        assert generated() >= seen


def test_requests_that_met_their_times_are_counted(llm: LLM) -> None:
    for slo, met in (({"slo_ttft_ms": 1e6, "slo_tpot_ms": 1e6}, "yes"), ({"slo_tpot_ms": 1e-6}, "no")):
        with serving(llm, **slo) as server:
            assert post(server, {**LONG, "max_tokens": 5}).status_code == 200
            text = httpx.get(f"{server.url}/metrics").text
        assert f'slipstream:slo_requests_total{{met="{met}",model_name="{MODEL}"}} 1.0' in text
    with pytest.raises(ConfigError, match=r"slo_ttft_ms=0: must be above 0"):
        ServeConfig(slo_ttft_ms=0)


def test_keys_of_a_file_are_read_again(llm: LLM, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What is wrong with a new file leaves the old keys, and the log never has any."""
    caplog.set_level(logging.INFO, "slipstream.serve")
    keys = tmp_path / "keys"
    keys.write_text("# of ours\nann=one-key\n\nbob=other-key\n")
    with serving(llm, keys=(ApiKey.of("root=given-key"),), key_file=keys) as server:

        def known() -> list[str]:
            names = ("given", "one", "other", "new")
            headers = [{"Authorization": f"Bearer {name}-key"} for name in names]
            answers = [httpx.get(f"{server.url}/v1/models", headers=header) for header in headers]
            return [name for name, answer in zip(names, answers, strict=True) if answer.status_code == 200]

        def read(event: str) -> None:
            caplog.clear()
            server.read_keys()
            until = time.monotonic() + 30
            while event not in [record.getMessage() for record in caplog.records]:
                assert time.monotonic() < until

        assert known() == ["given", "one", "other"]
        keys.write_text("ann=new-key\n")
        read("keys read")
        assert known() == ["given", "new"]
        for wrong in (b"", b"# none\n", b"bob=new-key\nann=new-key\n", b"an/n=other-key\n", b"\xff\xfe", None):
            keys.unlink()
            if wrong is not None:
                keys.write_bytes(wrong)
            read("keys not changed")
            why = "".join(str(getattr(record, "fields", "")) for record in caplog.records)
            assert f"--api-keys {keys}" in why
            assert "-key" not in why.replace("--api-keys", "")
            assert known() == ["given", "new"]
            keys.touch()


def test_metrics_may_have_a_port_of_their_own(llm: LLM) -> None:
    with serving(llm, metrics_port=0, keys=(ApiKey.of("a-good-key"),)) as server:
        apart = f"http://127.0.0.1:{server.service.config.metrics_port}"
        assert "slipstream:num_requests_running" in httpx.get(f"{apart}/metrics").text
        assert httpx.get(f"{apart}/health").status_code == 200
        assert httpx.get(f"{server.url}/health").status_code == 200
        headers = {"Authorization": "Bearer a-good-key", "Host": apart.removeprefix("http://")}
        for address in (f"{server.url}/metrics", f"{apart}/v1/models", f"{apart}/", f"{apart}/live"):
            answer = httpx.get(address, headers=headers)
            assert answer.status_code == 404
            assert "not on this port" in answer.json()["error"]["message"]


def test_a_key_is_looked_up_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request costs the same with 10,000 keys as with one."""
    compared, real = [], hmac.compare_digest

    def compare(one: bytes, other: bytes) -> bool:
        compared.append(one)
        return real(one, other)

    monkeypatch.setattr(hmac, "compare_digest", compare)
    keyring = Keyring([ApiKey.of(f"t{number}=key-{number}") for number in range(1000)])
    assert keyring.tenant_of("Bearer key-7") == "t7"
    assert keyring.tenant_of("bearer  key-999 ") == "t999"
    with pytest.raises(ApiError, match="not known here"):
        keyring.tenant_of("Bearer key-1000")
    with pytest.raises(ApiError, match="not known here"):
        keyring.tenant_of("Basic key-7")
    assert len(compared) <= 3


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


def test_a_log_that_is_not_read_holds_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines beyond a limit are dropped and counted."""
    reading, writing = os.pipe()
    lines, root = 30_000, logging.getLogger("slipstream")
    level = root.level

    def talk() -> None:
        for _ in range(lines):
            root.info("a line")

    with os.fdopen(reading) as reader, os.fdopen(writing, "w") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        handler = log_to_stderr("json")
        try:
            talker = threading.Thread(target=talk, daemon=True)
            talker.start()
            talker.join(30)
            assert not talker.is_alive()
            read: list[dict[str, Any]] = []
            listener = threading.Thread(target=lambda: read.extend(map(json.loads, reader)))
            listener.start()
            while not any(line["event"] == "log lines dropped" for line in read[-1:]):
                time.sleep(0.01)
            handler.close()
        finally:
            root.removeHandler(handler)
            root.setLevel(level)
        stderr.close()
        listener.join(30)
    assert len(read) - 1 + read[-1]["lines"] == lines


def test_the_log_has_no_text_of_clients(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "slipstream")
    with serving(llm) as server:
        for body in (
            {"model": MODEL, "prompt": "XSECRET", "user": "XSECRET"},
            {"model": "XSECRET", "prompt": "a"},
            {"model": MODEL, "prompt": "a", "a text XSECRET": 1},  # fields are named, texts are not
            {"model": MODEL, "prompt": "a", "stop": ["XSECRET" * 1000]},
            {"model": MODEL, "prompt": "a", "logit_bias": {"XSECRET": 1}},
            {"model": MODEL, "prompt": "a", "speculation": {"drafter": "XSECRET"}},
            {"model": MODEL, "prompt": "XSECRET" * 1000},
        ):
            post(server, body)
        post(server, {"model": MODEL, "messages": [{"role": "XSECRET", "content": "XSECRET"}]}, "/v1/chat/completions")
    fields = [getattr(record, "fields", {}) for record in caplog.records]
    assert len([f for f in fields if "status" in f]) == 8
    assert next(len(f["user"]) for f in fields if "user" in f) == 12
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
        "many fields": body(n=0, **{f"f{i}": i for i in range(60_000)}),
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


@pytest.mark.alone
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


@pytest.mark.parametrize("error", [ValueError("secret"), RequestError("the engine is closed")])
def test_an_engine_that_cannot_start_gives_its_place_back(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def start(host: InProcess, *requests: Any) -> Any:
        raise error

    monkeypatch.setattr(InProcess, "start", start)
    with serving(llm) as server:
        for stream in (False, True):
            answer = post(server, {**LONG, "stream": stream})
            assert answer.status_code == 500
            assert "secret" not in answer.text
        assert server.service.admission.inside == 0


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
            writer.write(b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
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


def test_where_there_is_no_room_for_a_connection(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    """Whoever comes is told, and so are `/health` and the log, once."""
    with serving(llm) as server, httpx.Client(base_url=server.url) as kept, httpx.Client(base_url=server.url) as other:
        assert kept.get("/health").json() == {"status": "ok", "reason": ""}
        server.server_state.most = 1
        for _ in range(3):
            refused = other.get("/version")
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "too_many_connections")
            assert refused.headers["retry-after"] == "5"
            probed = other.get("/health")  # on a new connection: a server that does not answer is started again
            assert (probed.status_code, probed.headers["connection"]) == (200, "close")
        found = kept.get("/health")
        assert (found.status_code, found.json()["status"]) == (200, "crowded")
        assert f"{server.server_state.limit} file descriptors" in found.json()["reason"]
        server.server_state.most = 2
        assert other.get("/version").status_code == 200
    assert [record.getMessage() for record in caplog.records].count("no room for connections") == 1


def test_the_limit_of_descriptors_is_raised_and_judged(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        with serving(llm) as server:
            raised = server.server_state.limit
            assert raised == resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 256
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    with serving(llm, max_queue=raised):
        (warned,) = [record for record in caplog.records if record.getMessage() == "few descriptors"]
    assert vars(warned)["fields"]["answers"] > raised
    with serving(llm, max_queue=0) as server, httpx.Client(base_url=server.url) as kept:
        assert kept.get("/health").status_code == 200
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            while kept.get("/health").json()["status"] != "crowded":
                pass
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


HERE = ["localhost", "LOCALHOST:8000", "127.0.0.1", "127.0.0.1:8000", "127.1.2.3", "[::1]", "[::1]:8000", "localhost."]


STRANGE = ["evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "", "10.0.0.1", "["]


def comes_in(name: str, **options: Any) -> bool:
    try:
        check_host({b"host": name.encode()}, checked_names(ServeConfig(**options)))
    except ApiError:
        return False
    return True


@pytest.mark.parametrize("bound", ["127.0.0.1", "::1", "localhost"])
def test_a_server_for_this_machine_answers_to_its_names_alone(bound: str) -> None:
    assert all(comes_in(name, host=bound) for name in HERE)
    assert not any(comes_in(name, host=bound) for name in STRANGE)


def test_names_beyond_this_machine() -> None:
    assert comes_in("gpu-box:8000", host="0.0.0.0")
    assert comes_in("chat.example", keys=(ApiKey.of("a-good-key"),))  # a page from elsewhere has none
    assert comes_in("Chat.Example:443", allowed_hosts=("chat.example",))
    assert comes_in("localhost", allowed_hosts=("chat.example",))
    assert not comes_in("evil.example", allowed_hosts=("chat.example",), host="0.0.0.0")
    assert not comes_in("evil.example", allowed_hosts=("chat.example",), keys=(ApiKey.of("a-good-key"),))
    assert comes_in("evil.example", allowed_hosts=("*",))
    check_host({}, checked_names(ServeConfig()))  # a browser always says it
    for wrong in ("chat.example:443", "http://chat.example", ""):
        with pytest.raises(ConfigError, match="allowed_hosts"):
            ServeConfig(allowed_hosts=(wrong,))


def test_a_page_that_took_our_address_reads_nothing(open_llm: Callable[..., LLM]) -> None:
    with serving(open_llm()) as server:
        for path in ("/", "/live", "/v1/models", "/health", "/nothing"):
            answer = httpx.get(server.url + path, headers={"Host": "evil.example"})
            assert answer.status_code == 403
            assert answer.json()["error"]["code"] == "host_not_allowed"
            assert "--allowed-host" in answer.json()["error"]["message"]
        body = {"model": "tiny", "prompt": "a"}
        asked = httpx.post(f"{server.url}/v1/completions", json=body, headers={"Host": "evil.example:8000"})
        assert asked.status_code == 403
        assert httpx.get(f"{server.url}/v1/models", headers={"Host": "localhost:1"}).status_code == 200


def test_pages_from_elsewhere_ask_where_their_origin_is_allowed(open_llm: Callable[..., LLM]) -> None:
    """A browser's preflight has no key; the request behind it needs one."""
    page, other = {"Origin": "https://chat.example"}, {"Origin": "https://evil.example"}
    asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    keys = (ApiKey.of("a-good-key"),)
    with serving(open_llm(), keys=keys, allowed_origins=("https://chat.example",)) as server:
        path = f"{server.url}/v1/chat/completions"
        allowed = httpx.options(path, headers={**page, **asks})
        assert allowed.status_code == 200
        assert allowed.headers["access-control-allow-origin"] == page["Origin"]
        assert "authorization" in allowed.headers["access-control-allow-headers"]
        assert "access-control-allow-origin" not in httpx.options(path, headers={**other, **asks}).headers
        answer = httpx.post(path, json={}, headers=page)
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (401, page["Origin"])
        assert "access-control-allow-origin" not in httpx.post(path, json={}, headers=other).headers
    for wrong in ("chat.example", "https://", ""):
        with pytest.raises(ConfigError, match="allowed_origins"):
            ServeConfig(allowed_origins=(wrong,))


def test_how_often_watchers_look_is_limited(open_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    llm = open_llm()
    with serving(llm) as server:
        for wrong in ("nan", "inf", "-1", "0", "0.01", "1e9", "x"):
            assert httpx.get(f"{server.url}/live?stream=true&every={wrong}").status_code == 400
    view = LiveView(llm.snapshot, lambda: 0, lambda: "ok")
    monkeypatch.setattr(live, "MAX_WATCHERS", 3)

    async def main() -> None:
        async with aclosing(view.watch(1.01)) as a, aclosing(view.watch(1.02)) as b, aclosing(view.watch(1.99)) as c:
            first, second, third = await anext(a), await anext(b), await anext(c)
            assert first == second == third  # the next slower pace, which they share
            with pytest.raises(ApiError) as refused:
                view.watch(1.0)
            assert refused.value.status == 429
            assert refused.value.headers["Retry-After"]
        async with aclosing(view.watch(1.0)) as again:
            assert await anext(again)

    asyncio.run(main())


PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture(scope="module")
def exporter() -> InMemorySpanExporter:
    """What was told; the library takes one provider a process."""
    spans = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    trace.set_tracer_provider(provider)
    return spans


@pytest.fixture
def spans(exporter: InMemorySpanExporter) -> InMemorySpanExporter:
    exporter.clear()
    return exporter


def of_ours(spans: InMemorySpanExporter) -> list[Any]:
    """Newer versions of FastAPI have some of their own."""
    return [s for s in spans.get_finished_spans() if getattr(s.instrumentation_scope, "name", "") == "slipstream"]


def test_strangers_make_no_names(open_llm: Callable[..., LLM], spans: InMemorySpanExporter) -> None:
    with serving(open_llm(), telemetry=True, keys=(ApiKey.of("a-good-key"),)) as server:
        known = {"Authorization": "Bearer a-good-key"}
        for i in range(3):
            assert httpx.get(f"{server.url}/secret/{i}").status_code == 401
            assert httpx.get(f"{server.url}/secret/{i}", headers=known).status_code == 404
            assert httpx.get(f"{server.url}/v1/models/m{i}", headers=known).status_code == 404
            assert httpx.get(f"{server.url}/live?every=x{i}", headers=known).status_code == 400
            assert httpx.request("PROPFIND", f"{server.url}/v1/models", headers=known).status_code == 405
        metrics = httpx.get(f"{server.url}/metrics", headers=known).text
    names = {span.name for span in of_ours(spans)}
    assert names == {"GET other", "GET /v1/models/{model}", "GET /live", "_OTHER /v1/models", "GET /metrics"}
    assert "secret" not in metrics


def test_a_span_a_request(open_llm: Callable[..., LLM], spans: InMemorySpanExporter) -> None:
    with serving(open_llm(), telemetry=True) as server:
        body = {"model": MODEL, "prompt": "XSECRET", "max_tokens": 9, "ignore_eos": True}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, headers={"traceparent": PARENT})
        httpx.post(f"{server.url}/v1/completions", json={"nonsense": "XSECRET"})
    good, bad = of_ours(spans)
    assert good.attributes is not None
    assert bad.attributes is not None
    assert good.name == "POST /v1/completions"
    assert good.context is not None
    assert f"{good.context.trace_id:032x}" == PARENT.split("-")[1]
    assert good.attributes["gen_ai.usage.output_tokens"] == 9
    assert good.attributes["slipstream.request_id"] == answer.headers["x-request-id"]
    assert good.start_time is not None
    assert good.end_time is not None
    assert good.end_time > good.start_time
    assert bad.attributes["http.response.status_code"] == 400
    assert not any("XSECRET" in span.to_json() for span in spans.get_finished_spans())


def test_it_is_not_imported_unless_asked_for() -> None:
    code = "import sys, slipstream.serve.server; print('opentelemetry.sdk' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.strip() == "False"
