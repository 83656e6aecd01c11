"""A server whose engine has a process of its own: clients go away, it hangs, it is told to end, it is killed."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

import inside
from conftest import save_model, tiny_llama
from serving import LONG, MODEL, engine_process, post, server_of, serving
from slipstream.core.errors import EngineDied
from slipstream.engine.remote import EngineProcess
from slipstream.serve.server import HttpServer
from test_serve_load import leave

STREAMED = {**LONG, "stream": True}
FAR = 60.0
"""Seconds that nothing takes here, on whatever machine."""


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """A tiny model with a long context: its answers can take a while."""
    folder = save_model(tmp_path_factory.mktemp("models") / "roomy", tiny_llama(max_position_embeddings=8192))
    with engine_process(folder, max_num_seqs=16) as made:
        yield made


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + FAR
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def health(server: HttpServer) -> tuple[int, str]:
    found = httpx.get(f"{server.url}/health", timeout=FAR)
    return found.status_code, found.json()["status"]


def test_clients_that_go_away_leave_nothing_behind(process: EngineProcess) -> None:
    body = json.dumps({**STREAMED, "max_tokens": 4000}).encode()
    form = json.dumps({**STREAMED, "ignore_eos": False, "max_tokens": 4000, "guided_regex": "[ab]{3000}"}).encode()
    with serving(process, max_queue=64) as server:

        async def crowd() -> None:
            waiting = asyncio.Semaphore(24)

            async def one(i: int) -> None:
                async with waiting:
                    await leave(server.url, form if i % 5 == 0 else body, i % 3)

            await asyncio.gather(*(one(i) for i in range(100)))

        asyncio.run(asyncio.wait_for(crowd(), 120))
        until(lambda: server.service.admission.inside == 0)
        process.call(inside.everything_is_free)
        gc.collect()  # clients that left before their answers began leave compiled grammars
        assert process.call(inside.kept) == 0
        assert not process._expected
        assert post(server, {**LONG, "max_tokens": 3}).status_code == 200


@pytest.mark.parametrize("how", ["in a round", "altogether"])
def test_health_tells_one_that_hangs(process: EngineProcess, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nobody who asks waits for it."""
    monkeypatch.setattr(process, "kill", lambda why: None)  # it is not given up here
    with serving(process, stall_s=0.5) as server:
        waiting = threading.Thread(target=post, args=(server, LONG))
        if how == "in a round":
            process.call(inside.hold)
            waiting.start()
            assert process.call(inside.reached)
        else:
            process._process.send_signal(signal.SIGSTOP)
            waiting.start()
        until(lambda: health(server) == (503, "stalled"))
        assert httpx.get(f"{server.url}/live", timeout=FAR).json()["health"] == "stalled"
        assert "slipstream:num_requests_running" in httpx.get(f"{server.url}/metrics", timeout=FAR).text
        if how == "in a round":
            process.call(inside.release)
        else:
            process._process.send_signal(signal.SIGCONT)
        waiting.join(FAR)
        assert not waiting.is_alive()
        until(lambda: health(server) == (200, "ok"))


ENDS = {
    "killed": ("", "ended by SIGKILL"),
    "hangs": ("", "no sign of progress"),
    "holds the interpreter": ("lock", "no sign of progress"),
    "device fails": ("device", "RuntimeError: CUDA error: an illegal memory access"),
}


@pytest.mark.parametrize("how", ENDS)
def test_one_that_ends_or_hangs_ends_all_streams_and_the_server(
    tiny_target: Path, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    then, why = ENDS[how]
    caplog.set_level(logging.INFO, "slipstream.serve")
    raised: list[BaseException] = []
    whole: list[httpx.Response] = []
    with EngineProcess(tiny_target, device="cpu", memory="64MiB", drafter="none", threads=1) as process:
        process.call(inside.hold, 3, then)
        server = server_of(process, stall_s=1.5 if why == "no sign of progress" else FAR)

        def serve() -> None:
            try:
                server.serve_forever()
            except EngineDied as error:
                raised.append(error)

        serving_thread = threading.Thread(target=serve, daemon=True)  # a test that fails must not hang
        serving_thread.start()
        asking = threading.Thread(target=lambda: whole.append(post(server, LONG)))
        asked = {**STREAMED, "logit_bias": {"64": 100}}  # "a": three bytes may be no character yet
        with httpx.stream("POST", f"{server.url}/v1/completions", json=asked, timeout=FAR) as stream:
            events = stream.iter_lines()
            assert next(events).startswith("data: {")
            asking.start()
            until(lambda: server.service.admission.inside == 2)
            if how == "killed":
                process._process.kill()
            elif then:
                with suppress(EngineDied):  # it may be over before that is answered
                    process.call(inside.release)
            rest = [line for line in events if line]
        asking.join(FAR)
        serving_thread.join(FAR)
        assert not serving_thread.is_alive()
        found = server.service.health()
        assert (found.status, found.http_status) == ("dead", 503)
        assert why in found.reason
        assert process._process.poll() is not None
        with pytest.raises(EngineDied):
            process.call(inside.process_id)
    assert rest[-1] == "data: [DONE]"
    assert json.loads(rest[-2].removeprefix("data: "))["error"]["code"] == "engine_dead"
    assert (whole[0].status_code, whole[0].json()["error"]["code"]) == (503, "engine_dead")
    (error,) = raised
    assert why in str(error)
    assert [record.getMessage() for record in caplog.records].count("engine died") == 1


def ended(process_id: int) -> bool:
    """Where nobody waits for it, something is left of it that does nothing any more."""
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def run(*command: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def catches_sigterm(process_id: int) -> bool:
    caught = Path(f"/proc/{process_id}/status").read_text().partition("SigCgt:")[2].split()[0]
    return bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1)


@pytest.mark.parametrize("stopped", [False, True])
def test_it_ends_when_its_parent_is_killed(stopped: bool) -> None:
    """Though it cannot see that itself: stopped, as where native code holds the interpreter."""
    if stopped and sys.platform != "linux":
        pytest.skip("where the system does not do it, the process has to see the end of its channel")
    code = "import time; from slipstream.engine.remote import spawn; print(spawn()[0].pid, flush=True); "
    with run(sys.executable, "-c", code + "time.sleep(1000)") as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert not ended(child)
        if stopped:
            until(lambda: catches_sigterm(child))  # it has begun
            os.kill(child, signal.SIGSTOP)
        parent.kill()
        until(lambda: ended(child))


@contextmanager
def command(model: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], str, int]]:
    """`slipstream serve`, its address and its engine's process."""
    settings = ["--model", str(model), "--device", "cpu", "--memory", "64MiB", "--threads", "1", *options]
    settings += ["--served-model-name", MODEL, "--port", "0", "--log-format", "json"]
    with run(sys.executable, "-m", "slipstream", "serve", *settings) as server:
        assert server.stderr is not None
        lines: list[str] = []
        while not lines or "serving" not in lines[-1]:
            lines.append(server.stderr.readline())
            assert lines[-1], "".join(lines)
        url = next(word for word in lines[-1].split() if word.startswith("http")).removesuffix("/v1")
        (child,) = map(int, Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split())
        yield server, url, child


@pytest.mark.parametrize("signalled", [True, False])
def test_a_supervisor_sees_the_end_of_one_that_hangs(tiny_target: Path, signalled: bool) -> None:
    """Told to end it does, within its time, as it should; else it says that something is wrong."""
    limits = ("--drain-timeout", "0.5", "--stall-timeout", str(FAR) if signalled else "1")
    with command(tiny_target, *limits) as (server, url, child):
        asked = {**STREAMED, "max_tokens": 240}
        with httpx.stream("POST", f"{url}/v1/completions", json=asked, timeout=FAR) as stream:
            events = stream.iter_lines()
            assert next(events).startswith("data: {")
            os.kill(child, signal.SIGSTOP)
            if signalled:
                server.terminate()
            rest = [line for line in events if line]
        assert server.wait(FAR) == (0 if signalled else 1)
        assert ended(child)
        assert server.stderr is not None
        said = server.stderr.read()
    code = json.loads(rest[-2].removeprefix("data: "))["error"]["code"]
    assert (code, rest[-1]) == ("shutting_down" if signalled else "engine_dead", "data: [DONE]")
    assert ("no sign of progress" in said) != signalled
    assert "Traceback" not in said


def test_signals_for_both_processes_let_answers_finish(tiny_target: Path) -> None:
    """As a terminal and a service manager send them."""
    with command(tiny_target) as (server, url, child):
        assert server.stderr is not None
        asked: dict[str, Any] = {**STREAMED, "max_tokens": 240}
        with httpx.stream("POST", f"{url}/v1/completions", json=asked, timeout=FAR) as stream:
            events = stream.iter_lines()
            assert next(events).startswith("data: {")
            for signalled in (child, server.pid):
                os.kill(signalled, signal.SIGINT)
                os.kill(signalled, signal.SIGTERM)
            rest = [line for line in events if line]
        said = server.stderr.read()
        assert server.wait(FAR) == 0, said
        assert ended(child)
    assert rest[-1] == "data: [DONE]"
    assert '"finish_reason":"length"' in rest[-2]
    logged = [json.loads(line)["event"] for line in said.splitlines() if line.startswith("{")]
    assert logged[0] == "draining"
    assert "Traceback" not in said
