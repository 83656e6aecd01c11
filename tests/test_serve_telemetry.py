"""Traces, for who asks for them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import httpx
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from serving import MODEL, serving
from slipstream import LLM

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_a_span_a_request(open_llm: Callable[..., LLM]) -> None:
    spans = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    trace.set_tracer_provider(provider)
    with serving(open_llm(), telemetry=True) as server:
        body = {"model": MODEL, "prompt": "XSECRET", "max_tokens": 9, "ignore_eos": True}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, headers={"traceparent": PARENT})
        httpx.post(f"{server.url}/v1/completions", json={"nonsense": "XSECRET"})
    finished = spans.get_finished_spans()  # newer versions of FastAPI have some of their own
    good, bad = [span for span in finished if getattr(span.instrumentation_scope, "name", "") == "slipstream"]
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
    assert not any("XSECRET" in span.to_json() for span in finished)


def test_it_is_not_imported_unless_asked_for() -> None:
    code = "import sys, slipstream.serve.server; print('opentelemetry.sdk' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.strip() == "False"
