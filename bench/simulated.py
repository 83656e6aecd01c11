"""Simulated traffic against the real engine: the same requests at the same times, one beside the other.

    python bench/simulated.py [--model default --drafter suffix --rates 1,3 --requests 14 --clock own --json FILE]
    python bench/simulated.py --model BIG --drafter eagle:FOLDER --rates 20,50 --requests 400 --max-tokens 64   on a GPU

At each rate the engine answers three times: with all that the drafter offers, without drafts, and with what the planner
takes. The first run is recorded, and what was recorded must tell all three: tokens a second, and the medians and means
of latencies.
With --clock own, time goes on only while the engine computes (`own_time.py`): for machines that are never quiet.
On a GPU each way is gone once before, since graphs of passes are captured there when a size comes first: BIG and FOLDER
are what `widen.py` and `widen_heads.py` make. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean, median
from typing import Protocol

from gpu_tokens import encode
from kept import command_line, told
from own_time import OwnTime, by_own_time

from slipstream import LLM, SamplingParams, SpeculationParams
from slipstream.bench import live, traffic
from slipstream.bench.outcome import Outcome, Served, Speculation, Targets
from slipstream.bench.prompts import load_prompts, select
from slipstream.bench.recorder import Recorder
from slipstream.bench.replica import Setting
from slipstream.bench.simulate import simulate
from slipstream.bench.traffic import Coming
from slipstream.cli.machine import hardware, load_before, versions
from slipstream.core.outputs import RequestOutput
from slipstream.drafters import merged_name, parse_merged
from slipstream.engine.build import build
from slipstream.engine.config import EngineConfig
from slipstream.engine.engine import Engine
from slipstream.engine.intake import Intake
from slipstream.plan.planner import Planner

WAYS: tuple[Speculation, ...] = ("fixed", "off", "planned")


@dataclass(frozen=True, slots=True)
class Compared:
    """One figure of one way at one rate."""

    rate: float
    way: str
    figure: str
    real: float
    simulated: float

    @property
    def off_by(self) -> float:
        return self.simulated / self.real - 1


def figures(served: Sequence[Served]) -> dict[str, float]:
    """Medians, and means: a median jumps where half of the requests meet another's prompt."""
    found = Outcome.of(served, Targets())
    means = {"ttft_mean": fmean(one.ttft for one in served), "tpot_mean": fmean(one.tpot for one in served)}
    return {"tokens_per_s": found.tokens_per_s, "ttft": found.ttft.p50, "tpot": found.tpot.p50, **means}


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
        texts = [prompt.text for prompt in select(load_prompts(options.prompts), limit=options.requests)]
        longest = min(options.prompt_tokens, real.engine.plan.max_model_len - options.max_tokens - 1)
        self.prompts = [encode(tokenizer, text, longest) for text in texts]
        self.max_tokens = options.max_tokens
        self._planner, self._runs = real.engine.drafting.planner, 0

    def send(self, way: Speculation, times: Sequence[float], nodes: int | None = None) -> list[Served]:
        """How each request fared, in their order. nodes: of a draft, at most; None: as many as is usual."""
        self._runs += 1
        self.real.engine.drafting.planner = self._planner if way == "planned" else Planner()
        tenant = f"run {self._runs}"
        spec = SpeculationParams(enabled=way != "off", drafter=self.drafter, draft_tokens=nodes, tenant=tenant)
        params = SamplingParams(temperature=0, max_tokens=self.max_tokens, speculation=spec)
        prompts = [self.prompts[i % len(self.prompts)] for i in range(len(times))]
        served = self.real.answer(prompts, params, times)
        print(f"{way}: {len(times)} requests within {max(one.ended for one in served):.1f} s", flush=True)
        return served

    def listened(self, recorder: Recorder, times: Sequence[float]) -> list[Served]:
        """The run with all drafts; before it some answers without, and with small ones."""
        self.real.engine.listen(recorder, all_guesses=True)
        traffic.rehearse(
            lambda some, nodes: self.send("fixed" if nodes else "off", some, nodes or None),
            drafts=bool(self.real.engine.drafting.on_device),
        )
        recorder.forget_requests()
        served = self.send("fixed", times)
        self.real.engine.listen(None)
        return served


def compared(sender: Sender, rate: float, options: argparse.Namespace) -> list[Compared]:
    """All ways, as often as is asked for, in turn. What was recorded in all of them tells the medians of each."""
    times = traffic.poisson_times(rate, len(sender.prompts), options.seed)
    if sender.real.engine.target.device.type == "cuda":
        for way in WAYS:
            sender.send(way, times)
    recorder = Recorder(sender.real.engine)
    seen: dict[Speculation, list[list[Served]]] = {way: [] for way in WAYS}
    for _ in range(options.repeats):
        for way, runs in seen.items():
            runs.append(sender.listened(recorder, times) if way == "fixed" else sender.send(way, times))
    recording = recorder.recording(sender.model)
    if options.record is not None:
        recording.save(options.record / f"{rate:g}.json")
    traces = recording.traces
    found = []
    for way, runs in seen.items():
        coming = [Coming(one.arrived, one.prompt_tokens, one.output_tokens, i) for i, one in enumerate(runs[0])]
        told = figures(simulate(recording, Setting(way, sender.drafter), coming, traces))
        real = [figures(served) for served in runs]
        found += [Compared(rate, way, name, median(one[name] for one in real), told[name]) for name in told]
    return found


def run(real: Answering, tokenizer: object, options: argparse.Namespace) -> list[Compared]:
    sender = Sender(real, tokenizer, options)
    sender.send("planned", [0.0] * 2)  # warms up, and lets the planner see passes
    return [one for rate in options.rates for one in compared(sender, rate, options)]


def rates(text: str) -> list[float]:
    """Numbers by commas."""
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = [0.0]
    if min(found) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} must be numbers above 0 by commas, such as 1,3")
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default")
    parser.add_argument("--drafter", default="suffix")
    parser.add_argument("--rates", type=rates, default="1,3", help="requests a second, by commas")
    parser.add_argument("--requests", type=int, default=14)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=128, help="of each prompt, at most")
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--max-num-seqs", type=int, default=32, help="requests that run at once")
    parser.add_argument("--memory", help="of the engine, such as 32GiB; by the wall clock")
    parser.add_argument("--clock", choices=("wall", "own"), default="wall")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", type=Path, help="a folder for the recordings, one a rate")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    if options.clock == "own" and options.memory is not None:
        parser.error(f"--memory {options.memory}: not with --clock own, whose engine takes what is usual; leave it out")
    load = load_before()
    if options.record is not None:
        options.record.mkdir(parents=True, exist_ok=True)
    if options.clock == "own":
        with by_own_time():  # one thread from the beginning
            real = ByOwnTime(options.model, options.drafter, options.max_num_seqs)
        found = run(real, real.tokenizer, options)
    else:
        sizes = {"max_num_seqs": options.max_num_seqs, "memory": options.memory}
        with LLM(options.model, drafter=options.drafter, prefix_caching=False, **sizes) as llm:
            found = run(ByTheWall(llm), llm.tokenizer, options)
    for one in found:
        print(
            f"{one.rate:5g}/s {one.way:8} {one.figure:12} {one.real:9.4f} real {one.simulated:9.4f} {one.off_by:+.1%}"
        )
    result = {
        "command": command_line(sys.argv),
        "date": datetime.now(UTC).date().isoformat(),
        "hardware": {**hardware(), **load},
        "versions": versions(),
        "model": told(options.model),
        "drafter": told(options.drafter),
        "clock": options.clock,
        "worst": max(abs(one.off_by) for one in found),
        "rows": [{"off_by": one.off_by, **{k: getattr(one, k) for k in Compared.__slots__}} for one in found],
    }
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
