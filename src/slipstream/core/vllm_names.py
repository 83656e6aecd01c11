"""vLLM's names and their meaning here: one table for `slipstream serve`, `LLM` and `SamplingParams`.

A name is passed on under our own, has no effect and says so in one line, or is refused with the remedy.
"""

from __future__ import annotations

import functools
import inspect
import json
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec

from slipstream.core.errors import ConfigError, SlipstreamError

Given = ParamSpec("Given")
Tell = Callable[[str], None]
_MULTIPLES = {**{u: 1000**n for n, u in enumerate("kmgt", 1)}, **{u: 1024**n for n, u in enumerate("KMGT", 1)}}


@dataclass(frozen=True, slots=True)
class Row:
    """The meaning of one name.

    to: our name; "": the same one; None: there is none.
    hint: why it has no effect, why it is refused and what to do, or what the value must be.
    refused: using it is an error.
    accepted: values, in small letters, that ask for our own behaviour; they pass in silence.
    values: the number of values on the command line: 0 for a switch, 1, or 2 for any number.
    read: from vLLM's value to ours; None where the value asks for the default.
    or_model: the model's own name is accepted, too.
    """

    to: str | None = None
    hint: str = ""
    refused: bool = False
    accepted: tuple[str, ...] = ()
    values: int = 1
    read: Callable[[Any], Any] | None = None
    or_model: bool = False

    def taken(self, name: str, value: Any, shown: str, tell: Tell, model: object = None) -> dict[str, Any]:
        """The value by our name; empty if it has no effect. shown: name and value as written."""
        if value is None or str(value).lower() in self.accepted or (self.or_model and str(value) == str(model)):
            return {}
        if self.to is None:
            if self.refused:
                raise ConfigError(f"{shown}: {self.hint}")
            tell(f"{shown} has no effect: {self.hint}")
            return {}
        try:
            ours = value if self.read is None else self.read(value)
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"{shown}: must be {self.hint}") from error
        return {} if ours is None else {self.to or name: ours}


def _count(value: Any) -> int | None:
    """8192, "8192", "8k" or "8K" (8000 or 8192); None for -1 and "auto"."""
    text = str(value).strip()
    if text in ("auto", "-1"):
        return None
    unit = _MULTIPLES.get(text[-1:])
    return int(text) if unit is None else int(float(text[:-1]) * unit)


def _nodes(value: Any) -> int:
    """5 or "5"."""
    if isinstance(value, bool) or int(value) != float(value):
        raise ValueError(value)
    return int(value)


def _part(value: Any) -> str:
    if not 0 < float(value) <= 1:
        raise ValueError(value)
    return f"{100 * float(value):.6g}%"


def _draft_model(value: Any) -> str:
    return "ngram" if value == "[ngram]" else f"model:{value}"


def _dtype(value: Any) -> Any:
    return {"half": "float16", "float": "float32"}.get(value, value)


def _ours(to: str = "", hint: str = "", **more: Any) -> Row:
    return Row(to, hint, **more)


def _ignored(hint: str, *accepted: str, values: int = 1) -> Row:
    return Row(None, hint, accepted=accepted, values=values)


def _refusal(hint: str, *accepted: str, values: int = 1) -> Row:
    return Row(None, hint, refused=True, accepted=accepted, values=values)


_ONE_DEVICE = _refusal("a model runs on one device; leave it out, or start a server for each GPU", "1")
_NO_ADAPTERS = "adapters are not applied; merge one into the weights with peft's merge_and_unload()"
_TEXT_ONLY = _ignored("prompts and answers are text")
_OWN_KERNELS = "kernels are chosen for the device"
_OWN_LAYOUT = "the cache has a layout of its own; --memory bounds it"
_REVISION = _refusal(
    "take a copy of that revision (hf download NAME --revision … --local-dir FOLDER) and name its folder", "main"
)
_DRAFT_TOKENS = "a whole number such as 5"
_CONFIG = "the model runs as its config.json says; change that in a copy of its folder"
_PIECES = "prompts are always read in pieces between the steps of others"
_PROXY = "put a proxy such as nginx or caddy in front, which does it"
_LOGS = "the log has one line a request and never its text (--log-format)"
_SAMPLING = "each request says how it samples; generation_config.json gives only the tokens that end an answer"

ENGINE: Mapping[str, Row] = {
    # the model
    "dtype": _ours(read=_dtype, hint="a name such as bfloat16"),
    "trust_remote_code": _ours(values=0, accepted=("false",)),
    "max_model_len": _ours(read=_count, hint="a number of tokens such as 8192 or 8k"),
    "tokenizer": Row(
        None, "a model comes with its tokenizer; put another into a copy of its folder", refused=True, or_model=True
    ),
    "tokenizer_mode": _refusal("the tokenizer is read as transformers does it; leave it out", "auto", "hf", "slow"),
    "skip_tokenizer_init": _refusal("answers are text; leave it out", "false", values=0),
    "revision": _REVISION,
    "code_revision": _REVISION,
    "tokenizer_revision": _REVISION,
    "task": _refusal("it generates text only; leave it out", "generate", "auto"),
    "runner": _refusal("it generates text only; leave it out", "generate", "auto"),
    "convert": _refusal("it generates text only; leave it out", "none", "auto"),
    "quantization": _refusal(
        "weights run as the checkpoint has them, in the precision that --dtype names; leave it out"
    ),
    "load_format": _refusal(
        "a folder of safetensors, a hub id or a .gguf file are read; name one", "auto", "safetensors"
    ),
    "config_format": _refusal("config.json is read as transformers does it; leave it out", "auto", "hf"),
    "model_loader_extra_config": _ignored("weights are read by a loader of our own"),
    "safetensors_load_strategy": _ignored("weights are read by a loader of our own"),
    "ignore_patterns": _ignored("only what a model needs is fetched"),
    "use_tqdm_on_load": _ignored("progress is shown on a terminal", "true", values=0),
    "download_dir": _refusal("set SLIPSTREAM_CACHE to the folder for models"),
    "hf_token": _refusal("set HF_TOKEN instead: other users of this machine can read a command line"),
    "hf_config_path": _refusal(_CONFIG),
    "hf_overrides": _refusal(_CONFIG),
    "rope_scaling": _refusal(_CONFIG),
    "rope_theta": _refusal(_CONFIG),
    "model_impl": _ignored("Slipstream's own pass runs every model that it supports", "auto"),
    "seed": _ignored("each request has a seed of its own; without one it draws a fresh one"),
    "generation_config": _refusal(_SAMPLING, "vllm", "auto"),
    "override_generation_config": _refusal(_SAMPLING),
    "logits_processors": _refusal("use logit_bias, bad_words or structured_outputs of a request", "[]"),
    "logits_processor_pattern": _refusal("use logit_bias, bad_words or structured_outputs of a request"),
    "max_logprobs": _ignored("a request may ask for 20", "20"),
    "logprobs_mode": _refusal("log probabilities are the raw model's; leave it out", "raw_logprobs"),
    # memory and the cache
    "gpu_memory_utilization": _ours("memory", read=_part, hint="a part above 0 and up to 1, such as 0.9"),
    "kv_cache_memory_bytes": _ours("memory", read=_count, hint="a number of bytes"),
    "enable_prefix_caching": _ours(values=0),
    "prefix_caching_hash_algo": _ignored("prefixes have a keyed hash of our own"),
    "block_size": _ignored("pages have 16 tokens", "16"),
    "kv_cache_dtype": _refusal("the cache has the precision of --dtype; leave it out", "auto"),
    "calculate_kv_scales": _ignored("the cache is not quantized", "false", values=0),
    "num_gpu_blocks_override": _ignored(_OWN_LAYOUT),
    "swap_space": _ignored("requests that must wait are computed anew", "0", "0.0"),
    "cpu_offload_gb": _refusal("weights must fit on the device; leave it out", "0", "0.0"),
    "kv_offloading_size": _refusal("the cache must fit on the device; leave it out", "0", "0.0"),
    "disable_sliding_window": _refusal("windows are part of the model; leave it out", "false", values=0),
    "disable_hybrid_kv_cache_manager": _ignored(_OWN_LAYOUT, "false", values=0),
    "kv_transfer_config": _refusal("a cache is not shared between servers; leave it out"),
    "kv_events_config": _refusal("a cache is not shared between servers; leave it out"),
    # the steps
    "max_num_seqs": _ours(),
    "max_num_batched_tokens": _ours(read=_count, hint="a number of tokens such as 2048 or 2k"),
    "enable_chunked_prefill": _ignored(_PIECES, "true", values=0),
    "max_num_partial_prefills": _ignored(_PIECES),
    "max_long_partial_prefills": _ignored(_PIECES),
    "long_prefill_token_threshold": _ignored(_PIECES),
    "scheduling_policy": _refusal("requests are served in a fair order of our own; leave it out", "fcfs"),
    "async_scheduling": _ignored("a GPU always has the next step queued", "true", values=0),
    "num_scheduler_steps": _ignored("a GPU always has the next step queued", "1"),
    "scheduler_delay_factor": _ignored("a request starts as soon as there is room", "0", "0.0"),
    "preemption_mode": _ignored("requests that must wait are computed anew", "recompute"),
    "use_v2_block_manager": _ignored(_OWN_LAYOUT, values=0),
    "enforce_eager": _ours("graphs", read=lambda value: not value, accepted=("false",), values=0),
    "compilation_config": _ignored(_OWN_KERNELS),
    "optimization_level": _ignored(_OWN_KERNELS),
    "cuda_graph_sizes": _ignored("what requests need is recorded at the start", values=2),
    "max_seq_len_to_capture": _ignored("what requests need is recorded at the start"),
    "attention_backend": _ignored(_OWN_KERNELS),
    "disable_cascade_attn": _ignored(_OWN_KERNELS, values=0),
    # many devices
    "tensor_parallel_size": _ONE_DEVICE,
    "pipeline_parallel_size": _ONE_DEVICE,
    "data_parallel_size": _ONE_DEVICE,
    "decode_context_parallel_size": _ONE_DEVICE,
    "enable_expert_parallel": _refusal("a model runs on one device; leave it out", "false", values=0),
    "distributed_executor_backend": _ignored("a model runs on one device"),
    "disable_custom_all_reduce": _ignored("a model runs on one device", values=0),
    "worker_use_ray": _ignored("a model runs on one device", values=0),
    # adapters, pictures
    "enable_lora": _refusal(_NO_ADAPTERS, "false", values=0),
    "max_loras": _ignored(_NO_ADAPTERS),
    "max_lora_rank": _ignored(_NO_ADAPTERS),
    "max_cpu_loras": _ignored(_NO_ADAPTERS),
    "lora_dtype": _ignored(_NO_ADAPTERS),
    "limit_mm_per_prompt": _TEXT_ONLY,
    "mm_processor_kwargs": _TEXT_ONLY,
    "allowed_local_media_path": _TEXT_ONLY,
    # speculation
    "speculative_config": _ours(),
    "speculative_model": _ours("drafter", read=_draft_model),
    "num_speculative_tokens": _ours("draft_tokens", read=_nodes, hint=_DRAFT_TOKENS),
    # the rest
    "structured_outputs_config": _ignored("forms are compiled by xgrammar"),
    "guided_decoding_backend": _ignored("forms are compiled by xgrammar", "auto", "xgrammar"),
    "reasoning_parser": _refusal(
        "thoughts come as part of the answer's text; leave it out and part them in the client"
    ),
    "enable_sleep_mode": _refusal("stop the server to free its memory; leave it out", "false", values=0),
    "disable_log_stats": _ignored("no statistics are logged; /metrics has them", "true", values=0),
    "otlp_traces_endpoint": _refusal("give --otel and set OTEL_EXPORTER_OTLP_ENDPOINT"),
    "collect_detailed_traces": _ignored("--otel has spans of each request"),
    "device": _ours(),
}
"""Of an engine: options of `vllm serve` and arguments of vLLM's `LLM`."""

SERVER: Mapping[str, Row] = {
    "host": _ours(),
    "port": _ours(),
    "served_model_name": _ours(values=2),
    "api_key": _ours(values=2),
    "tool_call_parser": _ours(),
    "enable_auto_tool_choice": _ignored("tools are always on", "true", values=0),
    "exclude_tools_when_tool_choice_none": _ignored("a request without tools sends none", values=0),
    "tool_parser_plugin": _refusal("no code is loaded; --tool-call-parser names a format"),
    "tool_server": _refusal("the client calls its tools itself; leave it out"),
    "chat_template": _ours(),
    "chat_template_content_format": _ignored(
        "a template gets texts; parts stand one after the other", "auto", "string"
    ),
    "trust_request_chat_template": _refusal("a request brings no template; leave it out", "false", values=0),
    "response_role": _ignored("it is always assistant", "assistant"),
    "enable_reasoning": _refusal("thoughts come as part of the answer's text; leave it out", "false", values=0),
    "lora_modules": Row(None, _NO_ADAPTERS, refused=True, values=2),
    "return_tokens_as_token_ids": _refusal('send "speculation": {"origins": true} for ids; leave it out', values=0),
    "enable_prompt_tokens_details": _ignored("usage always has them", "true", values=0),
    "enable_force_include_usage": _refusal("a stream has usage with stream_options.include_usage", "false", values=0),
    "enable_request_id_headers": _ignored("answers always have X-Request-Id", "true", values=0),
    "enable_server_load_tracking": _ignored("/metrics has the load", values=0),
    "disable_log_requests": _ignored(_LOGS, values=0),
    "enable_log_requests": _ignored(_LOGS, values=0),
    "enable_log_outputs": _refusal("the log never has prompts or answers; leave it out", "false", values=0),
    "max_log_len": _ignored(_LOGS),
    "log_config_file": _ignored(_LOGS),
    "uvicorn_log_level": _ignored(_LOGS),
    "disable_uvicorn_access_log": _ignored(_LOGS, values=0),
    "disable_fastapi_docs": _ignored("there are none", "true", values=0),
    "disable_frontend_multiprocessing": _ignored("the engine always has a process of its own", values=0),
    "api_server_count": _ignored("one process serves HTTP", "1"),
    "headless": _ONE_DEVICE,
    "middleware": _refusal("no code is loaded; " + _PROXY),
    "root_path": _refusal(_PROXY),
    "uds": _refusal("it listens on --host and --port"),
    "ssl_keyfile": _refusal(_PROXY),
    "ssl_certfile": _refusal(_PROXY),
    "ssl_ca_certs": _refusal(_PROXY),
    "allowed_origins": _ours(),
    "allow_credentials": _ignored("keys come in a header, not in cookies", "false", values=0),
    "allowed_methods": _ignored("methods and headers are those of the interface"),
    "allowed_headers": _ignored("methods and headers are those of the interface"),
}
"""Options of `vllm serve` alone."""

_SHORT = {
    "-tp": "tensor_parallel_size",
    "-pp": "pipeline_parallel_size",
    "-dp": "data_parallel_size",
    "-q": "quantization",
    "-dcp": "decode_context_parallel_size",
    "-ep": "enable_expert_parallel",
    "-sc": "speculative_config",
    "-cc": "compilation_config",
    "-O": "compilation_config",
}
_LEVEL = re.compile(r"-O(\d)")
"""vLLM's `-O3`."""

_PLANNED = "the planner drafts where it pays, by what was measured"
SPECULATION: Mapping[str, Row] = {
    "method": _ours(),
    "model": _ours(),
    "num_speculative_tokens": _ours(read=_nodes, hint=_DRAFT_TOKENS),
    "prompt_lookup_max": _ignored("ngram takes the longest match of up to 32 tokens"),
    "prompt_lookup_min": _ignored("ngram takes matches of 2 tokens or more"),
    "disable_by_batch_size": _ignored(_PLANNED),
    "draft_tensor_parallel_size": _ONE_DEVICE,
    "tensor_parallel_size": _ONE_DEVICE,
    "max_model_len": _ignored("a draft model stops where its own context ends, and the request goes on"),
    "quantization": _refusal("a draft model's weights run as its checkpoint has them; leave it out"),
    "revision": _REVISION,
    "code_revision": _REVISION,
    "enforce_eager": _ignored("enforce_eager of the engine is for all", "false"),
    "disable_padded_drafter_batch": _ignored("drafts are never padded"),
    "use_local_argmax_reduction": _ignored("a model runs on one device", "false"),
    "draft_load_config": _ignored("weights are read by a loader of our own"),
    "attention_backend": _ignored(_OWN_KERNELS),
    "moe_backend": _ignored(_OWN_KERNELS),
    "speculative_token_tree": _ignored("trees grow where they pay; num_speculative_tokens bounds them"),
    "parallel_drafting": _refusal("drafters that guess a block at a time are not known here; leave it out", "false"),
    "rejection_sample_method": _ignored('a request asks for it: "speculation": {"verifier": "rejection"}', "strict"),
    "draft_sample_method": _ignored("each drafter proposes its likeliest tokens", "greedy"),
    "acceptance_method": _refusal("guesses must be the model's own tokens; leave it out", "rejection_sampler"),
    "suffix_decoding_max_tree_depth": _ignored(_PLANNED),
    "suffix_decoding_max_cached_requests": _ignored("earlier answers are kept by size and tenant"),
    "suffix_decoding_max_spec_factor": _ignored(_PLANNED),
    "suffix_decoding_min_token_prob": _ignored(_PLANNED),
}
"""Keys of `speculative_config`."""

_USE_FORMS = "use structured_outputs=StructuredOutputsParams(…) with json, regex, choice or grammar"
SAMPLING: Mapping[str, Row] = {
    "best_of": _refusal("answers are not ranked; ask for n, and choose", "1"),
    "use_beam_search": _refusal("there are no beams; leave it out", "false"),
    "length_penalty": _refusal("it belongs to beams, and there are none; leave it out", "1", "1.0"),
    "early_stopping": _refusal("it belongs to beams, and there are none; leave it out", "false"),
    "prompt_logprobs": _refusal("those of a prompt are not kept; leave it out"),
    "truncate_prompt_tokens": _refusal("the library cuts no prompts; send a shorter one, or ask a server"),
    "guided_decoding": _refusal(_USE_FORMS),
    "logits_processors": _refusal("use logit_bias, bad_words or structured_outputs", "[]"),
    "detokenize": _ignored("token_ids are there as well as the text", "true"),
    "spaces_between_special_tokens": _refusal("special tokens are written with spaces; leave it out", "true"),
    "flat_logprobs": _ignored("logprobs are mappings by token", "false"),
    "skip_reading_prefix_cache": _ignored("the tokens are the same; cache_salt parts caches", "false"),
    "extra_args": _ignored("nothing here reads it"),
}
"""Arguments of vLLM's `SamplingParams` that ours does not have."""

_ALONE = {"ngram": "ngram", "ngram_gpu": "ngram", "suffix": "suffix"}
_WITH_MODEL = {"draft_model": "model", "eagle": "eagle", "eagle3": "eagle3", "medusa": "medusa"}


@dataclass(frozen=True, slots=True)
class Named:
    """A drafter as we name it."""

    drafter: str
    draft_tokens: int | None


def from_vllm(config: object, tell: Tell | None = None) -> Named:
    """The drafter of a `speculative_config`. tell: is called for keys without effect; None: Python warns of them."""
    if not isinstance(config, Mapping):
        raise ConfigError(f"speculative_config={config!r}: must be a mapping with {sorted(SPECULATION)}")
    if unknown := sorted(set(config) - set(SPECULATION)):
        raise ConfigError(f"speculative_config: unknown keys {unknown}; known are {sorted(SPECULATION)}")
    given: dict[str, Any] = {}
    for key, value in config.items():
        given |= SPECULATION[key].taken(key, value, f"speculative_config: {key}={value!r}", tell or _warn)
    model, tokens = given.get("model"), given.get("num_speculative_tokens")
    method = given.get("method", _method_of(model))
    if not isinstance(method, str | None):
        raise ConfigError(f"speculative_config: method={method!r} must be a text, such as ngram")
    if method is not None and (method == "mtp" or method.endswith("_mtp")):
        return Named("mtp", tokens)
    if method in _ALONE:
        return Named(_ALONE[method], tokens)
    if method in _WITH_MODEL and model:
        return Named(f"{_WITH_MODEL[method]}:{model}", tokens)
    raise ConfigError(
        f"speculative_config: method={method!r}, model={model!r}; known are {', '.join(_ALONE)}, mtp, and with a model "
        f"{', '.join(_WITH_MODEL)}; a drafter of your own is named with drafter"
    )


def _method_of(model: object) -> str | None:
    """The method that vLLM guesses from the model's name where none is given."""
    if not isinstance(model, str):
        return None
    if model in ("ngram", "[ngram]"):
        return "ngram"
    found = (method for method in ("eagle3", "eagle", "medusa") if method in model.rpartition("/")[2].lower())
    return next(found, "draft_model")


def takes_vllm_names(
    table: Mapping[str, Row], error: type[SlipstreamError] = ConfigError
) -> Callable[[Callable[Given, None]], Callable[Given, None]]:
    """Let a constructor take vLLM's arguments too: it gets those of the table under our names, or not at all."""

    def decorate(init: Callable[Given, None]) -> Callable[Given, None]:
        @functools.wraps(init)
        def run(*arguments: Given.args, **options: Given.kwargs) -> None:
            if table.keys().isdisjoint(options):
                return init(*arguments, **options)
            given: dict[str, Any] = options
            ours = {name: value for name, value in given.items() if name not in table}
            bound = inspect.signature(init).bind_partial(*arguments)
            bound.apply_defaults()
            model = given.get("model", bound.arguments.get("model"))
            for name in sorted(given.keys() - ours.keys()):
                try:
                    found = table[name].taken(name, given[name], f"{name}={given[name]!r}", _warn, model)
                except ConfigError as refused:
                    raise error(str(refused)) from refused
                if any((given | ours).get(taken) is not None for taken in found.keys() - {name}):
                    raise error(f"{name} is vLLM's name of {', '.join(found)}: give one of them")
                ours |= found
            return init(*arguments, **ours)

        return run

    return decorate


def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=4)


def from_vllm_flags(words: Sequence[str], tell: Tell) -> list[str]:
    """A command line of `vllm serve` as one of `slipstream serve`. Options that no row knows stay as they are."""
    line = _Line(words, tell)
    table, left, found = line.table, list(words), []
    parts: dict[str, dict[str, Any]] = {}  # of `--speculative-config.method ngram`
    # `--api-key KEY MODEL` must not make a key of the model: more than one value only where that is named elsewhere
    named = line.model is not None
    while left:
        word = left.pop(0)
        flag, equals, value = word.partition("=")
        if level := _LEVEL.fullmatch(word):
            flag, equals, value = "-O", "=", level[1]
        name, dot, key = flag.partition(".")
        name = _SHORT.get(name, name.removeprefix("--").replace("-", "_") if name.startswith("--") else "")
        on = not (name.startswith("no_") and name[3:] in table)
        name = name if on else name[3:]
        if name not in table or (table[name].values and not equals and not left):
            found.append(word)  # typer reports a missing value as for any option
        elif table[name].values == 0:
            found += line.flags(name, on, flag)
        else:
            values = [value] if equals else [left.pop(0)]
            while table[name].values > 1 and named and left and not left[0].startswith("-"):
                values.append(left.pop(0))
            if dot:
                parts.setdefault(name, {})[key.replace("-", "_")] = _json_or_text(values[0])
                continue
            for one in values:
                found += line.flags(name, one, f"{flag} {one}")
    for name, config in parts.items():
        text = json.dumps(config)
        found += line.flags(name, text, f"--{name.replace('_', '-')} {text}")
    return found


class _Line:
    """A command line of `vllm serve`, while its options are translated one by one."""

    def __init__(self, words: Sequence[str], tell: Tell) -> None:
        self.table = {**SERVER, **ENGINE}
        self.model = _model_of(words)
        self._tell = tell
        self._given = {word.partition("=")[0] for word in words}
        self._taken: dict[str, str] = {}  # by our option: the other name of vLLM's that it came from

    def flags(self, name: str, value: Any, shown: str) -> Sequence[str]:
        """Our option for one of vLLM's with this value; nothing where it has no effect."""
        for to, ours in self.table[name].taken(name, value, shown, self._tell, self.model).items():
            option = f"--{to.replace('_', '-')}"
            if to != name and (option in self._given or self._taken.setdefault(option, name) != name):
                raise ConfigError(f"{shown}: is vLLM's name of {option}; give one of them")
            if isinstance(ours, bool):
                return [option if ours else f"--no-{to.replace('_', '-')}"]
            return [f"{option}={ours}"]
        return ()


def _model_of(words: Sequence[str]) -> str | None:
    """The model that a command line names; None: none, or behind options."""
    for word, following in zip(words, [*words[1:], ""], strict=True):
        flag, equals, value = word.partition("=")
        if flag in ("--model", "-m"):
            return value if equals else following
    return words[0] if words and not words[0].startswith("-") else None


def _json_or_text(written: str) -> Any:
    try:
        return json.loads(written)
    except ValueError:
        return written
