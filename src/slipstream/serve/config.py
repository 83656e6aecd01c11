"""The settings of a server, and its API keys."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from slipstream.constrain.limits import CompileLimits
from slipstream.core.errors import ConfigError, read_named

LogFormat = Literal["text", "json"]
ToolFormat = Literal["auto", "hermes", "llama3_json"]
_MOST_KEYS = 10_000
_PADDED = 16
"""Fewest characters of a key that ends with `=`. A shorter text is a tenant without its key."""


@dataclass(frozen=True, slots=True)
class ApiKey:
    """The digest of a key, and its tenant. Tenants share no drafts and no caches. The key itself is not kept."""

    tenant: str
    digest: bytes = field(repr=False)

    @classmethod
    def of(cls, written: str) -> ApiKey:
        """From `TENANT=KEY`, or a bare key, whose tenant is named after its hash.

        A long text that ends with `=` is a bare key in base64: a key must not become a name, because logs show names.
        """
        whole = written.strip()
        tenant, parted, key = whole.partition("=")
        if not key.strip("="):  # the only `=` are at the end
            tenant, key = "", whole if not parted or len(whole) >= _PADDED else ""
        if not re.fullmatch(r"[\w.@-]{0,64}", tenant):
            raise ConfigError("API key: a tenant's name must be of letters, digits and . _ @ -, as in TENANT=KEY")
        if not key or not key.isascii() or not key.isprintable() or " " in key:
            raise ConfigError("API key: must be printable ASCII without spaces, alone or as TENANT=KEY")
        digest = hashlib.sha256(key.encode()).digest()
        return cls(tenant or f"key-{digest.hex()[:8]}", digest)


def read_keys(given: Sequence[ApiKey], file: Path | None) -> tuple[ApiKey, ...]:
    """The given keys and those of a file. Raises `ConfigError`, which never shows a key."""
    found, where = list(given), ""
    if file is not None:
        where = f"--api-keys {file}: "
        for number, line in enumerate(read_named(file, "--api-keys").splitlines(), 1):
            if line.strip() and not line.strip().startswith("#"):
                try:
                    found.append(ApiKey.of(line))
                except ConfigError as error:
                    raise ConfigError(f"{where}line {number}: {error}") from None
        if len(found) == len(given):  # an empty file must not open the server to everyone
            raise ConfigError(f"{where}has no key; write one [TENANT=]KEY a line")
    if len(found) > _MOST_KEYS:
        raise ConfigError(f"{where}API keys: {len(found)} are too many; give at most {_MOST_KEYS}")
    if len({key.digest for key in found}) < len(found):
        raise ConfigError(f"{where}API keys: one is there twice; give each tenant a key of its own")
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one request. Beyond them it is refused with 400 (413 for the body), before it costs anything.

    body_bytes: size of the JSON; None: 1 MiB, and 32 bytes for every token of the context.
    body_s: seconds until the body must have arrived.
    prompts: prompts of one /v1/completions request.
    choices: n times the prompts.
    stop_chars: characters of one stop string.
    nesting: levels of lists and objects in schemas and tools.
    request_s: seconds from arrival to the end of the answer.
    """

    body_bytes: int | None = None
    body_s: float = 30.0
    prompts: int = 64
    choices: int = 128
    top_logprobs: int = 20
    stops: int = 16
    stop_chars: int = 256
    nesting: int = 32
    request_s: float = 600.0

    def __post_init__(self) -> None:
        for key in self.__slots__:
            if getattr(self, key) is not None and not getattr(self, key) > 0:
                raise ConfigError(f"{key}={getattr(self, key)!r}: must be above 0")

    def body_for(self, context: int) -> int:
        """Most bytes of a body. context: the model's, in tokens."""
        return self.body_bytes or 2**20 + 32 * context


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """A server around one engine.

    models: the model's names in requests; the first is shown in answers.
    metrics_port: serve /metrics on this port (0: any free one) instead of the main one.
    slo_ttft_ms, slo_tpot_ms: limits of the times to the first token and per later token, for /metrics to count a
        request as good.
    keys, key_file: the API keys, and a file with more, one [TENANT=]KEY a line. Without any, no key is needed.
    allowed_hosts: the host names of the server, beside those of this machine ("*": any). Without any, names are
        checked only on a server for this machine that needs no key.
    allowed_origins: origins of web pages that browsers let read answers ("*": any).
    strict_fields: refuse unknown fields instead of ignoring them.
    max_queue: answers that may wait for a place in the engine; more are refused with 429.
    max_queue_per_key: waiting answers of one tenant; None: with several tenants a quarter of max_queue.
    chunk_chars: characters of every event of a stream, all events padded to one size; None: one event a step.
    drain_s: seconds that running requests have when the server is told to end.
    stall_s: seconds without progress until /health reports a hanging engine; after twice as many it is killed, and the
        server ends.
    telemetry: send OpenTelemetry traces, as that library's own environment variables say.
    compiling: limits of compiling the form of an answer.
    """

    models: Sequence[str] = ("default",)
    host: str = "127.0.0.1"
    port: int = 8000
    metrics_port: int | None = None
    slo_ttft_ms: float | None = None
    slo_tpot_ms: float | None = None
    keys: tuple[ApiKey, ...] = ()
    key_file: Path | None = None
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    strict_fields: bool = False
    limits: Limits = Limits()
    max_queue: int = 256
    max_queue_per_key: int | None = None
    chunk_chars: int | None = None
    drain_s: float = 60.0
    stall_s: float = 120.0
    tool_format: ToolFormat = "auto"
    log_format: LogFormat = "text"
    telemetry: bool = False
    compiling: CompileLimits = field(default_factory=CompileLimits)

    def __post_init__(self) -> None:
        self._check("models", bool(self.models) and all(self.models), "one name or more")
        read_keys(self.keys, self.key_file)
        named = all(re.fullmatch(r"\*|[\w.-]+|[\da-fA-F:.]*:[\da-fA-F:.]*:[\da-fA-F.]*", h) for h in self.allowed_hosts)
        self._check("allowed_hosts", named, 'names or addresses without a port, or "*"')
        origins = all(re.fullmatch(r"\*|[a-z][a-z0-9+.-]*://[^/\s]+", origin) for origin in self.allowed_origins)
        self._check("allowed_origins", origins, 'origins such as "https://chat.example.com", or "*"')
        self._check("port", 0 <= self.port <= 65535, "0 (any free one) to 65535")
        apart = self.metrics_port is None or 0 <= self.metrics_port <= 65535
        self._check("metrics_port", apart, "0 (any free one) to 65535, or None: on the main port")
        for key in ("slo_ttft_ms", "slo_tpot_ms"):
            self._check(key, getattr(self, key) is None or getattr(self, key) > 0, "milliseconds, above 0, or None")
        self._check("max_queue", self.max_queue >= 0, "0 or more")
        own = self.max_queue_per_key is None or self.max_queue_per_key >= 0
        self._check("max_queue_per_key", own, "0 or more, or None")
        self._check("chunk_chars", self.chunk_chars is None or 1 <= self.chunk_chars <= 4096, "1 to 4096, or None")
        self._check("drain_s", self.drain_s >= 0, "0 or more")
        self._check("stall_s", self.stall_s > 0, "above 0")
        formats = get_args(ToolFormat)
        self._check("tool_format", self.tool_format in formats, f"one of {', '.join(formats)}")
        self._check("log_format", self.log_format in get_args(LogFormat), f"one of {', '.join(get_args(LogFormat))}")

    @property
    def asks_for_keys(self) -> bool:
        return bool(self.keys) or self.key_file is not None

    def _check(self, key: str, right: bool, remedy: str) -> None:
        if not right:
            raise ConfigError(f"{key}={getattr(self, key)!r}: must be {remedy}")
