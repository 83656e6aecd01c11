"""The likeliest choices: the best is what the rule chooses, whatever a request asks for; shares add up."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from exactness import EXTRAS, TEMPERATURES
from slipstream import SamplingParams
from slipstream.sampling import SampleRows, SamplingTable, choose, row_keys
from slipstream.sampling.noise import gumbel
from slipstream.sampling.rank import HOPELESS, rank

VOCAB, DRAFT = 97, 40
CPU = torch.device("cpu")
LETTERS = {name: {k: v for k, v in extra.items() if k != "bad_words"} for name, extra in EXTRAS.items()}


def table_of(*params: SamplingParams) -> SamplingTable:
    table = SamplingTable(len(params), VOCAB, CPU)
    for slot, one in enumerate(params):
        assert one.seed is not None
        table.add(slot, one, seed=one.seed, prompt=[3, 5, 10], output=[10, 20], end_ids=[2, 10, 40])
    return table


def rows_of(count: int, slots: list[int] | None = None) -> SampleRows:
    at = torch.tensor(slots or list(range(count)))
    return SampleRows(slots=at, positions=torch.arange(5, 5 + count), generated=torch.full((count,), 2))


def asked(extra: dict[str, Any], temperature: float, seed: int) -> SamplingParams:
    return SamplingParams(temperature=temperature, seed=seed, **extra)


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("extra", LETTERS)
def test_the_best_is_what_the_rule_chooses(extra: str, drafts: bool) -> None:
    params = [asked(LETTERS[extra], t, seed) for t in TEMPERATURES for seed in range(5)]
    table = table_of(*params)
    features = table.features(list(range(len(params))))
    torch.manual_seed(3)
    vocab = torch.randperm(VOCAB)[:DRAFT].sort().values if drafts else None
    logits = 3 * torch.randn(len(params), DRAFT if drafts else VOCAB)
    whole = logits
    if vocab is not None:
        whole = torch.full((len(params), VOCAB), -torch.inf).index_copy_(1, vocab, logits)
    rows = rows_of(len(params))
    found = rank(logits, rows, table, features, 4, vocab)
    assert found.tokens[:, 0].tolist() == choose(whole, rows, table, features).tolist()
    assert all(len(set(line)) == 4 for line in found.tokens.tolist())
    assert (found.scores <= 0).all()
    assert (found.scores.diff(dim=1) <= 0).all()


def test_shares_are_of_the_noisy_scores() -> None:
    table = table_of(asked({}, 0.7, 9), asked({}, 0.0, 9))
    logits = torch.randn(2, VOCAB)
    found = rank(logits, rows_of(2), table, table.features([0, 1]), VOCAB)
    noise = gumbel(row_keys(torch.tensor([9]), torch.tensor([0]), torch.tensor([5])), torch.arange(VOCAB))[0]
    wanted = torch.stack(((logits[0] / 0.7 + noise).log_softmax(0), logits[1].log_softmax(0)))
    torch.testing.assert_close(found.scores, wanted.gather(1, found.tokens))
    torch.testing.assert_close(found.scores.exp().sum(1), torch.ones(2))


def test_what_cannot_come_has_no_hope() -> None:
    table = table_of(asked({"top_k": 2}, 1.0, 1), asked({}, 0.0, 1))
    logits = torch.randn(2, VOCAB)
    logits[1] = torch.nan
    found = rank(logits, rows_of(2), table, table.features([0, 1]), 3)
    assert (found.scores[0, :2] > HOPELESS).all()
    assert found.scores[0, 2] == HOPELESS
    assert found.scores.isfinite().all()
    assert ((found.tokens >= 0) & (found.tokens < VOCAB)).all()
