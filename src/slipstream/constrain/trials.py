"""Forms are tried out before they are compiled: with a few of the tokens, in a process that can be killed.

How long a form takes to compile depends on how ambiguous it is, which cannot be read off it: of two grammars of eight
rules one takes 10 ms and the other a minute. The compiler is a library that cannot be interrupted, and with all tokens
it would take too long to find out. With one in 32 of 49,152 it takes about a twentieth of the time.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import itertools
import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future, TimeoutError
from dataclasses import dataclass
from functools import cached_property
from typing import IO

from slipstream.constrain.source import Source
from slipstream.constrain.trial_process import FINE, WRONG
from slipstream.core.errors import QueueFull

_SAMPLE = 1536
_STEP = 32
"""One token in so many, but not fewer than the above: a larger vocabulary takes longer in its trial as well."""
_PATIENCE_S = 30.0
"""Seconds until an answer comes at the latest, the start of the process included."""


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
            self._tell(sample)

    def try_out(self, source: Source, sample: Sample, cpu_s: float) -> Outcome:
        """Can it be compiled within so many seconds of a CPU? Raises `OSError` where no process can be had."""
        answer: Future[Outcome] = Future()
        asked = {"vocabulary": sample.name, "kind": source.kind, "text": source.text, "free": source.free}
        mine = next(self._ids)
        try:
            with self._lock:
                to = self._tell(sample)
                self._waiting[mine] = answer
                _write(to, {"id": mine, **asked, "cpu_s": cpu_s})
            return answer.result(_PATIENCE_S + cpu_s)
        except (TimeoutError, CancelledError):
            raise QueueFull("structured_outputs: forms cannot be tried out right now; try again", 5.0) from None
        finally:
            self._waiting.pop(mine, None)

    def close(self) -> None:
        """End the process; the next form that needs one starts another."""
        with self._lock:
            process, self._process = self._process, None
        if process is not None and process.stdin is not None:
            with contextlib.suppress(OSError):  # it has ended, and something was not yet written to it
                process.stdin.close()
            process.terminate()  # it may still be importing, and nobody wants to wait for that
            process.wait()

    def _tell(self, sample: Sample) -> IO[bytes]:
        if self._process is None:
            self._process = self._started()
        assert self._process.stdin is not None
        if sample.name not in self._known:
            tokens = [token.decode("latin-1") for token in sample.tokens]
            _write(self._process.stdin, {"vocabulary": sample.name, "tokens": tokens})
            self._known.add(sample.name)
        return self._process.stdin

    def _started(self) -> subprocess.Popen[bytes]:
        """It sees no GPU, says nothing on the terminal, and ends with us, because nobody writes to it then."""
        self._known.clear()
        found = os.pathsep.join(filter(None, sys.path))
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "slipstream.constrain.trial_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": found, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
            start_new_session=True,  # Ctrl-C is for us
        )
        threading.Thread(target=self._listen, args=(process,), name="trials", daemon=True).start()
        return process

    def _listen(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        assert process.stdin is not None
        with process.stdout:
            for line in process.stdout:
                told = json.loads(line)
                if (answer := self._waiting.pop(told["id"], None)) is not None:
                    reason = told.get("reason", "") if told["outcome"] == WRONG else None
                    answer.set_result(Outcome(told["outcome"] == FINE, reason))
        process.wait()
        with contextlib.suppress(OSError):  # what was not yet written to it
            process.stdin.close()
        with self._lock:
            if self._process is process:  # else those who wait have another by now
                self._process = None
                for answer in list(self._waiting.values()):  # they go away by themselves meanwhile
                    answer.cancel()


WORKSHOP = Workshop()
atexit.register(WORKSHOP.close)


def _write(to: IO[bytes], what: dict[str, object]) -> None:
    to.write(json.dumps(what).encode() + b"\n")
    to.flush()
