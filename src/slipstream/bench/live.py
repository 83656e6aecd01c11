"""Traffic: prompts that are sent to an engine at given times, whether it keeps up or not."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from slipstream.bench.outcome import Served
from slipstream.core.errors import RequestError
from slipstream.core.outputs import RequestOutput
from slipstream.core.params import SamplingParams

if TYPE_CHECKING:
    from slipstream.engine.llm import LLM


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
    """Send each prompt (token ids) at its time, in seconds after the first; returns the outcomes in the same order.

    on_served: called with the number of requests that were answered since the last call.
    """
    return asyncio.run(_send(llm, prompts, params, times, on_served))


async def _send(
    llm: LLM,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    times: Sequence[float],
    on_served: Callable[[int], None],
) -> list[Served]:
    clock = asyncio.get_running_loop().time
    begun = clock()

    async def one(prompt: Sequence[int], own: SamplingParams, at: float) -> Served:
        await asyncio.sleep(max(0.0, begun + at - clock()))
        came = clock() - begun
        last: RequestOutput | None = None
        stream = llm.open_stream({"prompt_token_ids": list(prompt)}, own, streaming=False)
        try:
            while arrived := await stream.take():
                last = arrived[-1]
        finally:
            stream.close()
        assert last is not None
        answer = last.outputs[0]
        if answer.error is not None:
            raise RequestError(f"a request of the traffic failed: {answer.error}")
        on_served(1)
        timing = answer.timing
        return Served(
            came,
            len(prompt),
            len(answer.token_ids),
            came + timing.first_token_s,
            came + timing.total_s,
            answer.speculation.rounds,
        )

    jobs = zip(prompts, params, times, strict=True)
    return list(await asyncio.gather(*(one(*job) for job in jobs)))
