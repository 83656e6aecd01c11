"""What HTTP costs: the same requests through the library and through the server, throughput and first token of each.

    python -m slipstream.serve.measure --model default --requests 32 --max-tokens 128

Both run in turn, in one process, and each is compared with the one beside it: a machine that is faster or slower for a
while is so for both. The client has a process of its own, as clients do. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

WARM_UP = 2
FIRST_TOKENS = 20
"""Requests, one after the other, whose first token is timed."""
_ALL = "all"


@dataclass(frozen=True, slots=True)
class Speed:
    """Tokens a second of requests that run together, and seconds to a first token: medians."""

    tokens_per_s: float
    first_token_s: float


@dataclass(frozen=True, slots=True)
class Cost:
    """What HTTP takes: a part of the throughput, and milliseconds before a first token. Medians over pairs."""

    library: Speed
    http: Speed
    throughput_cost: float
    first_token_cost_ms: float


@dataclass(frozen=True, slots=True)
class Asked:
    requests: int
    max_tokens: int
    repeats: int

    def prompt(self, index: int) -> str:
        return f"Write {index + 3} sentences about the number {index}."


class Library:
    """The engine, asked by this process."""

    def __init__(self, llm: Any, asked: Asked) -> None:
        from slipstream.core.params import SamplingParams

        self._llm, self._asked = llm, asked
        self._params = SamplingParams(max_tokens=asked.max_tokens, temperature=0, ignore_eos=True)
        self._short = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)

    def all(self) -> float:
        """Seconds of all requests together."""
        begun = time.perf_counter()
        self._llm.generate([self._asked.prompt(i) for i in range(self._asked.requests)], self._params)
        return time.perf_counter() - begun

    def first(self, index: int) -> float:
        """Seconds to the first token of one."""
        begun = time.perf_counter()
        stream = self._llm.stream(self._asked.prompt(index), self._short)
        next(stream)
        took = time.perf_counter() - begun
        for _ in stream:
            pass
        return took


class Http:
    """The same through a server, asked by a process of its own."""

    def __init__(self, url: str, asked: Asked) -> None:
        command = [sys.executable, "-m", "slipstream.serve.measure", "--client", url]
        command += ["--requests", str(asked.requests), "--max-tokens", str(asked.max_tokens)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)

    def all(self) -> float:
        return self._ask(_ALL)

    def first(self, index: int) -> float:
        return self._ask(str(index))

    def close(self) -> None:
        self._process.communicate(timeout=60)

    def _ask(self, what: str) -> float:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{what}\n")
        told = self._process.stdout.readline()
        if not told:
            raise RuntimeError("the client ended: what it said is above")
        return float(told)


def measure(library: Library, http: Http, asked: Asked) -> Cost:
    tokens = asked.requests * asked.max_tokens
    whole = _pairs(lambda _: library.all(), lambda _: http.all(), asked.repeats)
    first = _pairs(library.first, http.first, FIRST_TOKENS)
    median = statistics.median
    speeds = [Speed(tokens / median(p[way] for p in whole), median(p[way] for p in first)) for way in (0, 1)]
    return Cost(
        speeds[0],
        speeds[1],
        round(1 - median(plain / served for plain, served in whole), 4),
        round(1000 * median(served - plain for plain, served in first), 2),
    )


def _pairs(one: Callable[[int], float], other: Callable[[int], float], count: int) -> list[tuple[float, float]]:
    """Both in turn, each of them first as often; the first few do not count."""
    found = []
    for i in range(WARM_UP + count):
        if i % 2:
            late = other(i)
            found.append((one(i), late))
        else:
            found.append((one(i), other(i)))
    return found[WARM_UP:]


async def serve_pairs(url: str, asked: Asked) -> None:
    """The client: does what each line says that comes in, and tells how long it took."""
    host, port = url.removeprefix("http://").split(":")
    connections = [await asyncio.open_connection(host, int(port)) for _ in range(asked.requests)]
    loop = asyncio.get_running_loop()
    while line := (await loop.run_in_executor(None, sys.stdin.readline)).strip():
        if line == _ALL:
            begun = time.perf_counter()
            await asyncio.gather(*(_ask(c, asked.prompt(i), asked.max_tokens) for i, c in enumerate(connections)))
            took = time.perf_counter() - begun
        else:
            took = await _ask(connections[0], asked.prompt(int(line)), 2)
        print(took, flush=True)


async def _ask(connection: tuple[asyncio.StreamReader, asyncio.StreamWriter], prompt: str, tokens: int) -> float:
    """A streamed answer, read to its end; seconds to its first event."""
    reader, writer = connection
    fields = {"model": "measured", "prompt": prompt, "max_tokens": tokens, "temperature": 0}
    body = json.dumps({**fields, "ignore_eos": True, "stream": True}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    begun = time.perf_counter()
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    if b" 200 " not in await reader.readline():
        raise RuntimeError(f"the server refused: {await reader.read(500)!r}")
    await reader.readuntil(b"data: {")
    first = time.perf_counter() - begun
    await reader.readuntil(b"data: [DONE]")
    await reader.readuntil(b"0\r\n\r\n")
    return first


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default")
    parser.add_argument("--drafter", default="none")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=6)
    parser.add_argument("--client", metavar="URL", help=argparse.SUPPRESS)
    options = parser.parse_args()
    asked = Asked(options.requests, options.max_tokens, options.repeats)
    if options.client:
        asyncio.run(serve_pairs(options.client, asked))
        return
    from slipstream.engine.llm import LLM
    from slipstream.serve.config import ServeConfig
    from slipstream.serve.server import HttpServer

    with LLM(
        options.model, drafter=options.drafter, device=options.device, max_num_seqs=max(32, asked.requests)
    ) as llm:
        server = HttpServer(llm, ServeConfig(models=("measured",), port=0))
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        http = Http(server.url, asked)
        try:
            found = measure(Library(llm, asked), http, asked)
        finally:
            http.close()
            server.drain()
            thread.join()
    print(json.dumps(asdict(found)))


if __name__ == "__main__":
    main()
