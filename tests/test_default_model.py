"""A real model: the same tokens as plain decoding, and plain greedy decoding the same as transformers."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from exactness import Case, differences, run
from slipstream import LLM, CompletionOutput, SamplingParams

pytestmark = [pytest.mark.slow, pytest.mark.alone]

CODE = "def area(width, height):\n    return width * height\n"
QUESTIONS = (
    "Why is the sky blue? Answer in two sentences.",
    f"Rename `width` to `breadth` and answer with the code only:\n\n{CODE}",
    f"Repeat this code without any change:\n\n```python\n{CODE}```",
    "Schreibe einen kurzen Satz über den Regen.",
)
PREDICTIONS = (
    "The sky is blue because of the way that light is scattered.",
    f"```python\n{CODE.replace('width', 'breadth')}```",
    f"```python\n{CODE}```",
    "Es regnet.",
)
EXTRAS: dict[str, dict[str, Any]] = {
    "plain": {},
    "top_p and penalties": {
        "top_p": 0.9,
        "repetition_penalty": 1.1,
        "frequency_penalty": 0.3,
        "presence_penalty": 0.2,
    },
}
TEMPERATURES = (0.0, 0.7, 1.2)
LENGTHS = (40, 48, 56, 64)


@dataclass(frozen=True)
class Bench:
    llm: LLM
    cases: list[Case]
    expected: list[CompletionOutput]  # without speculation

    @property
    def greedy(self) -> list[int]:
        return [i for i, case in enumerate(self.cases) if case.name.startswith("plain at 0.0")]


@pytest.fixture(scope="module")
def _all_threads() -> Iterator[None]:
    """Unlike the tiny ones, this model gains by both cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(os.cpu_count() or 1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def bench(_all_threads: None) -> Iterator[Bench]:
    drafters = ["ngram", "prediction", "model:default"]
    with LLM("default", drafter=drafters, device="cpu", planner="fixed", max_num_seqs=24, max_model_len=512) as llm:
        cases: list[Case] = []
        for extra, options in EXTRAS.items():
            for temperature in TEMPERATURES:
                for question, prediction, length in zip(QUESTIONS, PREDICTIONS, LENGTHS, strict=True):
                    params = SamplingParams(
                        temperature=temperature,
                        max_tokens=length,
                        seed=len(cases),
                        prediction=prediction,
                        **options,
                    )
                    prompt = tuple(llm.chat_prompt([{"role": "user", "content": question}]))
                    cases.append(Case(f"{extra} at {temperature}: {question[:30]}", prompt, params))
        yield Bench(llm, cases, run(llm, cases, None))


def accepted(outputs: Sequence[CompletionOutput]) -> int:
    return sum(output.speculation.accepted for output in outputs)


@pytest.mark.parametrize("drafter", ["ngram", "prediction", "model"])
def test_the_same_tokens(bench: Bench, drafter: str) -> None:
    got = run(bench.llm, bench.cases, drafter)
    assert not differences(bench.cases, bench.expected, got)
    drafted = sum(output.speculation.drafted for output in got)
    if drafter == "model":  # it drafts for itself, with the same noise: only where an answer ends are guesses left over
        assert accepted(got) > 0.9 * drafted
    else:
        assert 0 < accepted(got) < drafted


def test_the_same_tokens_alone(bench: Bench) -> None:
    """One request a pass instead of 24."""
    batch = [bench.cases[i] for i in bench.greedy]
    expected = [bench.expected[i] for i in bench.greedy]
    assert not differences(batch, expected, run(bench.llm, batch, None, alone=True))
    got = run(bench.llm, batch, "prediction", alone=True)
    assert not differences(batch, expected, got)
    assert got[2].speculation.rounds == 2  # it was told the whole answer: one round for the first token, one for all


def test_samples_are_text_and_differ(bench: Bench) -> None:
    """The comparison above is of real answers."""
    assert len({output.text for output in bench.expected}) > len(bench.expected) // 2
    assert all(output.error is None and len(output.token_ids) > 1 for output in bench.expected)
    assert CODE in bench.expected[2].text


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_greedy_decoding_is_what_transformers_says(bench: Bench, attention: str) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(
        bench.llm.model_path, dtype=torch.float32, attn_implementation=attention
    )
    for i in bench.greedy if attention == "sdpa" else bench.greedy[:1]:
        prompt = torch.tensor([bench.cases[i].prompt])
        with torch.inference_mode():
            theirs = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                do_sample=False,
                max_new_tokens=bench.cases[i].params.max_tokens,
                pad_token_id=0,
            )
        assert bench.expected[i].token_ids == theirs[0, prompt.shape[1] :].tolist()
