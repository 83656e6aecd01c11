"""Rounds in which the planner takes no guesses are counted, so that whoever wonders can be told."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from planning import Scripted
from queueing import OFF, Letters
from slipstream import LLM, SamplingParams, SpeculationParams
from slipstream.core.draft import Tree
from slipstream.plan.planner import Planner
from slipstream.plan.types import Offer

PARAMS = SamplingParams(temperature=0, max_tokens=12)
TEXT = [7, 8, 9] * 6


class Never(Scripted):
    """Nothing pays."""

    def nodes(self, offer: Offer) -> list[int]:
        return [0] * len(offer.caps)

    def trim(
        self, drafter: str, request_ids: Sequence[str], trees: Sequence[Tree], *_: object, **__: object
    ) -> list[Tree]:
        return [Tree()] * len(trees)


class Resting(Planner):
    """No guess of the host's is worth waiting for."""

    def asks(self, drafter: str, requests: int) -> bool:
        return False


@pytest.mark.parametrize("rounds", ["eager", "queued"])
@pytest.mark.parametrize("name", ["model", "letters"])
def test_what_does_not_pay_is_counted(open_llm: Callable[..., LLM], tiny_draft: Path, rounds: str, name: str) -> None:
    llm = open_llm(drafter=[f"model:{tiny_draft}", Letters()], rounds=rounds)
    params = SamplingParams(temperature=0, max_tokens=12, speculation=SpeculationParams(drafter=name))
    llm.engine.drafting.planner = Never()
    stats = llm.generate([TEXT], params)[0].outputs[0].speculation
    assert stats.drafted == 0
    assert stats.by_drafter[name].drafts == 0
    assert 1 <= stats.by_drafter[name].declined <= stats.rounds
    plainly = SamplingParams(temperature=0, max_tokens=12, speculation=OFF)
    assert not llm.generate([TEXT], plainly)[0].outputs[0].speculation.by_drafter


def test_so_is_what_nobody_waits_for(open_llm: Callable[..., LLM]) -> None:
    llm = open_llm(drafter=Letters(), rounds="queued")
    llm.engine.drafting.planner = Resting()
    stats = llm.generate([TEXT], PARAMS)[0].outputs[0].speculation
    assert stats.drafted == 0
    assert stats.by_drafter["letters"].declined >= 10


@pytest.mark.parametrize("rounds", ["eager", "queued"])
def test_forced_drafts_are_not_declined(open_llm: Callable[..., LLM], tiny_draft: Path, rounds: str) -> None:
    llm = open_llm(drafter=f"model:{tiny_draft}", rounds=rounds, planner="fixed")
    stats = llm.generate([TEXT], PARAMS)[0].outputs[0].speculation
    assert stats.by_drafter["model"].drafts >= 2
    assert stats.by_drafter["model"].declined == 0
