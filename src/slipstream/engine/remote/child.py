"""The engine's side: opens the `LLM`, takes in requests, sends out news, and ends when nobody is there any more.

The main thread reads, from the beginning: a parent that ends while the model is loading is not kept waiting for.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from slipstream.constrain.limits import CompileLimits
from slipstream.core.errors import EngineDied, SlipstreamError
from slipstream.core.outputs import RequestOutput
from slipstream.core.responsive import responsive
from slipstream.core.snapshot import Pulse
from slipstream.engine.llm import LLM
from slipstream.engine.remote.channel import CUT_OFF, Channel
from slipstream.engine.remote.messages import (
    Beat,
    Call,
    Compile,
    Drop,
    Failed,
    Forget,
    Logged,
    News,
    Opening,
    Progress,
    Ready,
    Returned,
    Start,
    refusal,
    sendable,
)
from slipstream.engine.remote.outbox import Outbox
from slipstream.engine.requests import Loaded, Request
from slipstream.engine.state import Job

LOOK_S = 0.1
"""How often news of the engine's state are sent while it changes."""
IDLE_S = 1.0
"""… and at least, so that the parent knows that this process is not stuck."""
_AT_ONCE = 32
"""Calls and forms that are being compiled (`serve/service.py` has as many threads that wait for them)."""
_PATIENCE_S = 2.0
"""Most seconds that the end waits for a round in flight."""


class HostedLLM(LLM):
    """An engine whose requests come from another process."""

    @property
    def loaded(self) -> Loaded:
        return self._intake.loaded

    def job_of(self, request: Request, compiling: CompileLimits | None = None) -> Job:
        return self._intake.job_of(request, lambda _: None, compiling)

    def post(self, jobs: Sequence[Job], refused: Callable[[Exception], None]) -> None:
        self._loop.post(jobs, refused)

    def drop(self, job: Job) -> None:
        self._loop.drop(job)

    def tell_after_turns(self, listener: Callable[[], None]) -> None:
        self._loop.tell_after_turns(listener)


class Child:
    """The process. Its parent sends an `Opening` first, and nothing else before it hears that the engine is ready."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._llm: HostedLLM | None = None
        self._outbox = Outbox(channel.send, self._look_between_turns)
        self._running: dict[int, Job] = {}
        self._compiled: dict[int, Job] = {}
        self._beside = ThreadPoolExecutor(_AT_ONCE, "asked")
        self._ending = threading.Event()

    def run(self) -> None:
        """Until the parent has nothing more to say, or ends. Does not return."""
        with suppress(*CUT_OFF):
            opening = self._channel.receive()
            threading.Thread(target=self._open, args=(opening,), name="opening", daemon=True).start()
            while True:
                self._hear(self._channel.receive())
        self._ending.set()
        if self._llm is not None:
            closing = threading.Thread(target=self._llm.close, daemon=True)
            closing.start()
            closing.join(_PATIENCE_S)
        sys.stderr.flush()
        os._exit(0)  # Python would look through all of torch for garbage once more, for seconds

    def _open(self, opening: Opening) -> None:
        """And tell how the engine is doing until the end. Whatever goes wrong, the parent hears of it."""
        _forward_logs(self._channel)
        try:
            if opening.threads is not None:
                torch.set_num_threads(opening.threads)
            llm = HostedLLM(**opening.options, on_progress=lambda text: self._channel.send(Progress(text)))
            self._llm = llm
            llm.tell_after_turns(self._tell)
            with responsive():
                beat = self._look()
                self._channel.send(Ready(llm.model_path, llm.loaded, llm.max_num_seqs, llm.speculates, beat))
                self._keep_telling(beat)
        except BaseException as error:
            if self._llm is None or not isinstance(error, OSError):  # else the parent is gone, and `run` ends
                self._break(_not_opened(error))

    def _break(self, error: SlipstreamError) -> None:
        """End this process, and say why."""
        with suppress(OSError):
            self._channel.send(Failed(error))
        sys.stderr.flush()
        os._exit(1)

    def _tell(self) -> None:
        """On the engine's thread, after each turn. An engine that broke ends its process: what is wrong with a device
        ends with it."""
        if why := self._opened.pulse().why:
            self._break(EngineDied(why))
        self._outbox.flush()

    def _keep_telling(self, told: Beat) -> None:
        """How the engine is doing, until the end."""
        told_at = time.perf_counter()
        while not self._ending.wait(LOOK_S):
            beat, now = self._look(), time.perf_counter()
            if beat != told or now - told_at >= IDLE_S:
                self._channel.send(beat)
                told, told_at = beat, now

    def _look(self) -> Beat:
        return Beat(self._opened.pulse(), self._opened.snapshot())

    def _look_between_turns(self) -> Beat:
        """On the engine's thread, which is at nothing now."""
        return Beat(Pulse(self._opened.pulse().alive, 0.0), self._opened.snapshot())

    @property
    def _opened(self) -> HostedLLM:
        assert self._llm is not None, "the parent waits until it is"
        return self._llm

    def _hear(self, message: object) -> None:
        match message:
            case Start(jobs):
                self._start(jobs)
            case Drop(numbers):
                for number in numbers:
                    if (job := self._running.pop(number, None)) is not None:
                        self._opened.drop(job)
            case Compile(number, request, limits):
                self._beside.submit(self._answer, number, partial(self._compile, number, request, limits))
            case Forget(number):
                self._compiled.pop(number, None)
            case Call(number, function, arguments):
                self._beside.submit(self._answer, number, partial(function, self._opened, *arguments))

    def _start(self, asked: Sequence[tuple[int, Request | None]]) -> None:
        first, jobs = asked[0][0], []
        try:
            for number, request in asked:
                job = self._compiled.pop(number) if request is None else self._opened.job_of(request)
                job.sink, job.holds = partial(self._report, number), self._outbox.holds
                self._running[number] = job
                jobs.append(job)
            self._opened.post(jobs, partial(self._refuse, first))
        except Exception as error:
            self._refuse(first, error)

    def _report(self, number: int, output: RequestOutput) -> None:
        """On the engine's thread."""
        if output.finished:
            self._running.pop(number, None)
        self._outbox.put(number, output)

    def _refuse(self, number: int, error: Exception) -> None:
        """On any thread. The parent then drops all that was to start with it."""
        with suppress(OSError):
            self._channel.send(News([refusal(number, error)]))

    def _compile(self, number: int, request: Request, limits: CompileLimits | None) -> Sequence[str]:
        """What no grammar holds of its form."""
        job = self._compiled[number] = self._opened.job_of(request, limits)
        return job.unenforced

    def _answer(self, number: int, make: Callable[[], Any]) -> None:
        try:
            returned = Returned(number, make())
        except BaseException as error:
            returned = Returned(number, error=sendable(error))
        with suppress(OSError):
            try:
                self._channel.send(returned)
            except OSError:
                raise
            except Exception as error:  # it cannot be pickled, and nothing was written: whoever waits must hear of it
                self._channel.send(Returned(number, error=sendable(error)))


def _not_opened(error: BaseException) -> SlipstreamError:
    """What the parent is told. What nobody foresaw is shown with all its lines here."""
    if isinstance(error, SlipstreamError):
        return error
    traceback.print_exception(error)
    return EngineDied(f"the engine could not be opened: {type(error).__name__}: {error}")


def _forward_logs(channel: Channel) -> None:
    """What this process has to say goes to the parent's log."""

    class Forward(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            with suppress(OSError):
                channel.send(Logged(record.name, record.levelno, self.format(record)))  # with its traceback

    log = logging.getLogger("slipstream")
    log.addHandler(Forward())
    log.setLevel(logging.INFO)
