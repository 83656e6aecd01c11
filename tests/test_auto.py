"""`auto`: who is opened for a target, what requests mean by the name, and that tokens stay the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from mtp_checkpoints import MTP, save_with_modules
from slipstream import LLM, SamplingParams, SpeculationParams
from slipstream.core.errors import CapacityError, ConfigError, InvalidRequest
from slipstream.drafters import DrafterSpec, parse_merged, register
from slipstream.drafters.auto import auto_specs, expanded
from slipstream.drafters.shipped import HEADS
from slipstream.engine.config import EngineConfig
from slipstream.engine.reasons import SWITCHED_OFF
from slipstream.models.default import default_folder

Open = Callable[..., LLM]

ECHO = [5, 6, 7, 8, 9, 10] * 6


def params(**more: object) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, **more)  # type: ignore[arg-type]


def test_every_target_has_suffix(tiny_target: Path) -> None:
    assert auto_specs(tiny_target, "cpu", {}) == (DrafterSpec("suffix"),)
    assert auto_specs(tiny_target, "cuda", {}) == (DrafterSpec("suffix"),)


def test_it_is_the_default(open_llm: Open) -> None:
    llm = open_llm(planner="fixed")
    assert llm.engine.drafting.default == "auto"
    assert llm.engine.drafting.auto == ("suffix",)
    assert set(llm.generate(ECHO, params())[0].outputs[0].speculation.by_drafter) == {"suffix"}


def test_the_default_model_has_its_head_on_a_gpu_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.drafters.auto._has_modules", lambda folder: False)
    head = DrafterSpec("eagle3", str(HEADS / "eagle3"))
    assert auto_specs(default_folder(), "cpu", {}) == (DrafterSpec("suffix"),)
    assert auto_specs(default_folder(), "cuda", {}) == (DrafterSpec("suffix"), head)


def test_who_names_another_head_has_that_one() -> None:
    own = DrafterSpec("suffix", "?mine")
    assert auto_specs(Path("nowhere"), "cpu", {"suffix": own}) == (own,)


def test_it_stands_among_others() -> None:
    auto = (DrafterSpec("suffix"), DrafterSpec("mtp"))
    specs = parse_merged("ngram+auto+suffix+model:some/path")
    names = [spec.name for spec in expanded(specs, auto)]
    assert names == ["ngram", "suffix", "mtp", "model"]
    assert [spec.name for spec in parse_merged("model:a+b+auto")] == ["model", "auto"]
    with pytest.raises(ConfigError, match="taken"):
        register("auto", "nowhere:Nothing")


def test_the_same_tokens(open_llm: Open, tiny_draft: Path) -> None:
    llm = open_llm(drafter=f"auto+model:{tiny_draft}", planner="fixed")
    plain = llm.generate(ECHO, params(speculation=SpeculationParams(enabled=False)))[0].outputs[0]
    auto = llm.generate(ECHO, params())[0].outputs[0]
    assert auto.token_ids == plain.token_ids
    assert set(auto.speculation.by_drafter) == {"suffix", "model"}
    named = llm.generate(ECHO, params(speculation=SpeculationParams(drafter="auto")))[0].outputs[0]
    assert named.token_ids == plain.token_ids
    assert set(named.speculation.by_drafter) == {"suffix"}


def test_a_prediction_joins_it(open_llm: Open) -> None:
    llm = open_llm(drafter="auto", planner="fixed")
    plain = llm.generate(ECHO, params(speculation=SpeculationParams(enabled=False)))[0].outputs[0]
    guided = llm.generate(ECHO, params(prediction=plain.text))[0].outputs[0]
    assert guided.token_ids == plain.token_ids
    assert {"suffix", "prediction"} <= set(guided.speculation.by_drafter)


def test_requests_know_it_only_where_it_is_loaded(open_llm: Open) -> None:
    llm = open_llm(drafter="ngram")
    with pytest.raises(InvalidRequest, match="auto"):
        llm.generate(ECHO, params(speculation=SpeculationParams(drafter="auto")))


def test_modules_of_the_checkpoint_are_found(tmp_path: Path) -> None:
    folder = save_with_modules(tmp_path / "mtp", MTP["deepseek"])
    assert auto_specs(folder, "cpu", {}) == (DrafterSpec("suffix"), DrafterSpec("mtp"))


def test_the_hard_switch_and_what_the_plan_says(open_llm: Open) -> None:
    llm = open_llm(drafter="auto", planner="adaptive", min_gain=1.05)
    llm.speculates = False
    off = llm.generate(ECHO, params())[0].outputs[0]
    assert off.speculation.drafted == 0
    assert llm.snapshot().decisions["off"] > 0
    assert off.speculation.plan == {"suffix": SWITCHED_OFF}
    assert set(llm.snapshot().plan.values()) == {SWITCHED_OFF}
    llm.speculates = True
    on = llm.generate(ECHO, params())[0].outputs[0]
    assert on.token_ids == off.token_ids
    assert set(on.speculation.plan) <= {"suffix"}
    assert (
        on.speculation.plan == {}
        or "x expected" in on.speculation.plan["suffix"]
        or "off" in on.speculation.plan["suffix"]
    )
    assert on.speculation.measured_gain is None or on.speculation.measured_gain > 0


def test_a_gain_below_one_is_refused(open_llm: Open) -> None:
    with pytest.raises(ConfigError, match=r"min_gain=0\.5"):
        open_llm(min_gain=0.5)


def test_a_gain_is_not_asked_of_drafts_that_are_always_made(open_llm: Open) -> None:
    with pytest.raises(ConfigError, match=r"min_gain=1\.5: must be 1 with planner='fixed'"):
        EngineConfig(planner="fixed", min_gain=1.5)
    EngineConfig(planner="fixed", min_gain=1)
    llm = open_llm(drafter="suffix", planner="fixed")
    stats = llm.generate(ECHO, params())[0].outputs[0].speculation
    assert stats.drafted
    assert (stats.expected_gain, stats.measured_gain) == (None, None), "nothing was measured"


def test_it_is_switched_by_true_and_false_only(open_llm: Open) -> None:
    llm = open_llm(drafter="suffix")
    with pytest.raises(ConfigError, match=r"speculates='no': must be True or False"):
        llm.speculates = "no"  # type: ignore[assignment]
    assert llm.speculates


def test_it_goes_without_those_that_keep_too_much_of_the_cache(open_llm: Open, tmp_path: Path) -> None:
    folder = save_with_modules(tmp_path / "mtp", MTP["deepseek"])
    said: list[str] = []
    llm = open_llm(folder, drafter="auto", max_draft_memory=0.001, on_progress=said.append)
    assert "mtp" not in llm.engine.drafting.drafters
    assert llm.engine.drafting.auto == ("suffix",)
    assert any("auto goes without mtp" in line for line in said)
    assert len(llm.generate(ECHO, params())[0].outputs[0].token_ids) == 24
    with pytest.raises(CapacityError, match="max_draft_memory"):
        open_llm(folder, drafter="mtp", max_draft_memory=0.001)
