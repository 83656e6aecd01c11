"""vLLM in the same cells with its fixed settings, each in a process of its own.

Requests come in a closed loop through the steps of vLLM's engine, and are timed as ours are.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from cells_work import FEW, WARM_S, Beat, Cell, Window, by_task, point, prompts_of, tokens_of, window
from vllm_peer import JsonTask, apart, opened

MODES = ("plain", "eagle3", "ngram", "draft", "eagle3_drawn", "ngram_gpu")


@dataclass(frozen=True, slots=True)
class Task(JsonTask):
    """The measurement of one process."""

    mode: str
    model: str
    draft: str | None
    prompts: str | None
    cells: tuple[Cell, ...]
    context: int
    max_tokens: int
    prompts_each: int
    seconds: tuple[float, ...]  # of a window, for each of the cells
    repeats: int

    @staticmethod
    def read(text: str) -> Task:
        given = json.loads(text)
        return Task(
            **{**given, "cells": tuple(Cell(**cell) for cell in given["cells"]), "seconds": tuple(given["seconds"])}
        )


def run_apart(task: Task, peer_path: str | None, timeout: float) -> dict[str, Any]:
    return apart("cells.py", task.arguments, peer_path, timeout)


def measure(task: Task, tell: Callable[[dict[str, Any]], None]) -> None:
    """Run vLLM in this process. `tell` receives all results so far after every cell."""
    vllm = opened(task.model, task.mode, task.draft, task.context, enable_prefix_caching=True)
    found: dict[str, Any] = {"version": vllm.version, "open_s": round(vllm.open_s, 1), "cells": {}}
    texts, tokenizer = by_task(Path(task.prompts) if task.prompts else None), vllm.llm.get_tokenizer()
    names, loads = count(), set()
    for cell, seconds in zip(task.cells, task.seconds, strict=True):
        room = vllm.context - task.max_tokens - 1
        prompts = prompts_of(tokenizer, texts[cell.task], cell.at_once, room, task.prompts_each)
        if cell.load not in loads:
            loads.add(cell.load)
            run(vllm.llm, cell, prompts, task.max_tokens, WARM_S, names)
        windows = [run(vllm.llm, cell, prompts, task.max_tokens, seconds, names) for _ in range(task.repeats)]
        found["cells"][cell.name] = point(windows)
        tell(found)


def run(
    llm: Any, cell: Cell, prompts: Sequence[list[int]], max_tokens: int, seconds: float, names: Iterator[int]
) -> Window:
    """One window of a closed loop, until the time is up and there are enough rounds to leave out one that compiles."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    engine, numbers, running = llm.llm_engine, count(), set[str]()

    def begin() -> None:
        name, number = f"cell-{next(names)}", next(numbers)
        most = tokens_of(number, cell.at_once, max_tokens)
        params = SamplingParams(
            temperature=cell.temperature, max_tokens=most, output_kind=RequestOutputKind.DELTA, detokenize=False
        )
        engine.add_request(name, {"prompt_token_ids": prompts[number % len(prompts)]}, params)
        running.add(name)

    for _ in range(cell.at_once):
        begin()
    beats: list[Beat] = []
    full: int | None = None
    while full is None or beats[-1].at - beats[full].at < seconds or len(beats) - full <= FEW:
        outputs = engine.step()
        tokens = [len(output.outputs[0].token_ids) for output in outputs]
        if any(tokens):
            beats.append(Beat(time.perf_counter(), sum(map(bool, tokens)), sum(tokens)))
            full = len(beats) - 1 if full is None and beats[-1].requests >= cell.at_once else full
        for output in outputs:
            if output.finished:
                running.discard(output.request_id)
                begin()
    engine.abort_request(sorted(running))
    while engine.has_unfinished_requests():
        engine.step()
    return window(beats, cell.at_once)
