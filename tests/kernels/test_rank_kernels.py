"""The kernels that rank tokens, against their torch twin, and the integers that they sort by."""

from __future__ import annotations

import pytest
import torch

from interpreted import DEVICE
from slipstream import SamplingParams
from slipstream.kernels.gpu.jit import jit, tl
from slipstream.kernels.gpu.sortable import NOTHING, sortable, unsorted
from slipstream.sampling import SampleRows, SamplingTable
from slipstream.sampling.rank import HOPELESS, _filters, _tempered, rank, rank_fused

WISHES = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=1e-40),
    SamplingParams(top_p=0.8),
    SamplingParams(temperature=2, top_k=3),
    SamplingParams(min_p=0.2),
]
R = len(WISHES)

# The interpreter computes with numpy, which warns where a cold temperature rightly makes a score infinite.
pytestmark = pytest.mark.filterwarnings(
    "ignore:overflow encountered:RuntimeWarning", "ignore:invalid value:RuntimeWarning"
)


def table_of(wishes: list[SamplingParams], vocab_size: int, device: torch.device = DEVICE) -> SamplingTable:
    table = SamplingTable(len(wishes), vocab_size, device)
    for slot, wish in enumerate(wishes):
        table.add(slot, wish, seed=3 + slot)
    return table


def rows_of(slots: list[int], device: torch.device = DEVICE) -> SampleRows:
    at = torch.tensor(slots, device=device)
    return SampleRows(slots=at, positions=at + 10, generated=torch.zeros_like(at))


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("wishes", [[WISHES[0]] * R, WISHES, [WISHES[1], WISHES[0]] * 3], ids=["greedy", "all", "two"])
def test_the_kernels_match_the_twin(wishes: list[SamplingParams], drafts: bool) -> None:
    torch.manual_seed(1)
    vocab_size, width, count = 600, 150 if drafts else 600, 5
    table, rows = table_of(wishes, vocab_size), rows_of(list(range(R)))
    features = table.features(list(range(R)))
    logits = 4 * torch.randn(R, width, device=DEVICE)
    logits[:, 7] = logits[:, 3]  # ties
    vocab = torch.randperm(vocab_size)[:width].sort().values.to(DEVICE) if drafts else None
    floor = _tempered(logits, rows, table, features).floor if _filters(features) else None
    tokens, scores = rank_fused(logits, rows, table, count, vocab, floor, HOPELESS, sampled=features.sampled, chunk=64)
    cpu = torch.device("cpu")
    ids = None if vocab is None else vocab.cpu()
    on_cpu = (rows_of(list(range(R)), cpu), table_of(wishes, vocab_size, cpu))
    twin = rank(logits.cpu(), *on_cpu, features, count, ids)
    torch.testing.assert_close(scores.cpu(), twin.scores, rtol=1e-4, atol=1e-4)
    assert all(len(set(line)) == count for line in tokens.tolist())
    # of what cannot come any token will do, and of equals either
    for line in range(R):
        real = twin.scores[line] > HOPELESS
        alike = twin.scores[line].diff().abs().min() < 1e-4
        if not alike:
            assert tokens.cpu()[line][real].tolist() == twin.tokens[line][real].tolist()


def test_broken_rows_give_tokens_without_hope() -> None:
    table, rows = table_of(WISHES[:3], 100), rows_of([0, 1, 2])
    logits = torch.full((3, 100), torch.nan, device=DEVICE)
    logits[1] = -torch.inf
    tokens, scores = rank_fused(logits, rows, table, 4, None, None, HOPELESS, sampled=True, chunk=64)
    assert (scores == HOPELESS).all()
    assert all(len(set(line)) == 4 and max(line) < 100 for line in tokens.tolist())


@jit
def _both_ways(x_ptr: tl.tensor, key_ptr: tl.tensor, again_ptr: tl.tensor, N: tl.constexpr) -> None:
    at = tl.arange(0, N)
    key = sortable(tl.load(x_ptr + at))
    tl.store(key_ptr + at, key)
    tl.store(again_ptr + at, unsorted(key))


def test_keys_are_in_the_order_of_their_numbers() -> None:
    edges = [torch.inf, -torch.inf, 0.0, -0.0, 1e-45, -1e-45, 3.4e38, -3.4e38, -1e38, 1.0, -1.0]
    x = torch.cat((torch.tensor(edges), torch.randn(64 - len(edges)))).to(DEVICE)
    key, again = torch.empty(64, dtype=torch.int32, device=DEVICE), torch.empty_like(x)
    _both_ways[(1,)](x, key, again, N=64)
    assert torch.equal(again, x)
    assert torch.equal(key[:, None] < key, x[:, None] < x)
    assert torch.equal(key[:, None] == key, x[:, None] == x)  # both zeros are one
    assert int(key[1]) == int(getattr(NOTHING, "value", NOTHING))
