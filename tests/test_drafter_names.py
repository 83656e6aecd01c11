"""One name for one thing: a drafter is asked for, reported and missed under the name that its user wrote."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

import eagle_scenes
from serving import client_of, serving
from slipstream import LLM, SamplingParams, SpeculationParams
from slipstream.core.errors import ConfigError, InvalidRequest, ModelNotFound
from slipstream.core.vllm_names import from_vllm
from slipstream.drafters import loaded_as

OpenLLM = Callable[..., LLM]


def asked(llm: LLM, drafter: str | None) -> set[str]:
    """Who drafted for a request that asks for this one."""
    params = SamplingParams(
        temperature=0, max_tokens=12, ignore_eos=True, speculation=SpeculationParams(drafter=drafter, origins=True)
    )
    output = llm.generate([[5, 6, 7, 5, 6, 7, 5, 6]], params)[0].outputs[0]
    told = {name for origin in output.origins or () for name in origin.drafters}
    drafted = {name for name, stats in output.speculation.by_drafter.items() if stats.drafted}
    assert told <= drafted
    return drafted


@pytest.mark.parametrize("rounds", ["eager", "queued"])
@pytest.mark.parametrize("name", ["eagle3", "eagle"])
def test_it_is_shown_as_it_was_written(name: str, rounds: str, open_llm: OpenLLM, tmp_path: Path) -> None:
    head = eagle_scenes.eagle3().write(tmp_path / "head")
    llm = open_llm(drafter=f"{name}:{head}?depth=2", planner="fixed", rounds=rounds)
    for wanted in (None, "eagle", "eagle3"):  # both are names for it
        assert asked(llm, wanted) == {name}
    assert {found.name for found in llm.engine.drafting.drafters.values()} == {name, "prediction", "grammar"}
    assert set(llm.snapshot().drafters) == {name, "prediction", "grammar"}
    with pytest.raises(InvalidRequest, match=f"'medusa' is not loaded: must be one of {name}, prediction, grammar"):
        asked(llm, "medusa")
    with pytest.raises(InvalidRequest, match="must name each drafter once"):
        asked(llm, "eagle+eagle3")


def test_over_http_too(open_llm: OpenLLM, tmp_path: Path) -> None:
    head = eagle_scenes.eagle3().write(tmp_path / "head")
    llm = open_llm(drafter=f"eagle3:{head}?depth=2", planner="fixed")
    with serving(llm) as server:
        client = client_of(server)
        for wanted in ("eagle3", "eagle"):
            speculation = {"drafter": wanted, "report": True, "origins": True}
            answer = client.completions.create(
                model="tiny", prompt=[5, 6, 7], max_tokens=8, extra_body={"speculation": speculation}
            )
            report = answer.choices[0].model_dump()["speculation"]
            assert set(report["drafters"]) == {"eagle3"}
        metrics = client.with_options(base_url=server.url).get("/metrics", cast_to=str)
        assert 'drafter="eagle3"' in metrics
        assert 'drafter="eagle"' not in metrics


def test_merged_names_are_those_that_were_loaded() -> None:
    assert loaded_as("ngram+model+auto", ("ngram", "draft")) == "ngram+draft+auto"
    assert loaded_as("eagle3", ("ngram",)) == "eagle3"


def test_vllm_names_stay_ours() -> None:
    assert from_vllm({"method": "eagle3", "model": "some/where"}).drafter == "eagle3:some/where"
    with pytest.raises(ConfigError, match=r"method=\['ngram'\] must be a text"):
        from_vllm({"method": ["ngram"]})


@pytest.mark.parametrize("name", ["model", "draft", "eagle3", "medusa"])
def test_missing_weights_name_the_drafter(name: str, open_llm: OpenLLM, tmp_path: Path) -> None:
    path = f"{tmp_path}/nowhere"
    expected = f"drafter='{name}:{path}': '{path}': no such folder or file. Give NAME:PATH with the folder"
    with pytest.raises(ModelNotFound, match=re.escape(expected)):
        open_llm(drafter=f"{name}:{path}")
