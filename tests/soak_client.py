"""Many clients in a process of their own: `python soak_client.py URL STREAMS SECONDS`. The last line is JSON."""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from typing import Any

MODEL = "tiny"
HEAD = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: "


def body(rng: random.Random) -> dict[str, Any]:
    speculation: Any = rng.choice(["off", {"drafter": "suffix"}, {"drafter": "ngram"}, {"report": True}])
    return {
        "model": MODEL,
        "prompt": [rng.randrange(256) for _ in range(rng.randrange(20, 40))],
        "max_tokens": rng.randrange(20, 40),
        "temperature": rng.choice([0, 0.7, 1]),
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "speculation": speculation,
    }


async def one(host: str, port: int, seed: int, until: float, told: list[tuple[float, int]]) -> None:
    rng = random.Random(seed)
    reader, writer = await asyncio.open_connection(host, port)
    while time.monotonic() < until:
        asked = body(rng)
        written = json.dumps(asked).encode()
        begun = time.perf_counter()
        writer.write(f"{HEAD}{len(written)}\r\n\r\n".encode() + written)
        status = await reader.readline()
        assert b" 200 " in status, status
        await reader.readuntil(b"data: {")
        first = time.perf_counter() - begun
        rest = await reader.readuntil(b"data: [DONE]")
        await reader.readuntil(b"0\r\n\r\n")
        tokens = int(rest.rpartition(b'"completion_tokens": ')[2].partition(b",")[0])
        assert tokens == asked["max_tokens"]
        told.append((first, tokens))
    writer.close()


async def main(url: str, streams: int, seconds: float) -> None:
    host, port = url.removeprefix("http://").split(":")
    until = time.monotonic() + seconds
    told: list[tuple[float, int]] = []
    await asyncio.gather(*(one(host, int(port), seed, until, told) for seed in range(streams)))
    print(json.dumps({"first_token_s": [first for first, _ in told], "tokens": sum(count for _, count in told)}))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3])))
