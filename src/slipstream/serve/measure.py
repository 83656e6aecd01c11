"""What HTTP costs: the same requests through the library and through the server, throughput and first token of each.

    python -m slipstream.serve.measure --model default --requests 32 --json FILE

Both ask one engine in turn, and each is compared with the one beside it: a machine that is faster or slower for a while
is so for both. The library asks in the engine's process (`unserved.py`); the client has a process of its own, as
clients do. The last line is JSON, with the two bars that a server is held to: at most a twentieth of the throughput,
and 2 ms before a first token.

    throughput   so many requests at a time, each followed by another in its place; answers of several lengths
    burst        so many that all come at once, to a server that has nothing to do, and end at once: it reads them one
                 after the other, where the library has them all
    first_token  of one request alone
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from slipstream.serve.unserved import Asked, Library

WARM_UP = 2
FIRST_TOKENS = 20
"""Requests, one after the other, whose first token is timed."""
FEWEST = 3
"""Pairs that are measured however long they take."""
LOST_BAR = 0.05
FIRST_TOKEN_BAR_MS = 2.0
_ALL, _STEADY = "all", "steady"
_ANSWER_S = 120.0
"""What the client gives the server for one answer; then something is broken, and it says so."""
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]
_END = b"0\r\n\r\n"
_TAIL = 1024  # bytes of a stream that its end is looked for in


@dataclass(frozen=True, slots=True)
class Throughput:
    """Tokens a second of requests that run together: medians. lost: the part that HTTP takes, the median over pairs."""

    library_tok_s: float
    server_tok_s: float
    ratio: float
    lost: float
    pairs: int
    bar: float = LOST_BAR

    @property
    def met(self) -> bool:
        return self.lost <= self.bar


@dataclass(frozen=True, slots=True)
class FirstToken:
    """Milliseconds to a first token of one request alone: medians; the difference is the median over pairs."""

    library_ms: float
    server_ms: float
    difference_ms: float
    pairs: int
    bar_ms: float = FIRST_TOKEN_BAR_MS

    @property
    def met(self) -> bool:
        return self.difference_ms <= self.bar_ms


@dataclass(frozen=True, slots=True)
class Cost:
    throughput: Throughput
    burst: Throughput
    first_token: FirstToken

    def told(self) -> dict[str, Any]:
        """As JSON has it."""
        parts = (("throughput", self.throughput), ("burst", self.burst), ("first_token", self.first_token))
        return {name: {**asdict(part), "met": part.met} for name, part in parts}


class Http:
    """The same through a server, asked by a process of its own."""

    def __init__(self, url: str, asked: Asked) -> None:
        command = [sys.executable, "-m", "slipstream.serve.measure", "--client", url]
        command += ["--requests", str(asked.requests), "--max-tokens", str(asked.max_tokens), "--each", str(asked.each)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)

    def all(self) -> float:
        return self._ask(_ALL)

    def steady(self) -> float:
        return self._ask(_STEADY)

    def first(self, index: int) -> float:
        return self._ask(str(index))

    def close(self) -> None:
        try:
            self._process.communicate(timeout=10)  # its input ends, and so does it
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()

    def _ask(self, what: str) -> float:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{what}\n")
        told = self._process.stdout.readline()
        if not told:
            raise RuntimeError("the client ended: what it said is above")
        return float(told)


def measure(library: Library, http: Http, asked: Asked) -> Cost:
    steady = _pairs(lambda _: library.steady(), lambda _: http.steady(), asked.repeats, asked.seconds)
    burst = _pairs(lambda _: library.all(), lambda _: http.all(), asked.repeats, asked.seconds)
    first = _pairs(library.first, http.first, FIRST_TOKENS, asked.seconds)
    plain_ms, served_ms = (1000 * median(pair[way] for pair in first) for way in (0, 1))
    more_ms = 1000 * median(late - early for early, late in first)
    return Cost(
        _throughput(asked.steady_tokens, steady),
        _throughput(asked.requests * asked.max_tokens, burst),
        FirstToken(round(plain_ms, 3), round(served_ms, 3), round(more_ms, 3), len(first)),
    )


def _throughput(tokens: int, pairs: Sequence[tuple[float, float]]) -> Throughput:
    """By pairs of seconds, of the library and of the server."""
    ratio = median(plain / served for plain, served in pairs)
    alone, served = (tokens / median(pair[way] for pair in pairs) for way in (0, 1))
    return Throughput(round(alone, 1), round(served, 1), round(ratio, 4), round(1 - ratio, 4), len(pairs))


def _pairs(
    one: Callable[[int], float], other: Callable[[int], float], count: int, seconds: float
) -> list[tuple[float, float]]:
    """Both in turn, each of them first as often; the first few do not count."""
    found: list[tuple[float, float]] = []
    begun = time.perf_counter()
    for i in range(WARM_UP + count):
        if len(found) >= WARM_UP + FEWEST and time.perf_counter() - begun > seconds:
            break
        if i % 2:
            late = other(i)
            found.append((one(i), late))
        else:
            found.append((one(i), other(i)))
    return found[WARM_UP:]


async def serve_pairs(url: str, asked: Asked) -> None:
    """The client: does what each line says that comes in, and tells how long it took."""
    host, port = url.removeprefix("http://").rsplit(":", 1)
    connections = [await asyncio.open_connection(host, int(port)) for _ in range(asked.requests)]
    loop = asyncio.get_running_loop()
    while line := (await loop.run_in_executor(None, sys.stdin.readline)).strip():
        if line == _ALL:
            took = await _timed(_ask(c, asked.prompt(i), asked.max_tokens) for i, c in enumerate(connections))
        elif line == _STEADY:
            took = await _timed(_ask_in_turn(c, asked.steady(i)) for i, c in enumerate(connections))
        else:
            took = await _ask(connections[0], asked.prompt(int(line)), 2)
        print(took, flush=True)


async def _timed(asking: Iterable[Awaitable[object]]) -> float:
    begun = time.perf_counter()
    await asyncio.gather(*asking)
    return time.perf_counter() - begun


async def _ask_in_turn(connection: Connection, asked: Sequence[tuple[str, int]]) -> None:
    for prompt, tokens in asked:
        await _ask(connection, prompt, tokens)


async def _ask(connection: Connection, prompt: str, tokens: int) -> float:
    """A streamed answer, read to its end; seconds to its first event."""
    async with asyncio.timeout(_ANSWER_S):
        return await _answered(*connection, prompt, tokens)


async def _answered(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, prompt: str, tokens: int) -> float:
    fields = {"model": "measured", "prompt": prompt, "max_tokens": tokens, "temperature": 0}
    body = json.dumps({**fields, "ignore_eos": True, "stream": True}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    begun = time.perf_counter()
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    if b" 200 " not in await reader.readline():
        raise RuntimeError(f"the server refused: {await reader.read(2000)!r}")
    await reader.readuntil(b"data: {")
    first = time.perf_counter() - begun
    tail = b""
    while not (tail.endswith(_END) and b"data: [DONE]" in tail):
        part = await reader.read(1 << 16)  # not `readuntil`: a long answer is longer than it looks
        if not part:
            raise RuntimeError(f"the server hung up: {tail!r}")
        tail = (tail + part)[-_TAIL:]
    if b'"finish_reason":"length"' not in tail:
        raise RuntimeError(f"the answer is not as long as it was asked for: {tail!r}")
    return first


def main() -> None:
    begun = time.perf_counter()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default")
    parser.add_argument("--drafter", default="none")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--memory", default=None, help="for the cache, as 4GiB; else what there is")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--each", type=int, default=4, help="one after the other in each place, in the steady run")
    parser.add_argument("--repeats", type=int, default=8, help="most pairs of runs")
    parser.add_argument("--seconds", type=float, default=40.0, help="no further pair begins behind so many")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there as well")
    parser.add_argument("--client", metavar="URL", help=argparse.SUPPRESS)
    options = parser.parse_args()
    for name in ("requests", "max_tokens", "repeats", "each"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(options, name)}: must be at least 1")
    asked = Asked(options.requests, options.max_tokens, options.repeats, options.seconds, options.each)
    if options.client:
        asyncio.run(serve_pairs(options.client, asked))
        return
    from slipstream.engine.remote import EngineProcess
    from slipstream.serve.config import ServeConfig
    from slipstream.serve.server import HttpServer

    with EngineProcess(
        options.model,
        drafter=options.drafter,
        device=options.device,
        memory=options.memory,
        max_num_seqs=max(32, asked.requests),
    ) as llm:
        loaded_s = time.perf_counter() - begun
        server = HttpServer(llm, ServeConfig(models=("measured",), port=0))
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            library, http = Library(llm, asked), Http(server.url, asked)
            try:
                found = measure(library, http, asked)
            finally:
                http.close()
            where = library.machine()
        finally:
            server.drain()
            thread.join()
    took = {"load": round(loaded_s, 1), "all": round(time.perf_counter() - begun, 1)}
    what = {"model": options.model, "drafter": options.drafter, **asdict(asked)}
    told = json.dumps({**found.told(), **what, "took_s": took, "machine": where})
    if options.json is not None:
        options.json.write_text(told + "\n")
    print(told)


if __name__ == "__main__":
    main()
