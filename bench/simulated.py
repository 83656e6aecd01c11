"""Simulated traffic against the real engine: the same requests at the same times, one beside the other.

    python bench/simulated.py [--model default --drafter suffix --rates 1,3 --requests 14 --clock own --json FILE]
    python bench/simulated.py --model BIG --drafter eagle:FOLDER --rates 20,50 --requests 400 --max-tokens 64   on a GPU
    python bench/simulated.py --again FOLDER            simulates again what --record FOLDER kept: needs no model

At each rate the engine answers three times: with all that the drafter offers, without drafts, and with what the planner
takes. The first run is recorded, and what was recorded must tell all three: tokens a second, the part of requests that
are good, and the medians and means of latencies. With --windows N all of that is done N times, with other prompts at
other times, and what counts is all of it together. A machine may be quicker or slower from run to run: before each one
answer is timed alone.
With --clock own, time goes on only while the engine computes (`own_time.py`): for machines that are never quiet.
On a GPU each way is gone once before, since graphs of passes are captured there when a size comes first: BIG and FOLDER
are what `widen.py` and `widen_heads.py` make. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from gpu_tokens import encode
from kept import command_line, told
from own_time import OwnTime, by_own_time
from simulated_held import RUNS, WAYS, Compared, Run, costs_off_by, held, load_runs

from slipstream import LLM, SamplingParams, SpeculationParams
from slipstream.bench import live, traffic
from slipstream.bench.outcome import Served, Speculation, Targets
from slipstream.bench.prompts import load_prompts, select
from slipstream.bench.recorder import Recorder
from slipstream.bench.recording import Recording
from slipstream.bench.simulate import drafters_of
from slipstream.cli.machine import hardware, load_before, versions
from slipstream.core.outputs import RequestOutput
from slipstream.drafters import merged_name, parse_merged
from slipstream.engine.build import build
from slipstream.engine.config import EngineConfig
from slipstream.engine.engine import Engine
from slipstream.engine.intake import Intake
from slipstream.plan.planner import Planner


class Answering(Protocol):
    """A real engine. Nothing runs in it between two calls."""

    engine: Engine

    def answer(self, prompts: Sequence[list[int]], params: SamplingParams, times: Sequence[float]) -> list[Served]:
        """How each prompt fared that came so many seconds after the first."""


class ByTheWall:
    """Requests come from outside while the engine works, as to a server."""

    def __init__(self, llm: LLM) -> None:
        self.llm, self.engine = llm, llm.engine

    def answer(self, prompts: Sequence[list[int]], params: SamplingParams, times: Sequence[float]) -> list[Served]:
        return live.send(self.llm, prompts, [params] * len(prompts), times)


class ByOwnTime:
    """The engine is stepped here, and requests come by its own time."""

    def __init__(self, model: str, drafter: str, max_num_seqs: int) -> None:
        config = EngineConfig(prefix_caching=False, max_num_seqs=max_num_seqs)
        built = build(model, drafter, config, dtype="auto", device="cpu", trust_remote_code=False, progress=None)
        self.engine = built.engine
        self._intake = Intake(built.tokenizer, built.eos_ids, built.loaded)
        self.tokenizer = built.tokenizer
        self._clock = OwnTime()  # one for all runs, so that it never goes back

    def answer(self, prompts: Sequence[list[int]], params: SamplingParams, times: Sequence[float]) -> list[Served]:
        clock = self._clock
        sinks: list[list[RequestOutput]] = [[] for _ in prompts]
        with by_own_time(clock):
            begun, coming = clock(), 0
            while coming < len(prompts) or self.engine.busy:
                if not self.engine.busy:
                    clock.skip_to(begun + times[coming])
                while coming < len(prompts) and begun + times[coming] <= clock():
                    prompt = {"prompt_token_ids": prompts[coming]}
                    job = self._intake.job(prompt, params, sinks[coming].append, streaming=False)
                    job.arrived = begun + times[coming]  # while the engine was at work
                    self.engine.add(job)
                    coming += 1
                self.engine.step()
        return [_served(*parts) for parts in zip(sinks, times, prompts, strict=True)]


def _served(sink: Sequence[RequestOutput], at: float, prompt: Sequence[int]) -> Served:
    answer = sink[-1].outputs[0]
    assert answer.error is None, answer.error
    first, last = at + answer.timing.first_token_s, at + answer.timing.total_s
    return Served(at, len(prompt), len(answer.token_ids), first, last, answer.speculation.rounds)


class Sender:
    """An engine, and the requests that come to it."""

    def __init__(self, real: Answering, tokenizer: object, options: argparse.Namespace) -> None:
        self.real, self.model = real, told(options.model)
        self.drafter = merged_name(parse_merged(options.drafter))
        self.requests, self.max_tokens = options.requests, options.max_tokens
        texts = [prompt.text for prompt in select(load_prompts(options.prompts), limit=self.requests * options.windows)]
        random.Random(options.seed).shuffle(texts)  # they come by category
        longest = min(options.prompt_tokens, real.engine.plan.max_model_len - options.max_tokens - 1)
        self.prompts = [encode(tokenizer, text, longest) for text in texts]
        self._planner, self._sent = real.engine.drafting.planner, 0

    def send(
        self, way: Speculation, times: Sequence[float], nodes: int | None = None, first: int = 0
    ) -> tuple[Served, ...]:
        """How each request fared, in their order. nodes: of a draft, at most; None: as many as is usual. first: the
        first one's prompt."""
        self._sent += 1
        self.real.engine.drafting.planner = self._planner if way == "planned" else Planner()
        tenant = f"run {self._sent}"
        spec = SpeculationParams(enabled=way != "off", drafter=self.drafter, draft_tokens=nodes, tenant=tenant)
        params = SamplingParams(temperature=0, max_tokens=self.max_tokens, speculation=spec)
        prompts = [self.prompts[(first + i) % len(self.prompts)] for i in range(len(times))]
        return tuple(self.real.answer(prompts, params, times))

    def run(self, rate: float, window: int, way: Speculation, times: Sequence[float], recorder: Recorder | None) -> Run:
        """recorder: of the run with all drafts; None: of what does not count."""
        (alone,) = self.send("off", [0.0])
        costs = None
        if recorder is None:
            served = self._sent_in(window, way, times)
        elif way == "fixed":
            self._rehearse(recorder)
            served = self._sent_in(window, way, times)
            self.real.engine.listen(None)
        else:
            listener = Recorder(self.real.engine)
            self.real.engine.listen(listener)
            served = self._sent_in(window, way, times)
            self.real.engine.listen(None)
            costs = listener.recording(self.model).costs
        lasted = max(one.ended for one in served)
        print(
            f"{rate:g}/s {way}: {len(times)} requests within {lasted:.1f} s; one alone {alone.ended:.3f} s", flush=True
        )
        return Run(rate, window, way, recorder is not None, alone.ended, served, costs)

    def _sent_in(self, window: int, way: Speculation, times: Sequence[float]) -> tuple[Served, ...]:
        return self.send(way, times, first=window * self.requests)

    def _rehearse(self, recorder: Recorder) -> None:
        """Before the run with all drafts, some answers without, and with small ones. It listens from then on."""
        requests = recorder.requests
        self.real.engine.listen(recorder, all_guesses=True)
        traffic.rehearse(
            lambda some, nodes: self.send("fixed" if nodes else "off", some, nodes or None),
            drafts=bool(self.real.engine.drafting.on_device),
        )
        recorder.forget_requests(since=requests)


def at_rate(sender: Sender, rate: float, options: argparse.Namespace) -> tuple[list[Run], Recording]:
    """All ways in turn, as often as is asked for, and what was recorded of those with all drafts."""
    windows = range(options.windows)
    times = [traffic.poisson_times(rate, sender.requests, options.seed + window) for window in windows]
    runs = []
    if sender.real.engine.target.device.type == "cuda":
        runs += [sender.run(rate, 0, way, times[0], None) for way in WAYS]
    recorder = Recorder(sender.real.engine)
    runs += [sender.run(rate, window, way, times[window], recorder) for window in windows for way in WAYS]
    return runs, recorder.recording(sender.model)


def run(real: Answering, tokenizer: object, options: argparse.Namespace) -> tuple[list[Run], dict[float, Recording]]:
    sender = Sender(real, tokenizer, options)
    sender.send("planned", [0.0] * 2)  # warms up, and lets the planner see passes
    runs, recordings = list[Run](), dict[float, Recording]()
    for rate in options.rates:
        own, recordings[rate] = at_rate(sender, rate, options)
        runs += own
        if options.record is not None:
            recordings[rate].save(options.record / f"{rate:g}.json")
            (options.record / RUNS).write_text("".join(one.packed() + "\n" for one in runs))
    return runs, recordings


def rates(text: str) -> list[float]:
    """Numbers by commas."""
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = [0.0]
    if min(found) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} must be numbers above 0 by commas, such as 1,3")
    return found


def real_runs(options: argparse.Namespace) -> tuple[list[Run], dict[float, Recording]]:
    if options.clock == "own":
        with by_own_time():  # one thread from the beginning
            real = ByOwnTime(options.model, options.drafter, options.max_num_seqs)
        return run(real, real.tokenizer, options)
    sizes = {"max_num_seqs": options.max_num_seqs, "memory": options.memory}
    with LLM(options.model, drafter=options.drafter, prefix_caching=False, **sizes) as llm:
        return run(ByTheWall(llm), llm.tokenizer, options)


def kept_runs(folder: Path) -> tuple[list[Run], dict[float, Recording]]:
    runs = load_runs(folder)
    return runs, {rate: Recording.load(folder / f"{rate:g}.json") for rate in dict.fromkeys(one.rate for one in runs)}


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default")
    parser.add_argument("--drafter", default="suffix")
    parser.add_argument("--rates", type=rates, default="1,3", help="requests a second, by commas")
    parser.add_argument("--requests", type=int, default=14, help="of each run")
    parser.add_argument("--windows", type=int, default=1, help="runs of each way at each rate, with other prompts")
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=128, help="of each prompt, at most")
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--max-num-seqs", type=int, default=32, help="requests that run at once")
    parser.add_argument("--memory", help="of the engine, such as 32GiB; by the wall clock")
    parser.add_argument("--clock", choices=("wall", "own"), default="wall")
    parser.add_argument("--latency-target", help="what is good, such as ttft=0.5,tpot=0.05; else 1.5 times the usual")
    parser.add_argument("--seed", type=int, default=0, help="of the first window; the next has the next one")
    parser.add_argument("--record", type=Path, help="a folder for the recordings, one a rate, and the runs")
    parser.add_argument("--again", type=Path, help="simulate again what was kept in this folder")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    if options.clock == "own" and options.memory is not None:
        parser.error(f"--memory {options.memory}: not with --clock own, whose engine takes what is usual; leave it out")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    options = parsed(arguments)
    load = load_before()
    if options.record is not None:
        options.record.mkdir(parents=True, exist_ok=True)
    runs, recordings = real_runs(options) if options.again is None else kept_runs(options.again)
    targets = None if options.latency_target is None else Targets.parse(options.latency_target)
    found: list[Compared] = []
    for rate, recording in recordings.items():
        (drafter, *_) = drafters_of(recording)
        found += held([one for one in runs if one.rate == rate], recording, drafter, targets)
    for one in found:
        spread = " ".join(f"{value:.4f}" for value in one.each) if len(one.each) > 1 else ""
        print(
            f"{one.rate:5g}/s {one.way:8} {one.figure:12} {one.real:9.4f} real {one.simulated:9.4f} {one.off_by:+.1%}"
            f"   {spread}"
        )
    told_of = [_about(one, recordings[one.rate]) for one in runs]
    for about in told_of:
        costs = ", ".join(f"{kind} {off:+.1%}" for kind, off in about["costs_off_by"].items())
        print(
            f"{about['rate']:5g}/s {about['way']:8} one alone {about['alone_s']:.3f} s; told of passes: {costs or '-'}"
        )
    result = {
        "command": command_line(sys.argv),
        "date": datetime.now(UTC).date().isoformat(),
        "hardware": {**hardware(), **load},
        "versions": versions(),
        "model": next(iter(recordings.values())).model,
        "clock": options.clock,
        "worst": max(abs(one.off_by) for one in found),
        "rows": [one.told() for one in found],
        "runs": told_of,
    }
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


def _about(one: Run, recording: Recording) -> dict[str, Any]:
    """A run beside its figures."""
    own = {name: getattr(one, name) for name in ("rate", "window", "way", "counts", "alone_s")}
    return {**own, "costs_off_by": costs_off_by(one, recording)}


if __name__ == "__main__":
    main()
