"""The cost of HTTP: the same requests through the library and through the server.

    python tools/http_cost.py --model default --requests 32 --json FILE

Both use one engine in turn, and each run is compared with the one beside it, so that a machine that gets faster or
slower does so for both. The library's requests start in the engine's process; the client has a process of its own. The
last line is JSON, with the bars of a server: at most a twentieth of the throughput, and 2 ms before a first token.

    throughput   `--requests` at a time, each followed by another in its place; answers of several lengths
    burst        `--requests` at once, to an idle server
    first_token  of one request alone
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from slipstream.core.params import SamplingParams

if TYPE_CHECKING:  # the client does not need torch
    from slipstream.engine.llm import LLM

WARM_UP = 2
FIRST_TOKENS = 20
"""Requests, one after the other, whose first token is timed."""
FEWEST = 3
"""Pairs of runs that are measured however long they take."""
LOST_BAR = 0.05
FIRST_TOKEN_BAR_MS = 2.0
ANSWER_S = 120.0
"""Time for one answer before the client reports an error."""
_ALL, _STEADY = "all", "steady"
_END = b"0\r\n\r\n"
_TAIL = 1024  # bytes of a stream in which its end is looked for
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass(frozen=True, slots=True)
class Asked:
    """requests: at once. each: in the steady run, one after the other in each place.

    max_tokens: of each answer of a burst; in the steady run on average: equal ones would end together.
    seconds: no further pair of runs begins after this time, once there are FEWEST.
    """

    requests: int
    max_tokens: int
    repeats: int
    seconds: float = 40.0
    each: int = 4

    def prompt(self, index: int) -> str:
        return f"Write {index + 3} sentences about the number {index}."

    def steady(self, place: int) -> list[tuple[str, int]]:
        """The prompts of one place, with the lengths of their answers around `max_tokens`.

        All places have the same sum, so that none is empty before the others.
        """
        least, half = -(-self.max_tokens // 2), self.each // 2
        first = [least + (place * half + turn) * 7919 % (self.max_tokens + 1) for turn in range(half)]
        others = [2 * least + self.max_tokens - tokens for tokens in first]
        lengths = [*first, *[self.max_tokens] * (self.each % 2), *others]
        return [(self.prompt(place * self.each + turn), tokens) for turn, tokens in enumerate(lengths)]

    @property
    def steady_tokens(self) -> int:
        return sum(tokens for place in range(self.requests) for _, tokens in self.steady(place))


class Library:
    """Requests inside the engine's process. call: runs a function of an `LLM` there."""

    def __init__(self, call: Callable[..., Any], asked: Asked) -> None:
        self._call, self._asked = call, asked

    def run(self, what: str) -> float:
        """Seconds of a burst, of a steady run, or to the first token of the request with this number."""
        return float(self._call(run_in_library, self._asked, what))


def run_in_library(llm: LLM, asked: Asked, what: str) -> float:
    def params(max_tokens: int) -> SamplingParams:
        return SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)

    def place(number: int) -> None:
        for prompt, tokens in asked.steady(number):
            llm.generate(prompt, params(tokens))

    begun = time.perf_counter()
    if what == _ALL:
        llm.generate([asked.prompt(i) for i in range(asked.requests)], params(asked.max_tokens))
    elif what == _STEADY:
        with ThreadPoolExecutor(asked.requests) as places:
            list(places.map(place, range(asked.requests)))
    else:
        stream = llm.stream(asked.prompt(int(what)), params(2))
        next(stream)
        took = time.perf_counter() - begun
        for _ in stream:
            pass
        return took
    return time.perf_counter() - begun


def machine(llm: LLM) -> dict[str, Any]:
    """The hardware and versions: an event loop and a parser in pure Python cost several times more."""
    import fastapi
    import torch
    import uvicorn

    gpu = llm.engine.target.device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name() if gpu else f"{platform.processor() or platform.machine()} CPU",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "fastapi": fastapi.__version__,
        "uvicorn": uvicorn.__version__,
        **{name: importlib.util.find_spec(name) is not None for name in ("uvloop", "httptools")},
    }


class Http:
    """The same requests through a server, from a process of its own."""

    def __init__(self, url: str, asked: Asked) -> None:
        command = [sys.executable, __file__, "--client", url, "--requests", str(asked.requests)]
        command += ["--max-tokens", str(asked.max_tokens), "--each", str(asked.each)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)

    def run(self, what: str) -> float:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{what}\n")
        told = self._process.stdout.readline()
        if not told:
            raise RuntimeError("the client ended: its error is above")
        return float(told)

    def close(self) -> None:
        try:
            self._process.communicate(timeout=10)  # the end of its input ends it
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()


def measure(library: Callable[[str], float], http: Callable[[str], float], asked: Asked) -> dict[str, Any]:
    """The result by measurement. library, http: run one and return its seconds."""
    steady = _pairs(library, http, lambda _: _STEADY, asked.repeats, asked.seconds)
    burst = _pairs(library, http, lambda _: _ALL, asked.repeats, asked.seconds)
    first = _pairs(library, http, str, FIRST_TOKENS, asked.seconds)
    difference_ms = round(1000 * median(late - early for early, late in first), 3)
    return {
        "throughput": _throughput(asked.steady_tokens, steady),
        "burst": _throughput(asked.requests * asked.max_tokens, burst),
        "first_token": {
            "library_ms": round(1000 * median(early for early, _ in first), 3),
            "server_ms": round(1000 * median(late for _, late in first), 3),
            "difference_ms": difference_ms,
            "pairs": len(first),
            "bar_ms": FIRST_TOKEN_BAR_MS,
            "met": difference_ms <= FIRST_TOKEN_BAR_MS,
        },
    }


def _throughput(tokens: int, pairs: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """Medians of tokens a second. lost: HTTP's share, the median over pairs."""
    ratio = median(plain / served for plain, served in pairs)
    lost = round(1 - ratio, 4)
    return {
        "library_tok_s": round(tokens / median(plain for plain, _ in pairs), 1),
        "server_tok_s": round(tokens / median(served for _, served in pairs), 1),
        "ratio": round(ratio, 4),
        "lost": lost,
        "pairs": len(pairs),
        "bar": LOST_BAR,
        "met": lost <= LOST_BAR,
    }


def _pairs(
    one: Callable[[str], float],
    other: Callable[[str], float],
    what: Callable[[int], str],
    count: int,
    seconds: float,
) -> list[tuple[float, float]]:
    """Seconds of both in turn, each of them first in half of the pairs. The first WARM_UP are left out."""
    found: list[tuple[float, float]] = []
    begun = time.perf_counter()
    for i in range(WARM_UP + count):
        if len(found) >= WARM_UP + FEWEST and time.perf_counter() - begun > seconds:
            break
        if i % 2:
            late = other(what(i))
            found.append((one(what(i)), late))
        else:
            found.append((one(what(i)), other(what(i))))
    return found[WARM_UP:]


async def serve_client(url: str, asked: Asked) -> None:
    """The client's process: runs what each line of its input names, and prints the seconds."""
    host, port = url.removeprefix("http://").rsplit(":", 1)
    connections = [await asyncio.open_connection(host, int(port)) for _ in range(asked.requests)]
    loop = asyncio.get_running_loop()
    while line := (await loop.run_in_executor(None, sys.stdin.readline)).strip():
        if line == _ALL:
            took = await _timed(ask(c, asked.prompt(i), asked.max_tokens) for i, c in enumerate(connections))
        elif line == _STEADY:
            took = await _timed(ask_in_turn(c, asked.steady(i)) for i, c in enumerate(connections))
        else:
            took = await ask(connections[0], asked.prompt(int(line)), 2)
        print(took, flush=True)


async def _timed(asking: Iterable[Awaitable[object]]) -> float:
    begun = time.perf_counter()
    await asyncio.gather(*asking)
    return time.perf_counter() - begun


async def ask_in_turn(connection: Connection, asked: Sequence[tuple[str, int]]) -> None:
    for prompt, tokens in asked:
        await ask(connection, prompt, tokens)


async def ask(connection: Connection, prompt: str, tokens: int) -> float:
    """Read a streamed answer to its end; seconds to its first event."""
    async with asyncio.timeout(ANSWER_S):
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
        part = await reader.read(1 << 16)  # `readuntil` has a limit that long answers exceed
        if not part:
            raise RuntimeError(f"the server hung up: {tail!r}")
        tail = (tail + part)[-_TAIL:]
    if b'"finish_reason":"length"' not in tail:
        raise RuntimeError(f"the answer is shorter than max_tokens: {tail!r}")
    return first


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--model", default="default")
    made.add_argument("--drafter", default="none")
    made.add_argument("--device", default="auto")
    made.add_argument("--memory", default=None, help="of the cache, such as 4GiB; default: all that is free")
    made.add_argument("--requests", type=int, default=32)
    made.add_argument("--max-tokens", type=int, default=256)
    made.add_argument("--each", type=int, default=4, help="requests in each place of the steady run")
    made.add_argument("--repeats", type=int, default=8, help="most pairs of runs")
    made.add_argument("--seconds", type=float, default=40.0, help="no further pair begins after this time")
    made.add_argument("--json", type=Path, metavar="FILE", help="write the result there as well")
    made.add_argument("--client", metavar="URL", help=argparse.SUPPRESS)
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    begun = time.perf_counter()
    options = parser().parse_args(arguments)
    for name in ("requests", "max_tokens", "repeats", "each"):
        if getattr(options, name) < 1:
            parser().error(f"--{name.replace('_', '-')} {getattr(options, name)}: must be at least 1")
    asked = Asked(options.requests, options.max_tokens, options.repeats, options.seconds, options.each)
    if options.client:
        asyncio.run(serve_client(options.client, asked))
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
            http = Http(server.url, asked)
            try:
                found = measure(Library(llm.call, asked).run, http.run, asked)
            finally:
                http.close()
            where = llm.call(machine)
        finally:
            server.drain()
            thread.join()
    took = {"load": round(loaded_s, 1), "all": round(time.perf_counter() - begun, 1)}
    what = {"model": options.model, "drafter": options.drafter, **asdict(asked)}
    told = json.dumps({**found, **what, "took_s": took, "machine": where})
    if options.json is not None:
        options.json.write_text(told + "\n")
    print(told)


if __name__ == "__main__":
    import http_cost  # the engine's process finds its functions by the module's name

    http_cost.main()
