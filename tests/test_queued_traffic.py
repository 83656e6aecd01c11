"""Random traffic through a queued engine: the same answers as plain rounds give, and nothing lost between rounds.

Requests of every kind come at random moments, some are aborted; pages are plenty or few; drafters of all kinds.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from queueing import Echo, Letters, Queue
from slipstream import RequestOutput, SamplingParams, SpeculationParams
from slipstream.engine.state import Job
from stepping import Stepper

LONGEST = 200
SEEDS = range(24)


@dataclass(frozen=True)
class Wish:
    prompt: tuple[int, ...]
    params: dict[str, Any]


def wish(dice: random.Random) -> Wish:
    length = dice.choice([1, 2, 3, 15, 16, 17, 40, 90, 130, 150])
    params: dict[str, Any] = {
        "temperature": dice.choice([0, 0.7, 1.0]),
        "seed": dice.randrange(100),
        "max_tokens": dice.choice([1, 2, 5, 20, 40]),
        "ignore_eos": dice.random() < 0.7,
        "n": dice.choice([1, 1, 1, 2, 3]),
    }
    rare = {"logprobs": 2, "frequency_penalty": 0.7, "top_p": 0.8, "top_k": 7, "stop": ["e"], "bad_words": ["ab", "q"]}
    params |= {name: value for name, value in rare.items() if dice.random() < 0.2}
    begins = random.Random(dice.randrange(2)).choices(range(3, 250), k=dice.choice([0, 20, 100, length]))
    prompt = [*begins, *(dice.randrange(3, 250) for _ in range(length))][:length]  # some begin alike
    return Wish(tuple(prompt), params)


def told(outputs: list[RequestOutput]) -> list[tuple[Any, ...]]:
    assert sum(output.finished for output in outputs) == 1
    return [
        (tuple(a.token_ids), a.text, a.finish_reason, a.stop_reason, a.error, [list(p) for p in a.logprobs or ()])
        for a in outputs[-1].outputs
    ]


def answers(
    bench: Stepper, wishes: list[Wish], drafters: list[str | None], seed: int, *, aborts: bool
) -> dict[int, list[tuple[Any, ...]]]:
    """By wish, those aside that were aborted. Looks into the engine between any two rounds."""
    dice, engine = random.Random(seed), bench.engine
    waiting = list(enumerate(wishes))
    live: list[tuple[int, Job, list[RequestOutput]]] = []
    aborted: set[int] = set()
    while waiting or engine.busy:
        if waiting and dice.random() < 0.4:
            index, one = waiting.pop(0)
            drafter = dice.choice(drafters)
            how = SpeculationParams(
                enabled=drafter is not None, drafter=drafter, draft_tokens=dice.choice([None, 1, 3, 7])
            )
            heard: list[RequestOutput] = []
            params = SamplingParams(**one.params, speculation=how)
            job = bench._intake.job(list(one.prompt), params, heard.append, streaming=dice.random() < 0.3)
            engine.add(job)
            live.append((index, job, heard))
        if aborts and live and dice.random() < 0.05:
            index, job, _ = dice.choice(live)
            if job.id in engine.jobs:
                engine.abort(job.id)
                aborted.add(index)
        engine.step()
        engine.scheduler.check_integrity()
        for answer in engine.scheduler.running:
            assert answer.queued >= 0
            assert (answer.queued == 0) == (answer.coming == 0)
    assert engine.pool.free_pages == engine.pool.num_pages
    return {index: told(heard) for index, _, heard in live if index not in aborted}


@pytest.mark.parametrize("seed", SEEDS)
def test_the_same_answers_as_plain_rounds_give(tiny_target: Path, tiny_draft: Path, seed: int) -> None:
    dice = random.Random(seed)
    wishes = [wish(dice) for _ in range(dice.randrange(3, 9))]
    page_size = dice.choice([4, 16])
    config: dict[str, Any] = {
        "page_size": page_size,
        "max_num_seqs": dice.choice([2, 4, 8]),
        "max_num_batched_tokens": dice.choice([16, 64, 160]),
        "max_draft_rows": dice.choice([16, 64]),
        "planner": dice.choice(["fixed", "adaptive"]),
        "max_model_len": LONGEST,
    }
    if dice.random() < 0.5:
        config["pages"] = -(-LONGEST // page_size) + dice.randrange(1, 8)
    model = f"model:{tiny_draft}"
    drafters, names = dice.choice(
        [
            ([model], ["model", None]),
            (["ngram", "suffix"], ["ngram", "suffix", None]),
            ([model, Echo(), Letters(), "ngram"], ["model", "echo", "letters", "ngram", None]),
        ]
    )
    plain = answers(Stepper(tiny_target, None, prefix_caching=False, **config), wishes, [None], seed, aborts=False)
    queue = Queue(tiny_target, drafters, **config)
    found = answers(queue, wishes, names, seed, aborts=dice.random() < 0.5)
    queue.check_lanes()
    assert found == {index: plain[index] for index in found}


@pytest.mark.parametrize("seed", range(8))
def test_any_traffic_of_host_and_device_drafters(tiny_target: Path, tiny_draft: Path, seed: int) -> None:
    """Host and device drafters guess together while requests join, end and are aborted."""
    dice = random.Random(1000 + seed)
    wishes = [wish(dice) for _ in range(dice.randrange(3, 6))]
    wishes = [Wish(w.prompt, {**w.params, "max_tokens": 40, "logprobs": None}) for w in wishes]
    config: dict[str, Any] = {
        "page_size": 4,
        "max_num_seqs": dice.choice([2, 4]),
        "max_num_batched_tokens": dice.choice([64, 160]),
        "planner": dice.choice(["fixed", "adaptive"]),
        "max_model_len": LONGEST,
    }
    if dice.random() < 0.5:
        config["pages"] = -(-LONGEST // 4) + dice.randrange(1, 24)
    plain = answers(Stepper(tiny_target, None, prefix_caching=False, **config), wishes, [None], seed, aborts=False)
    drafters = [f"model:{tiny_draft}", Echo(), Letters(), "suffix"]
    queue = Queue(tiny_target, drafters, **config)
    found = answers(queue, wishes, ["letters+model", "suffix+model+echo"], seed, aborts=dice.random() < 0.5)
    queue.check_lanes()
    assert found == {index: plain[index] for index in found}
