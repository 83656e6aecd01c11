"""Asking for many answers, a few at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from slipstream.core.outputs import CompletionOutput
from slipstream.core.params import SamplingParams, SpeculationParams

if TYPE_CHECKING:
    from slipstream.engine.llm import LLM


@dataclass(frozen=True, slots=True)
class AuditPrompt:
    """A prompt as tokens, and what to call it in a report."""

    id: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Mode:
    """Plain decoding, or one drafter."""

    drafter: str | None = None  # its name in the engine
    draft_tokens: int | None = None

    @property
    def name(self) -> str:
        return self.drafter or "plain"

    @property
    def speculation(self) -> SpeculationParams:
        if self.drafter is None:
            return SpeculationParams(enabled=False)
        return SpeculationParams(drafter=self.drafter, draft_tokens=self.draft_tokens)


@dataclass(frozen=True, slots=True)
class Asked:
    """One prompt, what was asked of it, and the answer."""

    index: int
    params: SamplingParams
    answer: CompletionOutput


def with_seeds(params: SamplingParams, count: int) -> list[SamplingParams]:
    """One for each prompt: a sampled one has its own seed, the same in every mode."""
    if params.greedy:
        return [params] * count
    return [replace(params, seed=(params.seed or 0) + index) for index in range(count)]


def ask(
    llm: LLM, prompts: Sequence[AuditPrompt], params: Sequence[SamplingParams], at_once: int
) -> Iterator[list[Asked]]:
    """All prompts in their order, `at_once` of them in company at a time; with 1 each is alone."""
    for start in range(0, len(prompts), at_once):
        indices = range(start, min(start + at_once, len(prompts)))
        tagged = [{"prompt_token_ids": list(prompts[i].token_ids)} for i in indices]
        outputs = llm.generate(tagged, [params[i] for i in indices])
        yield [Asked(i, params[i], output.outputs[0]) for i, output in zip(indices, outputs, strict=True)]
