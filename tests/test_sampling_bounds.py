"""The numbers that sampling takes: at the bounds of each there is an answer, with and without the device ahead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from slipstream import LLM, SamplingParams, SpeculationParams
from slipstream.core.errors import InvalidRequest
from slipstream.core.params import MAX_BIAS, MAX_REPETITION, MAX_TEMPERATURE, MIN_REPETITION

PROMPT = [5, 6, 7, 5, 6, 7, 5, 6]
TINY = 5e-324
EDGES: list[dict[str, Any]] = [
    {"temperature": MAX_TEMPERATURE},
    {"top_p": TINY},
    {"top_p": 1 - 1e-16},
    {"min_p": TINY},
    {"min_p": 1.0},
    {"top_k": 1},
    {"top_k": 2**62},
    {"presence_penalty": -2, "frequency_penalty": -2},
    {"presence_penalty": 2, "frequency_penalty": 2},
    {"repetition_penalty": MIN_REPETITION},
    {"repetition_penalty": MAX_REPETITION},
    {"repetition_penalty": MIN_REPETITION, "temperature": TINY, "top_p": TINY},
    {"logit_bias": {5: MAX_BIAS, 6: -MAX_BIAS}},
    {"logit_bias": {5: MAX_BIAS}, "repetition_penalty": MIN_REPETITION, "temperature": TINY},
    {"logit_bias": {5: -MAX_BIAS}, "repetition_penalty": MIN_REPETITION, "temperature": 1e-38},
]


@pytest.mark.parametrize("rounds", ["eager", "queued"])
@pytest.mark.parametrize("verifier", ["exact", "rejection"])
def test_at_the_edges_there_is_an_answer(open_llm: Callable[..., LLM], rounds: str, verifier: Any) -> None:
    llm = open_llm(drafter="ngram", rounds=rounds, planner="fixed")
    speculation = SpeculationParams(verifier=verifier)
    params = [SamplingParams(seed=3, max_tokens=8, ignore_eos=True, speculation=speculation, **edge) for edge in EDGES]
    for edge, output in zip(EDGES, llm.generate([PROMPT] * len(EDGES), params), strict=True):
        answer = output.outputs[0]
        assert (answer.error, len(answer.token_ids)) == (None, 8), edge


def test_temperatures_too_small_to_divide_by_are_greedy(open_llm: Callable[..., LLM]) -> None:
    llm = open_llm(drafter="ngram")
    temperatures = [0.0, TINY, 1e-45, 1e-40, 1e-38, 1e-30, 1e-9]
    params = [SamplingParams(temperature=t, seed=3, max_tokens=12, ignore_eos=True) for t in temperatures]
    tokens = [output.outputs[0].token_ids for output in llm.generate([PROMPT] * len(params), params)]
    assert tokens == [tokens[0]] * len(tokens)


@pytest.mark.parametrize("wrong", [0, TINY, 1e-39, 0.0099, 10.1, float("nan"), float("inf")])
def test_what_would_make_logits_infinite_is_refused(wrong: float) -> None:
    with pytest.raises(InvalidRequest, match=r"repetition_penalty=.*: must be 0\.01 to 10"):
        SamplingParams(repetition_penalty=wrong)
