"""The fields of requests: OpenAI's, vLLM's further ones and our own.

A schema says whether a value is possible at all; `params.py` applies the limits of this server. There are three kinds
of fields without effect. A known one that changes no answer is ignored. A known one that would change the answer is
accepted at the values that ask for nothing, because clients send many of those, and refused by name at others
(`Neutral`; `docs/serving.md` has the same table). An unknown one is ignored and named (`unknown_fields`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    create_model,
    model_validator,
)
from pydantic_core import PydanticCustomError

from slipstream.core.params import SETTINGS
from slipstream.core.settings import Setting
from slipstream.serve.errors import UNSUPPORTED, refused

_MOST_UNKNOWN = 8
"""Most unknown fields of one object that are named."""

Whole = Annotated[int, Field(ge=0, le=2**62)]
TokenIds = Annotated[list[Annotated[int, Field(ge=0, le=2**31 - 1)]], Field(fail_fast=True, min_length=1)]
Strings = Annotated[list[str], Field(fail_fast=True)]


@dataclass(frozen=True, slots=True)
class Neutral:
    """A field that may be null, or one of these values. values=None: any value, since it changes no answer."""

    values: tuple[Any, ...] | None
    remedy: str = ""

    def fits(self, value: Any) -> bool:
        if value is None or self.values is None:
            return True
        return any(type(value) is type(one) and value == one for one in self.values)


_IGNORED = Neutral(None)
_MIN_GAIN = Neutral((), "an option of the server for all requests (--min-gain); leave it out")
_NO_BEAMS = "it belongs to beams, and there are none; leave it out"
_CACHED = {"cache_control": _IGNORED}
_CALL = dict.fromkeys(("index", "parsed_arguments", "provider_specific_fields", "extra_content"), _IGNORED)


class Fields(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)
    neutral: ClassVar[Mapping[str, Neutral]] = {}
    _unknown: tuple[str, ...] = PrivateAttr(())

    @model_validator(mode="wrap")
    @classmethod
    def _set_aside(cls, given: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Refuse a neutral field that asks for something, and remember the names of unknown ones."""
        if not isinstance(given, dict) or given.keys() <= _names(cls):
            return handler(given)
        for key in given.keys() & cls.neutral.keys():
            if not cls.neutral[key].fits(given[key]):
                refusal = {"name": key, "value": given[key], "remedy": cls.neutral[key].remedy}
                raise PydanticCustomError(UNSUPPORTED, "unsupported value", refusal)
        made = handler(given)
        unknown = (str(key) for key in given if key not in _names(cls) and key not in cls.neutral)
        made._unknown = tuple(islice(unknown, _MOST_UNKNOWN))
        return made


def unknown_fields(asked: Fields, place: str = "") -> Iterator[tuple[str, frozenset[str]]]:
    """The path of each unknown field, without indices, and the names that are known in its place."""
    for name in asked._unknown:
        yield place + name, _names(type(asked))
    for name in asked.model_fields_set:
        value = getattr(asked, name)
        for part in value if isinstance(value, list) else (value,):
            if not isinstance(part, Fields):
                break
            yield from unknown_fields(part, f"{place}{name}.")


@functools.cache
def _names(of: type[BaseModel]) -> frozenset[str]:
    return frozenset(field.alias or name for name, field in of.model_fields.items())


def check_nesting(param: str, value: Any, most: int) -> None:
    """Refuse more than `most` levels of lists and objects: other code walks them by recursion. This does not."""
    level = [value]
    for _ in range(most + 1):
        nested = [one.values() if isinstance(one, dict) else one for one in level if isinstance(one, dict | list)]
        level = [part for parts in nested for part in parts]
        if not level:
            return
    raise refused(param, f"nested too deep: must have at most {most} levels on this server")


class TextPart(Fields):
    neutral = {**_CACHED, "annotations": _IGNORED}
    type: Literal["text"]
    text: str


class RefusalPart(Fields):
    neutral = TextPart.neutral
    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


class ThinkingPart(Fields):
    """The thoughts of an earlier answer: left out of the prompt, and named as ignored."""

    neutral = {**_CACHED, "signature": _IGNORED}
    type: Literal["thinking"]
    text: ClassVar[str] = ""


Content = str | Annotated[list[TextPart], Field(fail_fast=True)]
AnswerPart = Annotated[TextPart | RefusalPart | ThinkingPart, Field(discriminator="type")]
AnswerContent = str | Annotated[list[AnswerPart], Field(fail_fast=True)]


def text_of(content: Content | AnswerContent | None) -> str:
    """The text of a message: that of its parts, joined."""
    return content or "" if content is None or isinstance(content, str) else "".join(part.text for part in content)


class StreamOptions(Fields):
    neutral = {
        "include_obfuscation": Neutral(
            (False,), "a server pads its streams or not (--stream-chunk-chars); leave it out"
        ),
    }
    include_usage: bool = False
    continuous_usage_stats: bool = Field(False, description="vLLM's: with include_usage, usage in every event")


class SpeculationFields(Fields):
    """How this request speculates. With the exact verifier this changes the speed, never the tokens."""

    neutral = {"min_gain": _MIN_GAIN}
    enabled: bool = Field(True, description="false decodes plainly")
    drafter: str | None = Field(None, max_length=256, description="one that the server has loaded, or several: A+B")
    draft_tokens: int | None = Field(None, ge=0, le=63, description="most guesses a round")
    verifier: Literal["exact", "rejection"] = "exact"
    material: str | Strings = Field(default_factory=list, description="texts that the answer may quote")
    report: bool = Field(False, description="report in the answer what speculation did")
    origins: bool = Field(False, description="report the drafter of each token")


class TextFormat(Fields):
    type: Literal["text"]


class JsonFormat(Fields):
    type: Literal["json_object"]
    schema_: dict[str, Any] | None = Field(None, alias="schema", description="llama.cpp's: a schema of the object")


class JsonSchema(Fields):
    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class SchemaFormat(Fields):
    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonFormat | SchemaFormat, Field(discriminator="type")]


class StructuredOutputs(Fields):
    """vLLM's: exactly one of the first six."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    json_object: bool = False
    regex: str | None = None
    choice: Strings | None = None
    grammar: str | None = None
    structural_tag: dict[str, Any] | str | None = None
    disable_any_whitespace: bool = True


class Prediction(Fields):
    """Text that the answer is likely to repeat. It is drafted from, never trusted."""

    type: Literal["content"]
    content: Content


def _field(setting: Setting) -> Any:
    """The HTTP field of a setting: the same kind and range, and null for its default."""
    limits: dict[str, Any] = {}
    if setting.kind is not bool:
        low = {} if setting.low is None else {"gt" if setting.above else "ge": setting.low}
        limits = {**low, "le": 2**31 - 1 if setting.high is None else setting.high}
    return setting.kind | None, Field(None, description=setting.help, **limits)


_Settings: Any = create_model(
    "_Settings", __base__=Fields, **{name: _field(setting) for name, setting in SETTINGS.items() if setting.http}
)


class SamplingFields(_Settings):  # type: ignore[misc]
    """The fields that completions and chat have in common."""

    neutral: ClassVar[Mapping[str, Neutral]] = {
        "min_gain": _MIN_GAIN,
        "store": _IGNORED,
        "metadata": _IGNORED,
        "service_tier": _IGNORED,
        "priority": _IGNORED,
        "request_id": _IGNORED,
        "guided_decoding_backend": _IGNORED,
        "prompt_cache_retention": _IGNORED,
        "prompt_cache_options": _IGNORED,
        "use_beam_search": Neutral((False,), "there are no beams; leave it out"),
        "length_penalty": Neutral((1.0, 1), _NO_BEAMS),
        "early_stopping": Neutral((False,), _NO_BEAMS),
        "prompt_logprobs": Neutral((), "those of a prompt are not kept; leave it out"),
        "spaces_between_special_tokens": Neutral((True,), "special tokens are written with spaces; leave it out"),
        "return_tokens_as_token_ids": Neutral((False,), "tokens are written as text; return_token_ids has their ids"),
        "logits_processors": Neutral(
            ([],), "no code of a request is run; use logit_bias, allowed_token_ids or bad_words"
        ),
        "prompt_embeds": Neutral((), "prompts are text or token ids; leave it out"),
        "guided_whitespace_pattern": Neutral((), "use structured_outputs with disable_any_whitespace"),
        "kv_transfer_params": Neutral((), "caches are not handed on between servers; leave it out"),
    }
    model: str | None = Field(None, max_length=512, description="default: the first that is served")
    best_of: int | None = Field(None, description="answers are not ranked: must equal n")
    seed: int | None = Field(None, ge=-(2**63), le=2**64 - 1, description=SETTINGS["seed"].help)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = Field(
        None, description="by token id, written as text", max_length=1024
    )
    allowed_token_ids: TokenIds | None = Field(None, max_length=2**20, description="the only ones that may be chosen")
    truncate_prompt_tokens: int | None = Field(
        None,
        ge=-1,
        le=2**31,
        description="keep this many tokens of the prompt's end; -1: what leaves room for the answer",
    )
    return_token_ids: bool | None = False
    bad_words: Strings | None = Field(None, max_length=64)
    stop: str | Strings | None = None
    stop_token_ids: Annotated[list[Whole], Field(fail_fast=True)] | None = Field(None, max_length=64)
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    user: str | None = Field(None, max_length=512)
    safety_identifier: str | None = Field(None, max_length=512, description="a newer name of user")
    prompt_cache_key: str | None = Field(
        None, max_length=512, description="prompts that begin alike share their cache without it"
    )
    speculation: SpeculationFields | Literal["off"] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = Field(None, description="an older name of structured_outputs.json")
    guided_regex: str | None = None
    guided_choice: Strings | None = None
    guided_grammar: str | None = None
    cache_salt: str | None = Field(
        None, max_length=256, description="prompts share cached parts only with those of the same salt"
    )
    prediction: Prediction | None = None


class CompletionRequest(SamplingFields):
    neutral: ClassVar[Mapping[str, Neutral]] = {
        **SamplingFields.neutral,
        "suffix": Neutral(("",), "nothing is written before a text"),
    }
    prompt: str | TokenIds | Strings | Annotated[list[TokenIds], Field(fail_fast=True)]
    max_tokens: int | None = Field(16, ge=1, le=2**30)
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool | None = False
    add_special_tokens: bool = True
    parse_special_tokens: bool = Field(
        False, description="read special tokens in the prompt's text as such: never for prompts that strangers wrote"
    )


class FunctionCall(Fields):
    neutral = _CALL
    name: str = Field(min_length=1, max_length=256)
    arguments: str


class ToolCall(Fields):
    neutral = _CALL
    id: str = Field(max_length=256)
    type: Literal["function"] = "function"
    function: FunctionCall


class _Message(Fields):
    """Clients add some of these keys to messages of answers, and send them back with the next turn."""

    neutral = {
        **_CALL,
        **_CACHED,
        "id": _IGNORED,
        "status": _IGNORED,
        "parsed": _IGNORED,
        "annotations": _IGNORED,
        "thinking_blocks": _IGNORED,
        "reasoning_details": _IGNORED,
        "audio": Neutral((), "messages are text; leave it out"),
        "function_call": Neutral((), "it is the old name: send tool_calls"),
    }
    name: str | None = None


class SystemMessage(_Message):
    role: Literal["system", "developer"]
    content: Content


class UserMessage(_Message):
    role: Literal["user"]
    content: Content


class AssistantMessage(_Message):
    role: Literal["assistant"]
    content: AnswerContent | None = None
    refusal: str | None = None
    reasoning: str | None = Field(None, description="vLLM's newer name of reasoning_content")
    reasoning_content: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = Field(None, max_length=128)


class ToolMessage(_Message):
    role: Literal["tool"]
    content: Content
    tool_call_id: str = Field(max_length=256)


Message = Annotated[SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]
Messages = Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=4096)]


class Function(Fields):
    neutral = _CACHED
    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Fields):
    neutral = _CACHED
    type: Literal["function"]
    function: Function


class NamedFunction(Fields):
    name: str = Field(max_length=64)


class NamedTool(Fields):
    type: Literal["function"]
    function: NamedFunction


class Conversation(Fields):
    messages: Messages | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = Field(None, max_length=128)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, str | int | float | bool | None] | None = Field(None, max_length=32)


class ChatRequest(Conversation, SamplingFields):
    neutral = {
        **SamplingFields.neutral,
        "verbosity": _IGNORED,
        "include_reasoning": _IGNORED,
        "echo": Neutral((False,), "an answer does not repeat the last message; leave it out"),
        "modalities": Neutral((["text"],), "answers are text; leave it out"),
        "audio": Neutral((), "answers are text; leave it out"),
        "web_search_options": Neutral((), "nothing is looked up; leave it out"),
        "functions": Neutral(([],), "it is the old name: send tools"),
        "function_call": Neutral(("none",), "it is the old name: send tool_choice"),
        "chat_template": Neutral((), "it is the model's own; start the server with another model folder"),
        "documents": Neutral(([],), "write them into a message; speculation.material drafts from them"),
        "mm_processor_kwargs": Neutral(({},), "messages are text; leave it out"),
    }
    messages: Messages
    max_tokens: int | None = Field(None, ge=1, le=2**30)
    max_completion_tokens: int | None = Field(None, ge=1, le=2**30)
    logprobs: bool | None = False
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = True
    add_special_tokens: bool = Field(False, description="put the tokenizer's own around what the template wrote")
    reasoning_effort: str | None = Field(None, max_length=64, description="for templates that know it")


class TokenizeRequest(Conversation):
    """A text, or a conversation."""

    model: str | None = Field(None, max_length=512)
    prompt: str | None = None
    add_special_tokens: bool = True
    parse_special_tokens: bool = False
    return_token_strs: bool = False


class DetokenizeRequest(Fields):
    model: str | None = Field(None, max_length=512)
    tokens: Annotated[list[Annotated[int, Field(ge=0, le=2**31 - 1)]], Field(fail_fast=True)]
