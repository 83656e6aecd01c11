"""The server's log: one line a request, for people or as JSON. Never a prompt, an answer or a key."""

from __future__ import annotations

import json
import logging
import queue
import sys
import threading
import time
from contextlib import suppress
from typing import Any

from slipstream.serve.config import LogFormat
from slipstream.serve.record import Record

log = logging.getLogger("slipstream.serve")
_MOST_WAITING = 10_000
_LAST_S = 2.0
_ENDING = 503
"""What a server answers that was told to end: nothing is wrong with it."""


class JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        told: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            told["trace"] = self.formatException(record.exc_info)
        return json.dumps(told, ensure_ascii=False)


class PlainLines(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        fields = " ".join(f"{key}={_printable(value)}" for key, value in getattr(record, "fields", {}).items())
        return f"{super().formatMessage(record)} {fields}".rstrip()


def _printable(value: object) -> str:
    """In one line, and without what a terminal would obey: paths come from clients."""
    told = str(value)
    return told if told.isprintable() else repr(told)


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


def set_up(form: LogFormat) -> logging.Handler:
    """Send the log of Slipstream to stderr."""
    target = logging.StreamHandler(sys.stderr)
    target.setFormatter(JsonLines() if form == "json" else PlainLines())
    handler = QueuedHandler(target)
    root = logging.getLogger("slipstream")
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    return handler


def request_fields(record: Record) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "request_id": record.id,
        "method": record.method,
        "path": record.path,
        "status": record.status,
        "ms": round(record.seconds * 1000, 1),
    }
    if record.asked_id:
        fields["client_request_id"] = record.asked_id
    if record.tenant:
        fields["tenant"] = record.tenant
    if record.user:
        fields["user"] = record.user
    if record.answers:
        stats = record.speculation
        fields["prompt_tokens"] = record.prompt_tokens
        fields["completion_tokens"] = record.completion_tokens
        fields["first_token_ms"] = round(min(a.timing.first_token_s for a in record.answers) * 1000, 1)
        fields["finish"] = ",".join(dict.fromkeys(str(a.finish_reason) for a in record.answers))
        fields["tau"] = round(stats.tau, 2)
    if record.disconnected:
        fields["disconnected"] = True
    if record.error is not None:
        fields["error"] = record.error
    return fields


def log_failure(record: Record, error: Exception) -> None:
    """Something of ours went wrong: where."""
    log.error("failed", exc_info=error, extra={"fields": {"request_id": record.id}})


def log_request(record: Record) -> None:
    level = logging.ERROR if record.status >= 500 and record.status != _ENDING else logging.INFO
    log.log(level, "request", extra={"fields": request_fields(record)})
