"""All layers in one launch on a GPU: to the bit what the kernels of larger passes compute, time after time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import save_model, tiny_llama
from relay_scenes import SMALL, Scene
from slipstream import LLM, SamplingParams, SpeculationParams
from slipstream.drafters.model import ModelDrafter
from slipstream.models.gpu import GpuTrunk

pytestmark = pytest.mark.gpu
PASSES: dict[str, dict[str, Any]] = {
    "one row": {"contexts": (300,), "rows": (1,), "most_keys": 512},
    "two rows of one request": {"contexts": (127,), "rows": (2,), "most_keys": 512},
    "two requests": {"contexts": (7, 500), "rows": (1, 1)},
    "a row that is nobody's": {"contexts": (21,), "rows": (1,), "padding": 1},
    "a context in three runs": {"contexts": (1300,), "rows": (1,)},
    "two rows on the border of runs": {"contexts": (511,), "rows": (2,)},
    "room for runs that are not there": {"contexts": (90,), "rows": (2,), "most_keys": 8192},
}


@pytest.mark.parametrize("name", PASSES)
def test_the_same_bits_as_layer_by_layer(name: str) -> None:
    scene = Scene(SMALL, layers=30, dtype=torch.bfloat16, **PASSES[name])
    x, delta = scene.by_layers()
    kept = scene.caches()
    unlike = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(100):  # a lost race would be rare
        scene.forget()  # else what is read too early is there all the same
        ours, our_delta = scene.relayed(staged=False)
        unlike += (ours != x).any().long() + (our_delta != delta).any().long()
    assert unlike.item() == 0
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(scene.caches(), kept, strict=True))


def test_in_a_graph() -> None:
    scene = Scene(SMALL, layers=30, dtype=torch.bfloat16, contexts=(300,), rows=(1,))
    x, delta = scene.relayed(staged=False)
    scene.layout.tables.clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ours, our_delta = scene.relayed(staged=False)
    unlike = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(200):
        scene.forget()
        graph.replay()
        unlike += (ours != x).any().long() + (our_delta != delta).any().long()
    assert unlike.item() == 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_an_engine_gives_the_same_tokens_without(tmp_path: Path, dtype: str) -> None:
    """By itself, in draft loops, in rounds of one and two rows."""
    config = tiny_llama(
        hidden_size=SMALL.width,
        intermediate_size=SMALL.inner,
        num_attention_heads=SMALL.heads,
        num_key_value_heads=SMALL.kv_heads,
        head_dim=SMALL.head_dim,
        max_position_embeddings=1024,
        initializer_range=0.05,
    )
    path = save_model(tmp_path / "small", config)
    prompts = [[30 + i % 200 for i in range(n)] for n in (5, 40, 300)]
    params = SamplingParams(temperature=1.0, max_tokens=40, ignore_eos=True, seed=3)
    answers = []
    for relayed in (True, False):
        with LLM(path, drafter=f"model:{path}", device="cuda", dtype=dtype, memory="1GiB", planner="fixed") as llm:
            trunks = [m for m in llm.engine.target.model.modules() if isinstance(m, GpuTrunk)]
            drafter = llm.engine.drafting.drafters["model"]
            assert isinstance(drafter, ModelDrafter)
            trunks += [m for m in drafter.runner.model.modules() if isinstance(m, GpuTrunk)]
            assert [trunk._relayed is not None for trunk in trunks] == [True, True]
            for trunk in trunks:
                if not relayed:
                    trunk._relayed = None
            for speculation in (SpeculationParams(enabled=False), SpeculationParams(drafter="model")):
                wanted = replace(params, speculation=speculation)
                answers += [[llm.generate([p], wanted)[0].outputs[0].token_ids for p in prompts]]
                answers += [[o.outputs[0].token_ids for o in llm.generate(prompts[:2], wanted)] + [answers[-1][2]]]
            agreed = {
                rows for trunk in trunks if trunk._relayed for rows, same in trunk._relayed._agrees.items() if same
            }
            assert agreed == ({1, 2} if relayed else set())
    assert all(found == answers[0] for found in answers)
