"""Traces, for who asks for them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from serving import MODEL, serving
from slipstream import LLM
from slipstream.serve.config import ApiKey

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture(scope="module")
def exporter() -> InMemorySpanExporter:
    """What was told; the library takes one provider a process."""
    spans = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    trace.set_tracer_provider(provider)
    return spans


@pytest.fixture
def spans(exporter: InMemorySpanExporter) -> InMemorySpanExporter:
    exporter.clear()
    return exporter


def of_ours(spans: InMemorySpanExporter) -> list[Any]:
    """Newer versions of FastAPI have some of their own."""
    return [s for s in spans.get_finished_spans() if getattr(s.instrumentation_scope, "name", "") == "slipstream"]


def test_strangers_make_no_names(open_llm: Callable[..., LLM], spans: InMemorySpanExporter) -> None:
    with serving(open_llm(), telemetry=True, keys=(ApiKey.of("a-good-key"),)) as server:
        known = {"Authorization": "Bearer a-good-key"}
        for i in range(3):
            assert httpx.get(f"{server.url}/secret/{i}").status_code == 401
            assert httpx.get(f"{server.url}/secret/{i}", headers=known).status_code == 404
            assert httpx.get(f"{server.url}/v1/models/m{i}", headers=known).status_code == 404
            assert httpx.get(f"{server.url}/live?every=x{i}", headers=known).status_code == 400
            assert httpx.request("PROPFIND", f"{server.url}/v1/models", headers=known).status_code == 405
        metrics = httpx.get(f"{server.url}/metrics", headers=known).text
    names = {span.name for span in of_ours(spans)}
    assert names == {"GET other", "GET /v1/models/{model}", "GET /live", "_OTHER /v1/models", "GET /metrics"}
    assert "secret" not in metrics


def test_a_span_a_request(open_llm: Callable[..., LLM], spans: InMemorySpanExporter) -> None:
    with serving(open_llm(), telemetry=True) as server:
        body = {"model": MODEL, "prompt": "XSECRET", "max_tokens": 9, "ignore_eos": True}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, headers={"traceparent": PARENT})
        httpx.post(f"{server.url}/v1/completions", json={"nonsense": "XSECRET"})
    good, bad = of_ours(spans)
    assert good.attributes is not None
    assert bad.attributes is not None
    assert good.name == "POST /v1/completions"
    assert good.context is not None
    assert f"{good.context.trace_id:032x}" == PARENT.split("-")[1]
    assert good.attributes["gen_ai.usage.output_tokens"] == 9
    assert good.attributes["slipstream.request_id"] == answer.headers["x-request-id"]
    assert good.start_time is not None
    assert good.end_time is not None
    assert good.end_time > good.start_time
    assert bad.attributes["http.response.status_code"] == 400
    assert not any("XSECRET" in span.to_json() for span in spans.get_finished_spans())


def test_it_is_not_imported_unless_asked_for() -> None:
    code = "import sys, slipstream.serve.server; print('opentelemetry.sdk' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.strip() == "False"
