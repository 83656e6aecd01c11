"""The sampling kernels at real sizes on a real GPU, and what only a GPU can show: no waiting, and captured graphs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fused_cases import Case
from slipstream.core.params import SamplingParams
from slipstream.sampling import Features, choose

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
WISHES = [
    SamplingParams(temperature=0),
    SamplingParams(),
    SamplingParams(top_p=0.95),
    SamplingParams(temperature=2, top_p=0.99),
    SamplingParams(temperature=50, top_p=0.7),  # nearly flat: long lists
    SamplingParams(top_k=50),
    SamplingParams(temperature=0.2, top_k=40, top_p=0.9),
    SamplingParams(top_k=20_000, top_p=0.999),
    SamplingParams(min_p=0.05),
    SamplingParams(top_p=0.9, min_p=0.02),
]
ALL_FEATURES = Features(greedy=True, sampled=True, top_k=True, top_p=True, min_p=True)


def some_logits(kind: str, rows: int, vocab_size: int) -> Tensor:
    logits = torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(vocab_size))
    if kind == "bf16":
        return (logits * 3).to(torch.bfloat16).float()  # thousands of ties
    return torch.zeros_like(logits) if kind == "equal" else logits * {"usual": 3.0, "flat": 1.0, "peaked": 12.0}[kind]


@pytest.mark.parametrize("vocab_size", [49_152, 151_936, 152_000])
@pytest.mark.parametrize("kind", ["usual", "bf16", "flat", "peaked", "equal"])
def test_tokens_are_the_twins(vocab_size: int, kind: str) -> None:
    Case(some_logits(kind, 2 * len(WISHES), vocab_size), WISHES).check()


def test_neither_company_nor_repetition_changes_a_token() -> None:
    case = Case(some_logits("bf16", 256, 49_152), WISHES)
    together = case.fused()
    assert together == case.fused(features=ALL_FEATURES) == case.fused(chunk=512)
    assert together[:40] == [case.alone(row) for row in range(40)]


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature")
def test_no_wait_and_the_same_tokens_in_a_graph() -> None:
    case = Case(some_logits("usual", len(WISHES), 151_936), WISHES)
    table, rows = case.table(CUDA), case.rows(CUDA)
    logits = torch.empty(case.logits.shape, device=CUDA)
    logits.copy_(case.logits.flip(0))
    choose(logits, rows, table, ALL_FEATURES)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = choose(logits, rows, table, ALL_FEATURES)
    logits.copy_(case.logits)
    for _ in range(3):
        graph.replay()
        assert tokens.tolist() == case.fused()
    torch.cuda.set_sync_debug_mode("error")
    try:
        chosen = choose(logits, rows, table, ALL_FEATURES)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert chosen.tolist() == case.fused()
