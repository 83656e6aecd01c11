"""Log probabilities of the raw model: values, ranks, and the order of the alternatives."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.sampling import raw_logprobs

V = 15
rows_of_logits = st.lists(
    st.lists(st.integers(-12, 12).map(lambda n: n / 4), min_size=V, max_size=V), min_size=1, max_size=4
)


@settings(deadline=None, max_examples=100)
@given(rows_of_logits, st.integers(0, V + 2), st.integers(0, V - 1))
def test_against_a_plain_reference(drawn: list[list[float]], top: int, chosen: int) -> None:
    found = raw_logprobs(torch.tensor(drawn), torch.full((len(drawn),), chosen), top)
    for row, logits in enumerate(drawn):
        log_p = np.array(logits) - np.log(np.exp(np.array(logits)).sum())
        order = sorted(range(V), key=lambda token: (-logits[token], token))[:top]
        assert found.chosen[row].item() == pytest.approx(log_p[chosen], abs=1e-5)
        assert found.ranks[row] == 1 + sum(x > logits[chosen] for x in logits)
        assert found.top_ids[row].tolist() == order
        assert found.top[row].tolist() == pytest.approx(log_p[order].tolist(), abs=1e-5)


def test_half_precision_and_impossible_tokens() -> None:
    logits = torch.tensor([[1.0, -math.inf, 3.0, 3.0]], dtype=torch.bfloat16)
    found = raw_logprobs(logits, torch.tensor([1]), 4)
    assert found.chosen.dtype == torch.float32
    assert found.chosen.tolist() == [-math.inf]
    assert found.ranks.tolist() == [4]
    assert found.top_ids.tolist() == [[2, 3, 0, 1]]


def test_where_nothing_was_chosen() -> None:
    found = raw_logprobs(torch.zeros(2, 3), torch.tensor([-1, 2]), 0)
    assert found.chosen.tolist() == pytest.approx([-math.inf, -math.log(3)])
    assert found.ranks.tolist() == [0, 1]
    assert found.top_ids.shape == found.top.shape == (2, 0)
