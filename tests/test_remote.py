"""An engine in a process of its own, without a server: its answers, its errors, and the channel to it."""

from __future__ import annotations

import asyncio
import gc
import logging
import pickle
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

import inside
from conftest import EOS
from serving import InProcess, engine_process
from slipstream import LLM, RequestOutput, SamplingParams, SpeculationParams, StructuredOutputsParams
from slipstream.constrain.limits import CompileLimits
from slipstream.core import errors
from slipstream.core.errors import EngineDied, InvalidRequest, ModelError, QueueFull, RequestError
from slipstream.core.outputs import CompletionOutput, Pulse
from slipstream.engine import remote
from slipstream.engine.remote import Channel, EngineProcess, spawn
from slipstream.engine.requests import Request
from slipstream.engine.streams import OUTBOX_SHARE, Outbox

EVERYTHING = SamplingParams(
    n=2,
    temperature=0.7,
    top_p=0.9,
    top_k=40,
    min_p=0.01,
    presence_penalty=0.1,
    frequency_penalty=0.2,
    repetition_penalty=1.1,
    logit_bias={65: 1.5},
    allowed_token_ids=[65, 66],
    bad_words=["zz"],
    min_tokens=3,
    max_tokens=30,
    stop=["é", "\x00"],
    stop_token_ids=[9],
    include_stop_str_in_output=True,
    ignore_eos=True,
    skip_special_tokens=False,
    seed=2**64 - 1,
    logprobs=2,
    prediction="abc abc",
    output_kind="delta",
    cache_salt="salt",
    timeout_s=100.0,
    speculation=SpeculationParams(
        drafter="suffix", draft_tokens=3, verifier="rejection", tenant="ann", material=("x y", "z"), origins=True
    ),
)
"""No field has its default, except for the grammar, which excludes some of the others."""

FORM = StructuredOutputsParams(regex="[ab]{3,9}")


@pytest.fixture(scope="module")
def llm(tiny_target: Path) -> Iterator[LLM]:
    with LLM(tiny_target, device="cpu", max_num_seqs=8, memory="64MiB", drafter=["ngram", "suffix"]) as made:
        yield made


@pytest.fixture(scope="module")
def process(tiny_target: Path) -> Iterator[EngineProcess]:
    with engine_process(tiny_target, drafter=["ngram", "suffix"]) as made:
        yield made


def answered(host: EngineProcess | InProcess, *asked: tuple[Any, SamplingParams]) -> list[RequestOutput]:
    """All outputs of requests that start together."""

    async def main() -> list[RequestOutput]:
        jobs = [await asyncio.to_thread(host.prepare, prompt, params) for prompt, params in asked]
        stream = host.start(*jobs)
        try:
            return [output for arrived in iter_until_empty(stream) for output in await arrived]
        finally:
            stream.close()

    def iter_until_empty(stream: Any) -> Iterator[Any]:
        while not (stream.finished and not stream._arrived):
            yield stream.take()

    return asyncio.run(asyncio.wait_for(main(), 120))


def test_every_parameter_travels() -> None:
    usual, usual_speculation = SamplingParams(), SpeculationParams()
    for params, plain in ((EVERYTHING, usual), (EVERYTHING.speculation, usual_speculation)):
        same = [f.name for f in fields(params) if getattr(params, f.name) == getattr(plain, f.name)]
        assert same in (["structured_outputs"], ["enabled"])
    for params in (EVERYTHING, SamplingParams(structured_outputs=FORM)):
        request = Request("r", "abc", [1, 2], params, True, 7, (1,), ((2,), (3,)), ((4,),))
        assert pickle.loads(pickle.dumps(request)) == request


def test_every_error_of_ours_travels() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    assert len(kinds) > 10
    for kind in kinds:
        error = kind("wrong", 2.5) if kind is QueueFull else kind("wrong")
        found = pickle.loads(pickle.dumps(error))
        assert (type(found), str(found), vars(found)) == (kind, "wrong", vars(error))


class Side:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def on_return(self, numbers: Sequence[int], value: Any) -> None:
        self.heard.append((tuple(numbers), value))

    def on_failure(self, numbers: Sequence[int], error: BaseException) -> None:
        self.heard.append((tuple(numbers), str(error)))


def test_a_channel_carries_messages_of_all_sizes_from_all_threads_and_reports_its_end() -> None:
    ours, theirs = socket.socketpair()
    sender, receiver, side = Channel(ours), Channel(theirs), Side()

    def talk(number: int) -> None:
        for i in range(200):
            sender.send(EngineProcess.on_return, (number,), (i, "x" * (5000 * (i % 7))))

    def say_all() -> None:
        threads = [threading.Thread(target=talk, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        sender.send(EngineProcess.on_return, (7, 8), threading.Lock())
        ours.sendall(pickle.dumps("half a message")[:-5])
        sender.end(socket.SHUT_WR)

    saying = threading.Thread(target=say_all)
    saying.start()
    receiver.receive(side)  # type: ignore[arg-type]  # returns where the message is cut off
    saying.join(60)
    *said, (numbers, failure) = side.heard
    assert (numbers, "cannot be pickled" in failure) == ((7, 8), True)
    for number in range(2):
        mine = [value for whose, value in said if whose == (number,)]
        assert mine == [(i, "x" * (5000 * (i % 7))) for i in range(200)]
    receiver.close()
    with pytest.raises(OSError, match="Broken pipe"):
        sender.send(EngineProcess.on_return, (), None)
    sender.close()


def test_a_server_does_not_wait_for_a_child_that_does_not_read(process: EngineProcess) -> None:
    """More than the sockets hold: nothing waits but what asked."""
    process._process.send_signal(signal.SIGSTOP)
    try:
        began = time.monotonic()
        for _ in range(20):
            process._drop(range(10**9, 10**9 + 100_000))
        assert time.monotonic() - began < 5
    finally:
        process._process.send_signal(signal.SIGCONT)
    assert process.call(inside.process_id) == process._process.pid


class Clock:
    """An outbox whose sending takes `each` seconds of work for every output."""

    def __init__(self, each: float) -> None:
        self.each, self.now, self.worked = each, 100.0, 0.0
        self.sent: list[Sequence[tuple[int, RequestOutput]]] = []
        self.outbox = Outbox(self.send, lambda: self.now, lambda: self.worked)

    def send(self, outputs: Sequence[tuple[int, RequestOutput]]) -> None:
        self.sent.append(outputs)
        self.worked += self.each * len(outputs)


class Saying:
    """A request that gets a token in every step."""

    def __init__(self, outbox: Outbox, number: int) -> None:
        self._outbox, self._number, self._new = outbox, number, 0

    def say(self, *, last: bool = False) -> None:
        self._new += 1
        self.report(last=last)

    def report(self, *, last: bool = False) -> None:
        if not self._outbox.holds(self, last):
            answer = CompletionOutput(0, "a" * self._new, [1] * self._new)
            self._outbox.put(self._number, RequestOutput("r", None, [], [answer], last))
            self._new = 0


@pytest.mark.parametrize(("streams", "round_s", "together"), [(7, 0.001, 1), (32, 0.008, 1), (32, 0.001, 5)])
def test_short_steps_of_a_crowd_share_a_message(streams: int, round_s: float, together: int) -> None:
    clock = Clock(each=3e-6)
    saying = [Saying(clock.outbox, number) for number in range(streams)]
    for _ in range(400):
        clock.now += round_s
        for one in saying:
            one.say()
        clock.outbox.flush()
    assert {len(outputs) for outputs in clock.sent} == {streams}  # one message for all of them
    assert len(clock.sent) == pytest.approx(400 / together, abs=40)
    if together > 1:
        assert clock.worked == pytest.approx(OUTBOX_SHARE * 400 * round_s, rel=0.3)
    for one in saying:
        one.say(last=True)
    clock.outbox.flush()
    tokens = [len(output.outputs[0].token_ids) for outputs in clock.sent for _, output in outputs]
    assert sum(tokens) == 401 * streams  # nothing is lost
    assert [output.finished for _, output in clock.sent[-1]] == [True] * streams


def test_answers_are_the_librarys(process: EngineProcess, llm: LLM) -> None:
    asked = [
        ("abc abc", SamplingParams(max_tokens=20, seed=5, temperature=0.8, logprobs=2)),
        ([97, 98, 99], SamplingParams(n=3, max_tokens=12, seed=1, stop=["e", "é"], bad_words=["a"])),
        ("abab" * 8, SamplingParams(max_tokens=30, temperature=0, prediction="abab", logit_bias={65: 4.0})),
        ("xy", SamplingParams(max_tokens=20, seed=2, structured_outputs=FORM)),
        ("xy", replace(EVERYTHING, speculation=replace(EVERYTHING.speculation, verifier="exact"))),
    ]
    for prompt, params in asked:
        here, there = answered(InProcess(llm), (prompt, params)), answered(process, (prompt, params))
        for index in range(params.n):
            ours, theirs = ([p for o in outputs for p in o.outputs if p.index == index] for outputs in (here, there))
            if params.output_kind == "delta":
                assert "".join(part.text for part in theirs) == "".join(part.text for part in ours)
                assert [t for part in theirs for t in part.token_ids] == [t for part in ours for t in part.token_ids]
            assert theirs[-1].text == ours[-1].text or params.output_kind == "delta"
            assert theirs[-1].finish_reason == ours[-1].finish_reason
            assert theirs[-1].stop_reason == ours[-1].stop_reason
            assert theirs[-1].timing.total_s > 0
            assert theirs[-1].speculation.emitted > 0
            for name in ("logprobs", "origins"):
                found = [getattr(part, name) for part in theirs]
                assert (None in found) == (None in [getattr(part, name) for part in ours])
        assert there[-1].finished
        assert there[-1].prompt_token_ids == here[-1].prompt_token_ids


def test_requests_that_start_together_are_counted(process: EngineProcess) -> None:
    before = process.snapshot().finished.get("length", 0)
    asked = [(f"x{i}", SamplingParams(max_tokens=5, ignore_eos=True, output_kind="delta")) for i in range(4)]
    outputs = answered(process, *asked)
    assert sum(output.finished for output in outputs) == 4
    assert process.snapshot().finished["length"] == before + 4  # the end was counted before it was delivered
    assert process.pulse().alive


def test_bad_requests_are_refused_as_in_the_library(process: EngineProcess, llm: LLM) -> None:
    form = StructuredOutputsParams(regex="a{")
    for prompt, params in (
        ("", SamplingParams()),
        ([EOS + 1000], SamplingParams()),
        ([1] * 5000, SamplingParams()),
        ("a", SamplingParams(speculation=SpeculationParams(drafter="unknown"))),
        ("a", SamplingParams(logit_bias={10_000: 1.0})),
        ("a", SamplingParams(structured_outputs=form)),
    ):
        with pytest.raises(InvalidRequest) as ours:
            InProcess(llm).prepare(prompt, params, compiling=CompileLimits())
        with pytest.raises(InvalidRequest, match=f"^{re.escape(str(ours.value))}$"):
            process.prepare(prompt, params, compiling=CompileLimits())


def test_a_name_in_use_is_refused_by_the_engine(process: EngineProcess) -> None:
    async def main() -> None:
        params = SamplingParams(max_tokens=200, ignore_eos=True, output_kind="delta")
        first, second = (process.start(process.prepare("a", params, request_id="same")) for _ in range(2))
        await first.take()
        with pytest.raises(InvalidRequest, match="'same' is running already"):
            await second.take()
        first.close()
        assert await first.take() == []

    asyncio.run(asyncio.wait_for(main(), 60))
    process.call(inside.everything_is_free)


def test_a_compiled_grammar_is_dropped_with_its_request(process: EngineProcess) -> None:
    job = process.prepare("a", SamplingParams(structured_outputs=FORM))
    assert process.call(inside.kept) == 1
    del job
    gc.collect()
    assert process.call(inside.kept) == 0


def test_a_running_request_outlives_its_owners_reference(process: EngineProcess) -> None:
    params = SamplingParams(max_tokens=30, structured_outputs=StructuredOutputsParams(regex="[ab]{20}"))

    async def main() -> None:
        stream = process.start(await asyncio.to_thread(process.prepare, "a", params))
        gc.collect()
        while not stream.finished:
            outputs = await stream.take()
        assert (outputs[-1].outputs[0].finish_reason, len(outputs[-1].outputs[0].text)) == ("stop", 20)

    asyncio.run(asyncio.wait_for(main(), 60))
    assert process.call(inside.kept) == 0


def test_calls_return_errors(process: EngineProcess) -> None:
    assert process.call(inside.process_id) == process._process.pid
    with pytest.raises(QueueFull) as full:
        process.call(inside.raises, QueueFull("come again", 3.0))
    assert full.value.retry_after_s == 3.0
    with pytest.raises(RequestError, match="KeyError: 'x'"):
        process.call(inside.raises, KeyError("x"))
    with pytest.raises(RequestError, match="FileNotFoundError: no such file"):
        process.call(inside.raises, FileNotFoundError("no such file"))
    with pytest.raises(RequestError, match="cannot be pickled"):
        process.call(inside.gives_what_cannot_be_sent)
    with pytest.raises(RequestError, match=r"cannot be read: .*elsewhere"):
        process.call(inside.gives_what_cannot_be_read)


def test_a_bad_message_fails_one_request(process: EngineProcess) -> None:
    """One that cannot be pickled, and one that the other process cannot read; others go on."""
    params = SamplingParams(max_tokens=30, ignore_eos=True)

    async def main() -> None:
        good = process.start(process.prepare("a", params))
        for bad in (threading.Lock(), inside.Unreadable()):
            stream = process.start(replace(process.prepare("a"), prompt=bad))  # type: ignore[arg-type]
            with pytest.raises(RequestError, match="a message cannot be"):
                await stream.take()
        while not good.finished:
            outputs = await good.take()
        assert len(outputs[-1].outputs[0].token_ids) == 30

    for bad in (lambda llm: llm, inside.Unreadable()):
        with pytest.raises(RequestError, match="a message cannot be"):
            process.call(inside.raises, bad)
    asyncio.run(asyncio.wait_for(main(), 60))
    assert not process._expected
    assert process.call(inside.process_id) == process._process.pid


def test_the_childs_log_records_reach_the_server(process: EngineProcess, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "slipstream")
    process.call(inside.logs, "50% of %s")
    assert ("slipstream.inside", logging.WARNING, "50% of %s") in caplog.record_tuples


def test_threads_of_the_child_switch_quickly(process: EngineProcess) -> None:
    interval, frozen = process.call(inside.turns)
    assert interval == pytest.approx(0.0001)
    assert frozen


def test_a_silent_process_counts_as_stuck(process: EngineProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.perf_counter()
    monkeypatch.setattr(process, "on_state", lambda *_: None)
    monkeypatch.setattr(process, "_pulse", Pulse(True, 0.0))
    monkeypatch.setattr(process, "_heard_at", now)
    monkeypatch.setattr(time, "perf_counter", lambda: now + 1.0)
    assert process.pulse().busy_s == 0  # it has nothing to do
    monkeypatch.setattr(time, "perf_counter", lambda: now + 50.0)
    assert process.pulse().busy_s == 50.0
    assert process.pulse().alive


def test_a_model_that_cannot_be_opened(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    with pytest.raises(ModelError) as ours:
        LLM(tmp_path, device="cpu")
    with pytest.raises(type(ours.value), match=f"^{re.escape(str(ours.value))}$"):
        EngineProcess(tmp_path, device="cpu")
    with pytest.raises(EngineDied, match="the engine could not be opened: RuntimeError"):
        EngineProcess(tmp_path, threads="two")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("program", "why"),
    [
        (["-c", "raise SystemExit(3)"], "ended with the code 3 while it opened"),
        (["-c", "import os; os.kill(os.getpid(), 9)"], "ended by SIGKILL, .* memory while it opened"),
        (["-c", "import threading; threading.Event().wait()"], "hung up without ending, and was killed"),
    ],
)
def test_a_process_that_does_not_open_the_model(
    program: list[str], why: str, tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "Event" in program[1]:
        monkeypatch.setattr(remote, "_END_S", 0.1)
    ours, theirs = socket.socketpair()
    theirs.close()
    process = subprocess.Popen([sys.executable, *program])
    monkeypatch.setattr(remote, "spawn", lambda: (process, Channel(ours)))
    with pytest.raises(EngineDied, match=why):
        EngineProcess(tiny_target)
    assert process.returncode is not None


def test_modules_in_the_current_folder_are_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "socket.py").write_text("raise SystemExit('from the folder')\n")
    monkeypatch.chdir(tmp_path)
    process, channel = spawn()
    channel.end(socket.SHUT_WR)
    assert process.wait(120) == 0
    channel.close()


def test_a_closed_engine_refuses_requests(tiny_target: Path) -> None:
    """And running requests are aborted."""
    process = EngineProcess(tiny_target, device="cpu", memory="64MiB", drafter="none", threads=1)

    async def main() -> None:
        params = SamplingParams(max_tokens=200, ignore_eos=True, output_kind="delta")
        process.call(inside.hold)
        stream = process.start(process.prepare("a", params))
        await asyncio.to_thread(process.call, inside.reached)
        process.call(inside.release)
        await asyncio.to_thread(process.close)
        outputs = [output for output in await stream.take() if output.finished]
        assert [output.outputs[0].finish_reason for output in outputs] == ["abort"]
        with pytest.raises(RequestError, match="closed") as closed:
            process.start(process.prepare("a"))
        assert not isinstance(closed.value, EngineDied)

    asyncio.run(asyncio.wait_for(main(), 120))
    process.close()
    assert process._process.returncode == 0
    assert not process.pulse().alive
    assert process.pulse().why == ""
