"""Latency under load: first tokens, and gaps between tokens, beside requests at a rate, bursts and long prompts.

    python -m slipstream.bench.load --server slipstream=http://127.0.0.1:8000 --server vllm=http://127.0.0.1:8001

Every server that speaks OpenAI's completions gets the same prompts (token ids) in turn, one scenario after the other.
`slipstream bench --long-prompts N` plays one of the scenarios in its own process. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from slipstream.engine.llm import LLM

ANSWER_S = 300.0  # an answer that takes longer is an error of the server
STREAMS = 8
SETTLED_S = 1.0  # running time of the streams before the first long prompt
LONG_EVERY_S = 1.0  # from the first token of a long prompt's answer to the next long prompt
VOCAB = 20_000  # token ids that prompts are drawn from; every common model has more
_prompts = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: sent `at` seconds after the scenario began."""

    prompt: Sequence[int]
    max_tokens: int
    at: float = 0.0


@dataclass(slots=True)
class Heard:
    """The arrival times of one answer's tokens. A step may emit several tokens, which count as one event."""

    ask: Ask
    sent: float = 0.0
    events: list[tuple[float, int]] = field(default_factory=list)  # clock time in seconds, new tokens
    whole: bool = False  # the answer came to its end

    @property
    def first_s(self) -> float:
        return self.events[0][0] - self.sent

    @property
    def gaps(self) -> list[float]:
        return [late - early for (early, _), (late, _) in itertools.pairwise(self.events)]

    @property
    def tokens(self) -> int:
        """A whole answer has `max_tokens` tokens; an event of a server does not say how many it holds."""
        return self.ask.max_tokens if self.whole else sum(count for _, count in self.events)

    @property
    def token_s(self) -> float:
        """Mean time of a token after the first."""
        return (self.events[-1][0] - self.events[0][0]) / max(1, self.tokens - self.events[0][1])

    def rate(self, begin: float, end: float) -> float:
        """Events per second between two clock times."""
        return sum(begin < at <= end for at, _ in self.events) / max(end - begin, 1e-9)


Send = Callable[[Ask], AsyncIterator[int]]
"""Sends a request. Yields the number of new tokens whenever some arrive."""


async def hear(send: Send, ask: Ask, begun: float) -> Heard:
    await asyncio.sleep(max(0.0, begun + ask.at - time.perf_counter()))
    heard = Heard(ask, time.perf_counter())
    async with asyncio.timeout(ANSWER_S):
        async for count in send(ask):
            heard.events.append((time.perf_counter(), count))
    heard.whole = True
    if not heard.events:
        raise RuntimeError("an answer came without a token")
    return heard


async def play(send: Send, asks: Iterable[Ask]) -> list[Heard]:
    begun = time.perf_counter()
    return list(await asyncio.gather(*(hear(send, ask, begun) for ask in asks)))


def prompt_of(length: int, vocab_size: int = VOCAB) -> list[int]:
    """Random ordinary tokens. No two prompts share a prefix, so that the prefix cache never helps."""
    dice = random.Random(next(_prompts))
    return [dice.randrange(min(100, vocab_size // 2), vocab_size) for _ in range(length)]


def at_a_rate(rate: float, count: int, length: int, max_tokens: int) -> list[Ask]:
    dice, at, asks = random.Random(count), 0.0, []
    for _ in range(count):
        asks.append(Ask(prompt_of(length), max_tokens, at))
        at += dice.expovariate(rate)
    return asks


def summary(heard: Sequence[Heard]) -> dict[str, float]:
    """Latencies in milliseconds, and tokens per second of all requests together."""
    import numpy as np  # late: the command line imports this module before anything heavy is loaded

    firsts, each = [one.first_s for one in heard], [one.token_s for one in heard]
    gaps = [gap for one in heard for gap in one.gaps] or [0.0]
    begun, ended = min(one.sent for one in heard), max(one.events[-1][0] for one in heard)
    found = {
        "first_p50_ms": 1e3 * np.percentile(firsts, 50),
        "first_p99_ms": 1e3 * np.percentile(firsts, 99),
        "token_p50_ms": 1e3 * np.percentile(each, 50),
        "token_p99_ms": 1e3 * np.percentile(each, 99),
        "gap_p99_ms": 1e3 * np.percentile(gaps, 99),
        "gap_max_ms": 1e3 * max(gaps),
        "tok_s": sum(one.tokens for one in heard) / (ended - begun),
    }
    return {name: round(float(value), 2) for name, value in found.items()}


async def beside_long_prompts(
    send: Send, length: int, *, streams: int = 1, prompts: int = 1, vocab_size: int = VOCAB
) -> dict[str, float]:
    """The speed of running streams while long prompts are read one after another, relative to the streams alone.

    A stream slows down as its text grows, so its speed alone is the mean of the speeds before and after the prompts.
    """
    import numpy as np

    def asked() -> Ask:
        return Ask(prompt_of(length, vocab_size), 1)

    async def alone() -> tuple[float, float]:
        begun = time.perf_counter()
        await asyncio.sleep(1.5)
        return begun, time.perf_counter()

    await hear(send, asked(), 0.0)  # compile and record
    alone_s = float(np.median([(await hear(send, asked(), 0.0)).first_s for _ in range(3)]))
    heard = [Heard(Ask(prompt_of(16, vocab_size), length)) for _ in range(streams)]
    tasks = [asyncio.create_task(_endless(send, one)) for one in heard]
    await asyncio.sleep(SETTLED_S)
    while not all(len(one.events) > 8 for one in heard):
        await asyncio.sleep(0.01)
        for task in tasks:
            if task.done():
                task.result()
    spans_alone = [await alone()]
    read = []
    for _ in range(prompts):
        read.append(await hear(send, asked(), 0.0))
        await asyncio.sleep(LONG_EVERY_S if prompts > 1 else 0.0)
    spans_alone.append(await alone())
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    spans = [(one.sent, one.events[0][0]) for one in read]
    gaps = [
        late - early
        for one in heard
        for (early, _), (late, _) in itertools.pairwise(one.events)
        if any(begin < late and early < end for begin, end in spans)
    ]
    alone_rate = float(np.mean([one.rate(*span) for one in heard for span in spans_alone]))
    kept = [one.rate(*span) / alone_rate for one in heard for span in spans]
    return {
        "prompt_tokens": length,
        "streams": streams,
        "alone_per_s": round(alone_rate, 2),
        "kept": round(float(np.mean(kept)), 3),
        "gap_p99_ms": round(1e3 * float(np.percentile(gaps, 99)), 1),
        "gap_max_ms": round(1e3 * max(gaps), 1),
        "first_alone_ms": round(1e3 * alone_s, 1),
        "first_ms": round(1e3 * float(np.median([one.first_s for one in read])), 1),
        "first_times_alone": round(float(np.median([one.first_s for one in read])) / alone_s, 2),
    }


async def _endless(send: Send, heard: Heard) -> None:
    """Send the request again when its answer ends, until the task is cancelled."""
    while True:
        async for count in send(heard.ask):
            heard.events.append((time.perf_counter(), count))


def library(llm: LLM) -> Send:
    """The engine of this process, without HTTP."""
    from slipstream.core.params import SamplingParams

    async def send(ask: Ask) -> AsyncIterator[int]:
        params = SamplingParams(temperature=0, max_tokens=ask.max_tokens, ignore_eos=True, output_kind="delta")
        async for output in llm.generate_async(list(ask.prompt), params):
            if new := len(output.outputs[0].token_ids):
                yield new

    return send


class Server:
    """An OpenAI server. Events are read as they come, without a client library that would add its own time."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or 80

    async def model(self) -> str:
        reader, writer = await asyncio.open_connection(self._host, self._port)
        writer.write(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        body = (await reader.read()).partition(b"\r\n\r\n")[2]
        writer.close()
        found = body[body.index(b"{") : body.rindex(b"}") + 1]  # chunked or not
        return str(json.loads(found)["data"][0]["id"])

    def sender(self, model: str) -> Send:
        async def send(ask: Ask) -> AsyncIterator[int]:
            fields = {"model": model, "prompt": list(ask.prompt), "max_tokens": ask.max_tokens, "temperature": 0}
            body = json.dumps({**fields, "ignore_eos": True, "stream": True}).encode()
            reader, writer = await asyncio.open_connection(self._host, self._port)
            head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            try:
                writer.write(f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
                if b" 200 " not in (line := await reader.readline()):
                    raise RuntimeError(f"{line!r} {await reader.read(2000)!r}")
                while line := await reader.readline():
                    if line.startswith(b'data: {"error"') or b'"finish_reason":"error"' in line:
                        raise RuntimeError(f"the answer failed: {line[:500]!r}")
                    if line.startswith(b"data: {") and b'"choices":[]' not in line:
                        yield 1
            finally:
                writer.close()

        return send


SCENARIOS = ("burst 64x64", "burst 32x512", "rate 2", "rate 8", "rate 16", "rate 4 of 1500", "long", "long among 8")


async def scenario(name: str, send: Send, seconds: float) -> list[dict[str, float]]:
    """The figures of a scenario; of a burst those of the first run and of the second."""
    kind, _, rest = name.partition(" ")
    if kind == "burst":
        count, length = map(int, rest.split("x"))
        return [summary(await play(send, [Ask(prompt_of(length), 32) for _ in range(count)])) for _ in range(2)]
    if kind == "rate":
        rate, _, length_text = rest.partition(" of ")
        asks = at_a_rate(float(rate), max(8, int(float(rate) * seconds)), int(length_text or 512), 128)
        return [summary(await play(send, asks))]
    if rest:
        return [await beside_long_prompts(send, 6000, streams=STREAMS, prompts=4)]
    return [await beside_long_prompts(send, 6000)]


async def measure(servers: Mapping[str, str], names: Sequence[str], seconds: float) -> dict[str, Any]:
    found: dict[str, Any] = {}
    senders = {}
    for name, url in servers.items():
        server = Server(url)
        senders[name] = server.sender(await server.model())
        # ordinary traffic first, so that a warm server is measured
        await play(senders[name], at_a_rate(20, 40, 200, 48))
    for what in names:
        for name, send in senders.items():
            try:
                rows = await scenario(what, send, seconds)
            except Exception as error:
                rows = [{"error": f"{type(error).__name__}: {error}"}]  # type: ignore[dict-item]
            found.setdefault(what, {})[name] = rows
            for row in rows:
                print(f"{what:16} {name:10} {json.dumps(row)}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", action="append", required=True, metavar="NAME=URL")
    parser.add_argument("--scenario", action="append", choices=SCENARIOS, help="default: all")
    parser.add_argument("--seconds", type=float, default=12.0, help="of traffic at a rate")
    parser.add_argument("--json", type=Path, help="write the last line there as well")
    options = parser.parse_args()
    servers = dict(one.partition("=")[::2] for one in options.server)
    found = asyncio.run(measure(servers, options.scenario or SCENARIOS, options.seconds))
    report = json.dumps({"servers": list(servers), "scenarios": found})
    if options.json is not None:
        options.json.write_text(report + "\n")
    print(report)


if __name__ == "__main__":
    main()
