"""Forms with a real vocabulary of 49,152: valid answers, the tokens of plain decoding, and forced tokens that hold."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jsonschema
import pytest

from slipstream import LLM, SamplingParams, SpeculationParams, StructuredOutputsParams

pytestmark = pytest.mark.slow

COUNTRY: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "capital": {"type": "string", "maxLength": 20},
        "population_in_millions": {"type": "integer", "minimum": 0, "maximum": 2000},
        "continent": {"enum": ["Europe", "Asia", "Africa", "North America", "South America", "Oceania"]},
        "is_member_of_the_united_nations": {"type": "boolean"},
    },
    "required": ["name", "capital", "population_in_millions", "continent", "is_member_of_the_united_nations"],
}

ASKED = f"Describe France as a JSON object with the keys {', '.join(COUNTRY['required'])}."


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("default", drafter="ngram", device="cpu", memory="256MiB", max_model_len=512, planner="fixed") as llm:
        yield llm


@pytest.mark.parametrize("free", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_json_of_a_schema(llm: LLM, temperature: float, free: bool) -> None:
    form = StructuredOutputsParams(json=COUNTRY, disable_any_whitespace=not free)
    params = SamplingParams(temperature=temperature, seed=2, max_tokens=200, structured_outputs=form)
    asked = llm.chat_prompt([{"role": "user", "content": ASKED}])
    plain = llm.generate([asked], replace(params, speculation=SpeculationParams(enabled=False)))[0].outputs[0]
    drafted = llm.generate([asked], params)[0].outputs[0]
    assert drafted.token_ids == plain.token_ids
    assert drafted.finish_reason == "stop"
    jsonschema.validate(json.loads(drafted.text), COUNTRY)
    forced = drafted.speculation.by_drafter["grammar"]
    assert forced.alpha > 0.5
    assert drafted.speculation.tau > (1.1 if free else 2)
