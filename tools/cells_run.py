"""The parts of `cells.py` one after the other, in one engine, as long as there is time."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import cells_peers
import curve_ours
from cells_ours import AUTO, SETTINGS, Bench
from cells_trials import Trials, scripted
from cells_work import WARM_S, Cell, Window, by_task, keep_rounds, prompts_of, side_by_side
from curve_run import Models, peer_draft
from kernel_clock import free
from results import Report
from slipstream import LLM
from slipstream.core.interpreter import responsive
from slipstream.drafters import merged_name, parse_merged
from slipstream.drafters.base import Drafter
from slipstream.models.load import load_config

CONTEXT = 2048
WEIGHTS = {"eagle": "eagle3", "model": "draft", "medusa": "medusa"}
"""By drafter: the folder of its weights."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What was asked for by lists."""

    parts: tuple[str, ...]
    settings: tuple[str, ...]
    cells: tuple[Cell, ...]
    seconds: dict[int, float]  # of a measurement, by requests at once
    trials: tuple[int, ...]  # requests at once
    peers: tuple[str, ...]


@dataclass(slots=True)
class Clock:
    """How long there is still, and how long what is left will take, by what was done. budget: None: there is no end."""

    budget: float | None
    seconds: Callable[[], float] = time.perf_counter
    done: int = 0
    spent: float = 0.0
    _begun: float = field(init=False)

    def __post_init__(self) -> None:
        self._begun = self.seconds()

    @contextmanager
    def step(self) -> Iterator[None]:
        begun = self.seconds()
        yield
        self.done += 1
        self.spent += self.seconds() - begun

    @property
    def left(self) -> float:
        return float("inf") if self.budget is None else self.budget - (self.seconds() - self._begun)

    def takes(self, steps: int) -> float:
        """Seconds of so many more, as they were so far."""
        return steps * self.spent / self.done if self.done else 0.0


class Run:
    """One call: models, engine and report."""

    def __init__(self, options: argparse.Namespace, wanted: Wanted, report: Report) -> None:
        self.options, self.wanted, self.report = options, wanted, report
        self.models = Models(options, report)
        self.clock = Clock(options.budget)
        self.texts = by_task(options.prompts)

    @cached_property
    def target(self) -> str:
        """The large model; without one, the small model is what is measured."""
        return str(self.models.target if self.options.target else self.models.small)

    @property
    def context(self) -> int:
        positions: int = load_config(
            self.models.target if self.options.target else self.models.small
        ).max_position_embeddings
        return min(CONTEXT, positions)

    def specs(self) -> dict[str, str]:
        """By drafter, how the engine is told of those that the settings need."""
        needed = dict.fromkeys(name for mode in SETTINGS if mode.name in self.wanted.settings for name in mode.needs)
        named = (part.name for part in parse_merged(self.options.auto))
        needed |= dict.fromkeys(name for name in named if name != AUTO)
        found: dict[str, str] = {}
        for name in needed:
            spec = self._weights(name) if name in WEIGHTS else name
            if spec is not None:
                found[name] = f"{spec}?{self.options.eagle}" if name == "eagle" and self.options.eagle else spec
        return found

    def _weights(self, name: str) -> str | None:
        if self.options.target:
            return self.models.drafters.get(WEIGHTS[name])
        folder = self.models.heads / WEIGHTS[name]
        return f"{name}:{folder}" if (folder / "config.json").is_file() else None

    def modes(self, there: Sequence[str]) -> list[curve_ours.Mode]:
        """The settings whose drafters are there."""
        wanted = [mode for mode in SETTINGS if mode.name in self.wanted.settings]
        found = [mode for mode in wanted if set(there).issuperset(mode.needs)]
        self.report.put([mode.name for mode in wanted if mode not in found], "left_out")
        return found

    @contextmanager
    def engine(self, specs: dict[str, str], own: Sequence[Drafter]) -> Iterator[Bench]:
        """One engine for all that is measured."""
        options, on_gpu = self.options, self.options.device.startswith("cuda")
        parts = [part.name for part in parse_merged(options.auto)]
        auto = "+".join(specs.get(name, name) for name in parts if name == AUTO or name in specs)
        at_once = max([cell.at_once for cell in self.wanted.cells] + list(self.wanted.trials))
        llm = LLM(
            self.target,
            drafter=[auto, *(spec for spec in specs.values() if spec != auto), *own],
            device=options.device,
            dtype=str(self.models.dtype).removeprefix("torch."),
            memory="32GiB" if on_gpu else None,
            max_model_len=self.context,
            max_num_seqs=max(at_once, 32),
            rounds=options.rounds,
        )
        try:
            yield Bench(llm, merged_name(parse_merged(auto)))
        finally:
            llm.close()

    def keep(self, where: str, setting: str, seen: Window) -> None:
        """These rounds, if they are to be kept."""
        if self.options.rounds_to:
            keep_rounds(self.options.rounds_to, where, setting, seen)

    def prompts(self, llm: LLM, cell: Cell) -> list[list[int]]:
        room = llm.max_model_len - self.options.max_tokens - 1
        return prompts_of(llm.tokenizer, self.texts[cell.task], cell.at_once, room, self.options.prompts_each)


def run(options: argparse.Namespace, wanted: Wanted, report: Report) -> None:
    """All parts that are wanted. One that fails is noted, and the others go on."""
    whole = Run(options, wanted, report)
    report.results["on"] = options.device
    if {"cells", "adversaries", "switches"} & set(wanted.parts):
        with report.part("ours"):
            _ours(whole)
        report.say(f"{free(whole.models.device) / 1e9:.2f} GB of the device still held")
    if "peers" in wanted.parts:
        _peers(whole)


def _ours(whole: Run) -> None:
    own = scripted(whole.options.phase) if {"adversaries", "switches"} & set(whole.wanted.parts) else []
    specs = whole.specs()
    modes = whole.modes(list(specs))
    with whole.engine(specs, own) as bench, responsive():  # as the server runs it
        whole.report.put(sorted(bench.llm.engine.drafting.auto), "auto")
        if "cells" in whole.wanted.parts:
            _cells(whole, bench, modes)
        trials = Trials(bench, own, _mixed(whole, bench.llm), whole.options.max_tokens, whole.keep)
        for name, part in (("adversaries", _adversaries), ("switches", _switches)):
            if name in whole.wanted.parts:
                with whole.report.part(name):
                    part(whole, trials)


def _cells(whole: Run, bench: Bench, modes: Sequence[curve_ours.Mode]) -> None:
    """Cell after cell; those that the results have are left out, and those that there is no time for."""
    report, options, by_name = whole.report, whole.options, {mode.name: mode for mode in modes}
    known = report.results.get("cells", {})
    left = [cell for cell in whole.wanted.cells if not by_name.keys() <= known.get(cell.name, {}).keys()]
    warm = set[tuple[int, float]]()  # loads
    for number, cell in enumerate(left):
        needed = whole.clock.takes(1)
        if whole.clock.left < needed:
            rest = len(left) - number
            report.say(f"no time for {rest} cells, which would take {whole.clock.takes(rest):.0f} s")
            report.put([cell.name for cell in left[number:]], "cells_left")
            return
        with report.part(f"cell {cell.name}"), whole.clock.step():
            prompts, seconds = whole.prompts(bench.llm, cell), whole.wanted.seconds[cell.at_once]
            bench.read(prompts)

            def measure(
                name: str, cell: Cell = cell, prompts: list[list[int]] = prompts, seconds: float = seconds
            ) -> Any:
                seen = bench.measure(by_name[name], cell, prompts, options.max_tokens, seconds)
                whole.keep(cell.name, name, seen)
                return seen

            firsts = bench.distinct(modes, cell.at_once)
            names = list(dict.fromkeys(firsts.values()))
            for name in names if cell.load not in warm else ():
                bench.measure(by_name[name], cell, prompts, options.max_tokens, WARM_S)
            warm.add(cell.load)
            found = side_by_side(names, measure, options.repeats)
            if AUTO in found:
                found[AUTO]["plan"] = bench.planner.reasons()  # what it decided last, in words
            alike = {name: found[as_] | ({"same_as": as_} if as_ != name else {}) for name, as_ in firsts.items()}
            report.put(known.get(cell.name, {}) | alike, "cells", cell.name)
        report.say(f"{number + 1} of {len(left)} cells; {whole.clock.takes(len(left) - number - 1):.0f} s to go")
    report.put([], "cells_left")


def _mixed(whole: Run, llm: LLM) -> list[list[int]]:
    """Prompts of all tasks by turns, for the trials."""
    most = max(whole.wanted.trials)
    by_tasks = [whole.prompts(llm, Cell(task, most, 0.0)) for task in whole.texts]
    return [prompts[i] for i in range(max(map(len, by_tasks))) for prompts in by_tasks if i < len(prompts)][: 2 * most]


def _adversaries(whole: Run, trials: Trials) -> None:
    for at_once in whole.wanted.trials:
        found = trials.adversaries(at_once, whole.options.trial_seconds, whole.options.repeats)
        whole.report.put(found, "adversaries", str(at_once))


def _switches(whole: Run, trials: Trials) -> None:
    phase = whole.options.phase
    for at_once in whole.wanted.trials:
        whole.report.put(trials.text(at_once, phase), "switches", f"echoing, surprising, echoing; {at_once} at once")
    most = max(whole.wanted.trials)
    if most > 1:
        whole.report.put(trials.load(most, phase), "switches", f"1, {most}, 1 at once")


def _peers(whole: Run) -> None:
    options = whole.options
    for mode in whole.wanted.peers:
        with whole.report.part(f"vLLM {mode}"):
            task = cells_peers.Task(
                mode,
                whole.target,
                peer_draft(whole.models, mode) if options.target else None,
                str(options.prompts) if options.prompts else None,
                whole.wanted.cells,
                whole.context,
                options.max_tokens,
                options.prompts_each,
                tuple(whole.wanted.seconds[cell.at_once] for cell in whole.wanted.cells),
                options.repeats,
            )
            found = cells_peers.run_apart(task, options.peer_path, options.peer_timeout)
            older = whole.report.results.get("vllm", {}).get(mode, {}).get("cells", {})
            whole.report.put(found | {"cells": older | found.get("cells", {})}, "vllm", mode)
