"""What clients may send: OpenAI's fields, vLLM's further ones, and ours. Others are set aside, to be named.

Whether a value is possible in itself is said here; whether it is on this server is for `sampling.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ModelWrapValidatorHandler, PrivateAttr, model_validator
from pydantic_core import PydanticCustomError

from slipstream.serve.neutral import (
    CALL,
    CHAT,
    COMPLETION,
    IGNORED,
    MESSAGE,
    PART,
    SPECULATION,
    STREAM_OPTIONS,
    TOOL,
    Neutral,
)

UNSUPPORTED = "unsupported_field"
_MOST_UNKNOWN = 8
"""Unknown fields of one object that are named. A body may have very many."""

Whole = Annotated[int, Field(ge=0, le=2**62)]
TokenIds = Annotated[list[Annotated[int, Field(ge=0, le=2**31 - 1)]], Field(fail_fast=True, min_length=1)]
Strings = Annotated[list[str], Field(fail_fast=True)]


class Fields(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)
    neutral: ClassVar[Mapping[str, Neutral]] = {}  # further fields, which nothing here acts on
    _unknown: tuple[str, ...] = PrivateAttr(())

    @model_validator(mode="wrap")
    @classmethod
    def _set_aside(cls, given: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Refuse a neutral field that asks for something, and remember the names of unknown ones."""
        if not isinstance(given, dict) or given.keys() <= _names(cls):
            return handler(given)
        for key in given.keys() & cls.neutral.keys():
            if not cls.neutral[key].fits(given[key]):
                told = {"name": key, "value": given[key], "remedy": cls.neutral[key].remedy}
                raise PydanticCustomError(UNSUPPORTED, "unsupported value", told)
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


class StreamOptions(Fields):
    neutral = STREAM_OPTIONS
    include_usage: bool = False
    continuous_usage_stats: bool = Field(False, description="vLLM's: with include_usage, usage in every event")


class SpeculationFields(Fields):
    """How this request speculates; with the exact verifier that changes the speed, never the tokens."""

    neutral = SPECULATION
    enabled: bool = Field(True, description="false decodes plainly")
    drafter: str | None = Field(None, max_length=256, description="one that the server has loaded, or several: A+B")
    draft_tokens: int | None = Field(None, ge=0, le=63, description="most guesses a round")
    verifier: Literal["exact", "rejection"] = "exact"
    material: str | Strings = Field(default_factory=list, description="texts that the answer may quote")
    report: bool = Field(False, description="say in the answer what speculation did")
    origins: bool = Field(False, description="say of each token who guessed it")


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


class SamplingFields(Fields):
    """What completions and chat have in common."""

    model: str | None = Field(None, max_length=512, description="default: the first that is served")
    n: int | None = Field(None, ge=1, le=128)
    best_of: int | None = Field(None, description="answers are not ranked: as many as n")
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=2**31)
    min_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, ge=0.01, le=10)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = Field(
        None, description="by token id, written as text", max_length=1024
    )
    allowed_token_ids: TokenIds | None = Field(None, max_length=2**20, description="the only ones that may be chosen")
    truncate_prompt_tokens: int | None = Field(
        None,
        ge=-1,
        le=2**31,
        description="keep so many tokens of the prompt's end; -1: what leaves room for the answer",
    )
    return_token_ids: bool | None = False
    bad_words: Strings | None = Field(None, max_length=64)
    min_tokens: Whole | None = None
    stop: str | Strings | None = None
    stop_token_ids: Annotated[list[Whole], Field(fail_fast=True)] | None = Field(None, max_length=64)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    seed: int | None = Field(None, ge=-(2**63), le=2**64 - 1)
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
    neutral = COMPLETION
    prompt: str | TokenIds | Strings | Annotated[list[TokenIds], Field(fail_fast=True)]
    max_tokens: int | None = Field(16, ge=1, le=2**30)
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool | None = False
    add_special_tokens: bool = True
    parse_special_tokens: bool = Field(
        False, description="read special tokens in the prompt's text as such: only for prompts that no stranger wrote"
    )


class TextPart(Fields):
    neutral = PART
    type: Literal["text"]
    text: str


class RefusalPart(Fields):
    neutral = PART
    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


class ThinkingPart(Fields):
    """An answer's thoughts, as some clients send them back: left out of the prompt and named as ignored."""

    neutral = {**PART, "signature": IGNORED}
    type: Literal["thinking"]
    text: ClassVar[str] = ""


Content = str | Annotated[list[TextPart], Field(fail_fast=True)]
AnswerPart = Annotated[TextPart | RefusalPart | ThinkingPart, Field(discriminator="type")]
AnswerContent = str | Annotated[list[AnswerPart], Field(fail_fast=True)]


class Prediction(Fields):
    """Text that the answer is likely to repeat. It is drafted from, never trusted."""

    type: Literal["content"]
    content: Content


class FunctionCall(Fields):
    neutral = CALL
    name: str = Field(min_length=1, max_length=256)
    arguments: str


class ToolCall(Fields):
    neutral = CALL
    id: str = Field(max_length=256)
    type: Literal["function"] = "function"
    function: FunctionCall


class SystemMessage(Fields):
    neutral = MESSAGE
    role: Literal["system", "developer"]
    content: Content
    name: str | None = None


class UserMessage(Fields):
    neutral = MESSAGE
    role: Literal["user"]
    content: Content
    name: str | None = None


class AssistantMessage(Fields):
    neutral = MESSAGE
    role: Literal["assistant"]
    content: AnswerContent | None = None
    name: str | None = None
    refusal: str | None = None
    reasoning: str | None = Field(None, description="vLLM's newer name of reasoning_content")
    reasoning_content: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = Field(None, max_length=128)


class ToolMessage(Fields):
    neutral = MESSAGE
    role: Literal["tool"]
    content: Content
    tool_call_id: str = Field(max_length=256)
    name: str | None = None


Message = Annotated[SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]
Messages = Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=4096)]


class Function(Fields):
    neutral = TOOL
    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Fields):
    neutral = TOOL
    type: Literal["function"]
    function: Function


class NamedFunction(Fields):
    name: str = Field(max_length=64)


class NamedTool(Fields):
    type: Literal["function"]
    function: NamedFunction


class ChatFields(Fields):
    """What a conversation is, for answers and for counting its tokens."""

    messages: Messages
    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = Field(None, max_length=128)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, str | int | float | bool | None] | None = Field(None, max_length=32)


class ChatRequest(ChatFields, SamplingFields):
    neutral = CHAT
    max_tokens: int | None = Field(None, ge=1, le=2**30)
    max_completion_tokens: int | None = Field(None, ge=1, le=2**30)
    logprobs: bool | None = False
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = True
    add_special_tokens: bool = Field(False, description="put the tokenizer's own around what the template wrote")
    reasoning_effort: str | None = Field(None, max_length=64, description="for templates that know it")


class TokenizeRequest(Fields):
    """A text, or a conversation."""

    model: str | None = Field(None, max_length=512)
    prompt: str | None = None
    messages: Messages | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = Field(None, max_length=128)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, str | int | float | bool | None] | None = Field(None, max_length=32)
    add_special_tokens: bool = True
    parse_special_tokens: bool = False
    return_token_strs: bool = False


class DetokenizeRequest(Fields):
    model: str | None = Field(None, max_length=512)
    tokens: Annotated[list[Annotated[int, Field(ge=0, le=2**31 - 1)]], Field(fail_fast=True)]


for _late in (SamplingFields, CompletionRequest):  # which speak of what stands below them
    _late.model_rebuild()
