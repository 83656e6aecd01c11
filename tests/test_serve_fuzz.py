"""Requests of all kinds, made up from the server's own description: none of them may find a fault in the server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.result import Ok

from serving import MODEL, serving
from slipstream import LLM
from slipstream.serve.server import HttpServer

PATHS = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/models",
    "/v1/models/{model}",
    "/tokenize",
    "/detokenize",
    "/health",
    "/ping",
    "/metrics",
    "/live",
    "/version",
)


@pytest.fixture(scope="module")
def server(tiny_target: Path) -> Iterator[HttpServer]:
    with LLM(tiny_target, device="cpu", max_num_seqs=8, memory="64MiB") as llm:
        with serving(llm) as made:
            yield made
        assert llm.engine.pool.free_pages == llm.engine.pool.num_pages


@pytest.fixture(scope="module")
def operations(server: HttpServer) -> dict[str, Any]:
    described = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    return {one.ok().path: one.ok() for one in described.get_all_operations() if isinstance(one, Ok)}


def test_all_endpoints_are_described(operations: dict[str, Any]) -> None:
    assert set(operations) == set(PATHS)


@pytest.mark.parametrize("mode", list(GenerationMode))
@pytest.mark.parametrize("path", PATHS)
def test_nothing_breaks_it(operations: dict[str, Any], path: str, mode: GenerationMode) -> None:
    examples = 25 if operations[path].body else 5

    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(operations[path].as_strategy(generation_mode=mode))
    def ask(case: Any) -> None:
        if isinstance(case.body, dict) and "model" in case.body:
            case.body["model"] = MODEL  # beyond the first check
        if path == "/live":
            case.query = {}  # as a stream it goes on for ever
        case.call_and_validate(checks=[not_a_server_error], timeout=30)

    if mode is GenerationMode.POSITIVE or operations[path].body:
        ask()
