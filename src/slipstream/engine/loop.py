"""One thread that drives an engine, so that callers on any thread, blocking or asynchronous, share its batches."""

from __future__ import annotations

import atexit
import ctypes
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from slipstream.core.errors import EngineDied, RequestError, device_failed
from slipstream.core.interpreter import tidy
from slipstream.core.outputs import Pulse, RequestOutput
from slipstream.engine.state import Job
from slipstream.engine.step import Engine

_CLOSED = "the engine is closed: make a new LLM"
_log = logging.getLogger("slipstream.engine")
_PATIENCE_S = 10.0
"""Longest time that the end of the program waits for a step in flight."""
_PAUSE_S = 0.5
"""Time without work after which garbage is collected."""

_running: set[EngineLoop] = set()  # those whose thread has not ended


class EngineLoop:
    """Takes jobs at any time from any thread; makes steps while there is work, and sleeps otherwise.

    make: builds the engine, on the loop's own thread. On a CPU each thread that computes keeps a team of workers, and
    two teams on the same cores delay each other at every product (measured: steps half as long again).
    after_turn: called on the engine's thread after each step and each action. It must be quick and must not raise.
    """

    def __init__(self, make: Callable[[], Engine], after_turn: Callable[[], None] = lambda: None) -> None:
        self.engine: Engine
        self.after_turn = after_turn
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._open = True
        self._ended = False  # written by the engine's thread alone, as its last action
        self._broke = ""  # why the engine ended, where `close` did not end it
        self._turn_began: float | None = None  # None: it waits for work
        self._lock = threading.Lock()  # nothing enters the inbox of a loop that was told to end
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
            self._thread.join(_PATIENCE_S)  # a program that ends first would tear the thread out of torch, and abort
            raise error

    def post(self, jobs: Sequence[Job], refused: Callable[[Exception], None]) -> None:
        """Start jobs together, without waiting. Their sinks, and `refused` where one cannot run, are called on the
        engine's thread.

        Raises `QueueFull` at once where too many wait.
        """

        def start() -> None:
            try:
                self._add(jobs)
            except Exception as error:
                with suppress(Exception):  # its caller is gone
                    refused(error)

        self._post(start, jobs)

    def abort(self, job_id: str) -> None:
        """End the job of this name after the step in flight. Does not wait."""
        self._post_unless_closed(lambda: self.engine.abort(job_id))

    def drop(self, job: Job) -> None:
        """Abort this very job, and no other that has taken its name since it ended."""
        self._post_unless_closed(lambda: self.engine.abort(job.id) if self.engine.jobs.get(job.id) is job else None)

    def call(self, action: Callable[[], None]) -> None:
        """Run an action between two steps, and wait for it."""
        done: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

        def run() -> None:
            try:
                action()
                done.put(None)
            except BaseException as error:
                done.put(error)

        self._post(run)
        if (error := done.get()) is not None:
            raise error

    def pulse(self) -> Pulse:
        """Whether the engine's thread lives, and how long its turn has lasted. Does not disturb it."""
        began = self._turn_began
        alive = self._thread.is_alive() and self._open
        return Pulse(alive, 0.0 if began is None else time.perf_counter() - began, self._broke)

    def close(self, timeout: float | None = None) -> None:
        """Abort all jobs, end the thread, and wait for it: no longer than `timeout` seconds."""
        self._tell_to_end()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout)

    def _closed(self) -> RequestError:
        return EngineDied(f"{_CLOSED} ({self._broke})") if self._broke else RequestError(_CLOSED)

    def _tell_to_end(self) -> None:
        def end() -> None:
            self._ended = True
            for job_id in list(self.engine.jobs):
                self.engine.abort(job_id)

        with self._lock:
            if self._open:
                self._open = False
                self._inbox.put(end)

    def _stop_making(self) -> None:
        """Raise `KeyboardInterrupt` in the thread that makes the engine, and wait for its end.

        A thread that still runs when the program ends is torn out of torch, and that aborts the process.
        """
        self._tell_to_end()  # the engine may be ready, or not begun
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
            job.sink = self._watched(job)
            self.engine.add(job)

    def _watched(self, job: Job) -> Callable[[RequestOutput], None]:
        """The job's sink; if it raises, the job is dropped and the engine goes on."""
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
        del make  # it refers to its owner
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
            except BaseException as error:  # a drafter's code may raise anything, and this thread must survive it
                self._fail(error)
            self.after_turn()
        self._turn_began = None

    def _next(self) -> Callable[[], None]:
        """Wait for the next action."""
        with suppress(queue.Empty):
            return self._inbox.get(timeout=_PAUSE_S)
        tidy()
        return self._inbox.get()

    def _fail(self, error: BaseException) -> None:
        """End all jobs, with the reason. If that fails, or the device did, close the engine and answer its callers."""
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
    """End the threads of engines that were not closed: one that computes while Python exits aborts the process."""
    for loop in list(_running):
        loop.close(_PATIENCE_S)


def _wait_for(made: queue.SimpleQueue[BaseException | None]) -> BaseException | None:
    """Wait in short turns, since a Ctrl-C that comes just before a wait does not end it."""
    while True:
        with suppress(queue.Empty):
            return made.get(timeout=0.2)
