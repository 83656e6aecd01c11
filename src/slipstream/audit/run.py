"""The whole audit: which stages, in which order; interrupted, it tells what is known so far."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slipstream.audit.answers import AuditPrompt, Mode
from slipstream.audit.cache import Cache
from slipstream.audit.drawn import Drawn
from slipstream.audit.equality import Equality, Reference
from slipstream.audit.fresh import Transformers, fits_twice
from slipstream.audit.probe import PROBE, Probe
from slipstream.audit.results import Audit, Check
from slipstream.audit.rule import SHAPES, Rule
from slipstream.audit.stage import Bench, LeftOut, Setting, Stage
from slipstream.core.params import SamplingParams

if TYPE_CHECKING:
    from slipstream.engine.llm import LLM

TRANSFORMERS_PROMPTS = 4
"""Prompts that transformers computes as well: whether our passes are right does not depend on many."""


@dataclass(frozen=True, slots=True)
class AuditConfig:
    """What to audit, and how thoroughly."""

    drafters: tuple[str, ...]  # their names in the engine
    settings: tuple[Setting, ...]  # the first is greedy
    at_once: int = 8
    draft_tokens: int | None = None
    samples: int = 256  # answers drawn for each test of a distribution; 0: none is tested
    transformers: bool = True
    trust_remote_code: bool = False


def settings(
    max_tokens: int, seed: int, own: SamplingParams | None = None, *, sampled: bool = True
) -> tuple[Setting, ...]:
    """Greedy, and unless that is all, sampled: with `own` where it is given, else at temperature 1, without and with
    top-p."""
    greedy = Setting("greedy", SamplingParams(temperature=0, max_tokens=max_tokens))
    if not sampled:
        return (greedy,)
    if own is not None:
        limits = (
            (f"top-k {own.top_k}", own.top_k),
            (f"top-p {own.top_p:g}", own.top_p < 1),
            (f"min-p {own.min_p:g}", own.min_p),
        )
        name = ", ".join([f"T={own.temperature:g}", *(text for text, wanted in limits if wanted)])
        return greedy, Setting(name, own)
    whole = SamplingParams(temperature=1, max_tokens=max_tokens, seed=seed)
    nucleus = SamplingParams(temperature=1, top_p=0.9, max_tokens=max_tokens, seed=seed)
    return greedy, Setting("T=1", whole), Setting("T=1, top-p 0.9", nucleus)


class Progress:
    """Hears how an audit goes on. This one does nothing with it."""

    def start(self, stage: Stage, number: int, of: int) -> None:
        """A stage begins."""

    def step(self, steps: int) -> None:
        """So many steps of it are done."""

    def done(self, check: Check | None) -> None:
        """It is over."""


def audit(
    llm: LLM, probe: Probe, prompts: Sequence[AuditPrompt], config: AuditConfig, progress: Progress | None = None
) -> Audit:
    """Run all stages. `llm` must have the drafters of `config` and this probe.

    Ctrl-C or an error ends it early, with a result.
    """
    progress = progress or Progress()
    bench = Bench(llm, prompts, min(config.at_once, len(prompts)), probe)
    notes: list[str] = []
    stages = list(plan(bench, config))
    checks: list[Check] = []
    stopped: BaseException | None = None
    for number, stage in enumerate(stages, 1):
        progress.start(stage, number, len(stages))
        started = time.perf_counter()
        try:
            for steps in stage.steps():
                progress.step(steps)
        except (KeyboardInterrupt, Exception) as error:  # out of memory, say: what is known so far shall not be lost
            stopped = error
        check = stage.check(complete=stopped is None, seconds=time.perf_counter() - started)
        progress.done(check)
        if check is not None:
            checks.append(check)
        if stopped is not None:
            what = "Interrupted" if isinstance(stopped, KeyboardInterrupt) else f"{type(stopped).__name__} ({stopped})"
            notes.append(f"{what} in stage {number} of {len(stages)} ({stage.title}).")
            rest = [later.check(complete=False, seconds=0.0) for later in stages[number:]]
            checks += [check for check in rest if check is not None]
            break
    interrupted = isinstance(stopped, KeyboardInterrupt)
    broken = stopped is not None and not interrupted
    return Audit(tuple(checks), config.drafters, bench.rounding.why, tuple(notes), interrupted, broken)


def plan(bench: Bench, config: AuditConfig) -> Iterator[Stage]:
    """The stages in order, with those that are left out."""
    if not config.drafters:
        yield LeftOut("drafters", "none was named (--drafter)", declined=True)
    if bench.at_once == 1:
        alone = config.at_once == 1
        why = "left out (--concurrency 1)" if alone else "there was one prompt only; give more (--limit, --prompts)"
        yield LeftOut("answers in a batch", why, declined=alone)
    modes = [Mode(drafter, config.draft_tokens) for drafter in config.drafters] + [Mode(PROBE)]
    greedy = config.settings[0]
    for setting in config.settings:
        yield Reference(bench, setting)
        if bench.at_once > 1:
            yield Equality(bench, setting, Mode(), bench.at_once)
        for mode in modes:
            for at_once in dict.fromkeys((1, bench.at_once)):
                yield Equality(bench, setting, mode, at_once)
        if setting is greedy:
            for mode in modes:
                yield Cache(bench, greedy, mode, bench.fresh)
            yield _against_transformers(bench, greedy, modes[0], config)
    sampled = next((setting.params for setting in config.settings if not setting.params.greedy), None)
    if sampled is None:
        yield LeftOut("sampled answers", "left out (--temperature 0)", declined=True)
    elif not config.samples:
        yield LeftOut("rejection sampling", "left out (--samples 0)", declined=True)
    else:
        for shape in SHAPES:
            yield Rule(bench, shape, sampled.temperature)
        for mode in modes:
            yield Drawn(bench, greedy, mode, sampled.temperature, sampled.seed or 0, config.samples)


def _against_transformers(bench: Bench, greedy: Setting, mode: Mode, config: AuditConfig) -> Stage:
    title = "cache against transformers"
    if not config.transformers:
        return LeftOut(title, "left out (--no-transformers)", declined=True)
    if not fits_twice(bench.llm):
        why = "no memory for a second copy of the weights; --no-transformers does without"
        return LeftOut(title, why, declined=False)
    return Cache(bench, greedy, mode, Transformers(bench.llm, config.trust_remote_code), most=TRANSFORMERS_PROMPTS)
