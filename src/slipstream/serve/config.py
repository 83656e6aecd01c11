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
from slipstream.core.settings import check_settings, setting

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


_SERVER, _LIMITS, _OUTPUT = "server", "limits", "output"


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one request. Beyond them it is refused with 400 (413 for the body), before it costs anything.

    body_bytes: Size of a request's JSON. Default: 1 MiB, and 32 bytes for every token of the context.
    body_s: Seconds until the body must have arrived.
    prompts: Prompts of one /v1/completions request.
    choices: n times the prompts.
    stop_chars: Characters of one stop string.
    nesting: Levels of lists and objects in schemas and tools.
    request_s: From a request's arrival to the end of its answer.
    """

    body_bytes: int | None = setting(int, None, low=1024, flag="--max-body", metavar="BYTES", panel=_LIMITS)
    body_s: float = setting(float, 30.0, low=0, above=True)
    prompts: int = setting(int, 64, low=1)
    choices: int = setting(int, 128, low=1)
    top_logprobs: int = setting(int, 20, low=1)
    stops: int = setting(int, 16, low=1)
    stop_chars: int = setting(int, 256, low=1)
    nesting: int = setting(int, 32, low=1)
    request_s: float = setting(
        float, 600.0, low=0, above=True, flag="--request-timeout", metavar="SECONDS", panel=_LIMITS
    )

    def __post_init__(self) -> None:
        check_settings(self)

    def body_for(self, context: int) -> int:
        """Most bytes of a body. context: the model's, in tokens."""
        return self.body_bytes or 2**20 + 32 * context


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """A server around one engine. A setting with a placeholder (`metavar`) is an option of `slipstream serve`.

    keys: API keys, beside those of `key_file`. Without any, no key is needed.
    allowed_origins: origins of web pages that browsers let read answers ("*": any).
    compiling: limits of compiling the form of an answer.
    host: Where to listen. 0.0.0.0 lets other machines in: set a key first.
    port: 0 takes any free one.
    metrics_port: Serve /metrics here, beside /health, /ping and /version, and not on --port.
    models: What clients call the model; may be repeated, and the first is shown in answers. Default: --model.
    key_file: Keys, one [TENANT=]KEY a line; # begins a comment. The file is read again on SIGHUP.
    allowed_hosts: A host name that clients may use; may be repeated, * for any. Default: this machine's names if it
        listens on this machine alone and asks for no key, else any.
    strict_fields: Refuse requests with unknown fields. Default: ignore these, and name them in the log and in the
        answer's header X-Slipstream-Ignored-Fields.
    max_queue: Answers that may wait; further ones get 429.
    max_queue_per_key: Answers of one tenant that may wait. Default: of several tenants a quarter of --max-queue.
    drain_s: Time for running requests when the server is told to end.
    stall_s: Time without progress of the engine before /health says so; after twice that time the server ends with exit
        code 1.
    chunk_chars: Cut streams into events of N characters, all padded to one size, so that network traffic does not show
        how many guesses were accepted. Default: one event a step.
    tool_format: How the model writes tool calls: hermes (Hermes, Qwen, SmolLM3), llama3_json, or auto: as its chat
        template has it.
    log_format: text, or json for programs: a line a request, on stderr.
    slo_ttft_ms: Count requests in /metrics whose first token came within this time.
    slo_tpot_ms: The same for the mean time of each later token; both must be met.
    telemetry: Send OpenTelemetry traces, as its OTEL_… variables say. Needs opentelemetry-sdk and an exporter.
    """

    host: str = setting(str, "127.0.0.1", metavar="ADDRESS", panel=_SERVER)
    port: int = setting(int, 8000, low=0, high=65535, metavar="PORT", panel=_SERVER)
    metrics_port: int | None = setting(int, None, low=0, high=65535, metavar="PORT", panel=_SERVER)
    models: Sequence[str] = setting(
        str, ("default",), many=True, flag="--served-model-name", metavar="NAME", panel=_SERVER
    )
    keys: tuple[ApiKey, ...] = ()
    key_file: Path | None = setting(Path, None, flag="--api-keys", metavar="FILE", panel=_SERVER)
    allowed_hosts: Sequence[str] = setting(str, (), many=True, flag="--allowed-host", metavar="NAME", panel=_SERVER)
    allowed_origins: tuple[str, ...] = ()
    strict_fields: bool = setting(bool, False, flag="--strict-fields", panel=_SERVER)
    limits: Limits = Limits()
    max_queue: int = setting(int, 256, low=0, metavar="N", panel=_LIMITS)
    max_queue_per_key: int | None = setting(int, None, low=0, metavar="N", panel=_LIMITS)
    drain_s: float = setting(float, 60.0, low=0, flag="--drain-timeout", metavar="SECONDS", panel=_LIMITS)
    stall_s: float = setting(float, 120.0, low=0, above=True, flag="--stall-timeout", metavar="SECONDS", panel=_LIMITS)
    chunk_chars: int | None = setting(
        int, None, low=1, high=4096, flag="--stream-chunk-chars", metavar="N", panel=_SERVER
    )
    tool_format: ToolFormat = setting(
        str, "auto", choices=get_args(ToolFormat), flag="--tool-call-parser", metavar="FORMAT", panel=_SERVER
    )
    log_format: LogFormat = setting(str, "text", choices=get_args(LogFormat), metavar="FORMAT", panel=_OUTPUT)
    slo_ttft_ms: float | None = setting(float, None, low=0, above=True, metavar="MS", panel=_OUTPUT)
    slo_tpot_ms: float | None = setting(float, None, low=0, above=True, metavar="MS", panel=_OUTPUT)
    telemetry: bool = setting(bool, False, flag="--otel", panel=_OUTPUT)
    compiling: CompileLimits = field(default_factory=CompileLimits)

    def __post_init__(self) -> None:
        check_settings(self)
        for key in ("models", "allowed_hosts"):
            object.__setattr__(self, key, tuple(getattr(self, key)))
        self._check("models", bool(self.models) and all(self.models), "one name or more")
        read_keys(self.keys, self.key_file)
        named = all(re.fullmatch(r"\*|[\w.-]+|[\da-fA-F:.]*:[\da-fA-F:.]*:[\da-fA-F.]*", h) for h in self.allowed_hosts)
        self._check("allowed_hosts", named, 'names or addresses without a port, or "*"')
        origins = all(re.fullmatch(r"\*|[a-z][a-z0-9+.-]*://[^/\s]+", origin) for origin in self.allowed_origins)
        self._check("allowed_origins", origins, 'origins such as "https://chat.example.com", or "*"')

    @property
    def asks_for_keys(self) -> bool:
        return bool(self.keys) or self.key_file is not None

    def _check(self, key: str, right: bool, remedy: str) -> None:
        if not right:
            raise ConfigError(f"{key}={getattr(self, key)!r}: must be {remedy}")
