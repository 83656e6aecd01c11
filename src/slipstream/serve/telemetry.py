"""The record of each HTTP request, and its line in the log and its OpenTelemetry span. None has a prompt or a key."""

from __future__ import annotations

import hashlib
import json
import logging
import queue
import secrets
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from starlette.types import Scope, Send

from slipstream.core.errors import ConfigError, install
from slipstream.core.outputs import SpeculationStats, Timing
from slipstream.serve.config import LogFormat

log = logging.getLogger("slipstream.serve")
_PLACE = "slipstream.record"
_MOST_WAITING = 10_000
_LAST_S = 2.0
_DRAINING = 503
"""The status of a server that drains, which is not logged as an error."""


@dataclass(slots=True)
class AnswerRecord:
    """One answer: numbers only."""

    tokens: int = 0
    finish_reason: str | None = None
    timing: Timing = field(default_factory=Timing)
    speculation: SpeculationStats = field(default_factory=SpeculationStats)


@dataclass(slots=True)
class Record:
    """Filled in on the request's way; read by the log, the metrics and the traces.

    user: a hash of the client's name for its user. status: 0 until the answer begins. asked_id: the client's own id of
    the request. ignored: fields that are unknown. unenforced: rules of a schema that its grammar does not hold.
    send: the server's own `send`, for the many events of a stream: past everything that only looks at how it begins.
    """

    id: str = field(default_factory=lambda: secrets.token_hex(12))
    method: str = ""
    path: str = ""
    tenant: str = ""
    body_bytes: int = 0
    user: str = ""
    status: int = 0
    arrived: float = field(default_factory=time.perf_counter)
    answers: list[AnswerRecord] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompts
    streamed: bool = False
    disconnected: bool = False
    error: str | None = None
    asked_id: str = ""
    ignored: list[str] = field(default_factory=list)
    unenforced: Sequence[str] = ()
    send: Send | None = None

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.arrived

    def note_user(self, user: str | None) -> None:
        if user:
            self.user = hashlib.sha256(user.encode("utf-8", "replace")).hexdigest()[:12]

    @property
    def completion_tokens(self) -> int:
        return sum(answer.tokens for answer in self.answers)

    @property
    def first_token_s(self) -> float:
        return min(answer.timing.first_token_s for answer in self.answers)

    @property
    def speculation(self) -> SpeculationStats:
        """Of all answers together."""
        return SpeculationStats.total(answer.speculation for answer in self.answers)

    @staticmethod
    def of(scope: Scope) -> Record:
        found = scope[_PLACE]
        assert isinstance(found, Record)
        return found

    def attach(self, scope: Scope) -> None:
        scope[_PLACE] = self


class JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            entry["trace"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


class PlainLines(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        fields = " ".join(f"{key}={_printable(value)}" for key, value in getattr(record, "fields", {}).items())
        return f"{super().formatMessage(record)} {fields}".rstrip()


def _printable(value: object) -> str:
    """One line without control characters: paths come from clients, and a terminal obeys them."""
    text = str(value)
    return text if text.isprintable() else repr(text)


class QueuedHandler(logging.Handler):
    """Writes records on a thread of its own: a slow reader of stderr must not hold the event loop.

    most: records that may wait; later ones are dropped and counted.
    """

    def __init__(self, target: logging.Handler, most: int = _MOST_WAITING) -> None:
        super().__init__()
        self._target = target
        self._waiting: queue.Queue[logging.LogRecord | None] = queue.Queue(most)
        self._dropped = 0
        self._thread = threading.Thread(target=self._write, name="log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._waiting.put_nowait(record)
        except queue.Full:
            self._dropped += 1

    def close(self) -> None:
        """Write what waits, for a limited time. `logging` calls this when the process ends."""
        with suppress(queue.Full):
            self._waiting.put(None, timeout=_LAST_S)
        self._thread.join(_LAST_S)
        super().close()

    def _write(self) -> None:
        while (record := self._waiting.get()) is not None:
            self._target.handle(record)
            if self._dropped and self._waiting.empty():
                self._target.handle(self._note_of_dropped())

    def _note_of_dropped(self) -> logging.LogRecord:
        self.acquire()
        dropped, self._dropped = self._dropped, 0
        self.release()
        fields = {"fields": {"lines": dropped}}
        return log.makeRecord(log.name, logging.WARNING, "", 0, "log lines dropped", (), None, extra=fields)


def log_to_stderr(form: LogFormat) -> logging.Handler:
    """Send the log of Slipstream to stderr."""
    target = logging.StreamHandler(sys.stderr)
    target.setFormatter(JsonLines() if form == "json" else PlainLines())
    handler = QueuedHandler(target)
    root = logging.getLogger("slipstream")
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    return handler


def log_failure(record: Record, error: Exception) -> None:
    """Log the traceback of an internal error."""
    log.error("failed", exc_info=error, extra={"fields": {"request_id": record.id}})


def log_request(record: Record) -> None:
    fields: dict[str, Any] = {
        "request_id": record.id,
        "method": record.method,
        "path": record.path,
        "status": record.status,
        "ms": round(record.seconds * 1000, 1),
    }
    optional = {"client_request_id": record.asked_id, "tenant": record.tenant, "user": record.user}
    fields |= {key: value for key, value in optional.items() if value}
    if record.answers:
        fields["prompt_tokens"] = record.prompt_tokens
        fields["completion_tokens"] = record.completion_tokens
        fields["first_token_ms"] = round(record.first_token_s * 1000, 1)
        fields["finish"] = ",".join(dict.fromkeys(str(a.finish_reason) for a in record.answers))
        fields["tau"] = round(record.speculation.tau, 2)
    if record.disconnected:
        fields["disconnected"] = True
    if record.error is not None:
        fields["error"] = record.error
    level = logging.ERROR if record.status >= 500 and record.status != _DRAINING else logging.INFO
    log.log(level, "request", extra={"fields": fields})


_METHODS = ("GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH")


class Tracer:
    """One OpenTelemetry span a request, made when the request is over.

    The library's own environment variables (`OTEL_…`), or a provider that is set up already, say where spans go.
    """

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

    def trace(self, scope: Scope, record: Record, endpoint: str) -> None:
        """A span in the trace that the request's headers name. endpoint: a known path, or "other"."""
        headers = {key.decode("latin-1"): value.decode("latin-1") for key, value in scope["headers"]}
        method = record.method if record.method in _METHODS else "_OTHER"
        attributes: dict[str, str | int | float] = {
            "http.request.method": method,
            "http.response.status_code": record.status,
            "slipstream.request_id": record.id,
        }
        if record.answers:
            stats = record.speculation
            attributes |= {
                "gen_ai.usage.input_tokens": record.prompt_tokens,
                "gen_ai.usage.output_tokens": record.completion_tokens,
                "gen_ai.latency.time_to_first_token": record.first_token_s,
                "gen_ai.latency.time_in_queue": max(answer.timing.queued_s for answer in record.answers),
                "slipstream.tau": stats.tau,
                "slipstream.drafted": stats.drafted,
                "slipstream.accepted": stats.accepted,
            }
        ended = time.time_ns()
        span = self._tracer.start_span(
            f"{method} {endpoint}",
            context=self._propagate.extract(headers),
            kind=self._server,
            start_time=ended - int(record.seconds * 1e9),
            attributes=attributes,
        )
        if record.status >= 500:
            span.set_status(self._error)
        span.end(ended)


def _provide(trace: Any) -> None:
    """Set a provider that sends spans where the environment says, unless there is one."""
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
