"""docs/extending.md is right: its code makes a drafter that works, by name, merged, and in both engines."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import slipstream
from slipstream import LLM, SamplingParams, SpeculationParams, drafters

PAGE = Path(slipstream.__file__).parents[2] / "docs" / "extending.md"
PARAMS = SamplingParams(temperature=1.0, seed=5, max_tokens=40, ignore_eos=True, logit_bias={10: 8.0, 20: 8.0, 30: 8.0})


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch, tiny_target: Path) -> dict[str, Any]:
    """What the page's code leaves behind, run from top to bottom with a tiny model for the default one."""
    monkeypatch.setattr(drafters, "_entries", dict(drafters._entries))
    code = "\n".join(re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE))
    assert code.count('"default"') == 1
    names: dict[str, Any] = {"__name__": "followers"}
    future, rest = "from __future__ import annotations\n", code.replace('"default"', repr(str(tiny_target)))
    exec(compile(future + rest.replace(future, ""), str(PAGE), "exec"), names)
    return names


def test_the_page_runs(capsys: pytest.CaptureFixture[str], page: dict[str, Any]) -> None:
    assert "DrafterStats(drafts=" in capsys.readouterr().out
    stats = page["drafted"].speculation.by_drafter["followers"]
    assert (stats.failures, stats.drafts > 0, stats.drafted > 0) == (0, True, True)
    assert drafters.drafter_factory("followers") is page["FollowersDrafter"]


@pytest.mark.parametrize("rounds", ["eager", "queued"])
@pytest.mark.parametrize("drafter", ["followers", "followers+ngram"])
def test_its_drafter_is_exact_and_right_now_and_then(
    page: dict[str, Any], open_llm: Callable[..., LLM], rounds: str, drafter: str
) -> None:
    llm = open_llm(drafter=drafter, planner="fixed", rounds=rounds)
    prompts = [[10, 20, 30, 10, 20], [30, 10, 30, 10], [20]]
    off = replace(PARAMS, speculation=SpeculationParams(enabled=False))
    plain = [output.outputs[0].token_ids for output in llm.generate(prompts, off)]
    got = [output.outputs[0] for output in llm.generate(prompts, PARAMS)]
    assert [answer.token_ids for answer in got] == plain
    for answer in got:
        stats = answer.speculation.by_drafter["followers"]
        assert stats.failures == 0
        assert 0 < stats.accepted < stats.drafted
