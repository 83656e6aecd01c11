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
from slipstream.core.outputs import RequestOutput
from slipstream.core.responsive import tidy
from slipstream.core.snapshot import Pulse
from slipstream.engine.engine import Engine
from slipstream.engine.state import Job

_CLOSED = "the engine is closed: make a new LLM"
_log = logging.getLogger("slipstream.engine")
_PATIENCE_S = 10.0
"""Most seconds that the end of the program waits for a round in flight."""
_PAUSE_S = 0.5
"""Nobody asked for anything for so long: there is time to tidy up."""

_running: set[EngineLoop] = set()  # those whose thread has not ended


class EngineLoop:
    """Takes jobs at any time from any thread; runs rounds while there is work and sleeps when there is none.

    make: builds the engine, on the loop's own thread. On a CPU each thread that computes keeps a team of workers, and
    two teams on the same cores put each other to sleep between any two products (seen: steps half as fast again).
    """

    def __init__(self, make: Callable[[], Engine]) -> None:
        self.engine: Engine
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._open = True
        self._ended = False  # the engine's thread alone writes it, as the last thing that it was told to do
        self._broke = ""  # why it ended, where nobody closed it
        self._turn_began: float | None = None  # of the round in the making; None: it waits for work
        self._after_turn: tuple[Callable[[], None], ...] = ()
        self._lock = threading.Lock()  # nothing may enter the inbox once the loop was told to end
        self._coming = 0  # answers of jobs that are in the inbox
        made: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, args=(make, made), name="slipstream-engine", daemon=True)
        _running.add(self)
        try:
            self._thread.start()
            error = _hear(made)
        except BaseException:  # Ctrl-C: nobody will use what is being made
            self._stop_making()
            raise
        if error is not None:
            # it has only to end: but a program that ends meanwhile tears it out of torch, and that ends in an abort
            self._thread.join(_PATIENCE_S)
            raise error

    def submit(self, *jobs: Job) -> None:
        """Start jobs together. Their sinks hear of them from the engine's thread; one that cannot run raises here.

        Raises `QueueFull` at once where too many wait.
        """
        self.call(lambda: self._add(*jobs), jobs)

    def post(self, jobs: Sequence[Job], refused: Callable[[Exception], None]) -> None:
        """Start jobs without waiting; `refused` hears, on the engine's thread, why one of them cannot run.

        Raises `QueueFull` here and at once where too many wait.
        """

        def start() -> None:
            try:
                self._add(*jobs)
            except Exception as error:
                with suppress(Exception):  # nobody is there any more to hear it
                    refused(error)

        self._post(start, jobs)

    def abort(self, job_id: str) -> None:
        """End the job of this name after the round in flight. Does not wait."""
        self._post_unless_closed(lambda: self.engine.abort(job_id))

    def drop(self, job: Job) -> None:
        """The same for its owner: where it ended by itself, another of the same name is left alone."""
        self._post_unless_closed(lambda: self.engine.abort(job.id) if self.engine.jobs.get(job.id) is job else None)

    def call(self, action: Callable[[], None], jobs: Sequence[Job] = ()) -> None:
        """Run something between two rounds, and wait for it. It adds these jobs."""
        done: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

        def run() -> None:
            try:
                action()
                done.put(None)
            except BaseException as error:
                done.put(error)

        self._post(run, jobs)
        error = done.get()
        if error is not None:
            raise error

    def tell_after_turns(self, *listeners: Callable[[], None]) -> None:
        """From now on call these, and no others, on the engine's thread after every round and all else that it does.

        They must be quick and must not raise.
        """
        self._after_turn = listeners

    def pulse(self) -> Pulse:
        """How the engine's thread is doing, asked without disturbing it."""
        began = self._turn_began
        alive = self._thread.is_alive() and self._open
        return Pulse(alive, 0.0 if began is None else time.perf_counter() - began, self._broke)

    def close(self, timeout: float | None = None) -> None:
        """Abort what runs, end the thread, and wait for it: no longer than `timeout` seconds."""
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
        """Raise in the thread that makes the engine, and wait for its end.

        Left alone it would be torn out of the middle of torch when the program ends, and that ends in an abort.
        """
        self._tell_to_end()  # it may not have begun, or just be ready and wait for work
        thread = ctypes.c_ulong(self._thread.ident or 0)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(KeyboardInterrupt))
        with suppress(RuntimeError):  # not begun: it ends as soon as it does
            self._thread.join()
        _running.discard(self)

    def _add(self, *jobs: Job) -> None:
        with self._lock:
            self._coming -= _answers(jobs)
        if self._ended:
            raise self._closed()
        for job in jobs:
            job.sink = self._watched(job)
            self.engine.add(job)

    def _watched(self, job: Job) -> Callable[[RequestOutput], None]:
        """The job's sink; one that raises has nobody behind it any more, so the job ends and the engine goes on."""
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
        with suppress(RequestError):  # nothing runs in a closed engine: there is nothing to end
            self._post(action)

    def _run(self, make: Callable[[], Engine], made: queue.SimpleQueue[BaseException | None]) -> None:
        try:
            if not self._open:  # nobody waits for it any more
                raise RequestError(_CLOSED)
            self.engine = make()
        except BaseException as error:
            _running.discard(self)
            made.put(error)
            return
        del make  # it holds on to whoever made it
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
            except BaseException as error:  # a drafter's code may raise anything: this thread must not die of it
                self._fail(error)
            for tell in self._after_turn:
                tell()
        self._turn_began = None

    def _next(self) -> Callable[[], None]:
        """What is to be done next; waits for it."""
        with suppress(queue.Empty):
            return self._inbox.get(timeout=_PAUSE_S)
        tidy()
        return self._inbox.get()

    def _fail(self, error: BaseException) -> None:
        """End what runs, with the reason. An engine that cannot even do that, or whose device failed, is closed, and
        keeps nobody waiting."""
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
            while not self._inbox.empty():  # callers that wait for their turn are told that the engine is closed
                with suppress(Exception):
                    self._inbox.get()()


def _answers(jobs: Sequence[Job]) -> int:
    return sum(len(job.answers) for job in jobs)


@atexit.register
def _close_all() -> None:
    """End the threads of engines that nobody closed: a thread that computes while Python goes away ends in an abort."""
    for loop in list(_running):
        loop.close(_PATIENCE_S)


def _hear(made: queue.SimpleQueue[BaseException | None]) -> BaseException | None:
    """Wait for it. A Ctrl-C that comes just before a wait begins does not end it, so no wait is long."""
    while True:
        with suppress(queue.Empty):
            return made.get(timeout=0.2)
