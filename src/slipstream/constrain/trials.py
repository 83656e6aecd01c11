"""Forms are tried out before they are compiled: with a few of the tokens, in a process that can be killed.

How long a form takes to compile depends on how ambiguous it is, which cannot be read off it: of two grammars of eight
rules one takes 10 ms and the other a minute. The compiler is a library that cannot be interrupted, and with all tokens
it would take too long to find out. With one in 32 of 49,152 it takes about a twentieth of the time.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import io
import itertools
import json
import os
import select
import subprocess
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import CancelledError, Future, TimeoutError
from dataclasses import dataclass
from functools import cached_property

from slipstream.constrain.source import Source
from slipstream.constrain.trial_process import FINE, STARVED, WRONG
from slipstream.core import interpreter
from slipstream.core.errors import QueueFull

_SAMPLE = 1536
_STEP = 32
"""One token in so many, but not fewer than the above: a larger vocabulary takes longer in its trial as well."""
_PATIENCE_S = 30.0
"""Seconds until an answer comes at the latest, the start of the process included; and until it has read what it is
told, or it is ended."""


@dataclass(frozen=True)
class Sample:
    """Some tokens of a vocabulary: all of one byte, and every so many-th of the others."""

    tokens: tuple[bytes, ...]

    @staticmethod
    def of(vocabulary: Sequence[bytes]) -> Sample:
        step = max(1, min(_STEP, len(vocabulary) // _SAMPLE))
        kept = (token for i, token in enumerate(vocabulary) if token and (len(token) == 1 or i % step == 0))
        return Sample(tuple(dict.fromkeys(kept)))

    @cached_property
    def name(self) -> str:
        return hashlib.sha256(b"\0".join(self.tokens)).hexdigest()


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a trial came to."""

    fine: bool
    reason: str | None = None  # what is wrong with the form; None where it is fine, or took too long


class Workshop:
    """The process in which forms are tried out: one for all engines, started when the first form needs it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._waiting: dict[int, Future[Outcome]] = {}
        self._known: set[str] = set()  # vocabularies that the process has
        self._ids = itertools.count()

    def warm(self, sample: Sample) -> None:
        """Start it, and let it have the vocabulary. Does not wait for it."""
        with self._lock:
            self._running()
        threading.Thread(target=self._introduce, args=(sample,), name="trials", daemon=True).start()

    def _introduce(self, sample: Sample) -> None:
        with self._lock, contextlib.suppress(OSError):  # who asks next finds out
            if self._process is not None:
                self._tell(sample)

    def try_out(self, source: Source, sample: Sample, cpu_s: float) -> Outcome:
        """Can it be compiled within so many seconds of a CPU? Raises `OSError` where no process can be had."""
        answer: Future[Outcome] = Future()
        asked = {"vocabulary": sample.name, "kind": source.kind, "text": source.text, "free": source.free}
        mine = next(self._ids)
        try:
            if not self._lock.acquire(timeout=_PATIENCE_S):
                raise TimeoutError
            try:
                self._tell(sample)
                self._waiting[mine] = answer
                self._send({"id": mine, **asked, "cpu_s": cpu_s})
            finally:
                self._lock.release()
            return answer.result(_PATIENCE_S + cpu_s)
        except (TimeoutError, CancelledError, BrokenPipeError):  # it hangs, or has just ended: another will do
            raise QueueFull("structured_outputs: forms cannot be tried out right now; try again", 5.0) from None
        finally:
            self._waiting.pop(mine, None)

    def close(self) -> None:
        """End the process; the next form that needs one starts another."""
        if (process := self._process) is not None:
            process.kill()  # it may still be importing, or hang: who writes to it just now must not wait
        with self._lock:
            if process is not None and self._process is process:
                self._process = None
        if process is not None:
            process.wait()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            self._process = self._started()
        return self._process

    def _tell(self, sample: Sample) -> None:
        self._running()
        if sample.name not in self._known:
            tokens = [token.decode("latin-1") for token in sample.tokens]
            self._send({"vocabulary": sample.name, "tokens": tokens})
            self._known.add(sample.name)

    def _send(self, what: dict[str, object]) -> None:
        """Under the lock. One that does not take it is of no use any more."""
        process = self._running()
        try:
            _write(process, what)
        except OSError:
            process.kill()  # half a line is of no use to anybody
            self._forget(process)
            raise

    def _forget(self, process: subprocess.Popen[bytes]) -> None:
        """Under the lock. Those who wait for it must come again."""
        if self._process is process:  # else those who wait have another by now
            self._process = None
            for answer in list(self._waiting.values()):  # they go away by themselves meanwhile
                answer.cancel()

    def _started(self) -> subprocess.Popen[bytes]:
        """It sees no GPU, says nothing on the terminal, and ends with us, because nobody writes to it then."""
        self._known.clear()
        process = subprocess.Popen(
            interpreter.command("-W", "ignore", "-m", "slipstream.constrain.trial_process"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            env=interpreter.surroundings(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1"),
            start_new_session=True,  # Ctrl-C is for us
        )
        assert process.stdin is not None
        os.set_blocking(process.stdin.fileno(), False)  # `_write` waits, but not for ever
        threading.Thread(target=self._listen, args=(process,), name="trials", daemon=True).start()
        return process

    def _listen(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        assert process.stdin is not None
        with io.BufferedReader(process.stdout) as lines:  # type: ignore[type-var]  # a raw file, by `bufsize`
            self._hear(lines)
        process.wait()
        with self._lock:
            process.stdin.close()
            self._forget(process)

    def _hear(self, lines: Iterable[bytes]) -> None:
        """Hand the outcomes to the callers that wait for them."""
        for line in lines:
            told = json.loads(line)
            if (answer := self._waiting.pop(told["id"], None)) is None:
                continue
            if told["outcome"] == STARVED:
                answer.cancel()  # the caller must ask again
            else:
                reason = told.get("reason", "") if told["outcome"] == WRONG else None
                answer.set_result(Outcome(told["outcome"] == FINE, reason))


WORKSHOP = Workshop()
atexit.register(WORKSHOP.close)


def _write(process: subprocess.Popen[bytes], what: dict[str, object]) -> None:
    """Raises `TimeoutError` where it does not read."""
    assert process.stdin is not None
    pipe, left = process.stdin.fileno(), memoryview(json.dumps(what).encode() + b"\n")
    until = time.monotonic() + _PATIENCE_S
    room = select.poll()  # `select` knows only the first thousand files
    room.register(pipe, select.POLLOUT)
    while left:
        try:
            left = left[os.write(pipe, left) :]
        except BlockingIOError:
            if not room.poll(max(0.0, until - time.monotonic()) * 1000):
                raise TimeoutError("the process in which forms are tried out does not read") from None
