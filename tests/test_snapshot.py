"""What an engine tells those who watch it agrees with what its requests were told."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scripted import Answers, RaisesForSome, Right, RightThenWrong
from slipstream import LLM, SamplingParams, SpeculationParams
from slipstream.core.outputs import Snapshot

PARAMS = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, seed=1)
PROMPTS = [[7, 3, i] for i in range(5)]


def told(llm: LLM) -> Answers:
    answers = Answers()
    for prompt, output in zip(PROMPTS, llm.generate(PROMPTS, PARAMS), strict=True):
        answers.tell(prompt, PARAMS.seed, output.outputs[0].token_ids)
    return answers


@pytest.mark.parametrize("rounds", ["eager", "queued"])
@pytest.mark.parametrize("kind", [Right, RightThenWrong])
def test_counts_are_those_of_the_requests(
    open_llm: Callable[..., LLM], kind: type[Right] | type[RightThenWrong], rounds: str
) -> None:
    drafter = kind(told(open_llm(drafter=None)))
    llm = open_llm(drafter=drafter, planner="fixed", rounds=rounds)
    assert llm.snapshot().rounds == 0
    outputs = [output.outputs[0] for output in llm.generate(PROMPTS, PARAMS)]
    seen = llm.snapshot()
    stats = [output.speculation for output in outputs]
    assert seen.generated_tokens == sum(s.emitted for s in stats) == 5 * 16
    assert seen.turns == sum(s.rounds for s in stats)
    assert seen.prompt_tokens == 5 * 3
    assert seen.draft_tokens == sum(s.drafted for s in stats)
    assert seen.accepted_tokens == sum(s.accepted for s in stats) > 0
    assert seen.drafts == sum(s.by_drafter[kind.name].drafts for s in stats)
    assert seen.drafters[kind.name].accepted == seen.accepted_tokens
    assert seen.drafters["prediction"].drafts == 0
    assert seen.rejected_tokens == seen.draft_tokens - seen.accepted_tokens
    assert list(seen.accepted_by_position) == sorted(seen.accepted_by_position, reverse=True)
    assert len(seen.accepted_by_position) == (2 if kind is RightThenWrong else 6)
    assert seen.finished == {"length": 5}
    assert seen.decisions["drafted"] == seen.drafts
    assert seen.decisions["off"] == seen.decisions["failed"] == 0
    assert seen.verify_s > 0
    assert seen.verify_s == pytest.approx(sum(s.verify_s for s in stats))
    assert sum(seen.token_gaps) == seen.generated_tokens - len(outputs)
    assert seen.token_gaps[0] >= seen.accepted_tokens - len(outputs)  # those of one round come together
    waited = sum(output.timing.total_s - output.timing.first_token_s for output in outputs)
    assert 0 < seen.token_gaps_s <= waited
    assert seen.tenants == {}
    assert (seen.running, seen.waiting, seen.pages_used, seen.refused) == (0, 0, 0, 0)
    assert seen.pages_free == seen.pages == llm.engine.pool.num_pages


def test_the_memory_of_drafters(open_llm: Callable[..., LLM], tiny_target: Path) -> None:
    llm = open_llm(drafter=("ngram", "suffix", f"model:{tiny_target}"))
    before = llm.snapshot().drafter_bytes
    plan = llm.memory_plan
    assert before["ngram"] == 0
    assert before["model"] >= plan.draft_weights_bytes + plan.draft_cache_bytes > 0
    for name in ("ngram", "suffix"):
        params = replace(PARAMS, max_tokens=40, speculation=SpeculationParams(drafter=name, tenant="ann"))
        stream: Any = llm.stream(list(range(100)), params)
        next(stream)
        seen = llm.between_rounds(lambda engine: engine.snapshot())
        assert seen.drafter_bytes[name] > before[name]
        assert seen.tenants == {"ann": (1, 0)}
        stream.close()
        llm.between_rounds(lambda engine: None)
    assert llm.snapshot().drafter_bytes["ngram"] == 0
    assert llm.snapshot().drafter_bytes["suffix"] > before["suffix"], "the store remembers the answer"


def test_failures_are_counted(open_llm: Callable[..., LLM]) -> None:
    drafter = RaisesForSome(told(open_llm(drafter=None)))
    drafter.hates = frozenset({1})
    llm = open_llm(drafter=drafter, planner="fixed")
    llm.generate(PROMPTS[0], PARAMS)
    seen = llm.snapshot()
    assert seen.drafters[drafter.name].failures == 1
    assert seen.late[drafter.name] == 0
    assert (seen.dropped, seen.drops) == ({}, {drafter.name: {"raised": 1}})
    assert seen.decisions["failed"] > 0
    off = replace(PARAMS, speculation=SpeculationParams(enabled=False), max_tokens=4)
    llm.generate(PROMPTS[1], off)
    assert llm.snapshot().decisions["off"] == 3  # but not for the first token, which comes of the prompt


def test_another_thread_may_watch_while_the_engine_works(open_llm: Callable[..., LLM]) -> None:
    llm = open_llm()
    seen: list[Snapshot] = []
    over = threading.Event()

    def watch() -> None:
        while not over.is_set():
            seen.append(llm.snapshot())

    watcher = threading.Thread(target=watch)
    watcher.start()
    llm.generate([[i, 2] for i in range(12)], SamplingParams(max_tokens=30, ignore_eos=True, n=2))
    over.set()
    watcher.join()
    for before, after in itertools.pairwise(seen):
        assert before.generated_tokens <= after.generated_tokens
        assert before.rounds <= after.rounds
    assert any(0 < one.running <= 8 for one in seen)
    assert all(0 <= one.pages_used <= one.pages for one in seen)
