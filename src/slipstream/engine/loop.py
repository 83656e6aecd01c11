"""The thread that runs an engine. Callers on any thread, blocking or asynchronous, share its batches."""

from __future__ import annotations

import atexit
import ctypes
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVar

from slipstream.core.errors import EngineDied, RequestError, device_failed
from slipstream.core.interpreter import tidy
from slipstream.core.outputs import Pulse, RequestOutput
from slipstream.engine.state import Job
from slipstream.engine.step import Engine

Result = TypeVar("Result")
_CLOSED = "the engine is closed: make a new LLM"
_log = logging.getLogger("slipstream.engine")
_PATIENCE_S = 10.0
"""Longest time that the exiting program waits for an engine's thread."""
_PAUSE_S = 0.5
"""Time without work after which to collect garbage."""

_running: set[EngineLoop] = set()  # loops whose thread has not ended


class EngineLoop:
    """Takes jobs at any time from any thread; runs steps while there is work, and sleeps otherwise.

    make: builds the engine, on the loop's own thread: torch keeps a pool of CPU workers for each thread that computes,
    and two pools slow each other down (measured: steps take 1.5 times as long).
    after_turn: called on the engine's thread after each step and each action. Must be quick and must not raise.
    """

    def __init__(self, make: Callable[[], Engine], after_turn: Callable[[], None] = lambda: None) -> None:
        self.engine: Engine
        self.after_turn = after_turn
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._open = True
        self._ended = False  # written by the engine's thread only
        self._broke = ""  # the error that ended the engine; empty after `close`
        self._turn_began: float | None = None  # None: the thread waits for work
        self._lock = threading.Lock()  # a closed loop's inbox takes no more actions
        self._coming = 0  # answers of jobs in the inbox
        made: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, args=(make, made), name="slipstream-engine", daemon=True)
        _running.add(self)
        try:
            self._thread.start()
            error = _wait_for(made)
        except BaseException:  # Ctrl-C
            self._stop_making()
            raise
        if error is not None:
            self._thread.join(_PATIENCE_S)  # a program that exits while it is inside torch aborts
            raise error

    def post(self, jobs: Sequence[Job], refused: Callable[[Exception], None]) -> None:
        """Start jobs together, without waiting. Raises `QueueFull` if too many answers wait.

        Calls the jobs' sinks, and `refused` if a job cannot run, on the engine's thread.
        """

        def start() -> None:
            try:
                self._add(jobs)
            except Exception as error:
                with suppress(Exception):  # its caller is gone
                    refused(error)

        self._post(start, jobs)

    def abort(self, job_id: str) -> None:
        """End the job with this id between two steps. Does not wait."""
        self._post_unless_closed(lambda: self.engine.abort(job_id))

    def drop(self, job: Job) -> None:
        """Abort this job, but not a later one with the same id. Does not wait."""
        self._post_unless_closed(lambda: self.engine.abort(job.id) if self.engine.jobs.get(job.id) is job else None)

    def call(self, action: Callable[[], Result]) -> Result:
        """Run an action between two steps, and return its result."""
        done = Future[Result]()

        def run() -> None:
            try:
                done.set_result(action())
            except BaseException as error:
                done.set_exception(error)

        self._post(run)
        return done.result()

    def pulse(self) -> Pulse:
        """Whether the engine's thread is alive, and how long its turn has lasted. Does not wait."""
        began = self._turn_began
        alive = self._thread.is_alive() and self._open
        return Pulse(alive, 0.0 if began is None else time.perf_counter() - began, self._broke)

    def close(self, timeout: float | None = None) -> None:
        """Abort all jobs, end the thread, and wait at most `timeout` seconds for it."""
        self._request_end()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout)

    def _closed(self) -> RequestError:
        return EngineDied(f"{_CLOSED} ({self._broke})") if self._broke else RequestError(_CLOSED)

    def _request_end(self) -> None:
        def end() -> None:
            self._ended = True
            for job_id in list(self.engine.jobs):
                self.engine.abort(job_id)

        with self._lock:
            if self._open:
                self._open = False
                self._inbox.put(end)

    def _stop_making(self) -> None:
        """Raise `KeyboardInterrupt` in the thread that builds the engine, and wait for its end.

        A program that exits while a thread is inside torch aborts.
        """
        self._request_end()  # if the engine is ready, or its build has not begun
        thread = ctypes.c_ulong(self._thread.ident or 0)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(KeyboardInterrupt))
        with suppress(RuntimeError):  # the thread was not started
            self._thread.join()
        _running.discard(self)

    def _add(self, jobs: Sequence[Job]) -> None:
        with self._lock:
            self._coming -= _answers(jobs)
        if self._ended:
            raise self._closed()
        for job in jobs:
            job.sink = self._guarded(job)
            self.engine.add(job)

    def _guarded(self, job: Job) -> Callable[[RequestOutput], None]:
        """Wrap the job's sink: if it raises, the job is dropped and the engine goes on."""
        sink = job.sink

        def deliver(output: RequestOutput) -> None:
            try:
                sink(output)
            except Exception:
                self.drop(job)

        return deliver

    def _post(self, action: Callable[[], None], jobs: Sequence[Job] = ()) -> None:
        with self._lock:
            if not self._open:
                raise self._closed()
            if jobs:
                self.engine.check_queue(self._coming + _answers(jobs[:-1]))
                self._coming += _answers(jobs)
            self._inbox.put(action)

    def _post_unless_closed(self, action: Callable[[], None]) -> None:
        with suppress(RequestError):  # a closed engine has no jobs
            self._post(action)

    def _run(self, make: Callable[[], Engine], made: queue.SimpleQueue[BaseException | None]) -> None:
        try:
            if not self._open:  # interrupted before it began
                raise RequestError(_CLOSED)
            self.engine = make()
        except BaseException as error:
            _running.discard(self)
            made.put(error)
            return
        del make  # it holds a reference to the `LLM`
        made.put(None)
        self._serve()
        _running.discard(self)

    def _serve(self) -> None:
        while not self._ended:
            try:
                if self.engine.busy and self._inbox.empty():
                    self._turn_began = time.perf_counter()
                    self.engine.step()
                    self.engine.drafting.check()
                else:
                    self._turn_began = None
                    action = self._next()
                    self._turn_began = time.perf_counter()
                    action()
            except BaseException as error:  # a drafter may raise anything, and this thread must survive
                self._fail(error)
            self.after_turn()
        self._turn_began = None

    def _next(self) -> Callable[[], None]:
        """Wait for the next action. Collects garbage after a pause without work."""
        with suppress(queue.Empty):
            return self._inbox.get(timeout=_PAUSE_S)
        tidy()
        return self._inbox.get()

    def _fail(self, error: BaseException) -> None:
        """End all jobs with this error. If that fails, or the device has failed, close the engine too."""
        try:
            if device_failed(error):
                raise error
            self.engine.fail_all(error)
        except BaseException as worse:
            _log.error("the engine broke", exc_info=worse)
            broke = EngineDied(f"the engine broke: {type(worse).__name__}: {worse}")
            with self._lock:
                self._open, self._ended, self._broke = False, True, str(broke)
            for job in list(self.engine.jobs.values()):
                for answer in job.answers:
                    if not answer.ended:
                        answer.end("error", error=broke)
                job.report()
            while not self._inbox.empty():  # each of these reports that the engine is closed
                with suppress(Exception):
                    self._inbox.get()()


def _answers(jobs: Sequence[Job]) -> int:
    return sum(len(job.answers) for job in jobs)


@atexit.register
def _close_all() -> None:
    """Close the engines that are open: a thread that computes while Python exits aborts the process."""
    for loop in list(_running):
        loop.close(_PATIENCE_S)


def _wait_for(made: queue.SimpleQueue[BaseException | None]) -> BaseException | None:
    """Wait in short turns: a Ctrl-C just before a wait takes effect only when it ends."""
    while True:
        with suppress(queue.Empty):
            return made.get(timeout=0.2)
