"""A warm engine has all that greedy and sampled requests need: nothing is recorded while they are answered."""

from __future__ import annotations

from pathlib import Path

import pytest

from exactness import differences, plain, run
from gpu_scenes import open_on_gpu, save_real_heads, some_cases
from scripted import Answers, Bushy, Right
from slipstream.engine import rounds
from slipstream.models.graphs import recorded

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("often", [1, 1_000_000])
def test_the_same_tokens_and_nothing_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, often: int) -> None:
    monkeypatch.setattr(rounds, "_OFTEN", often)
    target = save_real_heads(tmp_path / "target", 2048)
    batch, answers = some_cases()[:2], Answers()
    with open_on_gpu(target, "bfloat16", drafter=None, graphs=False) as plainly:
        expected = plain(plainly, batch, answers)
    drafters, cold = [Right(answers), Bushy(answers), "ngram"], recorded.graphs
    with open_on_gpu(target, "bfloat16", drafter=drafters, warm_up=True, max_num_seqs=24) as llm:
        before = recorded.graphs
        assert before > cold + 50
        for name in (None, "right", "bushy", "ngram"):
            for alone in (True, False):
                assert not differences(batch, expected, run(llm, batch, name, alone=alone)), name
        if often > 1:
            assert recorded.graphs == before
        else:
            assert recorded.graphs > before, "what comes often gets rounds of its own"
        llm.engine.scheduler.check_integrity()
        assert llm.engine.pool.free_pages == llm.engine.pool.num_pages
