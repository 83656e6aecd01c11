"""One thread that drives an engine, so that callers on any thread, blocking or asynchronous, share its batches."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from slipstream.core.errors import RequestError
from slipstream.engine.engine import Engine
from slipstream.engine.state import Job


class EngineLoop:
    """Takes jobs at any time from any thread; runs rounds while there is work and sleeps when there is none."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._open = True
        self._lock = threading.Lock()  # nothing may enter the inbox once the loop was told to end
        self._thread = threading.Thread(target=self._run, name="slipstream-engine", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Start a job. Its sink hears of it from the engine's thread; a job that cannot run raises here."""
        self.call(lambda: self.engine.add(job))

    def abort(self, job_id: str) -> None:
        """End a job after the round in flight. Does not wait."""
        self._post(lambda: self.engine.abort(job_id))

    def call(self, action: Callable[[], None]) -> None:
        """Run something between two rounds, and wait for it."""
        done: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

        def run() -> None:
            try:
                action()
                done.put(None)
            except BaseException as error:
                done.put(error)

        self._post(run)
        error = done.get()
        if error is not None:
            raise error

    def close(self) -> None:
        """Abort what runs, end the thread, and wait for it."""

        def end() -> None:
            for job_id in list(self.engine.jobs):
                self.engine.abort(job_id)

        with self._lock:
            if not self._open:
                return
            self._open = False
            self._inbox.put(end)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _post(self, action: Callable[[], None]) -> None:
        with self._lock:
            if not self._open:
                raise RequestError("the engine is closed: make a new LLM")
            self._inbox.put(action)

    def _run(self) -> None:
        while self._open or not self._inbox.empty():
            while not self.engine.busy or not self._inbox.empty():
                self._inbox.get()()
                if not self._open and self._inbox.empty():
                    break
            if not self.engine.busy:
                continue
            try:
                self.engine.step()
            except Exception as error:
                self.engine.fail_all(error)
