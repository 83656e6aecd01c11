"""The engine in a process of its own, as a server runs it: `EngineProcess` in the server, `Child` in the other process.

A message names a method of the other side, the numbers of the requests or calls that it concerns, and arguments. One
that cannot be pickled or read fails what it concerns and nothing else. Pickle is safe here: the socket pair has no
name, and only the child inherits its end. Torch is imported late, so that the server imports its parts meanwhile.
"""

from __future__ import annotations

import asyncio
import itertools
import logging.handlers
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn

from slipstream.constrain.limits import THREADS, CompileLimits
from slipstream.core import interpreter
from slipstream.core.errors import EngineDied, InvalidRequest, RequestError, SlipstreamError
from slipstream.core.outputs import CompletionOutput, Pulse, RequestOutput, Snapshot, SpeculationStats, Timing
from slipstream.core.params import SamplingParams
from slipstream.engine.requests import Prompt, Request, Requests
from slipstream.engine.streams import Listeners, Outbox, OutputStream

if TYPE_CHECKING:
    from slipstream.engine.llm import LLM
    from slipstream.engine.state import Job

REPORT_S, HEARTBEAT_S = 0.1, 1.0  # between two reports of the engine's state: while it changes, and at most
SILENCE_S = 3.0  # a process that reports nothing for this long counts as stuck since its last report
_CLOSE_S = 4.0  # time that `close` gives a process that is not stuck before it is killed
_END_S = 2.0  # time that the child gives its last step, and the system a process that ends
_NO_TIMES, _NO_COUNTS = Timing(), SpeculationStats()  # an answer's own come with its end

Numbers = Sequence[int]  # of requests and calls, chosen by the server's side
Part = CompletionOutput | tuple[int, str, list[int]]  # of an answer with new text alone: index, text, tokens
News = tuple[list[Part], bool, int]  # of a request: its answers' parts, whether it finished, cached prompt tokens


class Channel:
    """One end of the socket pair. Any thread may send; one receives."""

    def __init__(self, end: socket.socket) -> None:
        self._socket, self._incoming, self._lock = end, end.makefile("rb", 1 << 18), threading.Lock()

    def send(self, method: Callable[..., None], numbers: Numbers, *args: Any) -> None:
        """Call a method of the other side. Waits until it is written; raises `OSError` if that process has ended."""
        name = method.__name__
        try:
            packed = pickle.dumps(args, pickle.HIGHEST_PROTOCOL)
        except Exception as error:
            name, packed = "on_failure", pickle.dumps((RequestError(f"a message cannot be pickled: {error}"),))
        with self._lock:
            self._socket.sendall(pickle.dumps((name, numbers, packed), pickle.HIGHEST_PROTOCOL))

    def receive(self, side: EngineProcess | Child) -> None:
        """Call the methods that the other side names, until that process ends."""
        with suppress(EOFError, OSError, pickle.UnpicklingError):
            while True:
                name, numbers, packed = pickle.load(self._incoming)
                try:
                    args = pickle.loads(packed)
                except Exception as error:
                    name, args = "on_failure", (RequestError(f"a message cannot be read: {error}"),)
                getattr(side, name)(numbers, *args)

    def end(self, how: int = socket.SHUT_RDWR) -> None:
        """SHUT_WR: send nothing more; the other side reads to the end. SHUT_RDWR: `receive` returns, too."""
        with suppress(OSError):
            self._socket.shutdown(how)

    def close(self) -> None:
        self._incoming.close()
        self._socket.close()


def spawn() -> tuple[subprocess.Popen[bytes], Channel]:
    """Start a child. It ends with this process; on Linux with the calling thread, which must last therefore."""
    ours, theirs = socket.socketpair()
    with theirs:
        program = f"from slipstream.engine.remote import main; main({theirs.fileno()}, {os.getpid()})"
        process = subprocess.Popen(
            interpreter.command("-c", program),
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
            env=interpreter.surroundings(),
            start_new_session=True,  # a terminal's Ctrl-C is for the server
        )
    return process, Channel(ours)


class EngineProcess(AbstractContextManager["EngineProcess"]):
    """The server's side. Any thread may call it; nothing but `prepare` and `call` waits for the engine."""

    _snapshot: Snapshot

    def __init__(
        self,
        model: str | Path = "default",
        *,
        threads: int | None = None,
        meanwhile: Callable[[], object] = lambda: None,
        on_progress: Callable[[str], None] = lambda text: None,
        **options: Any,
    ) -> None:
        """model, options: those of `LLM`, drafters by name only. threads: of torch, on a CPU. meanwhile: called while
        the child opens the model."""
        self._process, self._channel = spawn()
        self._show, self._numbers = on_progress, itertools.count()
        self._lock = threading.Lock()  # over the table, and whether the process has ended
        self._expected: dict[int, Future[Any] | tuple[OutputStream, Request]] = {}  # calls, and running requests
        self._listeners = Listeners()
        self._outgoing: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._pulse, self._heard_at = Pulse(True, 0.0), time.perf_counter()  # by the last report
        self._why, self._opened, self._closing = "", False, False
        self._ended: RequestError | None = None
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._read, self._write)]
        for thread in self._threads:
            thread.start()
        try:
            opening = self._ask(Child.on_open, {"model": str(model), **options}, threads)
            meanwhile()
            from transformers import AutoTokenizer  # noqa: F401  # takes seconds, too

            model_path, loaded, self.max_num_seqs, self.speculates = opening.result()
            from slipstream.models.load import load_tokenizer

            self.tokenizer: Any = load_tokenizer(model_path, bool(options.get("trust_remote_code")))
        except BaseException:
            self._process.kill()
            self.close()
            raise
        self._opened = True
        self.max_model_len: int = loaded.plan.max_model_len
        self.drafters: tuple[str, ...] = tuple(loaded.drafters)
        self._requests = Requests(self.tokenizer, loaded)

    def prepare(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        streaming: bool = True,
        compiling: CompileLimits | None = None,
    ) -> Request:
        """Check and tokenize a request; the child compiles its grammar, within these limits, and this waits for it.

        Raises `InvalidRequest`, or `QueueFull` where too many grammars are being tried.
        """
        params = sampling_params or SamplingParams()
        request = self._requests.make(prompt, params, streaming=streaming, request_id=request_id)
        request = replace(request, number=next(self._numbers))
        if params.structured_outputs is not None:
            left_out = self._ask(Child.on_compile, request, compiling, number=request.number).result()
            request = replace(request, unenforced=tuple(left_out))
            drop = partial(self._channel.send, Child.on_drop, (request.number,))
            weakref.finalize(request, self._outgoing.put, drop).atexit = False  # a collection may call `put`
        return request

    def start(self, *requests: Request) -> OutputStream:
        """Start prepared requests together, for the running event loop. The stream ends when all of them have."""
        numbers = [request.number for request in requests]
        deliveries = self._listeners.to(asyncio.get_running_loop())
        stream = OutputStream(deliveries, partial(self._drop, numbers), len(numbers))
        self._expect({request.number: (stream, request) for request in requests})
        uncompiled = [request if request.params.structured_outputs is None else None for request in requests]
        self._outgoing.put(partial(self._channel.send, Child.on_start, numbers, uncompiled))
        return stream

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return `function(llm, *arguments)` of the child, where the function must be importable."""
        return self._ask(Child.on_call, function, *arguments).result()

    def expect_forms(self) -> None:
        """Have the child start the process that tries grammars out. Does not wait."""
        self._ask(Child.on_call, _warm_grammars)

    def pulse(self) -> Pulse:
        """Whether the engine lives and makes progress, by its last report and the time since."""
        if self._ended is not None:
            return Pulse(False, 0.0, str(self._ended) if isinstance(self._ended, EngineDied) else "")
        silent_s = time.perf_counter() - self._heard_at
        busy_s = self._pulse.busy_s + silent_s if self._pulse.busy_s > 0 or silent_s > SILENCE_S else 0.0
        return Pulse(self._pulse.alive, busy_s)

    def snapshot(self) -> Snapshot:
        """The engine's counters by its last report, which includes all answers whose ends were delivered."""
        return self._snapshot

    def kill(self, why: str) -> None:
        """End the child at once: running requests fail with `EngineDied`. Does not wait."""
        self._why = why
        self._process.kill()
        self._channel.end()

    def close(self) -> None:
        """End the child, whatever it does; running requests are aborted. May be called twice."""
        self._closing = True
        self._outgoing.put(None)
        self._wait(0.0 if self.pulse().busy_s > SILENCE_S else _CLOSE_S)
        self._channel.end()
        for thread in self._threads:
            thread.join()
        self._channel.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, method: Callable[..., None], *arguments: Any, number: int | None = None) -> Future[Any]:
        number = next(self._numbers) if number is None else number
        answer = Future[Any]()
        self._expect({number: answer})
        self._outgoing.put(partial(self._channel.send, method, (number,), *arguments))
        return answer

    def _expect(self, answers: Mapping[int, Future[Any] | tuple[OutputStream, Request]]) -> None:
        with self._lock:
            if self._ended is not None:
                raise self._ended
            self._expected.update(answers)

    def _drop(self, numbers: Numbers) -> None:
        for number in numbers:
            self._expected.pop(number, None)
        self._outgoing.put(partial(self._channel.send, Child.on_drop, numbers))

    def _write(self) -> None:
        with suppress(OSError):  # the reader notices the end as well
            while (send := self._outgoing.get()) is not None:
                send()
        self._channel.end(socket.SHUT_WR)

    def _read(self) -> None:
        try:
            self._channel.receive(self)
        finally:
            why = RequestError("the engine is closed") if self._closing else EngineDied(self._how_it_ended())
            with self._lock:
                self._ended = why
            self.on_failure([*self._expected], why)

    def on_progress(self, numbers: Numbers, text: str) -> None:
        self._show(text)

    def on_log(self, numbers: Numbers, record: logging.LogRecord) -> None:
        if (log := logging.getLogger(record.name)).isEnabledFor(record.levelno):
            log.handle(record)

    def on_state(self, numbers: Numbers, pulse: Pulse, snapshot: Snapshot) -> None:
        self._pulse, self._snapshot, self._heard_at = pulse, snapshot, time.perf_counter()

    def on_return(self, numbers: Numbers, value: Any) -> None:
        for number in numbers:
            if isinstance(answer := self._expected.pop(number, None), Future):
                answer.set_result(value)

    def on_failure(self, numbers: Numbers, error: Exception) -> None:
        for number in numbers:
            if isinstance(known := self._expected.pop(number, None), Future):
                known.set_exception(error)
            elif known is not None:
                with suppress(RequestError):  # its event loop is closed
                    known[0].put(error)
        self._listeners.flush()

    def on_news(self, numbers: Numbers, news: Sequence[News]) -> None:
        for number, (parts, finished, cached) in zip(numbers, news, strict=True):
            known = self._expected.pop(number, None) if finished else self._expected.get(number)
            if not isinstance(known, tuple):  # it was dropped meanwhile
                continue
            stream, request = known
            outputs = [part if isinstance(part, CompletionOutput) else _with_text(*part) for part in parts]
            try:
                stream.put(RequestOutput(request.id, request.prompt, request.prompt_ids, outputs, finished, cached))
            except RequestError:  # its event loop is closed
                self._drop((number,))
        self._listeners.flush()

    def _wait(self, seconds: float) -> bool:
        """Whether the process ends by itself within this time; else it is killed."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_S)
            return False
        return True

    def _how_it_ended(self) -> str:
        ended, code = self._wait(_END_S), self._process.returncode
        if self._why or self._pulse.why:
            return self._why or self._pulse.why
        how = "hung up without ending, and was killed"
        if ended:
            how = f"ended with the code {code}" if code >= 0 else f"was ended by {signal.Signals(-code).name}"
        if ended and -code == signal.SIGKILL:
            how += ", as the system does with what takes too much memory"
        return f"the engine's process {how}" + ("" if self._opened else " while it opened the model")


class Child:
    """The engine's side. The main thread receives; the engine's thread sends news, and waits while the server does not
    read, so that nothing piles up. Threads of the pool compile grammars, answer calls and report the state.
    """

    _llm: LLM  # the server sends nothing that needs it before it is open

    def __init__(self, channel: Channel) -> None:
        self._send = channel.send
        self._jobs: dict[int, Job] = {}  # running, or compiled and not started
        self._outbox = Outbox(self._send_news)
        self._pool = ThreadPoolExecutor(THREADS + 1)  # the server has THREADS that wait for answers; one reports

    def close(self) -> NoReturn:
        """End the engine and exit, past the usual way of Python, which would search all of torch for garbage."""
        if hasattr(self, "_llm"):
            closing = threading.Thread(target=self._llm.close, daemon=True)
            closing.start()
            closing.join(_END_S)
        sys.stderr.flush()
        os._exit(0)

    def on_open(self, numbers: Numbers, options: Any, threads: int | None) -> None:
        self._pool.submit(self._open, numbers, options, threads)

    def _open(self, numbers: Numbers, options: Any, threads: int | None) -> None:
        """Open the model; then report the state until the process ends."""
        send, log = self._send, logging.getLogger("slipstream")
        records = SimpleNamespace(put_nowait=lambda record: send(EngineProcess.on_log, (), record))
        log.addHandler(logging.handlers.QueueHandler(records))  # the server's log has its form and place
        log.setLevel(logging.INFO)
        logging.raiseExceptions = False  # there may be no server any more
        try:
            import torch

            from slipstream.engine.llm import LLM

            if threads is not None:
                torch.set_num_threads(threads)
            self._llm = llm = LLM(**options, on_progress=lambda text: send(EngineProcess.on_progress, (), text))
            llm._loop.after_turn = self._after_turn
        except BaseException as error:
            if not isinstance(error, SlipstreamError):
                traceback.print_exception(error)
                error = EngineDied(f"the engine could not be opened: {type(error).__name__}: {error}")
            self.on_failure(numbers, error)
            return
        with suppress(OSError), interpreter.responsive():
            send(EngineProcess.on_state, (), llm._loop.pulse(), llm.snapshot())
            opened = llm.model_path, llm._intake.loaded, llm.max_num_seqs, llm.speculates
            send(EngineProcess.on_return, numbers, opened)
            reported, reported_at = None, 0.0
            while True:
                state, now = (llm._loop.pulse(), llm.snapshot()), time.perf_counter()
                if state != reported or now - reported_at > HEARTBEAT_S:
                    send(EngineProcess.on_state, (), *state)
                    reported, reported_at = state, now
                time.sleep(REPORT_S)

    def _after_turn(self) -> None:
        """On the engine's thread. A broken engine ends its process: only a new one can use a device that failed."""
        if (pulse := self._llm._loop.pulse()).why:
            with suppress(OSError):
                self._send(EngineProcess.on_state, (), pulse, self._llm.snapshot())
            sys.stderr.flush()
            os._exit(1)
        self._outbox.flush()

    def _send_news(self, outputs: Sequence[tuple[int, RequestOutput]]) -> None:
        numbers = [number for number, _ in outputs]
        news = [([_part(answer) for answer in out.outputs], out.finished, out.num_cached_tokens) for _, out in outputs]
        with suppress(OSError):  # the server has ended: the main thread ends this process
            if any(output.finished for _, output in outputs):  # the counters come before the ends that they include
                self._send(EngineProcess.on_state, (), Pulse(True, 0.0), self._llm.snapshot())
            self._send(EngineProcess.on_news, numbers, news)

    def on_start(self, numbers: Numbers, requests: Sequence[Request | None]) -> None:
        """Start these together; None: the request's job was compiled before."""
        try:
            for number, request in zip(numbers, requests, strict=True):
                if request is not None:
                    self._jobs[number] = self._llm._intake.job_of(request)
                job = self._jobs[number]
                job.sink, job.holds = partial(self._put, number), self._outbox.holds
            self._llm._loop.post([self._jobs[number] for number in numbers], partial(self.on_failure, numbers))
        except Exception as error:
            self.on_failure(numbers, error)

    def _put(self, number: int, output: RequestOutput) -> None:
        if output.finished:
            self._jobs.pop(number, None)
        self._outbox.put(number, output)

    def on_drop(self, numbers: Numbers) -> None:
        for number in numbers:
            if (job := self._jobs.pop(number, None)) is not None:
                self._llm._loop.drop(job)

    def on_compile(self, numbers: Numbers, request: Request, limits: CompileLimits | None) -> None:
        def compile_it() -> Sequence[str]:
            job = self._jobs[request.number] = self._llm._intake.job_of(request, compiling=limits)
            return job.answers[0].output.unenforced

        self._pool.submit(self._answer, numbers, compile_it)

    def on_call(self, numbers: Numbers, function: Callable[..., Any], *arguments: Any) -> None:
        self._pool.submit(self._answer, numbers, partial(function, self._llm, *arguments))

    def _answer(self, numbers: Numbers, make: Callable[[], Any]) -> None:
        try:
            value = make()
        except BaseException as error:
            self.on_failure(numbers, error)
        else:
            with suppress(OSError):
                self._send(EngineProcess.on_return, numbers, value)

    def on_failure(self, numbers: Numbers, error: BaseException) -> None:
        """Tell the server, which drops the requests. Errors that are not Slipstream's travel as text."""
        sent = error if isinstance(error, SlipstreamError) else RequestError(f"{type(error).__name__}: {error}")
        with suppress(OSError):
            self._send(EngineProcess.on_failure, numbers, sent)


def main(end: int, parent: int) -> NoReturn:
    """The child's program. end: the number of its socket; parent: the server's process."""
    interpreter.end_with(parent)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)  # the server ends it; SIG_IGN would be inherited by its own children
    os.set_inheritable(end, False)  # else a child of this one would keep it open
    channel = Channel(socket.socket(fileno=end))
    child = Child(channel)
    channel.receive(child)
    child.close()


def _warm_grammars(llm: LLM) -> None:
    with suppress(InvalidRequest, OSError):  # without the extra [grammar], a request that needs it gets an error
        llm._intake.grammars.warm()


def _part(answer: CompletionOutput) -> Part:
    if answer.finish_reason is None and answer.logprobs is None and answer.origins is None:
        return answer.index, answer.text, answer.token_ids
    return answer


def _with_text(index: int, text: str, token_ids: list[int]) -> CompletionOutput:
    return CompletionOutput(index, text, token_ids, timing=_NO_TIMES, speculation=_NO_COUNTS)
