"""The engine asked without HTTP, by its own process: what `measure.py` compares a server with."""

from __future__ import annotations

import importlib.util
import platform
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slipstream.core.params import SamplingParams

if TYPE_CHECKING:  # the client of a measurement has no use for torch
    from slipstream.engine.llm import LLM
    from slipstream.engine.remote import EngineProcess


@dataclass(frozen=True, slots=True)
class Asked:
    """requests: at once. each: in the steady run, one after the other in each of their places.

    max_tokens: of an answer at once; in the steady run on average, since answers that end together begin together.
    seconds: no further pair of runs begins behind them, once there are a few.
    """

    requests: int
    max_tokens: int
    repeats: int
    seconds: float = 40.0
    each: int = 4

    def prompt(self, index: int) -> str:
        return f"Write {index + 3} sentences about the number {index}."

    def steady(self, place: int) -> list[tuple[str, int]]:
        """What is asked in one place: prompts, and how many tokens their answers have, around `max_tokens`.

        Every place has as many tokens in all, by short answers for long ones: none stands empty before the others do.
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
    """An engine, asked in its own process."""

    def __init__(self, engine: EngineProcess, asked: Asked) -> None:
        self._engine, self._asked = engine, asked

    def all(self) -> float:
        """Seconds of all requests together."""
        return float(self._engine.call(_all, self._asked))

    def steady(self) -> float:
        """Seconds of requests that follow one another, so many at a time."""
        return float(self._engine.call(_steady, self._asked))

    def first(self, index: int) -> float:
        """Seconds to the first token of one."""
        return float(self._engine.call(_first, self._asked, index))

    def machine(self) -> dict[str, Any]:
        """What was measured on: an event loop and a parser of pure Python cost several times as much."""
        return dict(self._engine.call(_machine))


def _params(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)


def _all(llm: LLM, asked: Asked) -> float:
    begun = time.perf_counter()
    llm.generate([asked.prompt(i) for i in range(asked.requests)], _params(asked.max_tokens))
    return time.perf_counter() - begun


def _steady(llm: LLM, asked: Asked) -> float:
    def place(number: int) -> None:
        for prompt, tokens in asked.steady(number):
            llm.generate(prompt, _params(tokens))

    begun = time.perf_counter()
    with ThreadPoolExecutor(asked.requests) as places:
        list(places.map(place, range(asked.requests)))
    return time.perf_counter() - begun


def _first(llm: LLM, asked: Asked, index: int) -> float:
    begun = time.perf_counter()
    stream = llm.stream(asked.prompt(index), _params(2))
    next(stream)
    took = time.perf_counter() - begun
    for _ in stream:
        pass
    return took


def _machine(llm: LLM) -> dict[str, Any]:
    import fastapi
    import torch
    import uvicorn

    gpu = llm.engine.target.device.type == "cuda"
    parts = {name: importlib.util.find_spec(name) is not None for name in ("uvloop", "httptools")}
    return {
        "device": torch.cuda.get_device_name() if gpu else f"{platform.processor() or platform.machine()} CPU",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "fastapi": fastapi.__version__,
        "uvicorn": uvicorn.__version__,
        **parts,
    }
