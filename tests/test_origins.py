"""Who guessed each token: what callers are told agrees with what the drafters were credited with."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from scripted import Answers, Bushy, Right, RightThenWrong
from slipstream import LLM, SamplingParams, SpeculationParams
from slipstream.core.outputs import CompletionOutput, Origin
from slipstream.core.verdict import Authors, Verdict, author

PLAIN = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, seed=1)
TOLD = replace(PLAIN, speculation=SpeculationParams(origins=True))
PROMPTS = [[7, 3, i] for i in range(4)]


def told(llm: LLM) -> Answers:
    answers = Answers()
    for prompt, output in zip(PROMPTS, llm.generate(PROMPTS, PLAIN), strict=True):
        answers.tell(prompt, PLAIN.seed, output.outputs[0].token_ids)
    return answers


def rounds_of(origins: Sequence[Origin]) -> list[list[Origin]]:
    return [list(part) for _, part in itertools.groupby(origins, key=lambda origin: origin.round)]


def agrees(output: CompletionOutput) -> None:
    """The rounds come in order, each with its accepted guesses and then the target's own token."""
    assert output.origins is not None
    assert len(output.origins) == len(output.token_ids)
    parts = rounds_of(output.origins)
    assert [part[0].round for part in parts] == list(range(1, output.speculation.rounds + 1))
    for part in parts[:-1]:  # the last one may be cut
        assert [origin.depth for origin in part] == [*range(1, len(part)), 0]
    assert all(bool(origin.depth) == bool(origin.drafters) for origin in output.origins)
    credit = Counter(name for origin in output.origins for name in origin.drafters)
    assert credit == {name: s.accepted for name, s in output.speculation.by_drafter.items() if s.accepted}
    ends = [origin.text_end for origin in output.origins]
    assert ends == sorted(ends)
    assert ends[-1] <= len(output.text)


@pytest.mark.parametrize("rounds", ["eager", "queued"])
@pytest.mark.parametrize("kinds", [(Right,), (RightThenWrong,), (Bushy,), (RightThenWrong, Bushy)])
def test_tokens_are_told_by_whom_they_were_guessed(
    open_llm: Callable[..., LLM], kinds: tuple[type[Right], ...], rounds: str
) -> None:
    answers = told(open_llm(drafter=None))
    llm = open_llm(drafter=[kind(answers) for kind in kinds], planner="fixed", rounds=rounds)
    names = "+".join(kind.name for kind in kinds)
    params = replace(TOLD, speculation=SpeculationParams(origins=True, drafter=names))
    for output in llm.generate(PROMPTS, params):
        agrees(output.outputs[0])
        assert {name for o in output.outputs[0].origins or () for name in o.drafters} == {k.name for k in kinds}
    plain = llm.generate(PROMPTS[0], replace(TOLD, speculation=SpeculationParams(enabled=False, origins=True)))
    assert all(origin.drafters == () for origin in plain[0].outputs[0].origins or ())
    assert [origin.round for origin in plain[0].outputs[0].origins or ()] == list(range(1, 25))


def test_nobody_asked(open_llm: Callable[..., LLM]) -> None:
    assert open_llm().generate(PROMPTS[0], PLAIN)[0].outputs[0].origins is None


def test_a_stream_of_news_tells_each_once(open_llm: Callable[..., LLM]) -> None:
    answers = told(open_llm(drafter=None))
    llm = open_llm(drafter=Right(answers), planner="fixed")
    whole = llm.generate(PROMPTS[1], TOLD)[0].outputs[0]
    parts = [output.outputs[0] for output in llm.stream(PROMPTS[1], replace(TOLD, output_kind="delta"))]
    assert [origin for part in parts for origin in part.origins or ()] == whole.origins
    assert all(len(part.origins or ()) == len(part.token_ids) for part in parts)


def test_a_stop_inside_an_accepted_run_cuts_them_too(open_llm: Callable[..., LLM]) -> None:
    answers = told(open_llm(drafter=None))
    llm = open_llm(drafter=Right(answers), planner="fixed")
    tokens = llm.generate(PROMPTS[0], PLAIN)[0].outputs[0].token_ids
    stopped = llm.generate(PROMPTS[0], replace(TOLD, stop_token_ids=[tokens[10]]))[0].outputs[0]
    assert len(stopped.origins or ()) == len(stopped.token_ids) <= 11


def test_guessers_of_merged_drafts() -> None:
    verdict = Verdict("a", (5, 6, 7), 4, 2, (0, 3), authors=Authors(("x", "y"), ((0, 1), (0, 2, 3))))
    assert [verdict.guessers(place) for place in range(3)] == [("x", "y"), ("y",), ()]
    assert Verdict("a", (5, 6), 1, 1, (0,), authors=author("x")).guessers(0) == ("x",)
