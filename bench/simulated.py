"""Simulated traffic against the real engine: the same requests at the same times, one beside the other.

    python bench/simulated.py [--model default --drafter suffix --rates 1,3 --requests 16 --max-tokens 32 --json FILE]

At each rate the engine answers three times: without drafts, with all that the drafter offers, and with what the planner
takes. The second run is recorded, and what was recorded must tell all three: tokens a second and median latencies.
The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from slipstream import LLM, SamplingParams, SpeculationParams
from slipstream.bench import live, traffic
from slipstream.bench.outcome import Outcome, Served, Speculation, Targets
from slipstream.bench.prompts import load_prompts, select
from slipstream.bench.recording import Recording
from slipstream.bench.replica import Setting
from slipstream.bench.simulate import simulate
from slipstream.bench.traffic import Coming
from slipstream.cli.traffic import Tape
from slipstream.plan.planner import Planner

WAYS: tuple[Speculation, ...] = ("fixed", "off", "planned")
FIGURES = ("tokens_per_s", "ttft", "tpot")


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
    found = Outcome.of(served, Targets())
    return {"tokens_per_s": found.tokens_per_s, "ttft": found.ttft.p50, "tpot": found.tpot.p50}


class Sender:
    """An engine, and requests that come to it at given times."""

    def __init__(self, llm: LLM, options: argparse.Namespace) -> None:
        self.llm, self.model, self.drafter = llm, options.model, options.drafter
        texts = [prompt.text for prompt in select(load_prompts(options.prompts), limit=options.requests)]
        longest = min(options.prompt_tokens, llm.max_model_len - options.max_tokens - 1)
        self.prompts = [llm.chat_prompt([{"role": "user", "content": text}])[:longest] for text in texts]
        self.max_tokens = options.max_tokens
        self._planner, self._runs = llm.engine.drafting.planner, 0

    def send(self, way: Speculation, times: Sequence[float], tape: Tape | None = None) -> list[Served]:
        """How each request fared, in their order."""
        self._runs += 1
        planner = self._planner if way == "planned" else Planner()
        self.llm.between_rounds(lambda engine: setattr(engine.drafting, "planner", planner))
        spec = SpeculationParams(enabled=way != "off", drafter=self.drafter, tenant=f"run {self._runs}")
        params = SamplingParams(temperature=0, max_tokens=self.max_tokens, speculation=spec)
        if tape is not None:
            tape.start()
        served = live.send(self.llm, self.prompts[: len(times)], [params] * len(times), times)
        print(f"{way}: {len(times)} requests within {max(one.ended for one in served):.1f} s", flush=True)
        return served

    def recorded(self, times: Sequence[float]) -> tuple[list[Served], Recording]:
        tape = Tape(self.llm, self.model)
        served = self.send("fixed", times, tape)
        return served, tape.stop()


def compared(sender: Sender, rate: float, seed: int) -> list[Compared]:
    times = traffic.poisson_times(rate, len(sender.prompts), seed)
    real, recording = sender.recorded(times)
    by_way = {"fixed": real} | {way: sender.send(way, times) for way in WAYS if way != "fixed"}
    traces = list(recording.traces)
    found = []
    for way, served in by_way.items():
        setting = Setting(way, sender.drafter)  # type: ignore[arg-type]  # the keys are of WAYS
        coming = [Coming(one.arrived, one.prompt_tokens, one.output_tokens, i) for i, one in enumerate(served)]
        told = figures(simulate(recording, setting, coming, traces))
        found += [Compared(rate, way, name, value, told[name]) for name, value in figures(served).items()]
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default")
    parser.add_argument("--drafter", default="suffix")
    parser.add_argument("--rates", default="1,3", help="requests a second, by commas")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=128, help="of each prompt, at most")
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    found: list[Compared] = []
    with LLM(options.model, drafter=options.drafter, prefix_caching=False) as llm:
        sender = Sender(llm, options)
        sender.send("planned", [0.0] * 2)  # warms up, and lets the planner see passes
        for rate in (float(part) for part in options.rates.split(",")):
            found += compared(sender, rate, options.seed)
    for one in found:
        print(
            f"{one.rate:5g}/s {one.way:8} {one.figure:13} {one.real:9.4f} real {one.simulated:9.4f} {one.off_by:+.1%}"
        )
    result = {
        "model": options.model,
        "drafter": options.drafter,
        "worst": max(abs(one.off_by) for one in found),
        "rows": [{"off_by": one.off_by, **{k: getattr(one, k) for k in Compared.__slots__}} for one in found],
    }
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
