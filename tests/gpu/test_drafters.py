"""Every drafter on a GPU: the same tokens, chains and trees, captured or not, in bf16 and fp32, by either verifier."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import eagle_scenes
from exactness import differences, plain, run
from gpu_scenes import open_on_gpu, some_cases
from medusa_checkpoints import chained_medusa, tiny_medusa
from mtp_checkpoints import MTP, save_with_modules
from shared_drafts import tiny_shared
from slipstream import SamplingParams, SpeculationParams
from test_feature_drafter import Levelling

pytestmark = pytest.mark.gpu

Spec = Callable[[Path, Path], str]
"""From the folders of a draft model and of heads to a drafter as users name it."""
SPECS: dict[str, Spec] = {
    "suffix": lambda draft, heads: "suffix",
    "lookahead": lambda draft, heads: "lookahead",
    "eagle1 chain": lambda draft, heads: f"eagle:{heads / 'eagle1'}?width=1&depth=4",
    "eagle3 tree": lambda draft, heads: f"eagle:{heads / 'eagle3'}",
    "eagle3 small tree": lambda draft, heads: f"eagle:{heads / 'eagle3'}?width=3&depth=3&nodes=9",
    "eagle3 in 8 bits": lambda draft, heads: f"eagle:{heads / 'eagle3'}?weights=fp8",
    "medusa": lambda draft, heads: f"medusa:{heads / 'medusa'}",
    "chained medusa": lambda draft, heads: f"medusa:{heads / 'chained'}",
    "suffix and chained medusa": lambda draft, heads: f"suffix+medusa:{heads / 'chained'}?width=4",
    "ngram and model": lambda draft, heads: f"ngram+model:{draft}",
    "a draft that shares embeddings": lambda draft, heads: f"model:{heads / 'shared'}",
    "suffix and eagle": lambda draft, heads: f"suffix+eagle:{heads / 'eagle3'}",
}


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("heads")
    eagle_scenes.eagle1().write(folder / "eagle1")
    eagle_scenes.eagle3().write(folder / "eagle3")
    tiny_medusa(folder / "medusa")
    chained_medusa(folder / "chained", noise=0.05)
    tiny_shared(folder / "shared")
    return folder


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("spec", SPECS)
def test_the_same_tokens(spec: str, dtype: str, tiny_target: Path, tiny_draft: Path, heads: Path) -> None:
    """Alone and in a batch, with graphs and without; and as many guesses are right with them as without."""
    drafter = SPECS[spec](tiny_draft, heads)
    batch = some_cases()
    accepted: list[list[int]] = []
    for graphs in (False, True):
        with open_on_gpu(tiny_target, dtype, drafter=drafter, graphs=graphs) as llm:
            expected = plain(llm, batch)
            name = llm.engine.drafting.default
            got = run(llm, batch, name)
            assert not differences(batch, expected, got)
            alone = run(llm, batch[:3], name, alone=True)
            assert not differences(batch[:3], expected[:3], alone)
            assert sum(output.speculation.drafted for output in got) > 0
            accepted.append([output.speculation.accepted for output in alone])
            llm.engine.scheduler.check_integrity()
    assert accepted[0] == accepted[1]


@pytest.mark.parametrize("graphs", [False, True])
def test_trees_of_all_levels(graphs: bool, tiny_target: Path, heads: Path) -> None:
    """Another number of levels in every round, each recorded by itself."""
    batch, planner = some_cases(), Levelling()
    with open_on_gpu(tiny_target, "bfloat16", drafter=f"eagle:{heads / 'eagle3'}", graphs=graphs) as llm:
        expected = plain(llm, batch)
        llm.engine.drafting.planner = planner
        got = run(llm, batch, llm.engine.drafting.default)
        assert not differences(batch, expected, got)
        llm.engine.scheduler.check_integrity()
    assert set(planner.asked) == {1, 2, 4, 6, 8, 10}
    assert not any(drafter.failures for output in got for drafter in output.speculation.by_drafter.values())


@pytest.mark.parametrize("family", ["glm", "mimo"])
def test_a_target_that_brings_its_own_modules(family: str, tmp_path: Path) -> None:
    target = save_with_modules(tmp_path / "target", MTP[family])
    prompts = [[5 + i] * (4 + 7 * i) for i in range(3)]
    params = SamplingParams(temperature=0.8, seed=4, max_tokens=24, ignore_eos=True)
    with open_on_gpu(target, "float32", drafter="mtp") as llm:
        off = llm.generate(prompts, replace(params, speculation=SpeculationParams(enabled=False)))
        on = llm.generate(prompts, params)
    assert [o.outputs[0].token_ids for o in on] == [o.outputs[0].token_ids for o in off]
    assert sum(o.outputs[0].speculation.drafted for o in on) > 0


@pytest.mark.parametrize("spec", ["ngram and model", "eagle3 tree"])
def test_requests_of_both_verifiers_in_one_batch(spec: str, tiny_target: Path, tiny_draft: Path, heads: Path) -> None:
    """Greedy ones and those of the exact rule keep their tokens beside one that is judged by rejection."""
    rule = SpeculationParams(verifier="rejection")
    greedy, sampled = (SamplingParams(temperature=t, seed=5, max_tokens=24, ignore_eos=True) for t in (0, 1))
    asked = [greedy, replace(greedy, speculation=rule), sampled, replace(sampled, speculation=rule)]
    prompts = [[7, 8, 9] * 4] * len(asked)
    with open_on_gpu(tiny_target, "bfloat16", drafter=SPECS[spec](tiny_draft, heads)) as llm:
        plainly = [
            llm.generate([prompts[0]], replace(p, speculation=SpeculationParams(enabled=False)))[0].outputs[0].token_ids
            for p in (greedy, sampled)
        ]
        got = [output.outputs[0] for output in llm.generate(prompts, asked)]
    assert [output.token_ids for output in got[:3]] == [plainly[0], plainly[0], plainly[1]]
    assert len(got[3].token_ids) == 24
