"""Our drafters on the large target, mode by mode and size by size, in one engine that has them all.

Sizes come first and modes within them, so that what is compared was measured within seconds. The figure is what users
get: the planner decides. With a planner that always drafts there is another engine, for comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from statistics import median
from typing import Any

from results import Report
from slipstream import LLM, SamplingParams, SpeculationParams
from slipstream.core.outputs import SpeculationStats
from slipstream.models.graphs import recorded
from work import PEER_DEPTH, QUICK_TOKENS, Run, Timed, one_run, timed


@dataclass(frozen=True, slots=True)
class Mode:
    """One way to answer. needs: drafters that guess for it together."""

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
    """Those whose drafters are there."""
    there = {spec.partition(":")[0] for spec in specs}
    return [mode for mode in modes if there.issuperset(mode.needs)]


@dataclass(frozen=True, slots=True)
class OurRun:
    """A run, and what it says of its rounds."""

    run: Run
    stats: tuple[SpeculationStats, ...]
    rounds: int  # of the engine, however many requests were in one
    seconds: Mapping[str, float]  # draft, verify, host


@dataclass(slots=True)
class Asker:
    """An engine and its prompts. A prompt's seed is its number, so that all modes and sizes give the same answers.

    Every request is a tenant of its own: drafters that remember answers would know them from the run before.
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
    """Runs in which nothing was recorded. One request of plain decoding has one shape: few tokens show it."""
    is_quick = not mode.needs and at_once == 1
    return timed(
        lambda: asker.run(mode, temperature, at_once),
        repeats,
        warm_up=(lambda: asker.run(mode, temperature, at_once, QUICK_TOKENS)) if is_quick else None,
        recorded=lambda: recorded.graphs,
    )


def point(found: Timed[OurRun], plain: Mapping[int, tuple[int, ...]]) -> dict[str, Any]:
    """One place of the curve. plain: answers of plain decoding, by prompt; empty: not known."""
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
    """So many requests at once, at one temperature."""

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
    """Every mode under every load, into the report: results[key][temperature][mode][requests at once]."""
    plain: dict[str, dict[int, tuple[int, ...]]] = {}
    for load in loads:
        for mode in modes:
            with report.part(f"{key} {mode.name} {load.name}, {load.at_once} at once"):
                found = measure(asker, mode, load.temperature, load.at_once, repeats)
                if not mode.needs:
                    plain.setdefault(load.name, dict(found.runs[0].run.answers))
                report.put(point(found, plain.get(load.name, {})), key, load.name, mode.name, str(load.at_once))
