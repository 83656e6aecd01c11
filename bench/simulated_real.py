"""Real runs of traffic: the same requests to one engine in all ways, of which those with all drafts are recorded."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from gpu_tokens import encode
from kept import told
from own_time import OwnTime, by_own_time
from simulated_held import RUNS, WAYS, Run

from slipstream import LLM, SamplingParams, SpeculationParams
from slipstream.bench import live, traffic
from slipstream.bench.deciding import with_planning
from slipstream.bench.outcome import Served, Speculation
from slipstream.bench.recording import Recording
from slipstream.cli.traffic import Found, Rounds, Tape
from slipstream.core.outputs import RequestOutput
from slipstream.core.responsive import rarely_searched
from slipstream.drafters import merged_name, parse_merged
from slipstream.engine.build import build
from slipstream.engine.config import EngineConfig
from slipstream.engine.engine import Engine
from slipstream.engine.intake import Intake
from slipstream.plan.planner import Planner


class Answering(Rounds, Protocol):
    """A real engine."""

    def answer(self, prompts: Sequence[list[int]], params: SamplingParams, times: Sequence[float]) -> list[Served]:
        """How each prompt fared that came so many seconds after the first."""


class ByTheWall:
    """Requests come from outside while the engine works, as to a server."""

    def __init__(self, llm: LLM) -> None:
        self.llm, self.engine = llm, llm.engine

    def between_rounds(self, look: Callable[[Engine], Found]) -> Found:
        return self.llm.between_rounds(look)

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

    def between_rounds(self, look: Callable[[Engine], Found]) -> Found:
        return look(self.engine)

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
        longest = min(options.prompt_tokens, real.engine.plan.max_model_len - options.max_tokens - 1)
        self.prompts = [encode(tokenizer, text, longest) for text in options.texts]
        self._known = self._planner = real.engine.drafting.planner
        self._sent = 0

    def forget(self) -> None:
        """Let the planner know no more than at the first call of this."""
        self._planner = copy.deepcopy(self._known)

    def send(
        self, way: Speculation, times: Sequence[float], nodes: int | None = None, first: int = 0
    ) -> tuple[Served, ...]:
        """How each request fared, in their order. nodes: of a draft, at most; None: as many as is usual. first: the
        first one's prompt."""
        self._sent += 1
        planner = self._planner if way == "planned" else Planner()
        self.real.between_rounds(lambda engine: setattr(engine.drafting, "planner", planner))
        tenant = f"run {self._sent}"
        spec = SpeculationParams(enabled=way != "off", drafter=self.drafter, draft_tokens=nodes, tenant=tenant)
        params = SamplingParams(temperature=0, max_tokens=self.max_tokens, speculation=spec)
        prompts = [self.prompts[(first + i) % len(self.prompts)] for i in range(len(times))]
        return tuple(self.real.answer(prompts, params, times))

    def run(self, rate: float, window: int, way: Speculation, times: Sequence[float], tape: Tape | None) -> Run:
        """tape: of the runs with all drafts; None: of what does not count."""
        (alone,) = self.send("off", [0.0])
        costs = None
        if tape is None:
            served = self._sent_in(window, way, times)
        elif way == "fixed":
            tape.start()
            tape.rehearse(self._rehearsed, crowds=not window)
            served = self._sent_in(window, way, times)
            tape.pause()
        else:
            own = Tape(self.real, self.model, busy=False)
            own.start(all_guesses=False)
            served = self._sent_in(window, way, times)
            costs = own.stop().costs
        lasted = max(one.ended for one in served)
        print(
            f"{rate:g}/s, window {window + 1}, {way}: {len(times)} requests within {lasted:.1f} s; one alone "
            f"{alone.ended:.3f} s",
            flush=True,
        )
        return Run(rate, window, way, tape is not None, alone.ended, served, costs)

    def _sent_in(self, window: int, way: Speculation, times: Sequence[float]) -> tuple[Served, ...]:
        return self.send(way, times, first=window * self.requests)

    def _rehearsed(self, times: Sequence[float], nodes: int) -> tuple[Served, ...]:
        return self.send("fixed" if nodes else "off", times, nodes or None)


def at_rate(sender: Sender, rate: float, options: argparse.Namespace, busy: bool) -> tuple[list[Run], Recording]:
    """All ways in turn, as often as is asked for, and what was recorded of those with all drafts. Each begins in its
    turn, or a machine that changes its speed would have one of them fare better."""
    windows = range(options.windows)
    seeds = [options.seed * options.windows + window for window in windows]
    times = [traffic.poisson_times(rate, sender.requests, seed) for seed in seeds]
    runs = []
    sender.forget()
    if sender.real.engine.target.device.type == "cuda":
        runs += [sender.run(rate, 0, way, times[0], None) for way in WAYS]
    tape = Tape(sender.real, sender.model, busy)
    for window in windows:
        turn = window % len(WAYS)
        runs += [sender.run(rate, window, way, times[window], tape) for way in WAYS[turn:] + WAYS[:turn]]
    recording = tape.stop()
    made = replace(recording.made, planner="fixed")  # in the runs that were recorded
    return runs, with_planning(replace(recording, made=made))


def run(
    real: Answering, tokenizer: object, options: argparse.Namespace, busy: bool
) -> tuple[list[Run], dict[float, Recording]]:
    sender = Sender(real, tokenizer, options)
    sender.send("planned", [0.0] * 2)  # warms up, and lets the planner see passes
    runs, recordings = list[Run](), dict[float, Recording]()
    for rate in options.rates:
        own, recordings[rate] = at_rate(sender, rate, options, busy)
        runs += own
        if options.record is not None:
            recordings[rate].save(options.record / f"{rate:g}.json")
            (options.record / RUNS).write_text("".join(one.packed() + "\n" for one in runs))
    return runs, recordings


def real_runs(options: argparse.Namespace, busy: bool) -> tuple[list[Run], dict[float, Recording]]:
    if options.clock == "own":
        with by_own_time():  # one thread from the beginning
            real = ByOwnTime(options.model, options.drafter, options.max_num_seqs)
        return run(real, real.tokenizer, options, busy)
    sizes = {"max_num_seqs": options.max_num_seqs, "memory": options.memory}
    llm = LLM(options.model, drafter=options.drafter, prefix_caching=False, warm_up=True, **sizes)
    with llm, rarely_searched():  # as a server's engine
        return run(ByTheWall(llm), llm.tokenizer, options, busy)
