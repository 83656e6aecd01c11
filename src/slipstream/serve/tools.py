"""Tool calls in an answer's text, by the formats in which models write them.

`hermes` (Hermes, Qwen, SmolLM3): `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, among other text.
`llama3_json` (Llama 3.1 and later): the whole answer is `{"name": …, "parameters": {…}}`, several parted by `;`.

A call is handed on when it is whole. Text that could be the beginning of one is held back until that is certain; text
that looked like a call and is none comes out as text.
"""

from __future__ import annotations

import json
import secrets
from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from slipstream.serve.config import ToolFormat

MAX_CALLS = 128


@dataclass(frozen=True, slots=True)
class Call:
    """One call: `arguments` is JSON, as the model wrote it but for spaces."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}")


@dataclass(frozen=True, slots=True)
class Parsed:
    """What a piece of text came to."""

    text: str = ""
    calls: tuple[Call, ...] = ()


class ToolParser(ABC):
    """Reads one answer as it grows. names: the tools that there are; a call of any other is text."""

    def __init__(self, names: Collection[str]) -> None:
        self.names = frozenset(names)
        self._held = ""

    @abstractmethod
    def feed(self, text: str, *, last: bool) -> Parsed:
        """The next piece of the answer; `last`: there will be no more."""

    def _call(self, value: Any) -> Call | None:
        if not isinstance(value, dict) or value.get("name") not in self.names:
            return None
        arguments = value.get("arguments", value.get("parameters", {}))
        if isinstance(arguments, str):
            return Call(value["name"], arguments)
        return Call(value["name"], json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, dict) else None


class HermesParser(ToolParser):
    _OPEN, _CLOSE = "<tool_call>", "</tool_call>"

    def feed(self, text: str, *, last: bool) -> Parsed:
        self._held += text
        shown: list[str] = []
        calls: list[Call] = []
        while True:
            start = self._held.find(self._OPEN)
            if start < 0:
                keep = 0 if last else _overlap(self._held, self._OPEN)
                shown.append(self._held[: len(self._held) - keep])
                self._held = self._held[len(self._held) - keep :]
                break
            end = self._held.find(self._CLOSE, start)
            if end < 0 and not last:
                shown.append(self._held[:start])
                self._held = self._held[start:]
                break
            inside = self._held[start + len(self._OPEN) : end if end >= 0 else None]
            after = len(self._held) if end < 0 else end + len(self._CLOSE)
            call = self._call(_loads(inside))
            shown.append(self._held[:start] if call else self._held[:after])
            calls += [call] if call else []
            self._held = self._held[after:]
        said = "".join(shown)
        return Parsed(said if said.strip() or not calls else "", tuple(calls[:MAX_CALLS]))


class LlamaParser(ToolParser):
    _TAG = "<|python_tag|>"

    def feed(self, text: str, *, last: bool) -> Parsed:
        self._held += text
        body = self._held.lstrip()
        if self._TAG.startswith(body) or body.startswith(self._TAG):
            body = body[len(self._TAG) :].lstrip()
        if body and not body.startswith("{"):  # it is not going to be one
            said, self._held = self._held, ""
            self.feed = _as_text  # type: ignore[method-assign]
            return Parsed(said)
        if not last:
            return Parsed()
        calls: list[Call] = []
        decoder = json.JSONDecoder()
        at = 0
        while at < len(body):
            try:
                value, at = decoder.raw_decode(body, at)
            except (ValueError, RecursionError):
                return Parsed(self._held)
            call = self._call(value)
            if call is None:
                return Parsed(self._held)
            calls.append(call)
            while at < len(body) and body[at] in "; \n\t":
                at += 1
        return Parsed("" if calls else self._held, tuple(calls[:MAX_CALLS]))


def _as_text(text: str, *, last: bool) -> Parsed:
    return Parsed(text)


class NamedParser(ToolParser):
    """Where the answer was made to be one tool's arguments: the whole of it is."""

    def feed(self, text: str, *, last: bool) -> Parsed:
        self._held += text
        (name,) = self.names
        return Parsed(calls=(Call(name, self._held),)) if last else Parsed()


class RequiredParser(ToolParser):
    """Where the answer was made to be a list of calls. One that was cut off comes out as text."""

    def feed(self, text: str, *, last: bool) -> Parsed:
        self._held += text
        if not last:
            return Parsed()
        calls = [self._call(value) for value in _loads(self._held) or ()]
        whole = tuple(call for call in calls if call is not None)
        return Parsed(calls=whole) if whole and len(whole) == len(calls) else Parsed(self._held)


PARSERS: dict[str, type[ToolParser]] = {"hermes": HermesParser, "llama3_json": LlamaParser}


def parser_for(wanted: ToolFormat, template: str | None) -> type[ToolParser]:
    """The named one, or the one whose format the model's chat template speaks of."""
    if wanted != "auto":
        return PARSERS[wanted]
    template = template or ""
    llama = '"parameters"' in template and "<tool_call>" not in template
    return LlamaParser if llama else HermesParser


def _loads(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _overlap(text: str, mark: str) -> int:
    """Length of the longest end of `text` that `mark` begins with."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), 0)
