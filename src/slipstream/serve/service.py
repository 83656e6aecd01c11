"""The service behind the endpoints: checks a request, prepares it for the engine, and chooses how to answer it."""

from __future__ import annotations

import asyncio
import functools
import re
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from difflib import get_close_matches
from itertools import islice
from typing import Any, TypeVar

from slipstream.constrain.limits import THREADS
from slipstream.core.outputs import Snapshot
from slipstream.core.params import SamplingParams
from slipstream.engine.remote import EngineProcess
from slipstream.engine.requests import Request
from slipstream.serve.admission import Admission, Drain, Health, health_of
from slipstream.serve.config import ServeConfig
from slipstream.serve.errors import ApiError, about, refused
from slipstream.serve.gate import Keyring
from slipstream.serve.live import Own
from slipstream.serve.metrics import Metrics
from slipstream.serve.params import naming_form, params_of
from slipstream.serve.prompts import PromptMaker
from slipstream.serve.responses import ChatWriter, CompletionWriter, ResponseOptions, ResponseWriter
from slipstream.serve.schemas import (
    ChatRequest,
    CompletionRequest,
    Conversation,
    DetokenizeRequest,
    Fields,
    NamedTool,
    SpeculationFields,
    TokenizeRequest,
    check_nesting,
    text_of,
    unknown_fields,
)
from slipstream.serve.streaming import EngineResponse
from slipstream.serve.telemetry import Record, log
from slipstream.serve.tools import MAX_CALLS, ToolParser, parser_for

_LONGEST_TOKEN = 16
"""Most characters of a token, on average over a long text. A longer text is not even tokenized."""
_SHORT = 4096
"""Bytes of a body that is prepared on the event loop's thread: a switch of threads would take longer."""
_MOST_IGNORED = 16
"""Unknown fields of one request that its answer names."""
_MOST_NAMED = 256
"""Most unknown fields that the log names, each once: clients can send any number."""
Made = TypeVar("Made")


class Service:
    """One engine for many clients. crowded: why there was lately no room for a connection, or ""."""

    def __init__(self, llm: EngineProcess, config: ServeConfig, crowded: Callable[[], str]) -> None:
        self.llm = llm
        self.config = config
        self.prompts = PromptMaker(llm.tokenizer)
        self.drain = Drain(config.drain_s)
        self.keys = Keyring(config.keys, config.key_file)
        self.admission = Admission(llm.max_num_seqs, config, self.drain, lambda: len(self.keys.tenants) > 1)
        self.metrics = Metrics(llm, config, self.admission)
        self.started = int(time.time())
        self._crowded = crowded
        self._named: set[str] = set()  # unknown fields that the log has
        self._own: defaultdict[str, Own] = defaultdict(Own)  # by tenant
        self._under_way: dict[str, tuple[str, EngineResponse]] = {}  # by request, with its tenant
        self._compiling = ThreadPoolExecutor(THREADS, "compile")
        self._parser = parser_for(config.tool_format, self.prompts.template)
        if self.prompts.template is not None and not self.prompts.takes_tools:
            log.info("the model's chat template knows no tools: a plain prompt lists them")

    def health(self) -> Health:
        draining, crowded = self.drain.begun, self._crowded()
        return health_of(self.llm.pulse(), draining=draining, crowded=crowded, stall_s=self.config.stall_s)

    def snapshot(self, tenant: str) -> Snapshot:
        """The view of a tenant: its own requests; on a server without keys everything."""
        now = self.llm.snapshot()
        if not tenant:
            return now
        running_tokens = sum([response.tokens for owner, response in self._under_way.values() if owner == tenant])
        running, waiting = now.tenants.get(tenant, (0, 0))
        return self._own[tenant].snapshot(running, waiting, running_tokens, now.drafters)

    async def complete(self, asked: CompletionRequest, record: Record) -> EngineResponse:
        with naming_form(asked):
            params, options = self._accepted(asked, record, "cmpl")
            if asked.echo and asked.logprobs is not None:
                raise refused("echo", "cannot go with logprobs: those of a prompt are not kept")
            prompts = self._prompts(asked)

            def ids(prompt: str | list[int]) -> list[int]:
                if isinstance(prompt, str):
                    return self.prompts.encode(
                        prompt, special=asked.add_special_tokens, parse=asked.parse_special_tokens
                    )
                return prompt

            def make() -> tuple[list[Request], ResponseWriter]:
                with about("prompt"):
                    jobs = [self._job(ids(prompt), params, record, i, asked) for i, prompt in enumerate(prompts)]
                echoes = [p if isinstance(p, str) else self.prompts.decode(p) for p in prompts] if asked.echo else []
                return jobs, CompletionWriter(options, [echo for echo in echoes for _ in range(params.n)])

            return await self._response(make, asked, params, record, len(prompts))

    async def chat(self, asked: ChatRequest, record: Record) -> EngineResponse:
        with naming_form(asked):
            params, options = self._accepted(asked, record, "chatcmpl")
            parser = self._tool_parser(asked)

            def make() -> tuple[list[Request], ResponseWriter]:
                with about("messages"):
                    job = self._job(self._conversation(asked), params, record, 0, asked, "messages")
                return [job], ChatWriter(options, parser, params.logprobs or 0, self.prompts.bytes_of)

            return await self._response(make, asked, params, record, 1)

    async def tokenize(self, asked: TokenizeRequest, record: Record) -> dict[str, Any]:
        self._check_fields(asked, record)
        if (asked.prompt is None) == (asked.messages is None):
            raise refused("prompt", "give either it or messages")
        self._check_length("prompt", len(asked.prompt or ""))
        self._check_conversation(asked)

        def make() -> list[int]:
            if asked.prompt is None:
                return self._conversation(asked)
            return self.prompts.encode(asked.prompt, special=asked.add_special_tokens, parse=asked.parse_special_tokens)

        with self.admission.brief(record.tenant):
            ids = await self._prepared(make, record)
        body: dict[str, Any] = {"count": len(ids), "max_model_len": self.llm.max_model_len, "tokens": ids}
        return {**body, "token_strs": self.prompts.spellings(ids) if asked.return_token_strs else None}

    async def detokenize(self, asked: DetokenizeRequest, record: Record) -> dict[str, str]:
        self._check_fields(asked, record)
        size = self.prompts.size
        if any(token >= size for token in asked.tokens):
            raise refused("tokens", f"must be token ids, 0 to {size - 1}")
        with self.admission.brief(record.tenant):
            return {"prompt": await self._prepared(lambda: self.prompts.decode(asked.tokens), record)}

    def models(self) -> dict[str, Any]:
        return {"object": "list", "data": [self.model(name) for name in self.config.models]}

    def model(self, name: str) -> dict[str, Any]:
        self._check_model(name)
        body = {"id": name, "object": "model", "created": self.started, "owned_by": "slipstream"}
        return {**body, "max_model_len": self.llm.max_model_len}

    def _accepted(
        self, asked: CompletionRequest | ChatRequest, record: Record, prefix: str
    ) -> tuple[SamplingParams, ResponseOptions]:
        """Check the fields that both endpoints have. prefix: of the response's id."""
        self._check_fields(asked, record)
        if isinstance(asked, ChatRequest):
            self._check_conversation(asked)
        record.note_user(asked.user or asked.safety_identifier)
        drafts, limits, chunk_chars = bool(self.llm.drafters), self.config.limits, self.config.chunk_chars
        params = params_of(asked, limits, record.tenant, drafts=drafts, parser=self._parser)
        self._check_length("prediction", len(params.prediction or ""))
        self._check_length("speculation.material", sum(map(len, params.speculation.material)))
        if asked.stream and chunk_chars is not None:
            if params.logprobs is not None:
                raise refused("logprobs", "this server's streams are cut into chunks of one size, which have none")
            if params.speculation.origins:
                raise refused("speculation.origins", "this server's streams do not show how many guesses stood")
            if asked.return_token_ids:
                raise refused("return_token_ids", "this server's streams do not show how many tokens an event has")
        stream = asked.stream_options
        return params, ResponseOptions(
            f"{prefix}-{record.id}",
            int(time.time()),
            asked.model or self.config.models[0],
            usage=stream is not None and stream.include_usage,
            running=stream is not None and stream.include_usage and stream.continuous_usage_stats,
            token_ids=bool(asked.return_token_ids),
            report=isinstance(asked.speculation, SpeculationFields) and asked.speculation.report,
            off=self._off(params),
            predicted=asked.prediction is not None,
            chunk_chars=chunk_chars if asked.stream else None,
        )

    def _off(self, params: SamplingParams) -> str | None:
        """Why no drafts can be made for a request with these parameters; None: they can."""
        if not params.speculation.enabled:
            return "the request turned it off"
        if not self.llm.speculates:
            return "it is switched off for all requests"
        if not self.llm.drafters:
            return "this server has no drafter: none was named, or speculation is switched off"
        return None

    def _check_fields(self, asked: Fields, record: Record) -> None:
        """Name unknown fields: in the answer and once in the log, or in a refusal. Then check the model."""
        for path, known in islice(unknown_fields(asked), _MOST_IGNORED):
            path, name = path[:64], path.rpartition(".")[2][:64]
            shown = path if re.fullmatch(r"[\w.-]+", path, re.ASCII) else "(no name)"
            if shown not in record.ignored:
                record.ignored.append(shown)
            if not self.config.strict_fields and (shown in self._named or len(self._named) >= _MOST_NAMED):
                continue
            near = get_close_matches(name, known, 1)
            remedy = f"did you mean {near[0]!r}?" if near else "leave it out"
            if self.config.strict_fields:
                message = f"{path}: unknown or unsupported field {name!r}; {remedy}"
                raise ApiError(400, message, param=path, code="unknown_field")
            self._named.add(shown)
            log.warning("unknown field ignored", extra={"fields": {"field": shown, "remedy": remedy}})
        self._check_model(getattr(asked, "model", None))

    def _check_model(self, name: str | None) -> None:
        if name is not None and name not in self.config.models:
            served = ", ".join(self.config.models)
            raise ApiError(
                404, f"model: {name!r} is not served here; ask for {served}", param="model", code="model_not_found"
            )

    def _tool_parser(self, asked: ChatRequest) -> Callable[[], ToolParser] | None:
        chosen, tools = asked.tool_choice, asked.tools or []
        if chosen not in (None, "none", "auto") and not tools:
            raise refused("tool_choice", "needs tools")
        if not tools or chosen == "none":
            return None
        names = [tool.function.name for tool in tools]
        if isinstance(chosen, NamedTool):
            return functools.partial(self._parser, [chosen.function.name], 1, quiet=True)
        most = 1 if asked.parallel_tool_calls is False else MAX_CALLS
        return functools.partial(self._parser, names, most, quiet=chosen == "required")

    @property
    def _most_characters(self) -> int:
        """The longest text that is tokenized. `truncate_prompt_tokens` cuts a longer one before; others are refused."""
        return self.llm.max_model_len * _LONGEST_TOKEN - 1

    def _check_length(self, param: str, length: int, unit: str = "characters", each: int = _LONGEST_TOKEN) -> None:
        """Refuse what cannot fit, before it is tokenized."""
        most = self.llm.max_model_len
        if length >= most * each:
            raise ApiError(
                400,
                f"{param}: {length} {unit} are too long: prompt and answer have {most} tokens together",
                param=param,
                code="context_length_exceeded",
            )

    def _check_room(self, asked: CompletionRequest | ChatRequest, prompt: int) -> None:
        """Refuse a requested length that does not fit behind the prompt; without one the context is the limit."""
        for name in ("max_tokens", "max_completion_tokens"):
            wanted = getattr(asked, name, None) if name in asked.model_fields_set else None
            room = self.llm.max_model_len - prompt
            if wanted is not None and wanted > room:
                raise ApiError(
                    400,
                    f"{name}={wanted}: too many, the prompt has {prompt} tokens, and both together may have "
                    f"{self.llm.max_model_len}; must be at most {room}, or left out",
                    param=name,
                    code="context_length_exceeded",
                )

    def _check_conversation(self, asked: Conversation) -> None:
        if not _truncates(asked):
            self._check_length("messages", sum(len(text_of(message.content)) for message in asked.messages or ()))
        for index, tool in enumerate(asked.tools or ()):
            check_nesting(f"tools.{index}.function.parameters", tool.function.parameters, self.config.limits.nesting)

    def _prompts(self, asked: CompletionRequest) -> list[str | list[int]]:
        given: Any = asked.prompt
        if not given and not isinstance(given, str):
            raise refused("prompt", "must have at least one prompt")
        one = isinstance(given, str) or isinstance(given[0], int)
        prompts: list[Any] = [given] if one else list(given)
        if len(prompts) > self.config.limits.prompts:
            raise refused("prompt", f"must be at most {self.config.limits.prompts} prompts on this server")
        if asked.truncate_prompt_tokens is not None:
            prompts = [prompt[-self._most_characters :] for prompt in prompts]
        for prompt in prompts:
            self._check_length("prompt", len(prompt))
        return prompts

    def _conversation(self, asked: Conversation) -> list[int]:
        """The tokens of a conversation. Its tools and template can make it longer than the messages."""
        parts = self.prompts.conversation(asked)
        if _truncates(asked):
            parts = _ending(parts, self._most_characters)
        self._check_length("messages", sum(map(len, parts)))
        return self.prompts.joined(parts, special=isinstance(asked, ChatRequest) and asked.add_special_tokens)

    def _job(
        self,
        ids: list[int],
        params: SamplingParams,
        record: Record,
        index: int,
        asked: CompletionRequest | ChatRequest,
        param: str = "prompt",
    ) -> Request:
        if asked.truncate_prompt_tokens is not None:
            most = self.llm.max_model_len
            room = most - (params.max_tokens if params.max_tokens < most else 1)
            kept = asked.truncate_prompt_tokens if asked.truncate_prompt_tokens >= 0 else room
            ids = ids[max(0, len(ids) - kept) :]
        self._check_length(param, len(ids), "tokens", 1)
        self._check_room(asked, len(ids))
        streaming = params.output_kind == "delta"
        name = f"{record.id}-{index}"
        job = self.llm.prepare(ids, params, request_id=name, streaming=streaming, compiling=self.config.compiling)
        record.unenforced = job.unenforced
        self._check_length("prediction", len(job.prediction), "tokens", 1)
        self._check_length("speculation.material", sum(map(len, job.material)), "tokens", 1)
        return job

    async def _response(
        self,
        make: Callable[[], tuple[list[Request], ResponseWriter]],
        asked: CompletionRequest | ChatRequest,
        params: SamplingParams,
        record: Record,
        prompts: int,
    ) -> EngineResponse:
        answers, limits = prompts * params.n, self.config.limits
        if answers > limits.choices:
            raise refused("n", f"{answers} answers are too many: must be at most {limits.choices} on this server")
        self.admission.enter(record.tenant, answers)

        def done(record: Record) -> None:
            self.admission.leave(record.tenant, answers)
            self.metrics.observe(record)
            _, response = self._under_way.pop(record.id)
            if record.tenant:
                self._own[record.tenant].note(record, response.tokens)

        try:
            jobs, writer = await self._prepared(make, record, slow=params.structured_outputs is not None)
            streamed, timeout_s = bool(asked.stream), limits.request_s
            response = EngineResponse(
                self.llm, jobs, params.n, writer, streamed=streamed, timeout_s=timeout_s, done=done, drain=self.drain
            )
        except BaseException:
            self.admission.leave(record.tenant, answers, ran=False)
            raise
        self._under_way[record.id] = record.tenant, response
        return response

    async def _prepared(self, make: Callable[[], Made], record: Record, *, slow: bool = False) -> Made:
        """Run `make`; on another thread if it takes long (slow: it may have to compile a form)."""
        if record.body_bytes <= _SHORT and not slow:
            return make()
        limit = self.config.limits.request_s
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(limit):
                return await loop.run_in_executor(self._compiling if slow else None, make)
        except TimeoutError:
            raise ApiError(408, f"the request was not prepared within {limit:g} s", code="timeout") from None


def _truncates(asked: Conversation) -> bool:
    return isinstance(asked, ChatRequest) and asked.truncate_prompt_tokens is not None


def _ending(parts: Sequence[str], characters: int) -> list[str]:
    """The last characters of a text in parts."""
    kept: list[str] = []
    for part in reversed(parts):
        if characters <= 0:
            break
        kept.append(part[-characters:])
        characters -= len(part)
    return kept[::-1]
