"""The whole audit: its stages in order. An interrupted audit still reports what it found."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slipstream.audit.distribution import SHAPES, Drawn, Rule
from slipstream.audit.equality import Cache, Equality, Reference
from slipstream.audit.probe import PROBE, Probe
from slipstream.audit.report import Audit, Check
from slipstream.audit.stage import AuditPrompt, AuditState, LeftOut, Mode, Setting, Stage, Transformers, fits_twice
from slipstream.core.params import SamplingParams

if TYPE_CHECKING:
    from slipstream.engine.llm import LLM

TRANSFORMERS_PROMPTS = 4  # prompts compared with transformers; more would add little


@dataclass(frozen=True, slots=True)
class AuditConfig:
    """What to audit, and how much."""

    drafters: tuple[str, ...]  # their names in the engine
    settings: tuple[Setting, ...]  # the first is greedy
    at_once: int = 8
    draft_tokens: int | None = None
    samples: int = 256  # answers drawn for each test of a distribution; 0: no such test
    transformers: bool = True
    trust_remote_code: bool = False


def settings(
    max_tokens: int, seed: int, own: SamplingParams | None = None, *, sampled: bool = True
) -> tuple[Setting, ...]:
    """The greedy setting and, if `sampled`, sampled ones: `own` if given, else temperature 1 without and with top-p."""
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
    """Receives an audit's progress; this base class ignores it."""

    def start(self, stage: Stage, number: int, of: int) -> None:
        """A stage begins."""

    def step(self, steps: int) -> None:
        """The stage finished another `steps` steps."""

    def done(self, check: Check | None) -> None:
        """The stage ended."""


def audit(
    llm: LLM, probe: Probe, prompts: Sequence[AuditPrompt], config: AuditConfig, progress: Progress | None = None
) -> Audit:
    """Run all stages. `llm` must have the drafters of `config` and this probe. Ctrl-C and errors end it early."""
    progress = progress or Progress()
    state = AuditState(llm, prompts, min(config.at_once, len(prompts)), probe)
    notes: list[str] = []
    stages = list(plan(state, config))
    checks: list[Check] = []
    stopped: BaseException | None = None
    for number, stage in enumerate(stages, 1):
        progress.start(stage, number, len(stages))
        started = time.perf_counter()
        try:
            for steps in stage.steps():
                progress.step(steps)
        except (KeyboardInterrupt, Exception) as error:  # keep the results so far, such as after out of memory
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
    return Audit(tuple(checks), config.drafters, state.rounding.why, tuple(notes), interrupted, broken)


def plan(state: AuditState, config: AuditConfig) -> Iterator[Stage]:
    """The stages in order, left-out ones included."""
    if not config.drafters:
        yield LeftOut("drafters", "none was named (--drafter)", declined=True)
    if state.at_once == 1:
        alone = config.at_once == 1
        why = "left out (--concurrency 1)" if alone else "there was one prompt only; give more (--limit, --prompts)"
        yield LeftOut("answers in a batch", why, declined=alone)
    modes = [Mode(drafter, config.draft_tokens) for drafter in config.drafters] + [Mode(PROBE)]
    greedy = config.settings[0]
    for setting in config.settings:
        yield Reference(state, setting)
        if state.at_once > 1:
            yield Equality(state, setting, Mode(), state.at_once)
        for mode in modes:
            for at_once in dict.fromkeys((1, state.at_once)):
                yield Equality(state, setting, mode, at_once)
        if setting is greedy:
            for mode in modes:
                yield Cache(state, greedy, mode, state.fresh)
            yield _against_transformers(state, greedy, modes[0], config)
    sampled = next((setting.params for setting in config.settings if not setting.params.greedy), None)
    if sampled is None:
        yield LeftOut("sampled answers", "left out (--temperature 0)", declined=True)
    elif not config.samples:
        yield LeftOut("rejection sampling", "left out (--samples 0)", declined=True)
    else:
        for shape in SHAPES:
            yield Rule(state, shape, sampled.temperature)
        for mode in modes:
            yield Drawn(state, greedy, mode, sampled.temperature, sampled.seed or 0, config.samples)


def _against_transformers(state: AuditState, greedy: Setting, mode: Mode, config: AuditConfig) -> Stage:
    title = "cache against transformers"
    if not config.transformers:
        return LeftOut(title, "left out (--no-transformers)", declined=True)
    if not fits_twice(state.llm):
        why = "no memory for a second copy of the weights; --no-transformers does without"
        return LeftOut(title, why, declined=False)
    return Cache(state, greedy, mode, Transformers(state.llm, config.trust_remote_code), most=TRANSFORMERS_PROMPTS)
