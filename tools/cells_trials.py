"""What a planner may be put through, on the real engine: drafters that mean ill, texts that change, loads that change.

Each trial has a copy of the engine's planner, with all that it has learned, and leaves the original as it was.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any

from cells_drafters import LONG, Answers, Knowing, Slow
from cells_ours import AUTO, PLAIN, Ask, Bench, Crowd
from cells_work import Beat, Window, side_by_side
from curve_ours import Mode
from slipstream import SamplingParams
from slipstream.plan.planner import Planner

NEAR = 0.25
"""The plan has followed when it is so near to where it will be, by the way that it has to go."""
SMOOTH = 6
"""Rounds over which that is judged: a probe, or a plain round to compare with, is no change of plan."""
LEAST = 0.5
"""Nodes of a request: where two plans differ by less, there is nothing to follow."""


def scripted(phase: int) -> list[Knowing]:
    """The drafters of the trials, to be opened with the engine; phase: rounds between changes of the text."""
    return [
        Knowing("wrong", lambda _: False),
        Slow("slow"),
        Knowing("alternating", lambda number: number % 2 == 0),
        Knowing("switching", lambda number: number // phase % 2 == 0),
    ]


ADVERSARIES = ("wrong", "slow", "alternating")


@dataclass(slots=True)
class Trials:
    """The trials of one engine. drafters: those of `scripted` that it was opened with. keep: hears of adversaries."""

    bench: Bench
    drafters: Sequence[Knowing]
    prompts: Sequence[list[int]]
    max_tokens: int
    keep: Callable[[str, str, Window], None] = lambda where, setting, seen: None
    _known: dict[tuple[int, ...], list[int]] = field(default_factory=dict)  # plain decoding's answers to the prompts

    def adversaries(self, at_once: int, seconds: float, repeats: int) -> dict[str, Any]:
        """Planned decoding with each of them, beside plain decoding."""
        self._known = self._known or self._answers(self.prompts, self.max_tokens)
        self._tell(self._known)
        planners = {name: copy.deepcopy(self.bench.planner) for name in ADVERSARIES}

        def measure(name: str) -> Window:
            with self.bench.planned(planners.get(name)):
                seen = self.bench.window(self._asking(Mode(name, () if name == PLAIN else (name,))), at_once, seconds)
            if name == PLAIN:
                for drafter in self.drafters:
                    if isinstance(drafter, Slow):
                        drafter.seconds = 2 * seen.seconds / len(seen.spans)  # two passes for each guess
            self.keep(f"adversaries x{at_once}", name, seen)
            return seen

        return side_by_side((PLAIN, *ADVERSARIES), measure, repeats)

    def text(self, at_once: int, phase: int) -> dict[str, Any]:
        """From echoing to surprising text and back: the drafter is right, wrong, and right again for a phase each."""
        tokens = phase * (2 * (LONG + 1) + 1) + LONG + 2
        room = self.bench.llm.max_model_len - tokens - 1
        prompts = [prompt[:room] for prompt in self.prompts[:at_once]]
        self._tell(self._answers(prompts, tokens, to_the_end=True))
        params = self._params(Mode("switching", ("switching",)), tokens, to_the_end=True)

        async def play(crowd: Crowd) -> None:
            crowd.grow(at_once)
            await crowd.until(lambda beats: len(_full(beats, at_once)) >= 3 * phase)

        with self.bench.planned(copy.deepcopy(self.bench.planner)):
            beats = _full(self.bench.run(lambda number: (prompts[number % at_once], params), play), at_once)
        drafted = [beat.drafted / beat.requests for beat in beats]
        return asdict(followed([drafted[n * phase : (n + 1) * phase] for n in range(3)], returns=True))

    def load(self, at_once: int, phase: int) -> dict[str, Any]:
        """One request, then so many, then one again, all of them planned."""
        marks: list[int] = []

        async def play(crowd: Crowd) -> None:
            for requests in (1, at_once, 1):
                crowd.grow(requests)
                await crowd.shrink(requests)
                begin = len(crowd.meter.beats)
                await crowd.until(lambda b, n=requests, at=begin: len(_exactly(b[at:], n)) >= phase)  # type: ignore[misc]
                marks.append(len(crowd.meter.beats))

        with self.bench.planned(copy.deepcopy(self.bench.planner)):
            beats = self.bench.run(self._asking(Mode(AUTO)), play)
        parts = zip((1, at_once, 1), (0, *marks[:2]), marks, strict=True)
        phases = [_exactly(beats[begin:end], requests) for requests, begin, end in parts]
        return asdict(followed([[beat.drafted / beat.requests for beat in part] for part in phases], again=True))

    def _asking(self, mode: Mode) -> Ask:
        params = self._params(mode, self.max_tokens)
        return lambda number: (self.prompts[number % len(self.prompts)], params)

    def _params(self, mode: Mode, max_tokens: int, *, to_the_end: bool = False) -> SamplingParams:
        own = self.bench.params(mode, 0.0, 0, max_tokens)
        return SamplingParams(
            temperature=0, seed=0, max_tokens=max_tokens, ignore_eos=to_the_end, speculation=own.speculation
        )

    def _answers(
        self, prompts: Sequence[list[int]], tokens: int, *, to_the_end: bool = False
    ) -> dict[tuple[int, ...], list[int]]:
        """What plain decoding answers."""
        params = self._params(Mode(PLAIN), tokens, to_the_end=to_the_end)
        with self.bench.planned(Planner()):
            outputs = self.bench.llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
        return {tuple(p): list(o.outputs[0].token_ids) for p, o in zip(prompts, outputs, strict=True)}

    def _tell(self, answers: Answers) -> None:
        """To those who will pretend to guess them."""
        for drafter in self.drafters:
            drafter.answers = answers


@dataclass(frozen=True, slots=True)
class Followed:
    """Nodes of a request in each phase, when the plan had settled, and after how many rounds it had followed each
    change; None: it did not change. nodes: round by round."""

    levels: list[float]
    rounds: list[int | None]
    nodes: list[list[float]]


def followed(phases: Sequence[Sequence[float]], *, returns: bool = False, again: bool = False) -> Followed:
    """phases: nodes of a request, round by round.

    returns: the last phase is as the first one, and a plan that drafts less in it has followed when it drafts as much
    as then. One that never does counts as all rounds of the phase. again: it is as the first one but for the texts, by
    which plans differ as well: it has followed when it drafts as it did then, or as it does when it has settled.
    """
    levels = [fmean(phase[len(phase) // 2 :]) for phase in phases]
    pairs = zip(levels, levels[1:], phases[1:], strict=False)
    rounds = [_rounds(part, was, now) for was, now, part in pairs]
    as_then = _rounds(phases[-1], levels[-2], levels[0])
    if returns and levels[-1] < levels[0]:
        rounds[-1] = as_then
    elif again and rounds[-1] is not None and as_then is not None:
        rounds[-1] = min(rounds[-1], as_then)
    nodes = [[round(count, 2) for count in phase] for phase in phases]
    return Followed([round(level, 2) for level in levels], rounds, nodes)


def _rounds(phase: Sequence[float], was: float, now: float) -> int | None:
    way = abs(now - was)
    if way < LEAST:
        return None
    for begin in range(len(phase)):
        if abs(fmean(phase[begin : begin + SMOOTH]) - now) <= NEAR * way:
            return begin
    return len(phase)


def _full(beats: Sequence[Beat], at_once: int) -> list[Beat]:
    """The rounds from the first one on in which all of them are. Some only read prompts, and emit for nobody."""
    first = next((i for i, beat in enumerate(beats) if beat.requests >= at_once), len(beats))
    return [beat for beat in beats[first:] if beat.requests]


def _exactly(beats: Sequence[Beat], requests: int) -> list[Beat]:
    return [beat for beat in beats if beat.requests == requests]
