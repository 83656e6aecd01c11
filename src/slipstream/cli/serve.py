"""`slipstream serve`: the model over HTTP with OpenAI's interface. Options are vLLM's where they mean the same."""

from __future__ import annotations

import functools
import gc
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from slipstream.bench.tune import read_engine
from slipstream.cli.help import Command
from slipstream.cli.loading import hosted
from slipstream.cli.options import MODEL, OF_REQUESTS, OF_SAMPLING, OUTPUT, SPECULATION, Common, option, with_common
from slipstream.cli.show import note
from slipstream.constrain.limits import CompileLimits
from slipstream.core.errors import ConfigError, InvalidRequest, install, read_named
from slipstream.core.vllm_names import from_vllm, from_vllm_flags
from slipstream.drafters.opening import naming
from slipstream.serve.config import ApiKey, Limits, LogFormat, ServeConfig, ToolFormat

SERVER = "Server"
LIMITS = "Limits"
KEY_VARIABLE = "SLIPSTREAM_API_KEY"
VLLM_KEY_VARIABLE = "VLLM_API_KEY"
_USUAL = ServeConfig()
_OPTIONS = {
    "models": "--served-model-name",
    "request_s": "--request-timeout",
    "allowed_origins": "--allowed-origins",
    "metrics_port": "--metrics-port",
    "max_queue_per_key": "--max-queue-per-key",
    "slo_ttft_ms": "--slo-ttft-ms",
    "slo_tpot_ms": "--slo-tpot-ms",
    "chunk_chars": "--stream-chunk-chars",
    "drain_s": "--drain-timeout",
    "stall_s": "--stall-timeout",
    "trial_s": "--compile-trial",
    "tool_format": "--tool-call-parser",
    "log_format": "--log-format",
}
"""Settings with another name on the command line."""
_WITHOUT_PREDICTION = (
    'a request brings its own ("prediction": {"type": "content", "content": …}), which is used beside any drafter; '
    "leave it out, or name another drafter, such as auto"
)


def _tell(message: str) -> None:
    note(message, style="yellow")


class ServeCommand(Command):
    """Also takes the options of `vllm serve`, by the table in `core/vllm_names.py`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, from_vllm_flags(args, _tell))


@functools.partial(with_common, hidden=OF_REQUESTS, without=_WITHOUT_PREDICTION)
def serve(
    common: Common,
    named: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="As --model, which may be left out then.", show_default=False)
    ] = None,
    host: Annotated[
        str,
        option(
            metavar="ADDRESS", panel=SERVER, help="Where to listen. 0.0.0.0 lets other machines in: set a key first."
        ),
    ] = _USUAL.host,
    port: Annotated[
        int, option("--port", metavar="PORT", min=0, max=65535, panel=SERVER, help="0 takes any free one.")
    ] = _USUAL.port,
    metrics_port: Annotated[
        int | None,
        option(
            metavar="PORT",
            min=0,
            max=65535,
            panel=SERVER,
            help="Serve /metrics here, beside /health, /ping and /version, and not on --port.",
        ),
    ] = None,
    served_model_name: Annotated[
        list[str] | None,
        option(metavar="NAME", panel=SERVER, help="What clients call the model; may be repeated. Default: --model."),
    ] = None,
    api_key: Annotated[
        list[str] | None,
        option(
            metavar="[TENANT=]KEY",
            panel=SERVER,
            help="Answer only requests with this key; may be repeated. Tenants share neither drafts nor caches. Other "
            f"users of this machine can read a command line: better in a file, or in the variable {KEY_VARIABLE}. "
            f"Default: the variable {VLLM_KEY_VARIABLE}.",
        ),
    ] = None,
    api_keys: Annotated[
        Path | None,
        option(
            metavar="FILE",
            panel=SERVER,
            help="Keys, one [TENANT=]KEY a line; # begins a comment. The file is read again on SIGHUP.",
        ),
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        option(
            metavar="NAME",
            panel=SERVER,
            help="A host name that clients may use; may be repeated, * for any. Default: this machine's names if it "
            "listens on this machine alone and asks for no key, else any.",
        ),
    ] = None,
    allowed_origins: Annotated[
        str,
        option(
            metavar="JSON",
            panel=SERVER,
            help="Origins of web pages whose scripts may send requests (CORS), as a JSON list: "
            "'[\"https://chat.example.com\"]', or '[\"*\"]' for any page. Default: none.",
        ),
    ] = "[]",
    strict_fields: Annotated[
        bool,
        option(
            "--strict-fields",
            panel=SERVER,
            help="Refuse requests with unknown fields. Default: ignore these, and name them in the log and in the "
            "answer's header X-Slipstream-Ignored-Fields.",
        ),
    ] = False,
    max_num_seqs: Annotated[
        int, option(metavar="N", min=1, panel=MODEL, help="Most answers in progress at once.")
    ] = 32,
    max_num_batched_tokens: Annotated[
        int | None,
        option(
            metavar="TOKENS",
            min=1,
            panel=MODEL,
            help="Most prompt tokens that a step reads. Beside running answers it reads fewer, by their measured time. "
            "Default: 512 on a CPU, 8192 on a GPU.",
        ),
    ] = None,
    speculative_config: Annotated[
        str | None,
        option(
            metavar="JSON",
            panel=SPECULATION,
            help='vLLM\'s way to name a drafter, in the place of --drafter: \'{"method": "ngram", '
            '"num_speculative_tokens": 5}\'.',
        ),
    ] = None,
    config: Annotated[
        Path | None,
        option(
            metavar="FILE",
            panel=MODEL,
            help="Model, drafter, draft tokens and least gain as `slipstream tune --config FILE` wrote them; options "
            "win over it.",
        ),
    ] = None,
    max_queue: Annotated[
        int,
        option(metavar="N", min=0, panel=LIMITS, help="Answers that may wait; further ones get 429."),
    ] = _USUAL.max_queue,
    max_queue_per_key: Annotated[
        int | None,
        option(
            metavar="N",
            min=0,
            panel=LIMITS,
            help="Answers of one tenant that may wait. Default: of several tenants a quarter of --max-queue.",
        ),
    ] = None,
    max_body: Annotated[
        int | None,
        option(
            metavar="BYTES",
            min=1024,
            panel=LIMITS,
            help="Of a request. Default: 1 MiB, and 32 bytes for every token of the context.",
        ),
    ] = None,
    request_timeout: Annotated[
        float, option(metavar="SECONDS", panel=LIMITS, help="From a request's arrival to the end of its answer.")
    ] = _USUAL.limits.request_s,
    compile_trial: Annotated[
        float,
        option(
            metavar="SECONDS",
            panel=LIMITS,
            help="CPU seconds that the form of an answer (schema, grammar, pattern) may take to compile with a sample "
            "of the vocabulary; the whole vocabulary takes about twenty times as long. Slower forms are refused.",
        ),
    ] = _USUAL.compiling.trial_s,
    drain_timeout: Annotated[
        float, option(metavar="SECONDS", panel=LIMITS, help="Time for running requests when the server is told to end.")
    ] = _USUAL.drain_s,
    stall_timeout: Annotated[
        float,
        option(
            metavar="SECONDS",
            panel=LIMITS,
            help="Time without progress of the engine before /health says so; after twice that time the server ends "
            "with exit code 1.",
        ),
    ] = _USUAL.stall_s,
    stream_chunk_chars: Annotated[
        int | None,
        option(
            metavar="N",
            min=1,
            panel=SERVER,
            help="Cut streams into events of N characters, all padded to one size, so that network traffic does not "
            "show how many guesses were accepted. Default: one event a step.",
        ),
    ] = None,
    tool_call_parser: Annotated[
        str,
        option(
            metavar="FORMAT",
            panel=SERVER,
            help="How the model writes tool calls: hermes (Hermes, Qwen, SmolLM3), llama3_json, or auto: as its chat "
            "template has it.",
        ),
    ] = "auto",
    chat_template: Annotated[
        Path | None,
        option(
            metavar="FILE", panel=SERVER, help="A Jinja template for conversations in the place of the model's own."
        ),
    ] = None,
    log_format: Annotated[
        str, option(metavar="FORMAT", panel=OUTPUT, help="text, or json for programs: a line a request, on stderr.")
    ] = "text",
    slo_ttft_ms: Annotated[
        float | None,
        option(metavar="MS", panel=OUTPUT, help="Count requests in /metrics whose first token came within this time."),
    ] = None,
    slo_tpot_ms: Annotated[
        float | None,
        option(metavar="MS", panel=OUTPUT, help="The same for the mean time of each later token; both must be met."),
    ] = None,
    otel: Annotated[
        bool,
        option(
            "--otel",
            panel=OUTPUT,
            help="Send OpenTelemetry traces, as its OTEL_… variables say. Needs opentelemetry-sdk and an exporter.",
        ),
    ] = False,
) -> None:
    """Serve a model over HTTP, with OpenAI's interface.

    Any OpenAI client works with base_url http://HOST:PORT/v1. Ctrl-C or SIGTERM ends the server after the running
    requests. Sampling and verifier are fields of each request. Options of `vllm serve` are taken too, or answered by
    one line that names ours.
    """
    _refuse_sampling(common)
    if config is not None:
        common = _with_config(common, config)
    if speculative_config is not None:
        common = _with_speculative_config(common, speculative_config)
    template = None if chat_template is None else read_named(chat_template, "--chat-template")
    more = {} if max_num_batched_tokens is None else {"max_num_batched_tokens": max_num_batched_tokens}
    with _naming_options():
        settings = ServeConfig(
            models=tuple(served_model_name or (common.model,)),
            host=host,
            port=port,
            metrics_port=metrics_port,
            slo_ttft_ms=slo_ttft_ms,
            slo_tpot_ms=slo_tpot_ms,
            keys=_keys(api_key or ()),
            key_file=api_keys,
            allowed_hosts=tuple(allowed_host or ()),
            allowed_origins=_origins(allowed_origins),
            strict_fields=strict_fields,
            limits=Limits(body_bytes=max_body, request_s=request_timeout),
            max_queue=max_queue,
            max_queue_per_key=max_queue_per_key,
            chunk_chars=stream_chunk_chars,
            drain_s=drain_timeout,
            stall_s=stall_timeout,
            tool_format=cast(ToolFormat, tool_call_parser),
            log_format=cast(LogFormat, log_format),
            telemetry=otel,
            compiling=CompileLimits(trial_s=compile_trial),
        )
    try:
        import fastapi  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"serve needs {error.name}: {install('serve')}") from error
    drafters = () if common.no_speculation else common.drafters
    with hosted(common, drafters, max_num_seqs=max_num_seqs, warm_up=True, **more) as llm:
        from slipstream.serve.server import HttpServer
        from slipstream.serve.telemetry import log_to_stderr

        log_to_stderr(settings.log_format)
        if template is not None:
            llm.tokenizer.chat_template = template
        server = HttpServer(llm, settings)
        with suppress(InvalidRequest, OSError):  # without the extra [grammar], requests that need it get an error
            llm.expect_forms()
        if not settings.asks_for_keys and host not in ("127.0.0.1", "::1", "localhost"):
            note(
                f"{host}: other machines may use this server without a key; --api-keys FILE asks for keys",
                style="yellow",
            )
        note(f"serving {settings.models[0]} at {server.url}/v1 (Ctrl-C ends it)")
        server.serve_forever()
    if "triton" not in sys.modules:  # its bindings would report frozen objects as leaks, line by line
        gc.freeze()  # a last search for garbage in all of torch would take seconds


@contextmanager
def _naming_options() -> Iterator[None]:
    """Begin errors about a setting with the option that gave it."""
    try:
        yield
    except ConfigError as error:
        key, _, rest = str(error).partition("=")
        if key not in _OPTIONS:
            raise
        raise ConfigError(f"{_OPTIONS[key]} {rest}") from error


def _refuse_sampling(common: Common) -> None:
    """Refuse shared options that are fields of a request here."""
    for name in OF_SAMPLING:
        if name in common.given:
            raise ConfigError(f"--{name.replace('_', '-')}: not for serve; it is a field of each request")
    if "verifier" in common.given:
        raise ConfigError('--verifier: not for serve; a request gives "speculation": {"verifier": …}')


def _with_config(common: Common, path: Path) -> Common:
    """The options, with the file's values where none were given."""
    engine = read_engine(path)
    found: dict[str, Any] = {}
    if "model" not in common.given and "model" in engine:
        found["model"] = engine["model"]
    if common.drafter is None:
        if "drafter" in engine:
            found["drafter"] = [engine["drafter"] or "none"]
        if common.draft_tokens is None:
            found["draft_tokens"] = engine.get("draft_tokens")
    if common.min_gain is None:
        found["min_gain"] = engine.get("min_gain")
    changed = replace(common, **found)
    with naming(f"--config {path}"):
        changed.check(None, _WITHOUT_PREDICTION, option="engine.drafter" if "drafter" in found else "--drafter")
    taken = {**found, "drafter": found["drafter"][0]} if "drafter" in found else found
    flags = [f"--{name.replace('_', '-')} {value}" for name, value in taken.items() if value is not None]
    why_none = "options win over it" if engine else "it has none"
    note(f"from {path}: {' '.join(flags) or f'nothing, since {why_none}'}")
    return changed


def _with_speculative_config(common: Common, written: str) -> Common:
    if common.drafter is not None or common.draft_tokens is not None:
        raise ConfigError("--speculative-config: give either it, or --drafter and --draft-tokens")
    try:
        config = json.loads(written)
    except ValueError as error:
        raise ConfigError(f"--speculative-config {written}: is not JSON ({error})") from error
    with naming(f"--speculative-config {written}"):
        named = from_vllm(config, _tell)
        changed = replace(common, drafter=[named.drafter], draft_tokens=named.draft_tokens)
        changed.check(None, _WITHOUT_PREDICTION)
    return changed


def _keys(given: Sequence[str]) -> tuple[ApiKey, ...]:
    """The keys of --api-key (by default vLLM's variable) and those of our own variable, each once.

    vLLM's variable holds one key without a tenant, whatever characters it has.
    """
    vllms, own = os.environ.get(VLLM_KEY_VARIABLE), os.environ.get(KEY_VARIABLE)
    written = given or ([f"={vllms}"] if vllms else [])
    return tuple(dict.fromkeys(map(ApiKey.of, [*written, *(own.split(",") if own else ())])))


def _origins(written: str) -> tuple[str, ...]:
    with suppress(ValueError):
        found = json.loads(written)
        if isinstance(found, list) and all(isinstance(origin, str) for origin in found):
            return tuple(found)
    raise ConfigError(f"--allowed-origins {written}: must be a JSON list of origins, such as '[\"https://a.example\"]'")
