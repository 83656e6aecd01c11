"""The suffix drafter in both engines: the same tokens, earlier answers and material that pay, tenants kept apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from slipstream import LLM, CompletionOutput, SamplingParams, SpeculationParams
from slipstream.core.draft import Tree
from slipstream.core.errors import InvalidRequest
from slipstream.drafters.base import DraftRequest
from slipstream.drafters.suffix import SuffixDrafter

PROMPTS = [[5, 6, 7, 8], [9] * 12, list(range(40, 70)), [100, 3, 100, 3, 100, 3], [10, 20, 30, 40, 10, 20, 30], [1]]
PARAMS = SamplingParams(temperature=1.0, seed=3, max_tokens=40, ignore_eos=True)
OFF = SpeculationParams(enabled=False)

both = pytest.mark.parametrize("rounds", ["eager", "queued"])


class Watched(SuffixDrafter):
    """Notes what it drafts."""

    def __init__(self, **options: Any) -> None:
        self.trees: list[Tree] = []
        super().__init__(**options)

    def propose(self, requests: Sequence[DraftRequest], budget: Sequence[int]) -> Sequence[Tree]:
        trees = super().propose(requests, budget)
        self.trees += trees
        return trees


def ask(llm: LLM, params: SamplingParams, how: SpeculationParams, alone: bool = False) -> list[CompletionOutput]:
    params = replace(params, speculation=how)
    if alone:
        return [llm.generate([prompt], params)[0].outputs[0] for prompt in PROMPTS]
    return [output.outputs[0] for output in llm.generate(PROMPTS, [params] * len(PROMPTS))]


def accepted(answers: Sequence[CompletionOutput]) -> int:
    return sum(answer.speculation.accepted for answer in answers)


@both
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("draft_tokens", "branches"), [(1, False), (24, True)])
def test_the_same_tokens_alone_and_in_company(
    open_llm: Callable[..., LLM], rounds: str, temperature: float, draft_tokens: int, branches: bool
) -> None:
    drafter = Watched()
    llm = open_llm(drafter=drafter, planner="fixed", rounds=rounds)
    params = replace(PARAMS, temperature=temperature)
    plain = [answer.token_ids for answer in ask(llm, params, OFF, alone=True)]
    for alone in (True, False, False):  # from the second time on past outputs vote, too
        got = ask(llm, params, SpeculationParams(draft_tokens=draft_tokens), alone)
        assert [answer.token_ids for answer in got] == plain
        assert not any(stats.failures for answer in got for stats in answer.speculation.by_drafter.values())
    assert any(not tree.is_chain for tree in drafter.trees) == branches
    assert accepted(got) > 0


@both
def test_what_was_answered_before_is_drafted_for_the_same_tenant_only(
    open_llm: Callable[..., LLM], rounds: str
) -> None:
    llm = open_llm(drafter=Watched(min_match=2), planner="fixed", rounds=rounds)
    one, two = SpeculationParams(tenant="one"), SpeculationParams(tenant="two")
    first = accepted(ask(llm, PARAMS, one))
    assert accepted(ask(llm, PARAMS, two)) == first  # as if nobody had asked before
    assert accepted(ask(llm, PARAMS, one)) > first + 100


@both
def test_material_is_drafted_from(open_llm: Callable[..., LLM], rounds: str) -> None:
    llm = open_llm(drafter=SuffixDrafter(min_match=2, store_tokens=0), planner="fixed", rounds=rounds)
    only_letters = dict.fromkeys(range(64, 90), 12.0)  # ASCII, so that the text gives the same tokens again
    params = replace(PARAMS, logit_bias=only_letters, max_tokens=60)
    plain = ask(llm, params, SpeculationParams())
    texts = [answer.text for answer in plain]
    assert all(llm.tokenizer.encode(text) == answer.token_ids for text, answer in zip(texts, plain, strict=True))
    got = ask(llm, params, SpeculationParams(material=texts))
    assert [answer.token_ids for answer in got] == [answer.token_ids for answer in plain]
    assert accepted(got) > accepted(plain) + 150
    assert accepted(ask(llm, params, SpeculationParams())) == accepted(plain)  # it went with its requests


def test_it_is_offered_by_name(open_llm: Callable[..., LLM]) -> None:
    llm = open_llm(drafter="suffix")
    assert ask(llm, PARAMS, SpeculationParams(drafter="suffix"))[0].error is None
    assert "suffix" in open_llm(speculative_config={"method": "suffix"}).engine.drafting.drafters


def test_material_that_nobody_drafts_from_is_refused(open_llm: Callable[..., LLM]) -> None:
    llm = open_llm(drafter=["ngram", SuffixDrafter()])
    given = SpeculationParams(material=["abc"])
    with pytest.raises(InvalidRequest, match=r"speculation\.material: ngram does not draft from it; name .*: suffix"):
        ask(llm, PARAMS, given)
    with pytest.raises(InvalidRequest, match="prediction does not draft from it"):
        ask(llm, replace(PARAMS, prediction="abc"), given)
    fine = [replace(given, drafter="suffix"), replace(given, drafter="ngram+suffix"), replace(given, enabled=False)]
    for how in fine:
        assert ask(llm, PARAMS, how)[0].error is None
    with pytest.raises(InvalidRequest, match="there is no drafter to draft from it; load one that does, such as suff"):
        ask(open_llm(drafter=None), PARAMS, given)
