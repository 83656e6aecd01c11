"""Our side of the benchmark: which part needs which model, and in which order they come.

Each stage opens a model, measures all that wants it, and is left by nobody who still holds it. The target is opened
twice, because the second start is the one that users see. The profiler comes last: it may slow down what follows it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import gpu_heads
import gpu_kernels
import gpu_passes
import gpu_tokens
import torch
from gpu_clock import Clock, clock_of, copy_bandwidth, free, idle_share
from gpu_report import Report
from gpu_tokens import Setup, Start, opened
from transformers import PreTrainedConfig

from slipstream.models.load import load_config
from slipstream.models.resolve import resolve

PARTS = ("tokens", "tree", "small", "long", "heads", "sampling", "kernels", "prefill", "idle")
IDLE_WARMUPS = 3
"""Answers before the one that is watched: sizes of rounds are captured when they first come, and guesses learn."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be measured, and on what."""

    target: str
    draft: str
    small: str | None
    prompts: Path
    max_tokens: int
    device: torch.device
    parts: tuple[str, ...]
    requests: tuple[int, ...] = (1,)  # of `kernels`

    def has(self, *names: str) -> bool:
        """Is one of these parts wanted?"""
        return not set(names).isdisjoint(self.parts)

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32

    def setup(self, model: str, drafters: Sequence[str]) -> Setup:
        context = min(gpu_tokens.CONTEXT, config_of(model).max_position_embeddings)
        return Setup(model, tuple(drafters), str(self.device), str(self.dtype).removeprefix("torch."), context)


def config_of(model: str) -> PreTrainedConfig:
    return load_config(resolve(model))


def measure(plan: Plan, report: Report, clock: Clock | None = None) -> None:
    """All parts of the plan. One that fails is noted, and the others go on."""
    clock = clock or clock_of(plan.device)
    stages: dict[str, tuple[bool, Callable[[Plan, Report, Clock], None]]] = {
        "copy": (plan.has("tree", "long", "heads"), _copy),
        "first opening": (plan.has("tokens", "tree"), _first_opening),
        "small": (plan.small is not None and plan.has("small"), _small),
        "random model": (plan.has("long", "heads", "sampling", "kernels"), _random_model),
        "second opening": (plan.has("prefill", "idle"), _second_opening),
    }
    if plan.has("tokens", "tree", "prefill", "idle"):
        report.results.setdefault("starts", [])  # with those of calls before, whose results are kept
    if plan.small is None and plan.has("small"):
        report.say("small is left out: there is no --small")
    for name, (wanted, stage) in stages.items():
        if wanted:
            with report.part(name):
                stage(plan, report, clock)
            report.say(f"{free(plan.device) / 1e9:.2f} GB of the device still held")


def _copy(plan: Plan, report: Report, clock: Clock) -> None:
    report.put(copy_bandwidth(plan.device, clock), "copy_bytes_per_s")


def _first_opening(plan: Plan, report: Report, clock: Clock) -> None:
    setup = plan.setup(plan.target, ("ngram", f"model:{plan.draft}"))
    with opened(setup, _noting(report)) as llm:
        runner = llm.engine.target
        report.put(runner.weights_bytes, "weights_bytes")
        if plan.has("tree"):
            with report.part("tree"):
                context = min(gpu_passes.CONTEXT, runner.max_positions - gpu_passes.TREE_ROWS)
                bandwidth = report.results["copy_bytes_per_s"]
                report.put(asdict(gpu_passes.tree_part(runner, bandwidth, clock, context=context)), "tree")
        if plan.has("tokens"):
            with report.part("tokens"):
                _answers(llm, setup, plan, report, "ours")


def _small(plan: Plan, report: Report, clock: Clock) -> None:
    assert plan.small is not None
    setup = plan.setup(plan.small, ())
    with opened(setup) as llm:
        _answers(llm, setup, plan, report, "small")


def _random_model(plan: Plan, report: Report, clock: Clock) -> None:
    runner = gpu_passes.random_runner(config_of(plan.target), plan.dtype, plan.device)
    report.say(f"a model of random weights: {runner.swaps}")
    if plan.has("long"):
        with report.part("long"):
            steps = gpu_passes.long_part(runner, report.results["copy_bytes_per_s"], clock)
            report.put([asdict(step) for step in steps], "long")
    if plan.has("heads"):
        with report.part("heads"):
            speed = report.results["copy_bytes_per_s"]
            report.put(asdict(gpu_heads.head_part(runner, speed, clock)), "heads")
            report.put(asdict(gpu_heads.head_part(runner, speed, clock, kept="fp8")), "heads_fp8")
    if plan.has("kernels") and plan.device.type == "cuda":
        with report.part("kernels"):
            found = gpu_kernels.kernel_part(runner, requests=plan.requests)
            report.put(report.results.get("kernels", {}) | found, "kernels")
    if plan.has("sampling"):  # last: it changes the LM head
        with report.part("sampling"):
            report.put([asdict(step) for step in gpu_passes.sampling_part(runner, clock)], "sampling")


def _second_opening(plan: Plan, report: Report, clock: Clock) -> None:
    setup = plan.setup(plan.target, ("ngram", f"model:{plan.draft}"))
    with opened(setup, _noting(report)) as llm:
        if plan.has("prefill"):
            with report.part("prefill"):
                stream = gpu_tokens.stream_of(llm.tokenizer, plan.prompts, gpu_tokens.PREFILL_TOKENS)
                first_token = gpu_tokens.answering(llm, "plain", 1)
                report.put(asdict(gpu_tokens.prefill_part(first_token, stream, setup.context)), "prefill")
        if plan.has("idle") and plan.device.type == "cuda":
            with report.part("idle"):
                prompts = gpu_tokens.prompts_for(llm.tokenizer, plan.prompts, setup.context, gpu_tokens.IDLE_TOKENS)
                for mode in setup.modes:
                    answer = gpu_tokens.answering(llm, mode, gpu_tokens.IDLE_TOKENS)
                    crowd = gpu_tokens.batch_of(prompts, 0, gpu_tokens.BATCHES[-1])
                    for name, asked in (("idle", prompts[:1]), ("idle_in_a_crowd", crowd)):
                        for _ in range(IDLE_WARMUPS):
                            answer(asked)
                        report.put(idle_share(partial(answer, asked)), name, mode)


def _noting(report: Report) -> Callable[[Start], None]:
    return lambda start: report.put([*report.results["starts"], asdict(start)], "starts")


def _answers(llm: Any, setup: Setup, plan: Plan, report: Report, name: str) -> None:
    prompts = gpu_tokens.prompts_for(llm.tokenizer, plan.prompts, setup.context, plan.max_tokens)
    gpu_tokens.modes_part(llm, setup.modes, prompts, plan.max_tokens, lambda mode, found: report.put(found, name, mode))
