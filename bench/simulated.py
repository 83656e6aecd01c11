"""Simulated traffic against the real engine: the same requests at the same times, one beside the other.

    python bench/simulated.py [--model default --drafter suffix --rates 1,3 --requests 14 --clock own --json FILE]
    python bench/simulated.py --model BIG --drafter eagle:FOLDER --rates 20,50 --requests 400 --max-tokens 64   on a GPU
    python bench/simulated.py --again FOLDER            simulates again what --record FOLDER kept: needs no model

At each rate the engine answers three times: with all that the drafter offers, without drafts, and with what the planner
takes. Runs with all drafts are recorded, and what was recorded must tell all three: tokens a second, the part of
requests that are good, and the medians and means of latencies. With --windows N all of that is done N times, with other
prompts at other times, by turns, and what counts is all of it together. A machine may be quicker or slower from run to
run: before each one answer is timed alone.
With --clock own, time goes on only while the engine computes (`own_time.py`): for machines that are never quiet.
On a GPU each way is gone once before, since graphs of passes are captured there when a size comes first: BIG and FOLDER
are what `widen.py` and `widen_heads.py` make. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kept import command_line, told
from simulated_held import GOOD, RUNS, Compared, Run, costs_off_by, held, load_runs, targets_of
from simulated_real import real_runs

from slipstream.bench.costs import RoundCosts
from slipstream.bench.outcome import Targets
from slipstream.bench.prompts import load_prompts, select
from slipstream.bench.recording import Recording
from slipstream.bench.simulate import doubts, drafters_of
from slipstream.cli.machine import hardware, load_before, versions
from slipstream.core.errors import ConfigError

_MEASURED = "measured.json"
"""How the runs of a folder were made, beside them."""


def rates(text: str) -> list[float]:
    """Numbers by commas."""
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = [0.0]
    if min(found) <= 0 or len(set(found)) < len(found):
        raise argparse.ArgumentTypeError(f"{text!r} must be numbers above 0 by commas, each once, such as 1,3")
    return found


def latencies(text: str) -> Targets:
    try:
        return Targets.parse(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def at_least(least: int) -> Callable[[str], int]:
    def count(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} must be a number of {least} or more")
        return int(text)

    return count


def called() -> dict[str, Any]:
    return {"command": command_line(sys.argv), "date": datetime.now(UTC).date().isoformat()}


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default")
    parser.add_argument("--drafter", default="suffix")
    parser.add_argument("--rates", type=rates, default=[1.0, 3.0], help="requests a second, by commas (1,3)")
    parser.add_argument("--requests", type=at_least(2), default=14, help="of each run")
    parser.add_argument(
        "--windows", type=at_least(1), default=1, help="runs of each way at each rate, with other prompts"
    )
    parser.add_argument("--max-tokens", type=at_least(2), default=32)
    parser.add_argument("--prompt-tokens", type=at_least(1), default=128, help="of each prompt, at most")
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--max-num-seqs", type=at_least(1), default=32, help="requests that run at once")
    parser.add_argument("--memory", help="of the engine, such as 32GiB; by the wall clock")
    parser.add_argument("--clock", choices=("wall", "own"), default="wall")
    parser.add_argument(
        "--latency-target", type=latencies, help="what is good, such as ttft=0.5,tpot=0.05; else 1.5 times the usual"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the prompts' order, and of when they come")
    parser.add_argument("--record", type=Path, help="a folder for the recordings, one a rate, and the runs")
    parser.add_argument("--again", type=Path, help="simulate again what was kept in this folder")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    if options.clock == "own" and options.memory is not None:
        parser.error(f"--memory {options.memory}: not with --clock own, whose engine takes what is usual; leave it out")
    if options.again is None:
        wanted = options.requests * options.windows
        try:
            options.texts = [prompt.text for prompt in select(load_prompts(options.prompts), limit=wanted)]
        except ConfigError as error:
            parser.error(str(error))
        random.Random(options.seed).shuffle(options.texts)  # they come by category
        if len(options.texts) < wanted:
            parser.error(
                f"--requests {options.requests} in --windows {options.windows}: {wanted} prompts, of which there are "
                f"{len(options.texts)}; name more (--prompts FILE), or ask for fewer"
            )
        return options
    for name in sorted(vars(options).keys() - {"again", "latency_target", "json"}):
        if getattr(options, name) != parser.get_default(name):
            flag = name.replace("_", "-")
            parser.error(f"--{flag}: the runs in --again {options.again} are made already; leave it out")
    for name in (_MEASURED, RUNS):
        if not (options.again / name).is_file():
            parser.error(
                f"--again {options.again}: there is no {name}; name a folder that --record made, with all "
                "runs of a rate at least"
            )
    return options


def measured_now(options: argparse.Namespace) -> tuple[dict[str, Any], list[Run], dict[float, Recording]]:
    """How the runs are made, and they."""
    load = load_before()
    how = {
        **called(),
        "hardware": {**hardware(), **load},
        "versions": versions(),
        "model": told(options.model),
        "drafter": told(options.drafter),
        "clock": options.clock,
    }
    if options.record is not None:
        options.record.mkdir(parents=True, exist_ok=True)
        (options.record / _MEASURED).write_text(json.dumps(how, indent=1) + "\n")
    return how, *real_runs(options, load["busy"])


def kept(folder: Path) -> tuple[dict[str, Any], list[Run], dict[float, Recording]]:
    runs = load_runs(folder)
    recordings = {rate: Recording.load(folder / f"{rate:g}.json") for rate in dict.fromkeys(one.rate for one in runs)}
    return json.loads((folder / _MEASURED).read_text()), runs, recordings


def main(arguments: Sequence[str] | None = None) -> None:
    options = parsed(arguments)
    try:
        how, runs, recordings = measured_now(options) if options.again is None else kept(options.again)
    except ConfigError as error:
        raise SystemExit(f"error: {error}") from error
    found, good, told_of, doubted = list[Compared](), dict[str, Targets](), list[dict[str, Any]](), list[str]()
    for rate, recording in recordings.items():
        own = [one for one in runs if one.rate == rate]
        drafters = drafters_of(recording)
        if not drafters:
            raise SystemExit(f"at {rate:g} a second nobody drafted: ask for more requests")
        targets = good[f"{rate:g}"] = options.latency_target or targets_of(own)
        found += held(own, recording, drafters[0], targets)
        priced = RoundCosts(recording.costs, apart=recording.machine.queued)
        told_of += [_about(one, costs_off_by(one, priced, recording.planning)) for one in own]
        doubted += [f"{rate:g}/s, not sure: {doubt}" for doubt in doubts(recording, drafters[0], together=True)]
    for one in found:
        spread = " ".join(f"{value:.4f}" for value in one.each) if len(one.each) > 1 else ""
        print(
            f"{one.rate:5g}/s {one.way:8} {one.figure:12} {one.real:9.4f} real {one.simulated:9.4f} {one.off_by:+.1%}"
            f"   {spread}"
        )
    for doubt in doubted:
        print(doubt)
    for about in told_of:
        costs = ", ".join(f"{kind} {off:+.1%}" for kind, off in about["costs_off_by"].items())
        print(
            f"{about['rate']:5g}/s {about['way']:8} one alone {about['alone_s']:.3f} s; told of passes: {costs or '-'}"
        )
    result = {
        **how,
        "simulated_again": None if options.again is None else called(),
        "good_is": {rate: asdict(targets) for rate, targets in good.items()},
        "worst": max(abs(one.off_by) for one in found if one.figure != GOOD),
        "worst_good": max(abs(one.off_by) for one in found if one.figure == GOOD),
        "rows": [one.told() for one in found],
        "runs": told_of,
    }
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


def _about(one: Run, off_by: Mapping[str, float]) -> dict[str, Any]:
    """A run beside its figures."""
    own = {name: getattr(one, name) for name in ("rate", "window", "way", "counts", "alone_s")}
    return {**own, "costs_off_by": off_by}


if __name__ == "__main__":
    main()
