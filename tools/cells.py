"""Does the planner choose well? Plain decoding, fixed settings and `auto` side by side, cell by cell, in one engine.

    python tools/cells.py --small SMALL --target BIG --work FOLDER --prompts spec_bench.jsonl --json cells.json
                          [--parts cells,adversaries,switches,peers] [--budget 540] [--add] [--cells "x1,qa x64"]
    python tools/cells.py --device cpu --json cells.json                   the default model, its own prompts, on a CPU
    python tools/cells.py --show cells.json [--into docs/cells.md]

A cell is a task (the six groups of Spec-Bench, or the categories of the prompts), so many requests at once, and a
temperature. SMALL, BIG and FOLDER are as for `curve.py`; without --target the small model itself is measured.

    cells        tokens per second of every setting in every cell, each --repeats times for --seconds, in turn
    adversaries  planned decoding with a drafter that is always wrong, slow, or right and wrong by turns, and plain
    switches     rounds until the plan follows a text that stops echoing and begins again, and a load of 1, most, 1
    peers        vLLM's fixed settings in the same cells, each in a process of its own

The JSON file is written after every cell. With --add, what it has is left out: a call that was broken off goes on. With
--budget, no cell is begun that would not end in time. The tables are printed before the last line, which is the JSON.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import cells_peers
import cells_table
import curve
from cells_work import AT_ONCE, TEMPERATURES, by_task, cells
from curve_table import filled
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
    """Seconds of a measurement, by how many requests are at once: one number for all, or one for each."""
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
    """The lists among the options. Sets what depends on the device or the target."""
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
    text = cells_table.markdown(results, options.figure)
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
    import cells_run  # brings torch and the engine, which a peer's process does not need

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that peers in their own groups end with us
    report = Report(first_results(options), options.json)
    with by_own_time() if options.clock == "own" else nullcontext():
        cells_run.run(options, cells_run.Wanted(**lists), report)
    show(report.results, options)
    print(json.dumps(report.results))


if __name__ == "__main__":
    main()
