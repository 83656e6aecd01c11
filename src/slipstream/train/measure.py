"""What counts: tokens a pass, with the drafter as it stands, in the real engine on prompts that were held out.

The engine is opened once, from a first export, and stays; each time the weights are copied into it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from slipstream.core.draft import MAX_NODES
from slipstream.core.errors import DrafterError
from slipstream.core.outputs import RequestOutput
from slipstream.core.params import SamplingParams
from slipstream.engine.llm import LLM
from slipstream.models.paths import Progress
from slipstream.train.config import TrainConfig
from slipstream.train.progress import under_way
from slipstream.train.recipe import Listens, Recipe, Text

_MEMORY = 4 * 2**30
_TOGETHER = 16


@dataclass(frozen=True, slots=True)
class Measured:
    """What some prompts brought at a temperature. tau counts the target's own token."""

    temperature: float
    tau: float
    alpha: float
    passes: int
    tokens: int

    def __str__(self) -> str:
        return f"tau {self.tau:.2f} at T={self.temperature:g}"


class Measure(AbstractContextManager["Measure"]):
    """An engine with the drafter that is trained."""

    def __init__(
        self,
        config: TrainConfig,
        recipe: Recipe,
        target: Path,
        prompts: Sequence[Sequence[int]],
        device: str,
        say: Progress,
    ) -> None:
        """say: hears that the engine is being opened, which takes as long as loading the target."""
        self._config, self._recipe, self._target, self._device, self._say = config, recipe, target, device, say
        self._prompts = [list(ids) for ids in prompts[: config.measure_prompts]]
        self._llm: LLM | None = None
        self._told = False  # a recipe that listens knows the texts

    def __call__(self) -> list[Measured]:
        """Tokens a pass at each temperature of the data, greedy included."""
        llm = self._opened()
        drafting = llm.engine.drafting
        drafter = drafting.drafters.get(drafting.default or "")
        if drafter is None:
            raise DrafterError(f"recipe {self._recipe.name}: must name one drafter, not {drafting.default!r}")
        if isinstance(self._recipe, Listens) and not self._told:
            said = self._answers(llm, 0.0)
            self._recipe.hear([Text(tuple(o.prompt_token_ids), tuple(o.outputs[0].token_ids)) for o in said])
            self._told = True
        self._recipe.refresh(drafter)
        temperatures = sorted({0.0, *self._config.temperatures})
        return [self._at(llm, temperature) for temperature in temperatures]

    def _at(self, llm: LLM, temperature: float) -> Measured:
        stats = [answer.speculation for output in self._answers(llm, temperature) for answer in output.outputs]
        passes, tokens = sum(s.rounds for s in stats), sum(s.emitted for s in stats)
        drafted, accepted = sum(s.drafted for s in stats), sum(s.accepted for s in stats)
        return Measured(temperature, tokens / max(passes, 1), accepted / max(drafted, 1), passes, tokens)

    def _answers(self, llm: LLM, temperature: float) -> list[RequestOutput]:
        room = llm.max_model_len - max(map(len, self._prompts))
        params = [
            SamplingParams(
                temperature=temperature, seed=seed, max_tokens=max(1, min(self._config.measure_tokens, room))
            )
            for seed in range(len(self._prompts))
        ]
        return llm.generate([{"prompt_token_ids": ids} for ids in self._prompts], params)

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
            max_num_seqs=_TOGETHER,
            max_draft_rows=_TOGETHER * (MAX_NODES + 1),  # trees are not cut because there are others
            planner="fixed",  # what the drafter can do, not what pays on this machine
            prefix_caching=False,  # what the drafter read of a prompt with other weights must not be found again
            graphs=False,  # few rounds of each size: to record one costs more than it saves
            trust_remote_code=self._config.trust_remote_code,
            on_progress=self._say,
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._llm is not None:
            self._llm.close()
            self._llm = None
