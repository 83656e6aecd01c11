"""`slipstream serve`: the model over HTTP with OpenAI's interface. Options are vLLM's where they mean the same."""

from __future__ import annotations

import functools
import gc
import json
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from slipstream.bench.tune import read_engine
from slipstream.cli.flags import naming_flags
from slipstream.cli.help import Command
from slipstream.cli.loading import hosted
from slipstream.cli.options import OF_REQUESTS, OF_SAMPLING, Common, Given, option, with_options
from slipstream.cli.show import note
from slipstream.constrain.limits import CompileLimits
from slipstream.core.errors import ConfigError, InvalidRequest, install, read_named
from slipstream.core.settings import setting
from slipstream.core.vllm_names import from_vllm, from_vllm_flags
from slipstream.drafters.opening import naming
from slipstream.serve.config import ApiKey, Limits, ServeConfig

SERVER = "Server"
KEY_VARIABLE = "SLIPSTREAM_API_KEY"
VLLM_KEY_VARIABLE = "VLLM_API_KEY"
_TRIAL_S = CompileLimits().trial_s
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


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """The options of `slipstream serve` that are no settings of `ServeConfig`.

    allowed_origins: Origins of web pages whose scripts may send requests (CORS), as a JSON list:
        '["https://chat.example.com"]', or '["*"]' for any page. Default: none.
    speculative_config: vLLM's way to name a drafter, in the place of --drafter: '{"method": "ngram",
        "num_speculative_tokens": 5}'.
    config: Model, drafter, draft tokens and least gain as `slipstream tune --config FILE` wrote them; options win over
        it.
    compile_trial: CPU seconds that the form of an answer (schema, grammar, pattern) may take to compile with a sample
        of the vocabulary; the whole vocabulary takes about twenty times as long. Slower forms are refused.
    chat_template: A Jinja template for conversations in the place of the model's own.
    """

    allowed_origins: str = setting(str, "[]", metavar="JSON", panel="server")
    speculative_config: str | None = setting(str, None, metavar="JSON", panel="speculation")
    config: Path | None = setting(Path, None, metavar="FILE", panel="model")
    compile_trial: float = setting(float, _TRIAL_S, metavar="SECONDS", panel="limits")
    chat_template: Path | None = setting(Path, None, metavar="FILE", panel="server")


@functools.partial(
    with_options,
    hidden=OF_REQUESTS,
    without=_WITHOUT_PREDICTION,
    more=("max_num_seqs", "max_num_batched_tokens"),
)
def serve(
    common: Common,
    server: Annotated[Given, ServeConfig],
    limits: Annotated[Given, Limits],
    own: ServeOptions,
    named: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="As --model, which may be left out then.", show_default=False)
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
) -> None:
    """Serve a model over HTTP, with OpenAI's interface.

    Any OpenAI client works with base_url http://HOST:PORT/v1. Ctrl-C or SIGTERM ends the server after the running
    requests. Sampling and verifier are fields of each request. Options of `vllm serve` are taken too, or answered by
    one line that names ours.
    """
    _refuse_sampling(common)
    if own.config is not None:
        common = _with_config(common, own.config)
    if own.speculative_config is not None:
        common = _with_speculative_config(common, own.speculative_config)
    template = None if own.chat_template is None else read_named(own.chat_template, "--chat-template")
    with naming_flags(ServeConfig, Limits, trial_s="--compile-trial"):
        settings = ServeConfig(
            **{"models": (common.model,), **server},
            keys=_keys(api_key or ()),
            allowed_origins=_origins(own.allowed_origins),
            limits=Limits(**limits),
            compiling=CompileLimits(trial_s=own.compile_trial),
        )
    try:
        import fastapi  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"serve needs {error.name}: {install('serve')}") from error
    drafters = () if common.no_speculation else common.drafters
    with hosted(common, drafters, warm_up=True) as llm:
        from slipstream.serve.server import HttpServer
        from slipstream.serve.telemetry import log_to_stderr

        log_to_stderr(settings.log_format)
        if template is not None:
            llm.tokenizer.chat_template = template
        http = HttpServer(llm, settings)
        with suppress(InvalidRequest, OSError):  # without the extra [grammar], requests that need it get an error
            llm.expect_forms()
        if not settings.asks_for_keys and settings.host not in ("127.0.0.1", "::1", "localhost"):
            note(
                f"{settings.host}: other machines may use this server without a key; --api-keys FILE asks for keys",
                style="yellow",
            )
        note(f"serving {settings.models[0]} at {http.url}/v1 (Ctrl-C ends it)")
        http.serve_forever()
    if "triton" not in sys.modules:  # its bindings would report frozen objects as leaks, line by line
        gc.freeze()  # a last search for garbage in all of torch would take seconds


def _refuse_sampling(common: Common) -> None:
    """Refuse shared options that are fields of a request here."""
    for name in OF_SAMPLING:
        if name in common.given:
            raise ConfigError(f"--{name.replace('_', '-')}: not for serve; it is a field of each request")
    if "verifier" in common.given:
        raise ConfigError('--verifier: not for serve; a request gives "speculation": {"verifier": …}')


def _with_config(common: Common, path: Path) -> Common:
    """The options, with the file's values where none were given."""
    stored = read_engine(path)
    own: dict[str, Any] = {}
    engine: dict[str, Any] = {}
    if "model" not in common.given and "model" in stored:
        own["model"] = stored["model"]
    if common.drafter is None and "drafter" in stored:
        own["drafter"] = [stored["drafter"] or "none"]
    for name in ("draft_tokens", "min_gain") if common.drafter is None else ("min_gain",):  # tokens of its drafter
        if name not in common.engine and stored.get(name) is not None:
            engine[name] = stored[name]
    changed = replace(common, **own, engine={**common.engine, **engine})
    with naming(f"--config {path}"):
        changed.check(None, _WITHOUT_PREDICTION, option="engine.drafter" if "drafter" in own else "--drafter")
    taken = {**own, **engine, **({"drafter": own["drafter"][0]} if "drafter" in own else {})}
    flags = [f"--{name.replace('_', '-')} {value}" for name, value in taken.items()]
    why_none = "options win over it" if stored else "it has none"
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
        tokens = {} if named.draft_tokens is None else {"draft_tokens": named.draft_tokens}
        changed = replace(common, drafter=[named.drafter], engine={**common.engine, **tokens})
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
