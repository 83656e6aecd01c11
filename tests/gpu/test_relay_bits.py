"""All layers in one launch on a GPU: to the bit what the kernels of larger passes compute, time after time."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from relay_scenes import Scene
from slipstream.kernels.relay import RelayShape

pytestmark = pytest.mark.gpu
SMALL = RelayShape(width=576, heads=9, kv_heads=3, head_dim=64, inner=1536)
PASSES: dict[str, dict[str, Any]] = {
    "one row": {"contexts": (300,), "rows": (1,), "most_keys": 512},
    "two rows of one request": {"contexts": (127,), "rows": (2,), "most_keys": 512},
    "two requests": {"contexts": (7, 500), "rows": (1, 1)},
    "a row that is nobody's": {"contexts": (21,), "rows": (1,), "padding": 1},
    "a context in three runs": {"contexts": (1300,), "rows": (1,)},
    "two rows on the border of runs": {"contexts": (511,), "rows": (2,)},
}


@pytest.mark.parametrize("name", PASSES)
def test_the_same_bits_as_layer_by_layer(name: str) -> None:
    scene = Scene(SMALL, layers=30, dtype=torch.bfloat16, **PASSES[name])
    x, delta = scene.by_layers()
    kept = scene.caches()
    unlike = torch.zeros((), dtype=torch.int64, device="cuda")
    scene.forget()
    for _ in range(100):  # a lost race would be rare
        ours, our_delta = scene.relayed(staged=False)
        unlike += (ours != x).any().long() + (our_delta != delta).any().long()
    assert unlike.item() == 0
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(scene.caches(), kept, strict=True))


def test_in_a_graph() -> None:
    scene = Scene(SMALL, layers=30, dtype=torch.bfloat16, contexts=(300,), rows=(1,))
    x, delta = scene.relayed(staged=False)
    scene.layout.tilings.clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ours, our_delta = scene.relayed(staged=False)
    for _ in range(200):
        graph.replay()
    assert torch.equal(ours, x)
    assert torch.equal(our_delta, delta)
