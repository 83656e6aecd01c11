"""An engine that a test runs step by step, and what its cache should hold. Not a test file."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipstream import CompletionOutput, RequestOutput, SamplingParams
from slipstream.engine import build as building
from slipstream.engine.build import DrafterChoice
from slipstream.engine.config import EngineConfig
from slipstream.engine.intake import Intake
from slipstream.kv.cache import KVCache
from slipstream.kv.pages import PageTable
from slipstream.models.batch import PassBatch
from slipstream.models.runner import Runner


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


@torch.inference_mode()
def prefill(runner: Runner, tokens: Sequence[int]) -> tuple[KVCache, Tensor]:
    """A cache of one page with these tokens, and the logits of all rows [N, V]."""
    count = len(tokens)
    cache = runner.new_cache(1, count)
    places = torch.arange(count)
    batch = PassBatch(
        input_ids=torch.tensor(tokens),
        positions=places,
        slots=places,
        row_starts=(0, count),
        prefix_lengths=(0,),
        pages=((0,),),
        is_tree=(False,),
        masks=None,
        logit_rows=None,
    )
    return cache, runner.forward(batch, cache)


def cache_error(runner: Runner, cache: KVCache, table: PageTable, tokens: Sequence[int]) -> float:
    """The largest difference between a request's entries in the cache and a fresh prefill, over all layers.

    As a part of the layer's largest entry: random weights make numbers of any size.
    """
    if not tokens:
        return 0.0
    right, _ = prefill(runner, tokens)
    size = table.pool.page_size
    slots = torch.tensor([table.pages[place // size] * size + place % size for place in range(len(tokens))])
    worst = 0.0
    for layer in range(len(cache.layers)):
        for have, want in ((cache.keys(layer), right.keys(layer)), (cache.values(layer), right.values(layer))):
            worst = max(worst, float((have[slots] - want).abs().max() / want.abs().max()))
    return worst
