"""Measures the planner's choices: plain decoding, fixed settings and `auto` side by side, cell by cell, in one engine.

    python tools/cells.py --small SMALL --target BIG --work FOLDER --prompts spec_bench.jsonl --json cells.json
                          [--parts cells,adversaries,switches,peers] [--budget 540] [--add] [--cells "x1,qa x64"]
    python tools/cells.py --device cpu --json cells.json                   the default model, its own prompts, on a CPU
    python tools/cells.py --show cells.json [--into docs/cells.md]

A cell is a task (the six groups of Spec-Bench, or the categories of the prompts), a number of requests at once, and a
temperature. SMALL, BIG and FOLDER are as for `curve.py`; without --target the small model itself is measured.

    cells        tokens per second of every setting in every cell, each --repeats times for --seconds, in turn
    adversaries  planned decoding with a drafter that is always wrong, slow, or right and wrong by turns, and plain
    switches     rounds until the plan follows a text that stops echoing and begins again, and a load of 1, most, 1
    peers        vLLM's fixed settings in the same cells, each in a process of its own

The JSON file is written after every cell. With --add, cells that it has are left out, so an interrupted call continues.
With --budget, no cell is begun that would not end in time. The tables are printed before the last line, the JSON.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from math import exp, fsum, log
from pathlib import Path
from typing import Any

import cells_peers
import curve
from cells_work import AT_ONCE, TEMPERATURES, by_task, cells
from curve import NOTHING, filled, table
from results import Report, chosen, first_results, sizes
from slipstream.core.errors import ConfigError

PARTS = ("cells", "adversaries", "switches", "peers")
_EAGLES = ("eagle3", "eagle3-15", "eagle3-3")
SETTINGS = ("plain", "auto", *_EAGLES, "suffix", "eagle3+suffix", "draft", "draft-2", "medusa", "ngram")
USUAL = {
    "cuda": "plain,auto,eagle3,eagle3-15,eagle3-3,suffix,eagle3+suffix,draft,ngram",
    "cpu": "plain,auto,suffix,ngram",
}
FIGURES = ("tok_s", "decode_tok_s", "steady_tok_s")
LOADS = {"cuda": AT_ONCE, "cpu": (1, 4)}
WARMTHS = {"cuda": TEMPERATURES, "cpu": (0.0,)}


PLAIN, AUTO = "plain", "auto"
OVER_PLAIN = {"cuda": 0.98, "cpu": 0.97}
OVER_BEST, OF_THE_WAY = 0.93, 0.90
ADVERSE, FOLLOWS = 0.03, 20
"""The bars: auto over plain decoding in any cell and over the best fixed setting there; the way from the best single
setting to the best of every cell; the cost of adversaries; rounds to follow a switch."""

Rates = Mapping[str, float]
"""Tokens per second by setting."""


def rates_of(results: Mapping[str, Any], figure: str = "tok_s") -> dict[str, Rates]:
    """By cell, where both plain decoding and auto were measured."""
    found = {
        name: {setting: point[figure] for setting, point in settings.items() if point.get(figure)}
        for name, settings in results.get("cells", {}).items()
    }
    return {name: rates for name, rates in found.items() if {PLAIN, AUTO} <= rates.keys()}


def best_fixed(rates: Rates) -> str:
    """The fastest setting other than auto; plain decoding is one of them."""
    return max((name for name in rates if name != AUTO), key=rates.__getitem__)


@dataclass(frozen=True, slots=True)
class Verdict:
    """All cells together. Means are geometric, of tokens per second."""

    cells: int
    least_over_plain: float
    least_over_best: float
    single: str  # the best setting for all cells
    single_mean: float
    auto_mean: float
    oracle_mean: float

    @property
    def of_the_way(self) -> float | None:
        """The position of auto between the best single setting (0) and the best setting of every cell (1); None: both
        are equal."""
        way = self.oracle_mean - self.single_mean
        return (self.auto_mean - self.single_mean) / way if way > 1e-9 * self.oracle_mean else None


def verdict(cells: Mapping[str, Rates]) -> Verdict | None:
    """None if nothing was measured. The single setting must have been measured in every cell."""
    if not cells:
        return None
    every = set.intersection(*(set(rates) for rates in cells.values())) - {AUTO}
    means = {name: _mean(rates[name] for rates in cells.values()) for name in sorted(every)}
    single = max(means, key=means.__getitem__)
    return Verdict(
        len(cells),
        min(rates[AUTO] / rates[PLAIN] for rates in cells.values()),
        min(rates[AUTO] / rates[best_fixed(rates)] for rates in cells.values()),
        single,
        means[single],
        _mean(rates[AUTO] for rates in cells.values()),
        _mean(rates[best_fixed(rates)] for rates in cells.values()),
    )


def markdown(results: Mapping[str, Any], figure: str = "tok_s") -> str:
    """The tables of all results. figure: the figure by which settings are compared."""
    parts = [f"`{results['command']}`, {results['device']}, {results['date']}"] if "command" in results else []
    kind = "cuda" if results.get("on", "cuda").startswith("cuda") else "cpu"
    cells = rates_of(results, figure)
    found = verdict(cells)
    if found is not None:
        parts += [_cells(results, cells, OVER_PLAIN[kind]), _settings(cells), _said(found, OVER_PLAIN[kind])]
    parts += [_adversaries(results, figure), _switches(results), _peers(results, cells)]
    failed = dict(results.get("failed", {}))
    failed |= {f"vLLM {mode}": part["failed"] for mode, part in results.get("vllm", {}).items() if "failed" in part}
    parts += [f"{name} failed: {why.strip().splitlines()[-1]}" for name, why in failed.items()]
    return "\n\n".join(part for part in parts if part)


def _cells(results: Mapping[str, Any], cells: Mapping[str, Rates], bar: float) -> str:
    rows = [["cell", "plain, tok/s", "best fixed", "tok/s", "auto, tok/s", "its tau", "auto / plain", "auto / best"]]
    for name, rates in cells.items():
        best, auto = best_fixed(rates), rates[AUTO]
        rows.append(
            [
                name,
                f"{rates[PLAIN]:,.0f}",
                best,
                f"{rates[best]:,.0f}",
                f"{auto:,.0f}",
                f"{results['cells'][name][AUTO]['tau']:.2f}",
                _marked(auto / rates[PLAIN], bar),
                _marked(auto / rates[best], OVER_BEST),
            ]
        )
    return table(rows)


def _marked(ratio: float, bar: float) -> str:
    return f"{ratio:.3f}" if ratio >= bar else f"**{ratio:.3f}**"


def _settings(cells: Mapping[str, Rates]) -> str:
    """Each setting relative to plain decoding by load: geometric means over the tasks."""
    loads = list(dict.fromkeys(name.partition(" ")[2] for name in cells))
    names = list(dict.fromkeys(setting for rates in cells.values() for setting in rates if setting != PLAIN))
    rows = [["times plain, mean over tasks", *loads]]
    for setting in names:
        row = [setting]
        for load in loads:
            ratios = [
                rates[setting] / rates[PLAIN]
                for name, rates in cells.items()
                if name.partition(" ")[2] == load and setting in rates
            ]
            row.append(f"{_mean(ratios):.2f}" if ratios else NOTHING)
        rows.append(row)
    return table(rows)


def _said(found: Verdict, bar: float) -> str:
    way = found.of_the_way
    return (
        f"{found.cells} cells. auto / plain is {found.least_over_plain:.3f} at the least (bar {bar}), auto / best "
        f"{found.least_over_best:.3f} (bar {OVER_BEST}). Geometric means, tok/s: best single setting ({found.single}) "
        f"{found.single_mean:,.1f}, auto {found.auto_mean:,.1f}, best of each cell {found.oracle_mean:,.1f}: auto is "
        f"{NOTHING if way is None else format(way, '.0%')} of the way (bar {OF_THE_WAY:.0%})."
    )


def _adversaries(results: Mapping[str, Any], figure: str) -> str:
    found = results.get("adversaries", {})
    rows = [["times plain, at once", *found]]
    for name in dict.fromkeys(name for part in found.values() for name in part if name != PLAIN):
        ratios = [part[name][figure] / part[PLAIN][figure] for part in found.values()]
        rows.append([f"drafter: {name}", *(_marked(ratio, 1 - ADVERSE) for ratio in ratios)])
    return table(rows) if found else ""


def _switches(results: Mapping[str, Any]) -> str:
    found = results.get("switches", {})
    rows = [["change", "nodes of a request, phase by phase", f"rounds until followed (bar {FOLLOWS})"]]
    for name, part in found.items():
        rounds = ["no change" if n is None else f"{n}" if n <= FOLLOWS else f"**{n}**" for n in part["rounds"]]
        rows.append([name, " → ".join(f"{level:g}" for level in part["levels"]), ", ".join(rounds)])
    return table(rows) if found else ""


def _peers(results: Mapping[str, Any], cells: Mapping[str, Rates]) -> str:
    """vLLM's settings, over the cells that were measured in both."""
    modes = {mode: part.get("cells", {}) for mode, part in results.get("vllm", {}).items()}
    modes = {mode: part for mode, part in modes.items() if part}
    shared = [name for name in cells if any(name in part for part in modes.values())]
    if not shared:
        return ""
    rows: list[Sequence[str]] = [["tok/s", "auto", *(f"vLLM, {mode}" for mode in modes), "auto / best of vLLM"]]
    ratios = []
    for name in shared:
        theirs = {mode: part[name]["tok_s"] for mode, part in modes.items() if name in part}
        ratios.append(cells[name][AUTO] / max(theirs.values()))
        given = [f"{theirs[mode]:,.0f}" if mode in theirs else NOTHING for mode in modes]
        rows.append([name, f"{cells[name][AUTO]:,.0f}", *given, f"{ratios[-1]:.2f}"])
    return table(rows) + f"\n\nauto over the best of vLLM's settings in each cell: {_mean(ratios):.2f} in the mean."


def _mean(values: Iterable[float]) -> float:
    """The geometric mean."""
    logs = [log(value) for value in values]
    return exp(fsum(logs) / len(logs))


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    curve.add_models(made)
    made.add_argument("--parts", default="cells,adversaries,switches", help=f"by comma, of {', '.join(PARTS)}")
    made.add_argument("--settings", help=f"by comma, of {', '.join(SETTINGS)}; all that are usual on the device")
    made.add_argument("--cells", default="", help="only those of this name or part of a name: 'rag x4 T=1', 'x1,qa'")
    made.add_argument("--tasks", help="by comma; default: all that the prompts have")
    made.add_argument("--at-once", help="requests at once, by comma; default: 1,4,16,64, on a CPU 1,4")
    made.add_argument("--temperatures", help="by comma; default: 0,1, on a CPU 0")
    made.add_argument(
        "--seconds", default="0.4", help="of a measurement in a cell; or by comma, for each of --at-once, fewest first"
    )
    made.add_argument("--repeats", type=int, default=2, help="measurements of each setting in a cell, in turn")
    made.add_argument("--max-tokens", type=int, default=128, help="of an answer; then the next request begins")
    made.add_argument("--prompts-each", type=int, default=16, help="prompts of a task, at least as many as at once")
    made.add_argument("--auto", help="what is planned: default auto, with a --target auto+eagle+model")
    made.add_argument("--trials", help="requests at once of adversaries and switches; default: fewest and most")
    made.add_argument("--trial-seconds", type=float, default=3.0, help="of each measurement with an adversary")
    made.add_argument("--phase", type=int, default=50, help="rounds between two switches")
    made.add_argument("--budget", type=float, help="seconds after which no further cell is begun")
    made.add_argument("--rounds", choices=("queued", "eager"), help="default: queued on a GPU, eager on a CPU")
    made.add_argument(
        "--clock", default="wall", choices=("wall", "own"), help="own: CPU time of the computing thread; for CPUs only"
    )
    made.add_argument(
        "--turns",
        type=Path,
        help="a file: processes with the same one measure in turn, such as two versions of the code",
    )
    made.add_argument("--rounds-to", type=Path, help="a file (JSON lines) for every round that was timed")
    made.add_argument("--figure", default="tok_s", choices=FIGURES, help="what the tables compare")
    made.add_argument("--peers", default="plain,eagle3,ngram", help=f"of vLLM: {', '.join(cells_peers.MODES)}")
    return made


def temperatures(text: str) -> tuple[float, ...]:
    try:
        found = tuple(sorted({float(part) for part in text.split(",") if part}))
    except ValueError:
        found = (-1.0,)
    if not found or found[0] < 0:
        raise ConfigError(f"--temperatures={text!r}: must be numbers from 0 on by commas, such as 0,1")
    return found


def windows(text: str, at_once: Sequence[int]) -> dict[int, float]:
    """Seconds of a measurement by requests at once: one number for all, or one for each."""
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = []
    if len(found) not in (1, len(at_once)) or not all(seconds > 0 for seconds in found):
        loads = ",".join(map(str, at_once))
        raise ConfigError(
            f"--seconds={text!r}: must be one number above 0, or one for each of {loads} at once, by comma"
        )
    return dict(zip(at_once, found * len(at_once) if len(found) == 1 else found, strict=True))


def checked(options: argparse.Namespace) -> dict[str, Any]:
    """The lists among the options. Sets defaults that depend on the device or the target."""
    kind = "cuda" if options.device.startswith("cuda") else "cpu"
    options.auto = options.auto or ("auto+eagle+model" if options.target else "auto")
    known = list(by_task(options.prompts))
    tasks = chosen("--tasks", options.tasks, known) if options.tasks else tuple(known)
    at_once = sizes("--at-once", options.at_once) if options.at_once else LOADS[kind]
    warmths = temperatures(options.temperatures) if options.temperatures else WARMTHS[kind]
    return {
        "parts": chosen("--parts", options.parts, PARTS),
        "settings": chosen("--settings", options.settings or USUAL[kind], SETTINGS),
        "cells": tuple(cells(tasks, at_once, warmths, options.cells)),
        "seconds": windows(options.seconds, at_once),
        "trials": sizes("--trials", options.trials) if options.trials else (at_once[0], at_once[-1]),
        "peers": chosen("--peers", options.peers, cells_peers.MODES),
    }


@contextmanager
def by_own_time() -> Iterator[None]:
    """Measure by the CPU clock of the computing thread: the time that other programs take is left out.

    This thread only waits, so its clock stays the wall clock. What others do to caches and memory still counts.
    """
    import torch

    real, threads, this = time.perf_counter, torch.get_num_threads(), threading.get_ident()
    torch.set_num_threads(1)
    time.perf_counter = lambda: real() if threading.get_ident() == this else time.thread_time()
    try:
        yield
    finally:
        time.perf_counter = real
        torch.set_num_threads(threads)


def show(results: dict[str, Any], options: argparse.Namespace) -> None:
    text = markdown(results, options.figure)
    if options.into:
        options.into.write_text(filled(options.into.read_text(), text, "cells"))
    print(text, flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    begun = curve.begin(parser(), arguments, cells_peers, show, checked)
    if begun is None:
        return
    options, lists = begun
    if options.clock == "own" and options.device.startswith("cuda"):
        parser().error("--clock own: only for --device cpu; a GPU's work is not the host's")
    if options.target and not options.work:
        parser().error("--target needs --work, a folder for what is made of the drafters")
    import cells_ours  # brings torch and the engine, which a peer's process does not need

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that peers in their own groups end with us
    report = Report(first_results(options), options.json)
    with by_own_time() if options.clock == "own" else nullcontext():
        cells_ours.run(options, cells_ours.Wanted(**lists), report)
    show(report.results, options)
    print(json.dumps(report.results))


if __name__ == "__main__":
    main()
