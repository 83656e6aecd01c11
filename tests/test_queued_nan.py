"""Numbers that are not finite in queued rounds: they end the request that is to blame, and nobody else."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from queueing import OFF, PARAMS, Echo, Letters
from slipstream import LLM
from slipstream.core.draft import Tree
from slipstream.drafters.base import DraftRequest, DraftRound
from slipstream.drafters.heads import FeatureDrafter
from tiny_heads import RandomHead

BAD = 13


class Heads(FeatureDrafter):
    """A random head, right by luck now and then."""

    name: ClassVar[str] = "heads"


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path) -> Path:
    """Reading one of its tokens gives NaN."""
    folder = tmp_path_factory.mktemp("models") / "poisoned"
    shutil.copytree(tiny_target, folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][BAD] = torch.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(autouse=True)
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check at load refuses weights with NaN."""
    monkeypatch.setattr("slipstream.models.parity._check_finite", lambda *_: None)


class TestNaN:
    SOUND = replace(PARAMS, logit_bias={BAD: -1e6})

    @pytest.mark.parametrize("drafter", [None, "echo", "letters"])
    def test_it_fails_one_request_and_no_other(
        self, open_llm: Callable[..., LLM], poisoned: Path, drafter: str | None
    ) -> None:
        made = {"echo": Echo(), "letters": Letters()}.get(drafter or "")
        llm = open_llm(poisoned, drafter=made, rounds="queued", planner="fixed")
        good = [[20 + i] * (3 + 4 * i) for i in range(3)]
        params = [replace(self.SOUND, seed=i, n=1 + i % 2) for i in range(3)]
        want = [[a.token_ids for a in o.outputs] for o in llm.generate(good, params)]
        says_it = replace(PARAMS, logit_bias={BAD: 1e6})
        outputs = llm.generate(
            [good[0], [1, BAD], good[1], [7, 7], good[2]], [params[0], PARAMS, params[1], says_it, params[2]]
        )
        assert [[a.token_ids for a in outputs[i].outputs] for i in (0, 2, 4)] == want
        for at, tokens in ((1, []), (3, [BAD])):
            (answer,) = outputs[at].outputs
            assert answer.finish_reason == "error"
            assert "no usable logits (NaN" in (answer.error or "")
            assert answer.token_ids == tokens
        for layer in range(len(llm.engine.cache.layers)):
            keys = llm.engine.cache.keys(layer)[: -llm.engine.config.page_size]  # the last page is nobody's
            assert not keys.isnan().any()
        assert [[a.token_ids for a in o.outputs] for o in llm.generate(good, params)] == want

    @pytest.mark.parametrize("rounds", ["eager", "queued"])
    @pytest.mark.parametrize("shape", [{"depth": 4}, {"depth": 3, "width": 3, "nodes": 12}], ids=["chain", "tree"])
    def test_a_head_forgets_it_too(
        self, open_llm: Callable[..., LLM], poisoned: Path, rounds: str, shape: dict[str, int]
    ) -> None:
        """A head reads the target's states, so what was not finite there is not in its own cache."""
        drafter = Heads(RandomHead(), **shape)
        llm = open_llm(poisoned, drafter=drafter, rounds=rounds, planner="fixed", memory="2MiB", max_model_len=32)
        good = [[20 + i] * (3 + 4 * i) for i in range(3)]
        params = [replace(self.SOUND, seed=i, max_tokens=12) for i in range(3)]
        want = llm.generate(good, params)
        for _ in range(3):  # pages go round
            bad = llm.generate([[1, BAD, 5, 6], [9] * 20, [BAD] * 17], replace(self.SOUND, max_tokens=8))
            assert [o.outputs[0].finish_reason for o in bad] == ["error", "length", "error"]
        assert drafter._cache is not None
        assert not any(plane.isnan().any() for plane in drafter._cache.planes)
        got = llm.generate(good, params)
        assert [o.outputs[0].token_ids for o in got] == [o.outputs[0].token_ids for o in want]
        assert [o.outputs[0].speculation.accepted for o in got] == [o.outputs[0].speculation.accepted for o in want]

    def check_drafts_change_nothing(self, llm: LLM) -> None:
        prompts = [[1, 2, 3], [4]]
        plainly = llm.generate(prompts, replace(self.SOUND, speculation=OFF))
        got = llm.generate(prompts, self.SOUND)
        assert [o.outputs[0].token_ids for o in got] == [o.outputs[0].token_ids for o in plainly]
        assert all(o.outputs[0].error is None and o.outputs[0].speculation.drafted for o in got)

    @pytest.mark.parametrize("tree", [Tree.chain([BAD]), Tree((BAD, 5, 6), (-1, -1, 1)), Tree.chain([5, BAD, 6])])
    def test_a_guess_that_is_not_finite_changes_nothing(
        self, open_llm: Callable[..., LLM], poisoned: Path, tree: Tree
    ) -> None:
        class Guess(Letters):
            def propose(self, requests: Sequence[DraftRequest], budget: Sequence[int]) -> Sequence[Tree]:
                return [tree if nodes >= len(tree) else Tree() for nodes in budget]

        llm = open_llm(poisoned, drafter=Guess(), rounds="queued", planner="fixed")
        self.check_drafts_change_nothing(llm)

    def test_nor_does_one_of_the_device(self, open_llm: Callable[..., LLM], poisoned: Path) -> None:
        """The next round is in flight already when the host hears that this one came to nothing."""

        class Poison(Echo):
            def draft(self, round: DraftRound) -> Tensor:
                return super().draft(round) * 0 + BAD

        llm = open_llm(poisoned, drafter=Poison(), rounds="queued", planner="fixed")
        self.check_drafts_change_nothing(llm)
