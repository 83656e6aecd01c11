"""Requests of all kinds, made up from the server's own description, and many clients for minutes."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.result import Ok

from conftest import save_model, tiny_llama
from serving import MODEL, serving
from slipstream import LLM
from slipstream.serve.server import HttpServer
from test_async import everything_is_free

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


STREAMS = 64


SECONDS = os.environ.get("SLIPSTREAM_SOAK_S", "300")


CLIENT = Path(__file__).with_name("soak_client.py")


@pytest.mark.soak
def test_sixty_four_streams_for_minutes(tmp_path: Path, open_llm: Callable[..., LLM]) -> None:
    folder = save_model(tmp_path / "soak", tiny_llama(max_position_embeddings=1024))
    llm = open_llm(folder, max_num_seqs=32, drafter=["ngram", "suffix"])
    with serving(llm) as server:
        command = [sys.executable, str(CLIENT), server.url, str(STREAMS), SECONDS]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        everything_is_free(llm)
    told = json.loads(done.stdout.splitlines()[-1])
    steady = told["first_token_s"][STREAMS:]  # the first met an engine that had computed nothing yet
    middle, slowest = statistics.median(steady), max(steady)
    print(
        f"{len(steady)} requests, {told['tokens']} tokens, first token median {middle:.3f} s, slowest {slowest:.3f} s"
    )
    assert slowest < 5 * middle
