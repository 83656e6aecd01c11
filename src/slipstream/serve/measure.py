"""What HTTP costs: the same requests through the library and through the server, throughput and first token of each.

    python -m slipstream.serve.measure --model default --requests 32 --max-tokens 128

The client has a process of its own, as clients do. The last line is JSON.
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
from dataclasses import asdict, dataclass
from typing import Any

WARM_UP = 2
FIRST_TOKENS = 20
"""Requests, one after the other, whose first token is timed."""


@dataclass(frozen=True, slots=True)
class Speed:
    """Tokens a second of requests that run together, the best of some repeats; median seconds to a first token."""

    tokens_per_s: float
    first_token_s: float


@dataclass(frozen=True, slots=True)
class Asked:
    requests: int
    max_tokens: int
    repeats: int

    def prompt(self, index: int) -> str:
        return f"Write {index + 3} sentences about the number {index}."


def measure_library(llm: Any, asked: Asked) -> Speed:
    from slipstream.core.params import SamplingParams

    params = SamplingParams(max_tokens=asked.max_tokens, temperature=0, ignore_eos=True)
    prompts = [asked.prompt(i) for i in range(asked.requests)]
    rates = []
    for _ in range(WARM_UP + asked.repeats):
        begun = time.perf_counter()
        outputs = llm.generate(prompts, params)
        rates.append(sum(len(o.outputs[0].token_ids) for o in outputs) / (time.perf_counter() - begun))
    firsts = []
    for index in range(WARM_UP + FIRST_TOKENS):
        begun = time.perf_counter()
        stream = llm.stream(asked.prompt(index), SamplingParams(max_tokens=2, temperature=0, ignore_eos=True))
        next(stream)
        firsts.append(time.perf_counter() - begun)
        for _ in stream:
            pass
    return Speed(max(rates[WARM_UP:]), statistics.median(firsts[WARM_UP:]))


async def measure_http(url: str, asked: Asked) -> Speed:
    host, port = url.removeprefix("http://").split(":")
    rates = []
    connections = [await asyncio.open_connection(host, int(port)) for _ in range(asked.requests)]
    for _ in range(WARM_UP + asked.repeats):
        begun = time.perf_counter()
        work = (_ask(c, asked.prompt(i), asked.max_tokens) for i, c in enumerate(connections))
        await asyncio.gather(*work)
        rates.append(asked.requests * asked.max_tokens / (time.perf_counter() - begun))
    firsts = [await _ask(connections[0], asked.prompt(i), 2) for i in range(WARM_UP + FIRST_TOKENS)]
    return Speed(max(rates[WARM_UP:]), statistics.median(firsts[WARM_UP:]))


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
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--client", metavar="URL", help=argparse.SUPPRESS)
    options = parser.parse_args()
    asked = Asked(options.requests, options.max_tokens, options.repeats)
    if options.client:
        print(json.dumps(asdict(asyncio.run(measure_http(options.client, asked)))))
        return
    from slipstream.engine.llm import LLM
    from slipstream.serve.config import ServeConfig
    from slipstream.serve.server import HttpServer

    with LLM(
        options.model, drafter=options.drafter, device=options.device, max_num_seqs=max(32, asked.requests)
    ) as llm:
        library = measure_library(llm, asked)
        server = HttpServer(llm, ServeConfig(models=("measured",), port=0))
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        command = [sys.executable, "-m", "slipstream.serve.measure", "--client", server.url]
        command += ["--requests", str(asked.requests), "--max-tokens", str(asked.max_tokens)]
        try:
            done = subprocess.run(
                [*command, "--repeats", str(asked.repeats)], capture_output=True, text=True, check=True
            )
        finally:
            server.drain()
            thread.join()
    http = Speed(**json.loads(done.stdout.splitlines()[-1]))
    told = {
        "library": asdict(library),
        "http": asdict(http),
        "throughput_cost": round(1 - http.tokens_per_s / library.tokens_per_s, 4),
        "first_token_cost_ms": round(1000 * (http.first_token_s - library.first_token_s), 2),
    }
    print(json.dumps(told))


if __name__ == "__main__":
    main()
