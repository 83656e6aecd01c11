"""Turns prompts and conversations into token ids. Special tokens that a client writes stay text.

A tokenizer makes a special token of its spelling anywhere. So each such spelling in a client's text is cut in two, and
the parts are tokenized one by one: no part spells a special token, and together they are the same text.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from jinja2.exceptions import TemplateError

from slipstream.core.spellings import byte_of, from_byte_level
from slipstream.engine.requests import check_text
from slipstream.serve.errors import ApiError, refused
from slipstream.serve.schemas import AssistantMessage, ChatRequest, Conversation, check_nesting, text_of

_DEEPEST = 64
"""Most levels of a call's arguments."""


class PromptMaker:
    """Tokenizes requests, for one tokenizer. Any thread may call it."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._template = _default_template(getattr(tokenizer, "chat_template", None))

    def encode(self, text: str, *, special: bool = True, parse: bool = False) -> list[int]:
        """The tokens of a text. special: add the tokenizer's own around it; parse: read special tokens in it."""
        check_text(text)
        if parse or not self._controls.search(text):
            return list(self._tokenizer.encode(text, add_special_tokens=special))
        mark = _mark()
        first, *rest = _cut(text, self._controls, mark).split(mark)
        ids = list(self._tokenizer.encode(first, add_special_tokens=special))
        for part in rest:
            ids += self._tokenizer.encode(part, add_special_tokens=False)
        return ids

    def conversation(self, asked: Conversation) -> list[str]:
        """A conversation in the model's chat template, up to the beginning of the answer: parts for `joined`."""
        if self._template is None:
            raise ApiError(400, "messages: this model has no chat template; use /v1/completions", param="messages")
        mark = _mark()
        messages = [self._message(message, mark) for message in asked.messages or ()]
        tools = [tool.model_dump(exclude_none=True) for tool in asked.tools or ()]
        tools = _mapped(tools, lambda text: _cut(text, self._controls, mark))
        if not self.takes_tools:
            none = isinstance(asked, ChatRequest) and asked.tool_choice == "none"
            tools = [] if none else tools
            if tools or any(message["role"] == "tool" or "tool_calls" in message for message in messages):
                messages, tools = _plainly(messages, tools), []
        if (
            asked.continue_final_message
            and asked.add_generation_prompt
            and "add_generation_prompt" in asked.model_fields_set
        ):
            raise refused("continue_final_message", "cannot go with add_generation_prompt: true")
        effort = asked.reasoning_effort if isinstance(asked, ChatRequest) else None
        given = {**({"reasoning_effort": effort} if effort else {}), **(asked.chat_template_kwargs or {})}
        kwargs = _mapped(given, lambda text: _cut(text, self._wide_controls, mark))
        if taken := sorted(kwargs.keys() & _OURS):
            raise refused("chat_template_kwargs", f"{taken[0]!r} is not for the template")
        try:
            rendered = self._tokenizer.apply_chat_template(
                messages,
                tools=tools or None,
                add_generation_prompt=asked.add_generation_prompt and not asked.continue_final_message,
                continue_final_message=asked.continue_final_message,
                tokenize=False,
                **kwargs,
            )
        except (TemplateError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise refused("messages", f"the model's chat template does not take them: {error}"[:500]) from error
        check_text(rendered)
        return [part for part in rendered.split(mark) if part]

    def joined(self, parts: Sequence[str], *, special: bool = False) -> list[int]:
        """The tokens of parts, tokenized one by one. special: add the tokenizer's own before the first."""
        encode = self._tokenizer.encode
        return [t for i, part in enumerate(parts) for t in encode(part, add_special_tokens=special and not i)]

    @property
    def takes_tools(self) -> bool:
        return self._template is not None and "tools" in self._template

    @property
    def template(self) -> str | None:
        return self._template

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def spellings(self, ids: Sequence[int]) -> list[str]:
        """The vocabulary's spelling of each token."""
        return [str(token) for token in self._tokenizer.convert_ids_to_tokens(list(ids))]

    def bytes_of(self, token: int, text: str) -> bytes:
        """The bytes of a token. text: its decoded text, which is no text for a part of a character."""
        written = None
        if "\ufffd" in text:
            spelling = self.spellings([token])[0]
            written = byte_of(spelling) or from_byte_level(spelling)
        return written or text.encode("utf-8", "replace")

    @property
    def size(self) -> int:
        return len(self._tokenizer)

    def _message(self, message: Any, mark: str) -> dict[str, Any]:
        role = "system" if message.role == "developer" else message.role
        strict = role in ("user", "tool")  # an answer may have the template's own marks
        controls = self._wide_controls if strict else self._controls

        def cut(text: str) -> str:
            return _cut(text, controls, mark)

        turn: dict[str, Any] = {"role": role, "content": cut(text_of(message.content))}
        if isinstance(message, AssistantMessage):
            turn["content"] = turn["content"] or cut(message.refusal or "")
            if thought := message.reasoning_content or message.reasoning:
                turn["reasoning_content"] = cut(thought)  # for the templates of reasoning models
        if message.name is not None:
            turn["name"] = cut(message.name)
        if message.role == "tool":
            turn["tool_call_id"] = cut(message.tool_call_id)
        if isinstance(message, AssistantMessage) and message.tool_calls:
            turn["tool_calls"] = [_mapped(_call(call), cut) for call in message.tool_calls]
        return turn

    @cached_property
    def _controls(self) -> re.Pattern[str]:
        return _pattern([token.content for token in self._added if token.special])

    @cached_property
    def _wide_controls(self) -> re.Pattern[str]:
        """Special tokens, and the tokens that the template writes between messages."""
        template = self._template or ""
        return _pattern(
            [t.content for t in self._added if t.special or (t.content in template and not t.content.isspace())]
        )

    @property
    def _added(self) -> Sequence[Any]:
        return list(getattr(self._tokenizer, "added_tokens_decoder", {}).values())


_TOOL_PROMPT = """You can call these functions, each given as JSON:
{tools}
To call one, answer with its name and its arguments, and its result comes in the next message:
<tool_call>
{{"name": "NAME", "arguments": {{"KEY": "VALUE"}}}}
</tool_call>
Where no function helps, answer in words."""
_PLAIN_CALL = '<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>'
_PLAIN_RESULT = "<tool_response>\n{}\n</tool_response>"
# fmt: off
_OURS = {
    "messages", "conversation", "tools", "chat_template", "tokenize", "return_dict", "return_tensors", "padding",
    "add_generation_prompt", "continue_final_message", "truncation", "max_length", "tokenizer_kwargs", "documents",
    "return_assistant_tokens_mask", "sanitize_control_tokens",
}
# fmt: on
"""Arguments of `apply_chat_template` that are not the template's."""


def _plainly(messages: Sequence[dict[str, Any]], tools: Sequence[Any]) -> list[dict[str, Any]]:
    """A conversation for a template without tools: a system message lists them, calls are written as
    `HermesParser` reads them, and results are user messages."""
    turns: list[dict[str, Any]] = []
    if tools:
        listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
        turns.append({"role": "system", "content": _TOOL_PROMPT.format(tools=listed)})
    for message in messages:
        role, texts = message["role"], [message["content"]]
        for call in message.get("tool_calls", ()):
            named = {key: json.dumps(call["function"][key], ensure_ascii=False) for key in ("name", "arguments")}
            texts.append(_PLAIN_CALL.format(**named))
        if role == "tool":
            role, texts = "user", [_PLAIN_RESULT.format(message["content"])]
        text = "\n".join(filter(None, texts))
        if turns and turns[-1]["role"] == role:  # some templates require alternating roles
            turns[-1] = {**turns[-1], "content": f"{turns[-1]['content']}\n\n{text}"}
        else:
            kept = {key: value for key, value in message.items() if key not in ("tool_calls", "tool_call_id")}
            turns.append({**kept, "role": role, "content": text})
    return turns


def _default_template(template: object) -> str | None:
    """Some models have several templates by name."""
    if isinstance(template, Mapping):
        template = template.get("default")
    return template if isinstance(template, str) else None


def _call(call: Any) -> dict[str, Any]:
    """A call for templates, which want the arguments as an object."""
    try:
        arguments = json.loads(call.function.arguments)
    except (ValueError, RecursionError):
        arguments = call.function.arguments
    if not isinstance(arguments, dict):
        arguments = call.function.arguments
    check_nesting("messages", arguments, _DEEPEST)
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}


def _mark() -> str:
    """A mark for cuts. Clients cannot guess it, and templates that write JSON do not escape it."""
    return f"@cut-{secrets.token_hex(8)}@"


def _pattern(spellings: Sequence[str]) -> re.Pattern[str]:
    """Matches any of these spellings, the longest first. A single character cannot be cut and is left out."""
    longest_first = sorted({s for s in spellings if len(s) > 1}, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def _cut(text: str, controls: re.Pattern[str], mark: str) -> str:
    """Put the mark into every spelling of a special token. Repeats, since they can overlap."""
    while controls.search(text):
        text = controls.sub(lambda found: found[0][0] + mark + found[0][1:], text)
    return text


def _mapped(value: Any, change: Any) -> Any:
    """A copy of lists and objects with every text changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_mapped(part, change) for part in value]
    if isinstance(value, dict):
        return {_mapped(key, change): _mapped(part, change) for key, part in value.items()}
    return value
