"""The check that everything here is about: the same requests with and without speculation give the same tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from scripted import Answers
from slipstream import LLM, CompletionOutput, SamplingParams, SpeculationParams

FEW = {10: 8.0, 20: 8.0, 30: 8.0, 40: 8.0}
"""A bias under which random weights say little but "+", "5", "?" and "I": text that repeats itself."""

EXTRAS: dict[str, dict[str, Any]] = {
    "plain": {},
    "top_p": {"top_p": 0.9},
    "top_k": {"top_k": 5},
    "min_p": {"min_p": 0.1},
    "penalties": {
        "presence_penalty": 0.9,
        "frequency_penalty": 0.7,
        "repetition_penalty": 1.4,
        "logit_bias": FEW,
    },
    "logit_bias": {"logit_bias": FEW},
    "allowed": {"allowed_token_ids": [10, 20, 30, 40, 95]},
    "bad_words": {"bad_words": ["5?", "+I+", "??"], "logit_bias": FEW},
    "min_tokens": {"min_tokens": 7, "stop_token_ids": [10, 40], "logit_bias": FEW},
}
TEMPERATURES = (0.0, 0.7, 1.2)

_PROMPTS = ((5, 6, 7, 8), (9,) * 12, tuple(range(40, 70)), (100, 3, 100, 3, 100, 3), (10, 20, 30, 40, 10, 20, 30), (1,))


@dataclass(frozen=True)
class Case:
    """One request. Its seed stands for its parameters: no other case has it."""

    name: str
    prompt: tuple[int, ...]
    params: SamplingParams

    @property
    def few(self) -> bool:
        return bool(self.params.logit_bias or self.params.allowed_token_ids)


def cases() -> list[Case]:
    """Every temperature with every other parameter; prompts and lengths vary, so that requests come and go."""
    found: list[Case] = []
    for extra, options in EXTRAS.items():
        for temperature in TEMPERATURES:
            i = len(found)
            params = SamplingParams(
                temperature=temperature, seed=100 + i, max_tokens=9 + 5 * i % 8, ignore_eos=True, **options
            )
            found.append(Case(f"{extra} at {temperature}", _PROMPTS[i % len(_PROMPTS)], params))
    return found


def run(
    llm: LLM, batch: Sequence[Case], drafter: str | None, *, alone: bool = False, draft_tokens: int | None = None
) -> list[CompletionOutput]:
    """The first answer to each case, by this drafter (None: without speculation), in one batch or one by one."""
    how = SpeculationParams(enabled=drafter is not None, drafter=drafter, draft_tokens=draft_tokens)
    params = [replace(case.params, speculation=how) for case in batch]
    prompts = [list(case.prompt) for case in batch]
    if alone:
        outputs = [llm.generate([prompt], p)[0] for prompt, p in zip(prompts, params, strict=True)]
    else:
        outputs = llm.generate(prompts, params)
    return [output.outputs[0] for output in outputs]


def plain(llm: LLM, batch: Sequence[Case], answers: Answers | None = None) -> list[CompletionOutput]:
    """Each case without speculation and without company: what all else is measured by."""
    outputs = run(llm, batch, None, alone=True)
    for case, output in zip(batch, outputs, strict=True):
        assert output.error is None
        if answers is not None:
            answers.tell(case.prompt, case.params.seed, output.token_ids)
    return outputs


def differences(
    batch: Sequence[Case], expected: Sequence[CompletionOutput], got: Sequence[CompletionOutput]
) -> list[str]:
    """Where the answers differ, in words. Nothing: exact."""
    found = []
    for case, want, have in zip(batch, expected, got, strict=True):
        if have.error is not None:
            found.append(f"{case.name}: {have.error}")
        elif want.token_ids != have.token_ids:
            pairs = zip(want.token_ids, have.token_ids, strict=False)
            at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(want.token_ids), len(have.token_ids)))
            found.append(f"{case.name}: {want.token_ids} became {have.token_ids} from token {at} on")
        elif (want.text, want.finish_reason, want.stop_reason) != (have.text, have.finish_reason, have.stop_reason):
            found.append(f"{case.name}: ends by {have.finish_reason} with {have.text!r}")
        elif have.speculation.rounds > len(have.token_ids):
            found.append(f"{case.name}: {have.speculation.rounds} rounds for {len(have.token_ids)} tokens")
    return found
