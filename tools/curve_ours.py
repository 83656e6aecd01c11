"""Our side of the curve: engines and drafters on the large target, part by part, and the tasks for vLLM.

Sizes come first and modes within them, so that compared figures were measured within seconds of each other. The curve
has the planner that users have; another engine always drafts, for comparison.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch

import acceptance
import curve_peers
import widen
import widen_heads
from kernel_clock import free
from results import Report
from slipstream import LLM, SamplingParams, SpeculationParams
from slipstream.core.outputs import SpeculationStats
from slipstream.drafters.opening import HEADS
from slipstream.models.graphs import recorded
from slipstream.models.heads.checkpoint import HeadFiles, TargetShape
from slipstream.models.heads.eagle_files import read_eagle, save_eagle3
from slipstream.models.load import load_config
from slipstream.models.resolve import resolve
from work import (
    CONTEXT,
    PEER_DEPTH,
    QUICK_TOKENS,
    Run,
    Setup,
    Timed,
    encode,
    first_turns,
    one_run,
    opened,
    prompts_for,
    timed,
)


@dataclass(frozen=True, slots=True)
class Mode:
    """A way to decode. needs: the drafters, whose drafts are merged."""

    name: str
    needs: tuple[str, ...] = ()
    draft_tokens: int | None = None  # None: the drafter's own number


MODES = (
    Mode("plain"),
    Mode("eagle3", ("eagle",)),
    Mode("eagle3+suffix", ("suffix", "eagle")),
    Mode("draft", ("model",), PEER_DEPTH),
    Mode("medusa", ("medusa",)),
    Mode("ngram", ("ngram",)),
)
ALWAYS = ("ngram", "suffix")
"""Drafters without weights."""


def drafters(found: Mapping[str, str], eagle_options: str = "") -> list[str]:
    """What the engine is opened with. found: drafters with weights, by the names of their folders."""
    made = [f"{spec}?{eagle_options}" if name == "eagle3" and eagle_options else spec for name, spec in found.items()]
    return [*ALWAYS, *made]


def possible(modes: Sequence[Mode], specs: Sequence[str]) -> list[Mode]:
    """The modes whose drafters are available."""
    there = {spec.partition(":")[0] for spec in specs}
    return [mode for mode in modes if there.issuperset(mode.needs)]


@dataclass(frozen=True, slots=True)
class OurRun:
    """A run with the statistics of its rounds."""

    run: Run
    stats: tuple[SpeculationStats, ...]
    rounds: int  # of the engine, however many requests were in one
    seconds: Mapping[str, float]  # draft, verify, host


@dataclass(slots=True)
class Asker:
    """An engine and its prompts. A prompt's seed is its number, so all modes and sizes give the same answers.

    Every request has a tenant of its own, since some drafters remember a tenant's answers.
    """

    llm: LLM
    prompts: Sequence[list[int]]
    max_tokens: int
    _tenants: count[int] = field(default_factory=count)

    def run(self, mode: Mode, temperature: float, at_once: int, max_tokens: int | None = None) -> OurRun:
        told: list[SpeculationStats] = []

        def ask(numbers: Sequence[int]) -> list[list[int]]:
            params = [self._params(mode, temperature, number, max_tokens or self.max_tokens) for number in numbers]
            outputs = self.llm.generate([{"prompt_token_ids": self.prompts[n]} for n in numbers], params)
            answers = [output.outputs[0] for output in outputs]
            if failed := [answer.error for answer in answers if answer.error]:
                raise RuntimeError(f"{mode.name}: {failed[0]}")
            told.extend(answer.speculation for answer in answers)
            return [list(answer.token_ids) for answer in answers]

        before = self.llm.snapshot()
        run = one_run(ask, len(self.prompts), at_once)
        after = self.llm.snapshot()
        parts = {name: getattr(after, f"{name}_s") - getattr(before, f"{name}_s") for name in PARTS}
        return OurRun(run, tuple(told), after.rounds - before.rounds, parts)

    def _params(self, mode: Mode, temperature: float, seed: int, max_tokens: int) -> SamplingParams:
        speculation = SpeculationParams(
            enabled=bool(mode.needs),
            drafter="+".join(mode.needs) or None,
            draft_tokens=mode.draft_tokens,
            tenant=f"request {next(self._tenants)}",
        )
        return SamplingParams(temperature=temperature, seed=seed, max_tokens=max_tokens, speculation=speculation)


PARTS = ("draft", "verify", "host")


def measured(asker: Asker, mode: Mode, temperature: float, at_once: int, repeats: int) -> Timed[OurRun]:
    """Runs without recording. Plain decoding of one request has one shape, so a few tokens warm it up."""
    is_quick = not mode.needs and at_once == 1
    return timed(
        lambda: asker.run(mode, temperature, at_once),
        repeats,
        warm_up=(lambda: asker.run(mode, temperature, at_once, QUICK_TOKENS)) if is_quick else None,
        recorded=lambda: recorded.graphs,
    )


def point(found: Timed[OurRun], plain: Mapping[int, tuple[int, ...]]) -> dict[str, Any]:
    """One point of the curve. plain: answers of plain decoding by prompt; empty if unknown."""
    runs = [part.run for part in found.runs]
    stats = [s for part in found.runs for s in part.stats]
    rounds, turns = sum(part.rounds for part in found.runs), sum(s.rounds for s in stats)
    drafted, accepted = sum(s.drafted for s in stats), sum(s.accepted for s in stats)
    answers = runs[0].answers
    made: dict[str, Any] = {
        "tok_s": median(run.rate for run in runs),
        "runs": [round(run.rate, 1) for run in runs],
        "tokens": runs[0].tokens,
        "tau": sum(s.emitted for s in stats) / turns,
        "alpha": accepted / drafted if drafted else None,
        "drafted_per_round": drafted / turns,
        "ms_per_round": {name: sum(part.seconds[name] for part in found.runs) / rounds * 1e3 for name in PARTS},
        "warm_ups": found.before,
        "recorded_while_timed": found.recorded,
    }
    if plain:
        made["same_as_plain"] = sum(answer == plain[number] for number, answer in answers)
        made["answers"] = len(answers)
    return made


@dataclass(frozen=True, slots=True)
class Load:
    """A number of requests at once, at one temperature."""

    temperature: float
    at_once: int

    @property
    def name(self) -> str:
        return f"T={self.temperature:g}"


def curve(
    asker: Asker,
    modes: Sequence[Mode],
    loads: Sequence[Load],
    repeats: int,
    report: Report,
    key: str,
    measure: Callable[[Asker, Mode, float, int, int], Timed[OurRun]] = measured,
) -> None:
    """Measure every mode under every load, into results[key][temperature][mode][requests at once]."""
    plain: dict[str, dict[int, tuple[int, ...]]] = {}
    for load in loads:
        for mode in modes:
            with report.part(f"{key} {mode.name} {load.name}, {load.at_once} at once"):
                found = measure(asker, mode, load.temperature, load.at_once, repeats)
                if not mode.needs:
                    plain.setdefault(load.name, dict(found.runs[0].run.answers))
                report.put(point(found, plain.get(load.name, {})), key, load.name, mode.name, str(load.at_once))


AT_ONCE = 48


def for_vllm(head: Path, model: Path, out: Path, layout: Literal["original", "speculators"]) -> Path:
    """Write the head in a layout that vLLM reads, which also tests our writer."""
    config = load_config(model)
    shape = TargetShape(config.hidden_size, config.vocab_size, config.num_hidden_layers, config.max_position_embeddings)
    return save_eagle3(read_eagle(HeadFiles.read(head), shape), out, layout, target=str(model), depth=PEER_DEPTH)


def ours(model: Path, head: Path, prompts: Path, max_tokens: int, device: str, limit: int | None) -> dict[str, Any]:
    """Acceptance of the head's chains in our engine: greedy, bf16, all first turns, chains as long as vLLM's."""
    with LLM(
        str(model),
        drafter=f"eagle:{head}?depth={PEER_DEPTH}&width=1",
        device=device,
        dtype="bfloat16" if device.startswith("cuda") else "float32",
        memory="8GiB" if device.startswith("cuda") else None,
        max_model_len=min(CONTEXT // 2, load_config(model).max_position_embeddings),
        max_num_seqs=AT_ONCE,
        max_draft_rows=AT_ONCE * (PEER_DEPTH + 1),
        planner="fixed",
        graphs=False,  # rounds of many sizes, few of each: recording them takes longer than it saves
    ) as llm:
        longest = llm.max_model_len - max_tokens - 1
        ids = [encode(llm.tokenizer, text, longest) for text in first_turns(prompts, limit)]
        found: dict[str, Any] = json.loads(json.dumps(acceptance.measured(llm, ids, 0.0, max_tokens).as_dict()))
        return found


@dataclass(frozen=True, slots=True)
class Lists:
    """The lists among the options."""

    parts: tuple[str, ...]
    modes: tuple[str, ...]
    peers: tuple[str, ...]
    sizes: tuple[int, ...]
    sampled: tuple[int, ...]
    fixed: tuple[int, ...]

    @property
    def loads(self) -> list[Load]:
        """One request first, at both temperatures: it matters most if time runs out."""
        both = [Load(0.0, size) for size in self.sizes] + [Load(1.0, size) for size in self.sampled]
        return sorted(both, key=lambda load: (load.at_once, load.temperature))


class Models:
    """The large target and its drafters: made on first use, and kept for the next call."""

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
        """The specs of the drafters for the large target, by the names of their folders."""
        made = widen_heads.widen_all(self.small, self.target, self.heads, self.options.work, self.dtype)
        self.report.put(sorted(made), "drafters")
        return made


class Bench(Models):
    """The models and options that the parts share."""

    def __init__(self, options: argparse.Namespace, lists: Lists, report: Report) -> None:
        super().__init__(options, report)
        self.lists = lists

    def modes(self, specs: Sequence[str]) -> list[Mode]:
        wanted = [mode for mode in MODES if mode.name in self.lists.modes]
        there = possible(wanted, specs)
        self.report.put([mode.name for mode in wanted if mode not in there], "left_out")
        return there

    def setup(self, specs: Sequence[str]) -> Setup:
        context = min(CONTEXT, load_config(self.target).max_position_embeddings)
        dtype = str(self.dtype).removeprefix("torch.")
        return Setup(str(self.target), tuple(specs), str(self.device), dtype, context)

    def measure(self, setup: Setup, modes: Sequence[Mode], loads: Sequence[Load], key: str) -> None:
        """Measure all modes and loads in one engine."""
        options = self.options
        with opened(setup) as llm:
            prompts = prompts_for(llm.tokenizer, options.prompts, setup.context, options.max_tokens)
            asker = Asker(llm, prompts, options.max_tokens)
            repeats = 1 if key == "fixed" else options.repeats
            curve(asker, modes, loads, repeats, self.report, key)


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
    specs = drafters(bench.drafters, bench.options.eagle)
    bench.measure(bench.setup(specs), bench.modes(specs), bench.lists.loads, "curve")


def _alone(bench: Bench) -> None:
    loads = [load for load in bench.lists.loads if load.at_once == 1]
    bench.measure(bench.setup(()), [mode for mode in MODES if not mode.needs], loads, "alone")


def _fixed(bench: Bench) -> None:
    specs = drafters(bench.drafters, bench.options.eagle)
    setup = replace(bench.setup(specs), planner="fixed")
    loads = [Load(0.0, size) for size in bench.lists.fixed]
    bench.measure(setup, [mode for mode in bench.modes(specs) if mode.needs], loads, "fixed")


def _interchange(bench: Bench) -> None:
    """Each side is kept separately, so that a failure of one keeps the other."""
    options, report = bench.options, bench.report
    head = bench.heads / "eagle3"
    with report.part("interchange, ours"):
        found = ours(bench.small, head, options.prompts, options.max_tokens, options.device, options.limit)
        report.put(found, "interchange", "ours")
    free(bench.device)
    with report.part("interchange, vLLM"):
        folder = for_vllm(head, bench.small, options.work / f"small-{options.layout}", options.layout)
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
    """The weights that a mode of vLLM drafts with."""
    if mode == "draft":
        given: str | None = models.options.peer_draft
        return given or models.drafters["draft"].partition(":")[2]
    if not mode.startswith("eagle3"):
        return None
    folder = Path(models.drafters["eagle3"].partition(":")[2])
    return str(folder / "speculators" if models.options.layout == "speculators" else folder)
