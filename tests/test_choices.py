"""What the target chose at every node of a tree, for drafters that declare that they need it; nothing for others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import ClassVar

import pytest

from queueing import Letters
from slipstream import LLM, SamplingParams, SpeculationParams
from slipstream.core.draft import ROOT, Tree
from slipstream.core.verdict import Verdict
from slipstream.drafters.base import DraftRequest, Needs


class Curious(Letters):
    """Draws trees, and notes what it is told of them."""

    name: ClassVar[str] = "curious"
    needs: ClassVar[Needs] = Needs(choices=True)

    def __init__(self) -> None:
        self.drafted: dict[str, tuple[list[int], Tree]] = {}  # by request: its text, and the tree behind it
        self.heard: list[tuple[list[int], Tree, Verdict]] = []

    def propose(self, requests: Sequence[DraftRequest], budget: Sequence[int]) -> Sequence[Tree]:
        trees = super().propose(requests, budget)
        for request, tree in zip(requests, trees, strict=True):
            self.drafted[request.id] = (list(request.tokens), tree)
        return trees

    def observe(self, verdicts: Sequence[Verdict]) -> None:
        for verdict in verdicts:
            if verdict.drafted:
                self.heard.append((*self.drafted.pop(verdict.request_id), verdict))
            else:
                assert len(verdict.choices) <= 1


class Deaf(Letters):
    """The same trees, but it asks for nothing."""

    name: ClassVar[str] = "deaf"

    def __init__(self) -> None:
        self.heard: list[Verdict] = []

    def observe(self, verdicts: Sequence[Verdict]) -> None:
        self.heard += verdicts


@pytest.mark.parametrize("rounds", ["eager", "queued"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_they_are_what_the_target_would_say_behind_each_node(
    open_llm: Callable[..., LLM], rounds: str, temperature: float
) -> None:
    drafter = Curious()
    llm = open_llm(drafter=drafter, rounds=rounds, planner="fixed")
    params = SamplingParams(
        temperature=temperature, seed=3, max_tokens=8, ignore_eos=True, logit_bias={10: 6.0, 20: 6.0, 30: 6.0}
    )
    mixed = [replace(params, speculation=SpeculationParams(enabled=i != 1)) for i in range(3)]
    llm.generate([[5, 6, 7], [8] * 5, [10, 20]], mixed)
    assert len(drafter.heard) >= 4
    once = replace(params, max_tokens=1, speculation=SpeculationParams(enabled=False))
    for text, tree, verdict in drafter.heard[:8]:
        paths: list[list[int]] = [[]]  # by row: the root, then the nodes
        for token, parent in zip(tree.tokens, tree.parents, strict=True):
            paths.append([*paths[1 + parent], token])
        want = [o.outputs[0].token_ids[0] for o in llm.generate([text + path for path in paths], once)]
        assert list(verdict.choices) == want
        at = ROOT
        for token, node in zip(verdict.tokens, (*verdict.path, ROOT), strict=True):
            assert verdict.choices[1 + at] == token
            at = node


@pytest.mark.parametrize("rounds", ["eager", "queued"])
def test_who_does_not_ask_is_told_nothing(open_llm: Callable[..., LLM], rounds: str) -> None:
    drafter = Deaf()
    llm = open_llm(drafter=drafter, rounds=rounds, planner="fixed")
    llm.generate([[5, 6, 7]], SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))
    assert any(verdict.drafted for verdict in drafter.heard)
    assert not any(verdict.choices for verdict in drafter.heard)
