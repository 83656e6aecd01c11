"""Measuring tau: the current drafter in the real engine on held-out prompts.

The engine is opened once, from a first export; each measurement copies the weights into it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from slipstream.core.draft import MAX_NODES
from slipstream.core.errors import DrafterError
from slipstream.core.outputs import RequestOutput, SpeculationStats
from slipstream.core.params import SamplingParams
from slipstream.engine.llm import LLM
from slipstream.models.paths import Progress
from slipstream.train.config import TrainConfig
from slipstream.train.progress import under_way, watched
from slipstream.train.recipe import Recipe, Text, UsesTexts

_MEMORY = 4 * 2**30  # bytes of the engine's cache on a GPU
_CONCURRENCY = 16


@dataclass(frozen=True, slots=True)
class Measured:
    """The result at one temperature. tau counts the target's own token."""

    temperature: float
    tau: float
    alpha: float
    passes: int
    tokens: int

    def __str__(self) -> str:
        return f"tau {self.tau:.2f} at T={self.temperature:g}"


class _Progress:
    """Progress of a measurement, from the engine's counters."""

    def __init__(self, llm: LLM, answers: int, longest: int) -> None:
        """longest: the most tokens of an answer."""
        self.activity = ""
        self._llm, self._answers, self._longest = llm, answers, longest
        self._begun, self._before = time.perf_counter(), llm.snapshot()

    def line(self) -> str:
        now, before = self._llm.snapshot(), self._before
        ended = sum(now.finished.values()) - sum(before.finished.values())
        tokens = now.generated_tokens - before.generated_tokens
        line = f"{self.activity}: {ended:,} of {self._answers:,} answers, {tokens:,} tokens"
        if not tokens:
            return line
        rate = tokens / (time.perf_counter() - self._begun)
        most = min(self._answers * self._longest - tokens, (self._answers - ended) * self._longest)
        return f"{line}, {rate:,.0f} tok/s, at most {most / rate:.0f} s left"


class Measure(AbstractContextManager["Measure"]):
    """Measures tau when called. Opens the engine on the first call; closes it on exit."""

    def __init__(
        self,
        config: TrainConfig,
        recipe: Recipe,
        target: Path,
        prompts: Sequence[Sequence[int]],
        device: str,
        say: Progress,
    ) -> None:
        self._config, self._recipe, self._target, self._device, self._say = config, recipe, target, device, say
        self._prompts = [list(ids) for ids in prompts[: config.measure_prompts]]
        self._llm: LLM | None = None
        self._has_texts = False  # the recipe got its held-out texts

    def __call__(self) -> list[Measured]:
        """tau at temperature 0 and at each temperature of the data."""
        llm = self._opened()
        drafting = llm.engine.drafting
        drafter = drafting.drafters.get(drafting.default or "")
        if drafter is None:
            raise DrafterError(f"recipe {self._recipe.name}: must name one drafter, not {drafting.default!r}")
        temperatures = sorted({0.0, *self._config.temperatures})
        wants_texts = isinstance(self._recipe, UsesTexts) and not self._has_texts
        longest = self._longest(llm)
        progress = _Progress(llm, len(self._prompts) * (len(temperatures) + wants_texts), longest)
        self._say(
            f"measuring tau on {len(self._prompts)} held-out prompts, up to {longest} tokens each, at "
            f"{', '.join(f'T={temperature:g}' for temperature in temperatures)} ..."
        )
        with watched(self._say, progress.line):
            if isinstance(self._recipe, UsesTexts) and not self._has_texts:
                progress.activity = "greedy answers for the recipe"
                texts = self._answers(llm, 0.0)
                self._recipe.use_texts([Text(tuple(o.prompt_token_ids), tuple(o.outputs[0].token_ids)) for o in texts])
                self._has_texts = True
            self._recipe.refresh(drafter)
            found = []
            for temperature in temperatures:
                progress.activity = f"measuring at T={temperature:g}"
                found.append(self._at(llm, temperature))
        return found

    def _at(self, llm: LLM, temperature: float) -> Measured:
        outputs = self._answers(llm, temperature)
        stats = SpeculationStats.total(answer.speculation for output in outputs for answer in output.outputs)
        return Measured(temperature, stats.tau, stats.alpha, stats.rounds, stats.emitted)

    def _answers(self, llm: LLM, temperature: float) -> list[RequestOutput]:
        longest = self._longest(llm)
        params = [
            SamplingParams(temperature=temperature, seed=seed, max_tokens=longest) for seed in range(len(self._prompts))
        ]
        return llm.generate([{"prompt_token_ids": ids} for ids in self._prompts], params)

    def _longest(self, llm: LLM) -> int:
        """The most tokens of an answer."""
        room = llm.max_model_len - max(map(len, self._prompts))
        return max(1, min(self._config.measure_tokens, room))

    def _opened(self) -> LLM:
        if self._llm is None:
            with under_way(self._say, "opening the engine to measure with"):
                self._llm = self._open()
        return self._llm

    def _open(self) -> LLM:
        folder = self._config.out / "measured"
        self._recipe.export(folder)
        on_gpu = self._device.startswith("cuda")
        return LLM(
            self._target,
            drafter=self._recipe.drafter(folder),
            device=self._device,
            memory=_MEMORY if on_gpu else None,
            max_num_seqs=_CONCURRENCY,
            max_draft_rows=_CONCURRENCY * (MAX_NODES + 1),  # no tree is cut for lack of rows
            planner="fixed",  # measures the drafter, not this machine
            prefix_caching=False,  # the drafter's part of a cached prefix would stem from older weights
            graphs=False,  # too few steps of each size to pay for a capture
            trust_remote_code=self._config.trust_remote_code,
            on_progress=self._say,
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._llm is not None:
            self._llm.close()
            self._llm = None
