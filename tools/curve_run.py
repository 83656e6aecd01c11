"""The parts of `curve.py` one after the other: which engine each needs, and what vLLM is asked for."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

import curve_interchange
import curve_ours
import curve_peers
import widen
import widen_heads
from curve_ours import Asker, Load
from kernel_clock import free
from results import Report
from slipstream.drafters.opening import HEADS
from slipstream.models.load import load_config
from slipstream.models.resolve import resolve
from work import CONTEXT, Setup, opened, prompts_for


@dataclass(frozen=True, slots=True)
class Lists:
    """What was asked for by lists."""

    parts: tuple[str, ...]
    modes: tuple[str, ...]
    peers: tuple[str, ...]
    sizes: tuple[int, ...]
    sampled: tuple[int, ...]
    fixed: tuple[int, ...]

    @property
    def loads(self) -> list[Load]:
        """One request first, at both temperatures: that matters most, should time run out."""
        both = [Load(0.0, size) for size in self.sizes] + [Load(1.0, size) for size in self.sampled]
        return sorted(both, key=lambda load: (load.at_once, load.temperature))


class Models:
    """The large target and its drafters: made when first asked for, and kept for the next call."""

    def __init__(self, options: argparse.Namespace, report: Report) -> None:
        self.options, self.report = options, report
        self.device = torch.device(options.device)
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32

    @cached_property
    def small(self) -> Path:
        return resolve(self.options.small)

    @cached_property
    def heads(self) -> Path:
        return Path(self.options.heads or HEADS)

    @cached_property
    def target(self) -> Path:
        folder: Path = self.options.target
        if not (folder / "config.json").is_file():  # comes after the weights
            self.report.say(f"making {folder.name}")
            widen.write(self.small, folder, widen.SHAPE, self.dtype)
        return folder

    @cached_property
    def drafters(self) -> dict[str, str]:
        """By the names of their folders, how an engine is told of those for the large target."""
        made = widen_heads.widen_all(self.small, self.target, self.heads, self.options.work, self.dtype)
        self.report.put(sorted(made), "drafters")
        return made


class Bench(Models):
    """What the parts share."""

    def __init__(self, options: argparse.Namespace, lists: Lists, report: Report) -> None:
        super().__init__(options, report)
        self.lists = lists

    def modes(self, specs: Sequence[str]) -> list[curve_ours.Mode]:
        wanted = [mode for mode in curve_ours.MODES if mode.name in self.lists.modes]
        there = curve_ours.possible(wanted, specs)
        self.report.put([mode.name for mode in wanted if mode not in there], "left_out")
        return there

    def setup(self, specs: Sequence[str]) -> Setup:
        context = min(CONTEXT, load_config(self.target).max_position_embeddings)
        dtype = str(self.dtype).removeprefix("torch.")
        return Setup(str(self.target), tuple(specs), str(self.device), dtype, context)

    def measure(self, setup: Setup, modes: Sequence[curve_ours.Mode], loads: Sequence[Load], key: str) -> None:
        """One engine, and all of this in it."""
        options = self.options
        with opened(setup) as llm:
            prompts = prompts_for(llm.tokenizer, options.prompts, setup.context, options.max_tokens)
            asker = Asker(llm, prompts, options.max_tokens)
            repeats = 1 if key == "fixed" else options.repeats
            curve_ours.curve(asker, modes, loads, repeats, self.report, key)


def run(options: argparse.Namespace, lists: Lists, report: Report) -> None:
    """All parts that are wanted. One that fails is noted, and the others go on."""
    bench = Bench(options, lists, report)
    stages: dict[str, Callable[[Bench], None]] = {
        "curve": _curve,
        "alone": _alone,
        "fixed": _fixed,
        "interchange": _interchange,
        "peers": _peers,
    }
    for name, stage in stages.items():
        if name in lists.parts:
            with report.part(name):
                stage(bench)
            report.say(f"{free(bench.device) / 1e9:.2f} GB of the device still held")


def _curve(bench: Bench) -> None:
    specs = curve_ours.drafters(bench.drafters, bench.options.eagle)
    bench.measure(bench.setup(specs), bench.modes(specs), bench.lists.loads, "curve")


def _alone(bench: Bench) -> None:
    loads = [load for load in bench.lists.loads if load.at_once == 1]
    bench.measure(bench.setup(()), [mode for mode in curve_ours.MODES if not mode.needs], loads, "alone")


def _fixed(bench: Bench) -> None:
    specs = curve_ours.drafters(bench.drafters, bench.options.eagle)
    setup = replace(bench.setup(specs), planner="fixed")
    loads = [Load(0.0, size) for size in bench.lists.fixed]
    bench.measure(setup, [mode for mode in bench.modes(specs) if mode.needs], loads, "fixed")


def _interchange(bench: Bench) -> None:
    """Each side is kept by itself: where one fails or comes in another call, the other one stays."""
    options, report = bench.options, bench.report
    head = bench.heads / "eagle3"
    with report.part("interchange, ours"):
        found = curve_interchange.ours(
            bench.small, head, options.prompts, options.max_tokens, options.device, options.limit
        )
        report.put(found, "interchange", "ours")
    free(bench.device)
    with report.part("interchange, vLLM"):
        folder = curve_interchange.for_vllm(head, bench.small, options.work / f"small-{options.layout}", options.layout)
        task = curve_peers.Task(
            "acceptance",
            "eagle3",
            str(bench.small),
            str(folder),
            str(options.prompts),
            options.max_tokens,
            limit=options.limit,
        )
        report.put(curve_peers.run_apart(task, options.peer_path, options.peer_timeout), "interchange", "vllm")
    sides = report.results.get("interchange", {})
    theirs = sides.get("vllm", {}).get("acceptance")
    if "ours" in sides and theirs:
        report.put(curve_peers.compared(sides["ours"], theirs), "interchange", "compared")


def _peers(bench: Bench) -> None:
    options = bench.options
    for mode in bench.lists.peers:
        with bench.report.part(f"vLLM {mode}"):
            task = curve_peers.Task(
                "curve",
                mode,
                str(bench.target),
                peer_draft(bench, mode),
                str(options.prompts),
                options.max_tokens,
                tuple((load.temperature, load.at_once) for load in bench.lists.loads),
                options.peer_repeats,
            )
            found: dict[str, Any] = curve_peers.run_apart(task, options.peer_path, options.peer_timeout)
            bench.report.put(found, "vllm", mode)


def peer_draft(models: Models, mode: str) -> str | None:
    """The weights that a mode of vLLM guesses with."""
    if mode == "draft":
        given: str | None = models.options.peer_draft
        return given or models.drafters["draft"].partition(":")[2]
    if not mode.startswith("eagle3"):
        return None
    folder = Path(models.drafters["eagle3"].partition(":")[2])
    return str(folder / "speculators" if models.options.layout == "speculators" else folder)
