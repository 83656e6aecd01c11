"""Requests at a rate: arrival times, prompts that are sent to an engine at these times, and their latencies."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import quantiles
from typing import TYPE_CHECKING

from slipstream.core.errors import ConfigError, RequestError
from slipstream.core.outputs import RequestOutput
from slipstream.core.params import SamplingParams

if TYPE_CHECKING:
    from slipstream.engine.llm import LLM


@dataclass(frozen=True, slots=True)
class Served:
    """The times of one request, in seconds since the first one arrived, and its tokens."""

    arrived: float
    prompt_tokens: int
    output_tokens: int
    first_token: float
    ended: float
    rounds: int

    @property
    def ttft(self) -> float:
        return self.first_token - self.arrived

    @property
    def tpot(self) -> float:
        """Seconds of a token after the first."""
        return (self.ended - self.first_token) / max(1, self.output_tokens - 1)


@dataclass(frozen=True, slots=True)
class Targets:
    """The largest latencies of a request that counts as good; None: any."""

    ttft: float | None = None
    tpot: float | None = None

    @staticmethod
    def parse(text: str) -> Targets:
        """`ttft=0.5,tpot=0.05`, in seconds."""
        found: dict[str, float] = {}
        for part in filter(None, text.split(",")):
            key, _, value = part.partition("=")
            try:
                found[key.strip()] = float(value)
            except ValueError:
                found = {"": 0.0}
            if not set(found) <= {"ttft", "tpot"} or min(found.values()) <= 0:
                raise ConfigError(f"--latency-target {text}: must be seconds above 0, as ttft=0.5,tpot=0.05")
        return Targets(**found)

    def met(self, request: Served) -> bool:
        return (self.ttft is None or request.ttft <= self.ttft) and (self.tpot is None or request.tpot <= self.tpot)


@dataclass(frozen=True, slots=True)
class Spread:
    """Percentiles, in seconds."""

    p50: float
    p90: float
    p99: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        if len(values) == 1:
            return Spread(values[0], values[0], values[0])
        cuts = quantiles(values, n=100, method="inclusive")
        return Spread(cuts[49], cuts[89], cuts[98])


@dataclass(frozen=True, slots=True)
class Outcome:
    """The results of all requests. Rates are per second, from the first arrival to the last end."""

    requests: int
    seconds: float
    tokens_per_s: float
    requests_per_s: float
    goodput: float  # requests per second that met the targets
    good: float  # share of requests that met the targets
    ttft: Spread
    tpot: Spread
    tau: float

    @staticmethod
    def of(served: Sequence[Served], targets: Targets) -> Outcome:
        seconds = max(request.ended for request in served) - min(request.arrived for request in served)
        tokens = sum(request.output_tokens for request in served)
        good = sum(map(targets.met, served))
        return Outcome(
            len(served),
            seconds,
            tokens / seconds,
            len(served) / seconds,
            good / seconds,
            good / len(served),
            Spread.of([request.ttft for request in served]),
            Spread.of([request.tpot for request in served]),
            tokens / max(1, sum(request.rounds for request in served)),
        )


def poisson_times(rate: float, count: int, seed: int) -> list[float]:
    """Arrival times of a Poisson process with `rate` requests a second; the first is 0."""
    dice = random.Random(f"arrivals {seed}")
    times = [0.0]
    while len(times) < count:
        times.append(times[-1] + dice.expovariate(rate))
    return times


def send(
    llm: LLM,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    times: Sequence[float],
    on_served: Callable[[int], None] = lambda count: None,
) -> list[Served]:
    """Send each prompt (token ids) at its time, in seconds after the first; returns the results in the same order.

    on_served: called with the number of requests that were answered since the last call.
    """

    async def send_all() -> list[Served]:
        clock = asyncio.get_running_loop().time
        begun = clock()

        async def one(prompt: Sequence[int], own: SamplingParams, at: float) -> Served:
            await asyncio.sleep(max(0.0, begun + at - clock()))
            arrived = clock() - begun
            last: RequestOutput | None = None
            stream = llm.open_stream({"prompt_token_ids": list(prompt)}, own, streaming=False)
            try:
                while outputs := await stream.take():
                    last = outputs[-1]
            finally:
                stream.close()
            assert last is not None
            answer = last.outputs[0]
            if answer.error is not None:
                raise RequestError(f"a request of the traffic failed: {answer.error}")
            on_served(1)
            first, end = arrived + answer.timing.first_token_s, arrived + answer.timing.total_s
            return Served(arrived, len(prompt), len(answer.token_ids), first, end, answer.speculation.rounds)

        return list(await asyncio.gather(*(one(*job) for job in zip(prompts, params, times, strict=True))))

    return asyncio.run(send_all())
