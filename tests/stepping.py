"""An engine without its thread: a test takes the rounds itself, and looks inside between two of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream import CompletionOutput, RequestOutput, SamplingParams
from slipstream.engine import build as building
from slipstream.engine.build import DrafterChoice
from slipstream.engine.config import EngineConfig
from slipstream.engine.intake import Intake


@dataclass(frozen=True)
class Arrival:
    """A request with a random prompt of this length, which comes in this round."""

    prompt: int
    params: SamplingParams
    joins: int = 0


class Stepper:
    """An engine that has exactly so many pages."""

    def __init__(self, model: Path, drafter: DrafterChoice, *, pages: int | None = None, **config: Any) -> None:
        options: dict[str, Any] = {"planner": "fixed", "max_draft_rows": 64, "memory": 2**26, **config}
        built = self._build(model, drafter, options)
        if pages is not None:
            plan = built.engine.plan
            cache = plan.cache_bytes // plan.num_pages * pages
            built = self._build(model, drafter, {**options, "memory": plan.workspace_bytes + cache})
            assert built.engine.pool.num_pages == pages
        self.engine = built.engine
        self.engine.scheduler.allowance = None  # it goes by the clock, and these tests count steps
        self._intake = Intake(built.tokenizer, built.eos_ids, built.loaded)

    @staticmethod
    def _build(model: Path, drafter: DrafterChoice, options: dict[str, Any]) -> building.Built:
        config = EngineConfig(**options)
        return building.build(
            str(model), drafter, config, dtype="float32", device="cpu", trust_remote_code=False, progress=None
        )

    def run(self, jobs: Sequence[Arrival], after_each: Callable[[], None] = lambda: None) -> list[CompletionOutput]:
        """All answers in the order of arrival. `after_each` is called between rounds."""
        dice = random.Random(len(jobs))
        waiting = sorted(((job, dice.choices(range(256), k=job.prompt)) for job in jobs), key=lambda j: j[0].joins)
        sinks: list[list[RequestOutput]] = []
        rounds = 0
        while waiting or self.engine.busy:
            while waiting and (waiting[0][0].joins <= rounds or not self.engine.busy):
                job, prompt = waiting.pop(0)
                sinks.append([])
                self.engine.add(self._intake.job(prompt, job.params, sinks[-1].append, streaming=False))
            self.engine.step()
            self.engine.scheduler.check_integrity()
            after_each()
            rounds += 1
            assert rounds < 1000, "the engine makes no progress"
        assert self.engine.pool.free_pages == self.engine.pool.num_pages
        return [answer for (output,) in sinks for answer in output.outputs]
