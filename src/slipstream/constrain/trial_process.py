"""A process of its own in which forms are tried out, compiled and followed: it may be killed where a thread may not.

`python -m slipstream.constrain.trial_process` reads lines of JSON: vocabularies, and forms to be compiled with them.
Each form is compiled in a fork, which the system ends when its time is over; so nothing is started anew, and what
crashes there crashes alone. A line of JSON says how it went. It ends when nobody writes to it any more, or for long.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import signal
import time
from collections.abc import Iterator
from typing import Any

from slipstream.constrain.source import Source

IDLE_S = 600.0
_MOST_BYTES = 2 << 30
"""Of memory, beyond what the process has before it compiles anything: libraries for GPUs take gigabytes."""
_WALL = 20
"""Times its time on a CPU that a form may take by the clock: others may need the CPU too."""
_LONGEST_REASON = 1000
"""Bytes: a line of less than 4,096 is written as a whole, whoever writes at the same time."""
LONGEST_PART = 0.01
"""Of its time on a CPU that one token of a text may take; with all tokens masks take about twenty times as long."""
_TEXTS, _LENGTH = 4, 32
"""Texts of the form that are followed, and tokens of each."""
FINE, WRONG, DEAR, STARVED = "fine", "wrong", "dear", "starved"
"""starved: it was ended by the clock, not by its time on a CPU: nothing is known of the form."""


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for forks
    compilers: dict[str, Any] = {}
    for line in _lines():
        asked = json.loads(line)
        if "tokens" in asked:
            compilers[asked["vocabulary"]] = _compiler(asked["tokens"])
        elif os.fork() == 0:
            _watch(asked, compilers[asked["vocabulary"]])
            os._exit(0)


def _lines() -> Iterator[bytes]:
    """Of the standard input."""
    rest = b""
    while select.select([0], [], [], IDLE_S)[0] and (got := os.read(0, 1 << 16)):
        *whole, rest = (rest + got).split(b"\n")
        yield from whole


def _compiler(tokens: list[str]) -> Any:
    """With one thread: none of this process's may run while it forks."""
    import xgrammar

    vocabulary = [token.encode("latin-1") for token in tokens]
    info = xgrammar.TokenizerInfo([*vocabulary, b""], xgrammar.VocabType.RAW, stop_token_ids=[len(vocabulary)])
    return xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)


def _watch(asked: dict[str, Any], compiler: Any) -> None:
    """Compile in another fork, and say what became of it."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.close(0)  # who writes there writes to the process that forked, or is to learn that it ended
    ours, theirs = os.pipe()
    fork = os.fork()
    if fork == 0:
        os.close(ours)
        _limit(asked["cpu_s"])
        os.write(theirs, json.dumps(_try(asked, compiler)).encode())
        os._exit(0)
    os.close(theirs)
    told = b"".join(iter(lambda: os.read(ours, 1 << 16), b""))
    _, status = os.waitpid(fork, 0)
    late = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM
    said = json.loads(told) if told else {"outcome": STARVED if late else DEAR}  # dear: its CPU time, or memory
    os.write(1, json.dumps({"id": asked["id"], **said}).encode() + b"\n")


def _limit(cpu_s: float) -> None:
    """Seconds of a CPU, and memory. Who goes beyond them is ended by the system."""
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    signal.setitimer(signal.ITIMER_REAL, _WALL * cpu_s)
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        most = _data_bytes() + _MOST_BYTES
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def _data_bytes() -> int:
    """What the process has now, as the limit counts it. Raises `OSError` where nobody tells."""
    with open("/proc/self/statm", encoding="ascii") as told:
        return int(told.read().split()[5]) * os.sysconf("SC_PAGE_SIZE")


def _try(asked: dict[str, Any], compiler: Any) -> dict[str, str]:
    try:
        compiled = Source(asked["kind"], asked["text"], asked["free"]).compile(compiler)
        slowest = max(_follow(compiled, random.Random(text)) for text in range(_TEXTS))
        return {"outcome": FINE if slowest <= LONGEST_PART * asked["cpu_s"] else DEAR}
    except MemoryError:
        return {"outcome": DEAR}
    except Exception as error:  # whatever the compiler does not like
        return {"outcome": WRONG, "reason": str(error)[-_LONGEST_REASON:]}


def _follow(compiled: Any, dice: random.Random) -> float:
    """Seconds of a CPU that the slowest token of a text of this form takes, drawn by chance."""
    import xgrammar

    matcher = xgrammar.GrammarMatcher(compiled)
    mask = xgrammar.allocate_token_bitmask(1, compiled.tokenizer_info.vocab_size)
    slowest = 0.0
    matcher.fill_next_token_bitmask(mask)  # what a fork touches for the first time takes longer
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
