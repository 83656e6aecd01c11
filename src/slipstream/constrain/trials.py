"""Trials: heavy forms are compiled with a sample of the tokens first, in a process that can be killed.

The time to compile a form depends on its ambiguity, which cannot be read off it: of two grammars of eight rules one
takes 10 ms and the other a minute. xgrammar cannot be interrupted, and with all tokens a trial would take too long.
With one in 32 of 49,152 it takes about a twentieth of the time.

`python -m slipstream.constrain.trials` is that process. It reads lines of JSON: vocabularies, and forms to be compiled
with them. Each form is compiled and followed in a fork, which the system ends when its time is over: there is no new
start, and a crash ends the fork alone. A line of JSON tells the outcome. The process ends when its input does, or after
`IDLE_S` without any.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import io
import itertools
import json
import os
import random
import select
import signal
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, TimeoutError
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from slipstream.constrain.source import Source
from slipstream.core import interpreter
from slipstream.core.errors import QueueFull

_SAMPLE = 1536
_STEP = 32
"""One token in 32, but at least the above: a larger vocabulary takes longer in its trial as well."""
_ANSWER_TIMEOUT_S = 30.0
"""Seconds until an answer must come, the start of the process included; and until the process must have read a line,
or it is killed."""
IDLE_S = 600.0
_MOST_BYTES = 2 << 30
"""Bytes of memory beyond those of the process before a form is compiled: libraries for GPUs take gigabytes."""
_WALL = 20
"""The limit by the clock as a multiple of the CPU time: other processes may need the CPU, too."""
_LONGEST_REASON = 1000
"""Bytes: a line of less than 4,096 is written as a whole, also where several forks write at a time."""
LONGEST_PART = 0.01
"""The share of the CPU time limit that one token of a text may take; with all tokens masks take about 20 times as
long."""
_TEXTS, _LENGTH = 4, 32
"""Random texts of the form that are followed, and tokens of each."""
FINE, WRONG, EXPENSIVE, STARVED = "fine", "wrong", "expensive", "starved"
"""expensive: it took too much time or memory. starved: it was ended by the clock, not by its CPU time, so nothing is
known."""


@dataclass(frozen=True)
class Sample:
    """Some tokens of a vocabulary: all of one byte, and a regular sample of the others."""

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
    """The outcome of a trial."""

    fine: bool
    reason: str | None = None  # the error in the form; None where it is fine, or took too long


class TrialProcess:
    """The process of trials: one for all engines, started for the first form."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._waiting: dict[int, Future[Outcome]] = {}
        self._known: set[str] = set()  # vocabularies that the process has
        self._ids = itertools.count()

    def warm(self, sample: Sample) -> None:
        """Start the process and send the vocabulary. Does not wait."""
        with self._lock:
            self._running()
        threading.Thread(target=self._introduce, args=(sample,), name="trials", daemon=True).start()

    def _introduce(self, sample: Sample) -> None:
        with self._lock, contextlib.suppress(OSError):  # the next trial reports it
            if self._process is not None:
                self._tell(sample)

    def try_out(self, source: Source, sample: Sample, cpu_s: float) -> Outcome:
        """Compile the form within `cpu_s` seconds of CPU time. Raises `OSError` if no process can be started,
        `QueueFull` if the trial had no result."""
        answer: Future[Outcome] = Future()
        asked = {"vocabulary": sample.name, "kind": source.kind, "text": source.text, "free": source.free}
        mine = next(self._ids)
        try:
            if not self._lock.acquire(timeout=_ANSWER_TIMEOUT_S):
                raise TimeoutError
            try:
                self._tell(sample)
                self._waiting[mine] = answer
                self._send({"id": mine, **asked, "cpu_s": cpu_s})
            finally:
                self._lock.release()
            return answer.result(_ANSWER_TIMEOUT_S + cpu_s)
        except (TimeoutError, CancelledError, BrokenPipeError):  # it hangs, ended, or got no CPU
            raise QueueFull("structured_outputs: forms cannot be tried out right now; try again", 5.0) from None
        finally:
            self._waiting.pop(mine, None)

    def close(self) -> None:
        """End the process; the next form that needs one starts another."""
        if (process := self._process) is not None:
            process.kill()  # first of all: it may hang, and a writer hold the lock
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
        """Send a line; the caller holds the lock. A process that does not read is killed."""
        process = self._running()
        try:
            _write(process, what)
        except OSError:
            process.kill()  # it may have half a line
            self._forget(process)
            raise

    def _forget(self, process: subprocess.Popen[bytes]) -> None:
        """Cancel the trials of a dead process; the caller holds the lock."""
        if self._process is process:  # else they are those of the next process
            self._process = None
            for answer in list(self._waiting.values()):  # a copy: callers remove theirs
                answer.cancel()

    def _started(self) -> subprocess.Popen[bytes]:
        """Start the process, without a GPU or output on the terminal. It ends with this process, since its input
        does."""
        self._known.clear()
        process = subprocess.Popen(
            interpreter.command("-W", "ignore", "-m", "slipstream.constrain.trials"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            env=interpreter.surroundings(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1"),
            start_new_session=True,  # Ctrl-C is not for it
        )
        assert process.stdin is not None
        os.set_blocking(process.stdin.fileno(), False)  # `_write` waits with a limit
        threading.Thread(target=self._listen, args=(process,), name="trials", daemon=True).start()
        return process

    def _listen(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        assert process.stdin is not None
        with io.BufferedReader(process.stdout) as lines:  # type: ignore[type-var]  # a raw file, by `bufsize`
            self._resolve(lines)
        process.wait()
        with self._lock:
            process.stdin.close()
            self._forget(process)

    def _resolve(self, lines: Iterable[bytes]) -> None:
        """Hand the outcomes to the waiting callers."""
        for line in lines:
            told = json.loads(line)
            if (answer := self._waiting.pop(told["id"], None)) is None:
                continue
            if told["outcome"] == STARVED:
                answer.cancel()  # the caller must ask again
            else:
                reason = told.get("reason", "") if told["outcome"] == WRONG else None
                answer.set_result(Outcome(told["outcome"] == FINE, reason))


TRIALS = TrialProcess()
atexit.register(TRIALS.close)


def _write(process: subprocess.Popen[bytes], what: dict[str, object]) -> None:
    """Send a line of JSON. Raises `TimeoutError` where the process does not read."""
    assert process.stdin is not None
    pipe, left = process.stdin.fileno(), memoryview(json.dumps(what).encode() + b"\n")
    until = time.monotonic() + _ANSWER_TIMEOUT_S
    room = select.poll()  # `select` knows only the first 1,024 files
    room.register(pipe, select.POLLOUT)
    while left:
        try:
            left = left[os.write(pipe, left) :]
        except BlockingIOError:
            if not room.poll(max(0.0, until - time.monotonic()) * 1000):
                raise TimeoutError("the process of trials does not read") from None


# --- in the process of trials ---------------------------------------------------------------------------------------


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # forks are not waited for
    compilers: dict[str, Any] = {}
    for line in _lines():
        asked = json.loads(line)
        if "tokens" in asked:
            compilers[asked["vocabulary"]] = _compiler(asked["tokens"])
        elif os.fork() == 0:
            _watch(asked, compilers[asked["vocabulary"]])
            os._exit(0)


def _lines() -> Iterator[bytes]:
    """Lines of the standard input."""
    rest = b""
    while select.select([0], [], [], IDLE_S)[0] and (got := os.read(0, 1 << 16)):
        *whole, rest = (rest + got).split(b"\n")
        yield from whole


def _compiler(tokens: list[str]) -> Any:
    """A compiler with one thread: no other may run while the process forks."""
    import xgrammar

    vocabulary = [token.encode("latin-1") for token in tokens]
    info = xgrammar.TokenizerInfo([*vocabulary, b""], xgrammar.VocabType.RAW, stop_token_ids=[len(vocabulary)])
    return xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)


def _watch(asked: dict[str, Any], compiler: Any) -> None:
    """Compile in another fork, and report the outcome."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.close(0)  # the input is the parent's
    ours, theirs = os.pipe()
    fork = os.fork()
    if fork == 0:
        os.close(ours)
        _limit(asked["cpu_s"])
        os.write(theirs, json.dumps(_try(asked, compiler)).encode())
        os._exit(0)
    os.close(theirs)
    told = b"".join(iter(lambda: os.read(ours, 1 << 16), b""))
    _, status, used = os.wait4(fork, 0)
    late = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM
    starved = late and used.ru_utime + used.ru_stime < asked["cpu_s"]
    said = json.loads(told) if told else {"outcome": STARVED if starved else EXPENSIVE}
    os.write(1, json.dumps({"id": asked["id"], **said}).encode() + b"\n")


def _limit(cpu_s: float) -> None:
    """Limit the fork's time and memory. The system ends it where it exceeds them."""
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    signal.setitimer(signal.ITIMER_REAL, _WALL * cpu_s)
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        most = _data_bytes() + _MOST_BYTES
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def _data_bytes() -> int:
    """Bytes of the process as `RLIMIT_DATA` counts them. Raises `OSError` on systems that cannot tell."""
    with open("/proc/self/statm", encoding="ascii") as told:
        return int(told.read().split()[5]) * os.sysconf("SC_PAGE_SIZE")


def _try(asked: dict[str, Any], compiler: Any) -> dict[str, str]:
    try:
        compiled = Source(asked["kind"], asked["text"], asked["free"]).compile(compiler)
        slowest = max(_follow(compiled, random.Random(text)) for text in range(_TEXTS))
        return {"outcome": FINE if slowest <= LONGEST_PART * asked["cpu_s"] else EXPENSIVE}
    except MemoryError:
        return {"outcome": EXPENSIVE}
    except Exception as error:  # any error of xgrammar's is one in the form
        return {"outcome": WRONG, "reason": str(error)[-_LONGEST_REASON:]}


def _follow(compiled: Any, dice: random.Random) -> float:
    """Seconds of a CPU for the slowest token of a random text of this form."""
    import xgrammar

    matcher = xgrammar.GrammarMatcher(compiled)
    mask = xgrammar.allocate_token_bitmask(1, compiled.tokenizer_info.vocab_size)
    slowest = 0.0
    matcher.fill_next_token_bitmask(mask)  # pages that a fork touches for the first time take longer
    for _ in range(_LENGTH):
        began = time.thread_time()
        matcher.fill_next_token_bitmask(mask)
        taken = time.thread_time() - began
        words = [(at, word) for at, word in enumerate(mask[0].tolist()) if word]
        if not words:
            break
        at, word = dice.choice(words)
        token = at * 32 + dice.choice([bit for bit in range(32) if word >> bit & 1])
        began = time.thread_time()
        going = matcher.accept_token(token) and not matcher.is_terminated()
        slowest = max(slowest, taken + time.thread_time() - began)
        if not going:
            break
    return slowest


if __name__ == "__main__":
    main()
