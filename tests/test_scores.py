"""How drafters rank tokens: first comes what the rule of sampling chooses; the scores are log q and the noise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.core.params import SamplingParams
from slipstream.sampling import SampleRows, SamplingTable, choose, gumbel
from slipstream.sampling.scores import draft_scores

VOCAB = 50

WISHES: dict[str, dict[str, Any]] = {
    "plain": {},
    "top_k": {"top_k": 4},
    "top_p": {"top_p": 0.7},
    "both": {"top_k": 6, "top_p": 0.8},
    "min_p": {"min_p": 0.2},
    "penalties": {"presence_penalty": 0.8, "frequency_penalty": 0.5, "repetition_penalty": 1.3},
    "bias": {"logit_bias": {3: 4.0, 7: -100.0}},
    "min_tokens": {"min_tokens": 9},
}


def batch(*params: SamplingParams) -> tuple[SampleRows, SamplingTable]:
    """20 rows of each request, at as many positions."""
    table = SamplingTable(len(params), VOCAB)
    for slot, wanted in enumerate(params):
        table.add(slot, wanted, seed=5 + slot, prompt=[1, 2], output=[3, 3, 4], end_ids=[2, 9])
    slots = torch.arange(len(params)).repeat_interleave(20)
    positions = torch.arange(20).repeat(len(params)) + 7
    return SampleRows(slots, positions, torch.full_like(slots, 3)), table


def logits_of(rows: SampleRows) -> Tensor:
    return 2 * torch.randn(rows.slots.shape[0], VOCAB, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.3])
@pytest.mark.parametrize("name", WISHES)
def test_the_first_is_what_the_rule_chooses(name: str, temperature: float) -> None:
    rows, table = batch(SamplingParams(temperature=temperature, **WISHES[name]))
    logits, features = logits_of(rows), table.features([0])
    before = logits.clone()
    scores = draft_scores(logits, rows, table, features)
    assert scores.argmax(dim=1).tolist() == choose(logits, rows, table, features).tolist()
    assert torch.equal(logits, before)


def test_requests_that_want_different_things() -> None:
    params = [SamplingParams(temperature=t, **w) for t in (0.0, 1.0) for w in WISHES.values()]
    rows, table = batch(*params)
    logits, features = logits_of(rows), table.features(list(range(len(params))))
    scores = draft_scores(logits, rows, table, features)
    assert scores.argmax(dim=1).tolist() == choose(logits, rows, table, features).tolist()


def test_scores_are_log_q_and_the_targets_noise() -> None:
    rows, table = batch(SamplingParams(temperature=0.5), SamplingParams(temperature=0))
    logits = logits_of(rows)
    scores = draft_scores(logits, rows, table, table.features([0, 1]))
    noise = gumbel(table.noise_keys(rows), torch.arange(VOCAB))
    torch.testing.assert_close(scores[:20], (logits[:20] / 0.5).log_softmax(1) + noise[:20])
    torch.testing.assert_close(scores[20:], logits[20:].log_softmax(1))


def test_what_is_filtered_out_comes_last() -> None:
    rows, table = batch(SamplingParams(temperature=1.0, top_k=3))
    scores = draft_scores(logits_of(rows), rows, table, table.features([0]))
    assert (scores.isfinite().sum(dim=1) == 3).all()
