"""Trees guessed on the device: rounds take them as they take the host's, in both engines."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from queueing import Queue
from slipstream import SamplingParams, SpeculationParams
from slipstream.core.draft import Draft
from slipstream.drafters.base import DeviceDrafter, DeviceTree, DraftRequest, DraftRound, Needs
from slipstream.engine.queued import QueuedEngine
from slipstream.kernels.gpu.rows import RECENT, ring
from stepping import Arrival, Stepper

PARENTS = (-1, -1, 0, 1, 1, 4, 4, 6)
RIGHT = {1: 1, 4: 2, 6: 3}
"""Of these nodes the path of the right tokens is made: how far ahead each looks."""


class Bush(DeviceDrafter):
    """Knows the answers, and hides them among wrong guesses: three levels are right, the fourth never is."""

    name: ClassVar[str] = "bush"
    needs: ClassVar[Needs] = Needs(device=True)
    default_draft_tokens: ClassVar[int] = len(PARENTS)
    makes_trees = True
    depth = 4
    most_nodes = len(PARENTS)

    def __init__(self, texts: Sequence[Sequence[int]]) -> None:
        longest = max(map(len, texts)) + 8
        self.texts = {tuple(text[:3]): torch.tensor([*text, *([0] * (longest - len(text)))]) for text in texts}
        self.truth = torch.zeros((17, longest), dtype=torch.int64)  # [slots, positions]
        self.asked: list[int] = []

    def start(self, request: DraftRequest) -> None:
        self.truth[request.slot] = self.texts[tuple(request.tokens[:3])]

    def tokens(self, slots: Tensor, lengths: Tensor, nodes: int) -> Tensor:  # [B, nodes]
        out = torch.empty((slots.shape[0], nodes), dtype=torch.int64)
        last = self.truth.shape[1] - 1
        for node in range(nodes):
            ahead = RIGHT.get(node)
            right = self.truth[slots, (lengths + (ahead or 1)).clamp_max(last)]
            out[:, node] = right if ahead else (right + node + 1) % 256  # siblings differ
        return out

    def draft(self, round: DraftRound) -> DeviceTree:
        self.asked.append(round.nodes)
        assert round.depth == min(4, round.nodes)
        tokens = self.tokens(round.lanes, round.state.length[round.lanes], round.nodes)
        return DeviceTree(tokens, torch.tensor(PARENTS[: round.nodes]).expand_as(tokens))

    def propose(self, requests: Sequence[DraftRequest], budget: Sequence[int]) -> Draft:
        slots = torch.tensor([request.slot for request in requests])
        lengths = torch.tensor([len(request.tokens) - 1 for request in requests])
        tokens = self.tokens(slots, lengths, max(budget))
        parents = torch.tensor(PARENTS[: max(budget)]).expand_as(tokens)
        return Draft(tokens, parents, torch.tensor(budget), False)


JOBS = [
    Arrival(5, SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)),
    Arrival(9, SamplingParams(temperature=1.0, seed=3, max_tokens=21, ignore_eos=True)),
    Arrival(4, SamplingParams(temperature=0.8, top_p=0.9, seed=5, max_tokens=26, ignore_eos=True), joins=2),
    Arrival(70, SamplingParams(temperature=0, frequency_penalty=0.5, max_tokens=12, ignore_eos=True), joins=1),
]


def prompts(jobs: Sequence[Arrival]) -> list[list[int]]:
    """As `Stepper.run` draws them."""
    dice = random.Random(len(jobs))
    return [dice.choices(range(256), k=job.prompt) for job in jobs]


@pytest.mark.parametrize("kind", [Stepper, Queue])
@pytest.mark.parametrize("nodes", [8, 5])
def test_the_right_path_is_found_and_nothing_else_changes(tiny_target: Path, kind: Any, nodes: int) -> None:
    plain = Stepper(tiny_target, None).run(JOBS)
    joined = sorted(JOBS, key=lambda job: job.joins)  # the order in which answers come
    texts = [[*prompt, *out.token_ids] for prompt, out in zip(prompts(JOBS), _in_order(plain, joined), strict=True)]
    bush = Bush(texts)
    got = kind(tiny_target, bush, draft_tokens=nodes).run(JOBS)
    for ours, theirs in zip(got, plain, strict=True):
        assert ours.token_ids == theirs.token_ids
        stats = ours.speculation.by_drafter["bush"]
        rounds = stats.drafts
        assert stats.accepted >= (3 if nodes == 8 else 2) * (rounds - 3)  # the last drafts are cut by the limit


def _in_order(outs: Sequence[Any], joined: Sequence[Arrival]) -> list[Any]:
    """Answers of `Stepper.run`, in the order of `JOBS`."""
    by_job = dict(zip(map(id, joined), outs, strict=True))
    return [by_job[id(job)] for job in JOBS]


def test_a_loop_is_made_for_few_sizes(tiny_target: Path) -> None:
    """A request that may have fewer nodes takes the first of them."""
    text = [1, 2, 3, *([0] * 40)]
    bush = Bush([text])
    bench = Queue(tiny_target, bush)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    bench.add([1, 2, 3], params)
    bench.drain()
    assert set(bush.asked) == {8}  # to the end: a tree is no deeper for having more nodes
    bush.asked.clear()
    bench.add([1, 2, 3], replace(params, speculation=SpeculationParams(draft_tokens=3)))
    bench.drain()
    assert set(bush.asked) == {4}


def test_the_device_knows_the_last_tokens(tiny_target: Path) -> None:
    """Each at its own place, when a request joins and after every round."""
    bench = Queue(tiny_target, None)
    assert isinstance(bench.engine, QueuedEngine)
    params = SamplingParams(temperature=0, max_tokens=90, ignore_eos=True)
    (first, _), (second, _) = bench.add(range(100), params), bench.add([7], params)
    state = bench.engine.lanes.state
    for _ in range(80):
        bench.engine.step()
        bench.engine._tell(bench.engine._hear_all())
        for job in (first, second):
            (answer,) = job.answers
            if answer.phase.name == "RUNNING" and answer.on_device:
                known = min(len(answer.tokens), RECENT)
                want, got = ring(answer.tokens), state.recent[answer.slot].tolist()
                if known == RECENT:
                    assert got == want
                else:
                    assert got[:known] == want[:known]
    bench.drain()


def test_trees_from_one_that_promised_chains_are_refused(tiny_target: Path) -> None:
    class Liar(Bush):
        name: ClassVar[str] = "liar"
        makes_trees = False

    bench = Queue(tiny_target, Liar([[1, 2, 3, *([0] * 40)]]))
    _, heard = bench.add([1, 2, 3], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    bench.drain()
    assert heard[-1].outputs[0].speculation.by_drafter["liar"].failures == 1
    assert len(heard[-1].outputs[0].token_ids) == 8
