"""The same requests for every engine, in every size of batch, and how often they are done until they count.

Nothing here knows an engine, and nothing is imported that a peer's process would have to bring along.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from gpu_tokens import questions

SIZES = (1, 2, 4, 8, 16, 32)
FEWEST = 2
"""Batches of a size, at least; all prompts come once at least."""
PATIENCE = 4
"""Runs in which something was recorded, before one counts all the same."""

Ask = Callable[[Sequence[int]], list[list[int]]]
"""Numbers of prompts that are asked at once; their answers."""
Result = TypeVar("Result")


def batches(prompts: int, at_once: int) -> list[list[int]]:
    """Numbers of prompts, batch by batch; from the first one again where they end."""
    count = max(-(-prompts // at_once), FEWEST)
    return [[number % prompts for number in range(i * at_once, (i + 1) * at_once)] for i in range(count)]


@dataclass(frozen=True, slots=True)
class Run:
    """All batches once."""

    answers: tuple[tuple[int, tuple[int, ...]], ...]  # number of the prompt, tokens
    seconds: float

    @property
    def tokens(self) -> int:
        return sum(len(answer) for _, answer in self.answers)

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def one_run(ask: Ask, prompts: int, at_once: int, seconds: Callable[[], float] = time.perf_counter) -> Run:
    """Batch after batch, prompts included."""
    parts = batches(prompts, at_once)
    begin = seconds()
    answered = [ask(part) for part in parts]
    taken = seconds() - begin
    pairs = [pair for part, answers in zip(parts, answered, strict=True) for pair in zip(part, answers, strict=True)]
    return Run(tuple((number, tuple(answer)) for number, answer in pairs), taken)


@dataclass(frozen=True, slots=True)
class Timed(Generic[Result]):
    """The runs that count, what came before them, and how much was recorded in those that count."""

    runs: tuple[Result, ...]
    before: int
    recorded: int


def timed(
    work: Callable[[], Result],
    repeats: int,
    *,
    warm_up: Callable[[], object] | None = None,
    recorded: Callable[[], int] = lambda: 0,
    patience: int = PATIENCE,
) -> Timed[Result]:
    """So many runs in which nothing was recorded, after one that warms up.

    recorded: graphs recorded so far. A run in which some were is done again, as often as there is patience for.
    """
    (warm_up or work)()
    kept: list[Result] = []
    before, unwanted = 1, 0
    while len(kept) < repeats:
        so_far = recorded()
        result = work()
        new = recorded() - so_far
        if new and before < 1 + patience:
            before += 1
            continue
        unwanted += new
        kept.append(result)
    return Timed(tuple(kept), before, unwanted)


def first_turns(path: Path, limit: int | None = None) -> list[str]:
    """The first turn of every question, or of so many, spread over the file."""
    turns: list[str] = [question["turns"][0] for question in questions(path)]
    if limit is None or limit >= len(turns):
        return turns
    return [turns[i * len(turns) // limit] for i in range(limit)]
