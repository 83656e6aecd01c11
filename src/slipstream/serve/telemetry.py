"""OpenTelemetry traces, for who asks for them: one span a request, with numbers and never a text.

The library is imported only then. Where spans go is said by its own environment variables (`OTEL_…`), or by whoever set
a provider up before.
"""

from __future__ import annotations

import time
from typing import Any

from starlette.types import Scope

from slipstream.core.errors import ConfigError, install
from slipstream.serve.record import Record

_METHODS = ("GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH")


class Tracer:
    """Tells of requests when they are over: it is in nobody's way."""

    def __init__(self) -> None:
        try:
            from opentelemetry import propagate, trace
            from opentelemetry.trace import SpanKind, StatusCode
        except ImportError as error:
            raise ConfigError(f"--otel needs OpenTelemetry: {install('otel')}") from error
        _provide(trace)
        self._propagate = propagate
        self._tracer = trace.get_tracer("slipstream")
        self._server, self._error = SpanKind.SERVER, StatusCode.ERROR

    def tell(self, scope: Scope, record: Record, endpoint: str) -> None:
        """The span of a request that is over; it belongs to the trace that its headers name.

        endpoint: which of ours it asked for, in words of ours: whatever strangers ask for, there are few names.
        """
        headers = {key.decode("latin-1"): value.decode("latin-1") for key, value in scope["headers"]}
        ended = time.time_ns()
        span = self._tracer.start_span(
            f"{_method(record)} {endpoint}",
            context=self._propagate.extract(headers),
            kind=self._server,
            start_time=ended - int(record.seconds * 1e9),
            attributes=_attributes(record),
        )
        if record.status >= 500:
            span.set_status(self._error)
        span.end(ended)


def _provide(trace: Any) -> None:
    """A provider that sends spans where the environment says, unless there is one."""
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    if isinstance(trace.get_tracer_provider(), TracerProvider):
        return
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        raise ConfigError(f"--otel needs an exporter: {install('otel')}") from error
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)


def _method(record: Record) -> str:
    return record.method if record.method in _METHODS else "_OTHER"


def _attributes(record: Record) -> dict[str, str | int | float]:
    told: dict[str, str | int | float] = {
        "http.request.method": _method(record),
        "http.response.status_code": record.status,
        "slipstream.request_id": record.id,
    }
    if record.answers:
        stats = record.speculation
        first = min(answer.timing.first_token_s for answer in record.answers)
        told |= {
            "gen_ai.usage.input_tokens": record.prompt_tokens,
            "gen_ai.usage.output_tokens": record.completion_tokens,
            "gen_ai.latency.time_to_first_token": first,
            "gen_ai.latency.time_in_queue": max(answer.timing.queued_s for answer in record.answers),
            "slipstream.tau": stats.tau,
            "slipstream.drafted": stats.drafted,
            "slipstream.accepted": stats.accepted,
        }
    return told
