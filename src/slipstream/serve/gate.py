"""Plain ASGI around the application: host name, API key, admission, body size and the log of each request.

A request is refused here before anything reads it. The events of a stream pass unchanged.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from slipstream.core.errors import ConfigError
from slipstream.serve.admission import Admission, Drain
from slipstream.serve.config import ApiKey, ServeConfig, read_keys
from slipstream.serve.errors import ApiError, for_log, from_exception
from slipstream.serve.page import PATHS
from slipstream.serve.telemetry import Record, log, log_failure, log_request

METRICS = "/metrics"
WATCHED = frozenset({METRICS, "/health", "/ping", "/version"})
"""Paths for operators, without anything about a client."""
OPEN = WATCHED.union(PATHS)
"""Paths that need no key: supervisors and scrapers have none, and the page asks its user for one."""
WORK = frozenset({"/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"})
_NO_HEAD = frozenset({"/live"})
"""Paths whose answer may have no end. For others HEAD is GET without the body, which uvicorn leaves out."""
_REQUEST_ID = re.compile(rb"[\w.:@/+=-]{1,128}")
IGNORED_FIELDS = "X-Slipstream-Ignored-Fields"
UNENFORCED = "X-Slipstream-Unenforced"
_LONGEST_HEADER = 2000
GONE = 499
"""nginx's status for a client that left before the answer. It is seen in logs and metrics only."""
_CHALLENGE = {"WWW-Authenticate": "Bearer"}


class Gate:
    """ended: called with every request when it is over."""

    def __init__(
        self,
        app: ASGIApp,
        config: ServeConfig,
        keys: Keyring,
        admission: Admission,
        drain: Drain,
        *,
        max_body: int,
        ended: Callable[[Scope, Record], None],
    ) -> None:
        self._app = app
        self._config = config
        self._keys = keys
        self._admission = admission
        self._drain = drain
        self._max_body = max_body
        self._names = checked_names(config)
        self._ended = ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._serve(scope, receive, send)
        elif scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1008})

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        record = Record(method=scope["method"], path=scope["path"])
        record.attach(scope)
        record.send = send
        if scope["method"] == "HEAD" and record.path not in _NO_HEAD:
            scope = {**scope, "method": "GET"}
        asked_id = dict(scope["headers"]).get(b"x-request-id", b"")
        record.asked_id = asked_id.decode() if _REQUEST_ID.fullmatch(asked_id) else ""

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                message["headers"] = [*message.get("headers", ()), *self._headers(record)]
            await send(message)

        try:
            body = await self._admit(scope, receive, record)
            if body is not None:
                record.body_bytes = len(body)
                await self._app(scope, _replayed(body, receive), answer)
        except asyncio.CancelledError:
            if self._drain.over_at is None:
                raise
            record.error = "cut off"  # the server ends, and this connection is closed
        except Exception as error:
            record.error = for_log(error)
            if not isinstance(error, ApiError):
                log_failure(record, error)
            if not record.status:
                await from_exception(error).response()(scope, receive, answer)
        finally:
            if record.disconnected or not record.status:
                record.status = GONE
            self._ended(scope, record)
            if record.path not in OPEN or log.isEnabledFor(logging.DEBUG):
                log_request(record)

    def _headers(self, record: Record) -> list[tuple[bytes, bytes]]:
        """The headers that every answer has."""
        headers = [(b"x-request-id", (record.asked_id or record.id).encode())]
        if record.ignored:
            headers.append((IGNORED_FIELDS.lower().encode(), ", ".join(record.ignored).encode()))
        if record.unenforced:
            rules = json.dumps("; ".join(record.unenforced))[1:-1]  # names of properties may have any character
            headers.append((UNENFORCED.lower().encode(), rules[:_LONGEST_HEADER].encode()))
        if self._drain.begun:
            headers.append((b"connection", b"close"))  # the next request should reach another server
        return headers

    async def _admit(self, scope: Scope, receive: Receive, record: Record) -> bytes | None:
        """The body of an admitted request; None: the client left."""
        headers = dict(scope["headers"])
        check_host(headers, self._names)
        self._check_port(scope, record.path)
        if record.path not in OPEN:
            record.tenant = self._keys.tenant_of(headers.get(b"authorization", b"").decode("latin-1"))
        if record.path in WORK:
            self._admission.check(record.tenant)
        length = headers.get(b"content-length", b"")
        return await self._read(receive, int(length) if length.isdigit() and len(length) < 19 else 0)

    def _check_port(self, scope: Scope, path: str) -> None:
        """With a port for metrics, that port has nothing else, and the main one has no metrics."""
        apart = self._config.metrics_port
        at_metrics = apart is not None and (scope.get("server") or ("", None))[1] == apart
        if path not in WATCHED if at_metrics else apart is not None and path == METRICS:
            where = "this port has the metrics alone" if at_metrics else "the metrics have a port of their own"
            raise ApiError(404, f"{path[:200]}: not on this port: {where}", code="not_found")

    async def _read(self, receive: Receive, announced: int) -> bytes | None:
        limit, patience_s = self._max_body, self._config.limits.body_s
        too_long = ApiError(
            413,
            f"the body has more than {limit} bytes; send less, or have the server started with a larger --max-body",
            code="body_too_long",
        )
        if announced > limit:
            raise too_long
        parts: list[bytes] = []
        size, more = 0, True
        try:
            async with asyncio.timeout(patience_s):
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    if size > limit:
                        raise too_long
                    more = message.get("more_body", False)
        except TimeoutError:
            raise ApiError(408, f"the body was not here within {patience_s:g} s", code="timeout") from None
        return b"".join(parts)


def _replayed(body: bytes, receive: Receive) -> Receive:
    """A `receive` that yields the body in one piece first."""
    first = True

    async def replay() -> Message:
        nonlocal first
        if first:
            first = False
            return {"type": "http.request", "body": body, "more_body": False}
        return await receive()

    return replay


class Keyring:
    """The valid API keys: those given at start, and those of a file, which `reload` reads again."""

    def __init__(self, given: Sequence[ApiKey] = (), file: Path | None = None) -> None:
        self._given, self._file = tuple(given), file
        self._read()

    def reload(self) -> None:
        """Read the file again. If it is wrong, the keys stay as they are and the log says why."""
        try:
            self._read()
        except ConfigError as error:
            log.error("keys not changed", extra={"fields": {"why": str(error)}})
        else:
            log.info("keys read", extra={"fields": {"keys": len(self._keys), "tenants": len(self.tenants)}})

    def _read(self) -> None:
        self._keys = {key.digest: key for key in read_keys(self._given, self._file)}
        self.tenants = frozenset(key.tenant for key in self._keys.values())  # empty without keys

    def tenant_of(self, authorization: str | None) -> str:
        """The tenant of a request; "" on a server without keys. Raises 401.

        The key is looked up by its digest, so the time of the lookup reveals nothing about other keys.
        """
        if not self._keys:
            return ""
        scheme, _, given = (authorization or "").partition(" ")
        digest = hashlib.sha256(given.strip().encode("utf-8", "replace")).digest()
        found = self._keys.get(digest)
        if found is None or not hmac.compare_digest(digest, found.digest) or scheme.lower() != "bearer":
            missing = "no API key was given" if not given else "the API key is not known here"
            remedy = "send it as `Authorization: Bearer KEY`"
            raise ApiError(401, f"{missing}; {remedy}", code="invalid_api_key", headers=_CHALLENGE)
        return found.tenant


def checked_names(config: ServeConfig) -> frozenset[str] | None:
    """The host names that requests may use, beside those of this machine; None: any.

    A web page can point its own name at this machine (DNS rebinding), and its browser then lets it read our answers.
    The `Host` header shows that name. A server with keys is safe, since a page has none; one that listens to other
    machines has names that it does not know.
    """
    if "*" in config.allowed_hosts:
        return None
    if not config.allowed_hosts and (config.asks_for_keys or not _is_local(config.host)):
        return None
    return frozenset({config.host.lower(), *(name.lower() for name in config.allowed_hosts)})


def check_host(headers: Mapping[bytes, bytes], names: frozenset[str] | None) -> None:
    """Raise 403 for a foreign name. A request without a name is not from a browser."""
    if names is None or b"host" not in headers:
        return
    name = headers[b"host"].decode("latin-1").strip().lower()
    name = name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0].removesuffix(".")
    if name not in names and not _is_local(name):
        raise ApiError(
            403, "the Host header names no host of this server; `--allowed-host NAME` adds one", code="host_not_allowed"
        )


def _is_local(name: str) -> bool:
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
