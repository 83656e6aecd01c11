"""A tiny model that says only twelve tokens, so that the distribution of its answers can be written down.

Real engines answer thousands of requests with it. What ought to come out is computed by transformers and by a plain
form of the sampling rule, which have nothing in common with the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from conftest import VOCAB
from rejection_scenes import START, Pair, Proposer, V, chi_square, pair
from slipstream import CompletionOutput, RequestOutput, SamplingParams, SpeculationParams
from slipstream.core.draft import Draft, Tree
from slipstream.drafters.base import DeviceDrafter, DraftRequest, HostDrafter, Needs, Services
from slipstream.engine.build import DrafterChoice
from stepping import Stepper

PROMPT = (40, 7, START)
ONLY = dict.fromkeys(range(V), 60.0)
"""A bias that leaves nothing but the tokens 0 to 11."""
PLACES = 4  # of each answer that are looked at: the first comes from the prompt, three can be drafted in one round
SAMPLES = 64  # of a request
ALWAYS = 1e-3  # p-value of a test that passes; seeds are fixed, so it always does or never
FOUND = 1e-5  # p-value of a mistake that is noticed, by as many draws as the tests that pass have

SETTINGS = {
    "T 1, top-k 6": SamplingParams(temperature=1.0, top_k=6),
    "T 0.6, top-p 0.9": SamplingParams(temperature=0.6, top_p=0.9),
}


def asked(setting: SamplingParams, drafter: str, *, verifier: str = "rejection") -> SamplingParams:
    how = SpeculationParams(drafter=drafter, verifier=verifier)  # type: ignore[arg-type]
    return replace(setting, max_tokens=PLACES + 1, ignore_eos=True, logit_bias=ONLY, n=SAMPLES, speculation=how)


class Crowd(Stepper):
    """An engine for a few hundred requests at a time."""

    def __init__(self, model: Path, drafter: DrafterChoice, **config: Any) -> None:
        super().__init__(model, drafter, **{"max_num_seqs": 256, "max_draft_rows": 256 * 11, **config})

    def answers(self, params: Sequence[SamplingParams]) -> list[CompletionOutput]:
        """To the same prompt with each of these."""
        heard: list[RequestOutput] = []
        jobs = [self._intake.job(list(PROMPT), one, heard.append, streaming=False) for one in params]
        for job in jobs:
            self.engine.add(job)
        while self.engine.busy:
            self.engine.step()
        told = [answer.output for job in jobs for answer in job.answers]
        assert not [answer.error for answer in told if answer.error]
        return told

    def tokens(self, params: SamplingParams, requests: int) -> Tensor:
        """The first tokens [requests * SAMPLES, PLACES] of as many answers."""
        told = self.answers([replace(params, seed=seed) for seed in range(requests)])
        return torch.tensor([answer.token_ids[:PLACES] for answer in told])


@dataclass(frozen=True)
class Expected:
    """The model's own distribution of the first places."""

    joint: Tensor  # [V] * PLACES fp64

    def p_value(self, tokens: Tensor) -> float:
        """Of each place alone and each two neighbours together the smallest, times their number."""
        found = []
        for place in range(PLACES):
            found.append(chi_square(tokens[:, place], self._marginal(place).flatten()))
            if place:
                codes = tokens[:, place - 1] * V + tokens[:, place]
                found.append(chi_square(codes, self._marginal(place - 1, place).flatten()))
        return min(1.0, min(found) * len(found))

    def _marginal(self, *places: int) -> Tensor:
        return self.joint.sum([place for place in range(PLACES) if place not in places])


def expected(folder: Path, setting: SamplingParams) -> Expected:
    """By transformers, over all that the model might have said before."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    texts = torch.tensor([PROMPT])  # [V ** place, prompt + place]
    joint = torch.ones((), dtype=torch.float64)
    with torch.inference_mode():
        for _ in range(PLACES):
            p = plain_rule(model(texts).logits[:, -1, :V].double(), setting)  # [V ** place, V]
            joint = joint[..., None] * p.view(*joint.shape, V)
            texts = torch.cat((texts.repeat_interleave(V, 0), torch.arange(V).repeat(len(texts))[:, None]), 1)
    return Expected(joint)


def plain_rule(logits: Tensor, setting: SamplingParams) -> Tensor:
    """Temperature, top-k, top-p on what that left: one row after the other."""
    rows = []
    for row in (logits / setting.temperature).softmax(1):
        order = row.argsort(descending=True)[: setting.top_k or None]
        kept = row[order] / row[order].sum()
        before = kept.cumsum(0) - kept
        order = order[before < setting.top_p]
        rows.append(torch.zeros_like(row).index_copy(0, order, row[order] / row[order].sum()))
    return torch.stack(rows)


class Drawing(DeviceDrafter):
    """Draws the trees of `rejection_scenes` by the request's own noise, and tells what it drew from."""

    name: ClassVar[str] = "drawing"
    needs: ClassVar[Needs] = Needs(device=True, probabilities=True)
    default_draft_tokens: ClassVar[int] = 16

    def __init__(self, shape: Proposer, setting: SamplingParams) -> None:
        self.shape = shape
        self.pair: Pair = pair(setting)
        self.told = True  # False: it hides what its nodes were drawn from

    def attach(self, services: Services) -> None:
        self._sampling = services.sampling

    def propose(self, requests: Sequence[DraftRequest], budget: Sequence[int]) -> Draft:
        last = torch.tensor([r.tokens[-1] for r in requests])
        streams = self._sampling.streams[torch.tensor([r.slot for r in requests])]
        made = self.shape(self.pair, last, streams, torch.tensor([len(r.tokens) for r in requests]))
        draft, q = made.draft, None
        if made.q is not None and made.drawn is not None and self.told:
            q = torch.nn.functional.pad(made.q * made.drawn[:, :, None], (0, VOCAB - V))
        counts = draft.counts.minimum(torch.tensor(budget))
        return Draft(draft.tokens, draft.parents, counts, draft.is_chain, q)


class Copying(HostDrafter):
    """Trees that were not drawn: the same always, by the last token."""

    name: ClassVar[str] = "copying"
    bounded: ClassVar[bool] = True
    default_draft_tokens: ClassVar[int] = 7

    def propose(self, requests: Sequence[DraftRequest], budget: Sequence[int]) -> Sequence[Tree]:
        trees = []
        for request, nodes in zip(requests, budget, strict=True):
            near = [(5 * request.tokens[-1] + step) % V for step in range(4)]
            tokens, parents = (*near[:3], *near[:2], near[3], near[0]), (-1, -1, -1, 0, 0, 1, 3)
            trees.append(Tree(tokens[:nodes], parents[:nodes]))
        return trees
